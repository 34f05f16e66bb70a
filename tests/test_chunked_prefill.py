"""Prompts in chunks beside the decode steps of others: the same tokens, and nobody waits for long."""

import numpy as np
import pytest
import tiny

from paxattn import LLM, SamplingParams
from paxattn.invariants import broken, check

PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of an 8-token page: k and v, layers, heads, dim, float32
PARAMS = SamplingParams(temperature=1.1, max_tokens=24, seed=3, logprobs=2, ignore_eos=True)


def engine(loaded, **options):
    options = {"page_size": 8, "max_num_seqs": 4, "compilation_cache": False, **options}
    return LLM(loaded, **options)


def completions(outputs):
    return [c.token_ids for o in outputs for c in o.outputs]


def logprobs(outputs):
    return [
        e[t].logprob
        for o in outputs
        for c in o.outputs
        for t, e in zip(c.token_ids, c.logprobs, strict=True)
    ]


@pytest.fixture(scope="module")
def prompts():
    return tiny.prompts(count=6, seed=4, longest=200)


@pytest.fixture(scope="module")
def whole(loaded, prompts):
    return engine(loaded).generate(prompts, PARAMS)


@pytest.fixture(scope="module")
def want(whole):
    return completions(whole)


@pytest.mark.parametrize("budget", [16, 64, 100])
def test_chunked_is_whole(loaded, prompts, whole, budget):
    llm = engine(loaded, max_num_batched_tokens=budget)
    llm.history = []
    outputs = llm.generate(prompts, PARAMS)
    assert completions(outputs) == completions(whole)
    # Products of other sizes sum in another order: the last bits may differ, and no more.
    np.testing.assert_allclose(logprobs(outputs), logprobs(whole), atol=1e-5)
    assert any(h.kind == "mixed" for h in llm.history)
    assert llm.stats()["pages_free"] == llm.stats()["pages_total"]
    assert not broken(check(llm._device.state.memory))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_chunked_is_whole_when_pages_run_out(loaded, mode):
    prompts = tiny.prompts(count=6, seed=4, longest=60)
    want = completions(engine(loaded).generate(prompts, PARAMS))
    llm = engine(loaded, max_num_batched_tokens=32, kv_cache_bytes=PAGE * 16, preemption=mode)
    assert completions(llm.generate(prompts, PARAMS)) == want
    assert llm.stats()["preemptions"] > 0


def test_chunked_with_samples_and_a_prefix_cache(loaded):
    prompts = [[7] * 90, [7] * 80 + [3] * 9, [7] * 90]
    params = SamplingParams(n=2, temperature=1.1, max_tokens=12, seed=8, ignore_eos=True)
    want = completions(engine(loaded).generate(prompts, params))
    llm = engine(loaded, max_num_batched_tokens=32, enable_prefix_caching=True)
    assert completions(llm.generate(prompts, params)) == want
    assert llm.stats()["prefix_hits"] > 0


def test_streams_go_on_while_a_long_prompt_is_computed(loaded):
    llm = engine(loaded, max_num_batched_tokens=16)
    llm.add_request([3, 1, 4], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    while not llm.step():
        pass
    long = llm.add_request([1] * 120, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    seen = []
    while llm.has_unfinished_requests():
        seen.append({o.request_id for o in llm.step()})
    first = next(i for i, ids in enumerate(seen) if long in ids)
    # 120 tokens in chunks of 8: fifteen steps, in each of which the stream gets a token.
    assert first == 14
    assert all(len(ids) == 1 for ids in seen[:first])


def test_one_more_program_and_none_after_it(loaded, prompts):
    llm = engine(loaded, max_num_batched_tokens=64)
    llm.generate(prompts, PARAMS)
    compiled = llm.stats()["compiled_by_kind"]
    assert compiled["mixed"] == 1
    llm.generate(prompts[::-1], PARAMS)
    assert llm.stats()["compiled_by_kind"] == compiled


@pytest.mark.parametrize("budget", [0, 15, True, 64.0])
def test_a_budget_that_is_too_small_is_named(loaded, budget):
    with pytest.raises(ValueError, match="max_num_batched_tokens must be"):
        engine(loaded, max_num_batched_tokens=budget)
