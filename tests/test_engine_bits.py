"""The engine's tokens and log-probabilities to the last bit, in programs compiled as a user's."""

import jax.numpy as jnp
import pytest
from test_engine import PAGE, engine, tokens

from paxattn import SamplingParams, kv_pool

pytestmark = pytest.mark.optimized


def test_preemption_changes_no_bit_of_a_sampled_run(loaded, prompts):
    params = SamplingParams(temperature=1.2, max_tokens=40, seed=5, logprobs=2, ignore_eos=True)
    ample = engine(loaded).generate(prompts, params)
    llm = engine(loaded, kv_cache_bytes=PAGE * 15)
    tight = llm.generate(prompts, params)
    assert llm.stats()["preemptions"] > 0
    assert tokens(ample) == tokens(tight)
    for a, b in zip(ample, tight, strict=True):
        assert a.outputs[0].logprobs == b.outputs[0].logprobs


def test_a_request_does_not_depend_on_its_batch(loaded, prompts):
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=11)
    llm = engine(loaded, max_num_seqs=16)
    together = tokens(llm.generate(prompts, params))
    assert together == tokens(reversed(llm.generate(prompts[::-1], params)))
    for prompt, got in zip(prompts, together, strict=True):
        assert tokens(llm.generate([prompt], params)) == [got]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stale_pages_cannot_be_seen(loaded, prompts, dtype):
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=3, ignore_eos=True)
    clean = engine(loaded, dtype=dtype).generate(prompts, params)
    llm = engine(loaded, dtype=dtype)
    everything = jnp.arange(llm._device.state.pool.num_pages, dtype=jnp.int32)
    llm._device.state = llm._device.state._replace(
        pool=kv_pool.fill_pages(llm._device.state.pool, everything, float("nan"))
    )
    poisoned = llm.generate(prompts, params)
    for a, b in zip(clean, poisoned, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprobs == b.outputs[0].logprobs
