"""Preemption by recomputation, by swap and by measured cost: no token and no bit depends on it."""

import pytest
import tiny

from paxattn import LLM, SamplingParams
from paxattn.invariants import broken, check

PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of an 8-token page: k and v, layers, heads, dim, float32
PARAMS = SamplingParams(temperature=1.1, max_tokens=40, seed=3, logprobs=2, ignore_eos=True)


def engine(loaded, **options):
    return LLM(loaded, page_size=8, max_num_seqs=8, compilation_cache=False, **options)


def completions(outputs):
    return [(c.token_ids, c.logprobs) for o in outputs for c in o.outputs]


def all_free(llm):
    stats = llm.stats()
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["swap_bytes_used"] == 0
    assert not broken(check(llm._device.state.memory, pins(llm)))


def pins(llm):
    from paxattn import prefix_cache

    prefix = llm._device.state.prefix
    return None if prefix is None else prefix_cache.pins(prefix)


@pytest.fixture(scope="module")
def want(loaded):
    return completions(engine(loaded).generate(tiny.prompts(), PARAMS))


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_swapped_is_never_swapped(loaded, want, mode):
    llm = engine(loaded, kv_cache_bytes=PAGE * 15, preemption=mode)
    assert completions(llm.generate(tiny.prompts(), PARAMS)) == want
    stats = llm.stats()
    assert stats["preemptions"] > 0
    assert stats["pages_swapped_out"] == stats["pages_swapped_in"]
    assert (stats["pages_swapped_out"] > 0) == (mode != "recompute")
    all_free(llm)


def test_swap_keeps_shared_pages_shared(loaded):
    prompts = [[9] * 24, [4] * 20, [5] * 17]
    params = SamplingParams(n=3, temperature=1.1, max_tokens=30, seed=8, ignore_eos=True)
    want = completions(engine(loaded).generate(prompts, params))
    llm = engine(loaded, kv_cache_bytes=PAGE * 26, preemption="swap")
    moved = []

    def watch(event, state):
        assert not broken(check(state.memory))
        if event.kind == "swap_out":
            group = llm._scheduler.waiting[0]
            full = len(group[0].prompt_ids) // 8
            entries = sum(llm._scheduler.pages(s.stored) for s in group)
            moved.append((group[0].swapped.num_pages, entries - 2 * full))

    llm.observer = watch
    assert completions(llm.generate(prompts, params)) == want
    assert moved
    assert all(count == distinct for count, distinct in moved)
    all_free(llm)


def test_swap_beside_a_prefix_cache(loaded, want):
    llm = engine(loaded, kv_cache_bytes=PAGE * 15, preemption="swap", enable_prefix_caching=True)
    for _ in range(2):
        assert completions(llm.generate(tiny.prompts(), PARAMS)) == want
    assert llm.stats()["pages_swapped_in"] > 0
    all_free(llm)


def test_swap_keeps_to_its_budget(loaded, want):
    llm = engine(loaded, kv_cache_bytes=PAGE * 15, preemption="swap", swap_bytes=0)
    assert completions(llm.generate(tiny.prompts(), PARAMS)) == want
    stats = llm.stats()
    assert stats["preemptions"] > 0 == stats["pages_swapped_out"]


def test_auto_takes_what_has_been_cheaper(loaded, want):
    llm = engine(loaded, kv_cache_bytes=PAGE * 15, preemption="auto")
    for seconds, swaps in ((1e9, False), (0.0, True)):
        before = llm.stats()
        llm._device.swap_seconds_per_page = seconds  # as if it had been measured
        llm._device._measure_swap = lambda *_: None
        assert completions(llm.generate(tiny.prompts(), PARAMS)) == want
        after = llm.stats()
        assert after["preemptions"] > before["preemptions"]
        assert (after["pages_swapped_out"] > before["pages_swapped_out"]) == swaps


def test_a_call_that_is_closed_gives_swapped_memory_back(loaded):
    llm = engine(loaded, kv_cache_bytes=PAGE * 15, preemption="swap")
    stream = llm.stream(tiny.prompts(), PARAMS)
    for _ in stream:
        if llm.stats()["swap_bytes_used"]:
            break
    else:
        pytest.fail("nothing was swapped out")
    stream.close()
    all_free(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption": "never"}, "preemption must be"),
        ({"swap_bytes": -1}, "swap_bytes must be"),
        ({"swap_bytes": 1.5}, "swap_bytes must be"),
    ],
)
def test_bad_options_are_named(loaded, options, message):
    with pytest.raises(ValueError, match=message):
        engine(loaded, **options)
