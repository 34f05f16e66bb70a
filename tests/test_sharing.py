"""Parallel sampling: n samples of a prompt share its pages and change no token of one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from paxattn import LLM, SamplingParams
from paxattn.decode import State, _fork
from paxattn.invariants import broken, check
from paxattn.sampling import sample_seed

pytestmark = pytest.mark.optimized

PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of an 8-token page: k and v, layers, heads, dim, float32
PROMPTS = [tiny.prompts(4, seed=1, longest=40)[i] for i in (1, 2, 3)] + [[9] * 16, [4]]
SAMPLED = dict(temperature=1.1, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(loaded):
    return LLM(loaded, page_size=8, max_num_seqs=8, compilation_cache=False)


@pytest.fixture(scope="module")
def want(llm):
    """Each sample as a request of its own, with the derived seed: tokens and log-probabilities."""
    prompts = [p for p in PROMPTS for _ in range(3)]
    params = [
        SamplingParams(**SAMPLED, seed=sample_seed(70 + i, j), logprobs=1)
        for i in range(len(PROMPTS))
        for j in range(3)
    ]
    alone = [o.outputs[0] for o in llm.generate(prompts, params)]
    return [alone[3 * i : 3 * i + 3] for i in range(len(PROMPTS))]


def groups():
    return [SamplingParams(**SAMPLED, n=3, seed=70 + i, logprobs=1) for i in range(len(PROMPTS))]


def same(outputs, want):
    for output, alone in zip(outputs, want, strict=True):
        assert [c.index for c in output.outputs] == [0, 1, 2]
        for got, expected in zip(output.outputs, alone, strict=True):
            assert got.token_ids == expected.token_ids
            assert got.logprobs == expected.logprobs


def test_samples_are_separate_requests_with_derived_seeds(llm, want):
    same(llm.generate(PROMPTS, groups()), want)
    assert len({tuple(c.token_ids) for c in want[0]}) == 3
    stats = llm.stats()
    assert stats["pages_free"] == stats["pages_total"]
    assert stats["page_entries"] == stats["pages_shared"] == 0
    assert not broken(check(llm._device.state.memory))


def test_full_prompt_pages_are_held_once_and_the_saving_is_reported(llm, want):
    before = llm._loop.entry_steps, llm._loop.page_steps
    seen = []
    for output in llm.stream([PROMPTS[3]], groups()[3]):
        if not output.finished:
            seen.append(llm.stats())
            assert not broken(check(llm._device.state.memory))
    # 16 prompt tokens are two pages for all three; each sample then has one page of its own.
    first = seen[1]
    assert (first["pages_shared"], first["page_entries"], first["pages_used"]) == (2, 9, 5)
    assert first["memory_saved"] == pytest.approx(4 / 9)
    entries, pages = llm._loop.entry_steps - before[0], llm._loop.page_steps - before[1]
    assert 0.3 < 1 - pages / entries < 0.5
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in want[3]]


def test_preempted_groups_leave_whole_and_give_the_same_tokens(loaded, want):
    llm = LLM(
        loaded, page_size=8, max_num_seqs=8, compilation_cache=False, kv_cache_bytes=PAGE * 14
    )
    left = []
    preempt = llm._scheduler.preempt

    def watched(keep=False):
        group = list(llm._scheduler.running[-1].group)
        rows = preempt(keep)
        left.append((group, rows))
        assert all(s.row == -1 for s in group)
        assert not set(map(id, group)) & set(map(id, llm._scheduler.running))
        return rows

    llm._scheduler.preempt = watched
    same(llm.generate(PROMPTS, groups()), want)
    assert any(len(rows) > 1 for _, rows in left)
    stats = llm.stats()
    assert stats["preemptions"] == sum(len(rows) for _, rows in left)
    assert stats["pages_free"] == stats["pages_total"] == 13
    assert not broken(check(llm._device.state.memory))


def test_traditional_cache_gives_the_same_samples_without_sharing(loaded, want):
    llm = LLM(
        loaded,
        page_size=8,
        max_model_len=64,
        max_num_seqs=2,
        cache="reserve-max",
        compilation_cache=False,
    )
    same(llm.generate(PROMPTS[:2], groups()[:2]), want[:2])


def test_a_group_that_can_never_run_is_refused_by_name(llm):
    outputs = llm.generate(
        [[1, 2], [3]], [SamplingParams(n=9), SamplingParams(max_tokens=1, logprobs=1)]
    )
    assert "n=9 " in outputs[0].error
    assert "max_num_seqs" in outputs[0].error
    assert len(outputs[1].outputs[0].token_ids) == 1


def test_a_group_of_one_token_leaves_at_once(llm):
    params = SamplingParams(n=3, max_tokens=1, seed=1, temperature=5.0, logprobs=1)
    (output,) = llm.generate([[1] * 9], params)
    assert [len(c.token_ids) for c in output.outputs] == [1, 1, 1]
    assert llm.stats()["pages_free"] == llm.stats()["pages_total"]


def test_forked_rows_hold_their_parents_content_and_the_pool_is_not_doubled(llm):
    pool, memory = llm._device.state.pool, llm._device.state.memory
    parents = jnp.asarray([-1, 0, 0, -1, -1, -1, -1, -1], jnp.int32)
    compiled = jax.jit(_fork, donate_argnums=0).lower(State(pool, memory), parents).compile()
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= pool.nbytes
    assert analysis.temp_size_in_bytes < pool.nbytes / 4


def test_derived_seeds_are_distinct_and_sample_zero_keeps_its_own():
    assert sample_seed(123, 0) == 123
    assert sample_seed(-1, 0) == 2**64 - 1
    seeds = {sample_seed(seed, i) for seed in range(100) for i in range(20)}
    assert len(seeds) == 2000
    # SplitMix64 from state 0: the first outputs of the published reference implementation.
    assert sample_seed(0, 1) == 0xE220A8397B1DCDAF
    assert np.uint64(sample_seed(0, 2)) == np.uint64(0x6E789E6AA1B965F4)
