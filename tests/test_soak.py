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
                temperature=0.0 if rng.random() < 0.5 else 1.0,
                max_tokens=int(rng.integers(1, 9)),
            )
        )
    return prompts, params


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64}])
def test_ten_thousand_requests_leak_nothing(options):
    llm = LLM(
        tiny.model(),
        page_size=8,
        max_num_seqs=16,
        kv_cache_bytes=PAGE * 60,
        enable_prefix_caching=True,
        compilation_cache=False,
        **options,
    )
    rng = np.random.default_rng(0)
    llm.generate(*requests(rng, 1000))
    gc.collect()
    compiled, arrays = llm.stats()["compiled_programs"], len(jax.live_arrays())
    for _ in range(5):
        outputs = llm.generate(*requests(rng, 1000))
        assert all(o.finished and not o.error for o in outputs)
    gc.collect()
    stats = llm.stats()
    assert stats["compiled_programs"] == compiled
    assert len(jax.live_arrays()) == arrays
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"] == 59
    assert stats["swap_bytes_used"] == 0
    assert min(stats[k] for k in ("preemptions", "prefix_hits", "prefix_evictions")) > 0
    state = llm._device.state
    assert not broken(check(state.memory, prefix_cache.pins(state.prefix)))
    assert not llm.has_unfinished_requests()
