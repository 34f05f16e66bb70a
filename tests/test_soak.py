"""Ten thousand requests in a row: nothing leaks, and nothing is compiled after the warm-up."""

import gc

import jax
import numpy as np
import pytest
import tiny

from paxattn import LLM, SamplingParams, prefix_cache
from paxattn.invariants import broken, check

PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of an 8-token page: k and v, layers, heads, dim, float32


def requests(rng, count):
    """Short prompts, many of which begin alike; lengths that make the small pool run out."""
    heads = [rng.integers(1, 256, 24).tolist() for _ in range(4)]
    prompts, params = [], []
    for _ in range(count):
        own = rng.integers(1, 256, int(rng.integers(1, 20))).tolist()
        prompts.append(heads[int(rng.integers(4))] + own if rng.random() < 0.5 else own)
        params.append(
            SamplingParams(
                n=int(rng.choice([1, 1, 1, 2])),
                temperature=1.0,
                top_k=int(rng.choice([0, 1])),  # 1 is greedy, by the same program
                max_tokens=int(rng.integers(1, 9)),
            )
        )
    return prompts, params


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"preemption": "swap"}, {"preemption": "recompute", "max_num_batched_tokens": 64}]
)
def test_ten_thousand_requests_leak_nothing(options):
    llm = LLM(
        tiny.model(),
        page_size=8,
        max_num_seqs=16,
        kv_cache_bytes=PAGE * 50,
        enable_prefix_caching=True,
        compilation_cache=False,
        **options,
    )
    rng = np.random.default_rng(0)
    # Each shape once: the largest prefill by hand, the others by a run.
    llm.generate(rng.integers(1, 256, (9, 40)).tolist(), SamplingParams(max_tokens=1))
    llm.generate(*requests(rng, 1500))
    gc.collect()
    compiled, arrays = llm.stats()["compiled_by_kind"], len(jax.live_arrays())
    for _ in range(3 if "max_num_batched_tokens" in options else 10):
        outputs = llm.generate(*requests(rng, 1000))
        assert all(o.finished and not o.error for o in outputs)
    gc.collect()
    stats = llm.stats()
    assert stats["compiled_by_kind"] == compiled
    assert len(jax.live_arrays()) == arrays
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"] == 49
    assert stats["swap_bytes_used"] == 0
    assert min(stats["prefix_hits"], stats["prefix_evictions"]) > 0
    if "max_num_batched_tokens" not in options:  # chunks come in too slowly to run out of pages
        assert stats["preemptions"] > 0
    state = llm._device.state
    assert not broken(check(state.memory, prefix_cache.pins(state.prefix)))
    assert not llm.has_unfinished_requests()
