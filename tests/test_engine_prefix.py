"""The prefix cache in the engine: what is found again changes no token, and is counted honestly."""

import dataclasses

import numpy as np
import pytest
import tiny

from paxattn import LLM, SamplingParams, prefix_cache
from paxattn.invariants import broken, check

PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of an 8-token page: k and v, layers, heads, dim, float32
PARAMS = SamplingParams(temperature=1.1, max_tokens=12, seed=3, ignore_eos=True, logprobs=1)
RNG = np.random.default_rng(4)
HEAD = RNG.integers(1, 256, 37).tolist()
# A shared beginning of 37 tokens (four pages of 8), of 20 (two), none, and two equal prompts.
PROMPTS = [HEAD + RNG.integers(1, 256, n).tolist() for n in (1, 9, 30)]
PROMPTS += [HEAD[:20] + [7] * 12, [5] * 25, HEAD[:32], HEAD[:32]]


def engine(loaded, **options):
    options = {"page_size": 8, "max_num_seqs": 8, "compilation_cache": False, **options}
    return LLM(loaded, **options)


@pytest.fixture(scope="module")
def want(loaded):
    """Each prompt without a prefix cache."""
    return [o.outputs[0] for o in engine(loaded).generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def llm(loaded):
    return engine(loaded, enable_prefix_caching=True)


@pytest.fixture(autouse=True)
def _forget(request):
    """Each test starts with an empty cache."""
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm._device.reset()
        llm._device.counts = dict.fromkeys(llm._device.counts, 0)


def sound(llm):
    assert not broken(check(llm._device.state.memory, prefix_cache.pins(llm._device.state.prefix)))
    stats = llm.stats()
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["pages_used"] == stats["tokens_held"] == 0
    return stats


def same(outputs, want):
    for output, expected in zip(outputs, want, strict=True):
        assert output.outputs[0].token_ids == expected.token_ids
        assert output.outputs[0].logprobs == expected.logprobs


def test_a_prefix_hit_gives_the_tokens_of_a_cold_run(llm, want):
    same(llm.generate(PROMPTS, PARAMS), want)  # shared among prompts that are computed together
    first = sound(llm)
    # By hand: 4, 4, 2 pages of HEAD, none, then 3 (the last page of 32 tokens is computed), 3.
    assert (first["prefix_hits"], first["prefix_saved_tokens"]) == (16, 128)
    same(llm.generate(PROMPTS, PARAMS), want)  # and with prompts that have gone
    second = sound(llm)
    could = sum((len(p) - 1) // 8 for p in PROMPTS)
    assert second["prefix_hits"] - first["prefix_hits"] == could
    assert second["prefix_misses"] == first["prefix_misses"] == could - 16


def test_the_tokens_of_an_evicting_pool_are_the_same(loaded, want):
    llm = engine(loaded, enable_prefix_caching=True, kv_cache_bytes=PAGE * 16)
    for _ in range(2):
        same(llm.generate(PROMPTS, PARAMS), want)
        stats = sound(llm)
    assert stats["prefix_evictions"] > 0
    assert stats["preemptions"] > 0
    assert stats["prefix_hits"] > 0
    # Recomputation is not a hit: every prompt page was asked for once a call.
    could = 2 * sum((len(p) - 1) // 8 for p in PROMPTS)
    assert stats["prefix_hits"] + stats["prefix_misses"] == could


def test_tenants_share_with_their_own_salt_only(llm, want):
    def ask(salt):
        before = llm.stats()["prefix_hits"]
        outputs = llm.generate([{"prompt": PROMPTS[2], "cache_salt": salt}], PARAMS)
        same(outputs, want[2:3])
        return llm.stats()["prefix_hits"] - before

    assert [ask("alice"), ask("bob"), ask("alice"), ask("bob")] == [0, 0, 8, 8]
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string; got 7"):
        ask(7)


def test_samples_of_a_cached_prompt(llm, want):
    params = dataclasses.replace(PARAMS, n=3)
    cold = llm.generate(PROMPTS[:2], params)
    warm = llm.generate(PROMPTS[:2], params)
    for a, b, alone in zip(cold, warm, want, strict=False):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        assert a.outputs[0].token_ids == alone.token_ids
    sound(llm)


def test_an_interrupted_prefill_leaves_no_page_without_content(llm, want, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._loop, "_prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
    assert sound(llm)["pages_cached"] == 0
    same(llm.generate(PROMPTS, PARAMS), want)


def test_nothing_compiles_after_the_first_round(llm):
    llm.generate(PROMPTS, PARAMS)
    compiled = llm.stats()["compiled_by_kind"]
    other = [[t % 255 + 1 for t in p] for p in PROMPTS]
    llm.generate(other + PROMPTS, PARAMS)
    assert llm.stats()["compiled_by_kind"] == compiled


def test_what_a_prefix_cache_cannot_serve_is_refused(loaded):
    with pytest.raises(ValueError, match="needs cache='paged'"):
        engine(loaded, cache="reserve-max", enable_prefix_caching=True)
    from paxattn.llama_config import RopeScaling

    config = dataclasses.replace(
        tiny.CONFIG, rope_scaling=RopeScaling(rope_type="dynamic", factor=2.0)
    )
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        engine(tiny.model(config), enable_prefix_caching=True)
