"""`LLM.save` and `LLM.rewind`: what comes after a rewind is what came the first time."""

import pytest
import tiny

from paxattn import LLM, SamplingParams, prefix_cache
from paxattn.invariants import broken, check
from paxattn.time_travel import diff

PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of an 8-token page: k and v, layers, heads, dim, float32
PARAMS = SamplingParams(temperature=1.1, max_tokens=20, seed=3, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM(
        tiny.model(),
        page_size=8,
        max_num_seqs=4,
        kv_cache_bytes=PAGE * 15,
        preemption="swap",
        enable_prefix_caching=True,
        compilation_cache=False,
    )


def run(llm):
    done = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                done[output.request_id] = [(c.token_ids, c.logprobs) for c in output.outputs]
    return done


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_the_same_future_twice(llm, steps):
    for prompt in tiny.prompts(6):
        llm.add_request(prompt, PARAMS)
    for _ in range(steps):
        llm.step()
    saved = llm.save()
    again = llm.save()
    assert not diff(saved.state, again.state)
    assert saved.nbytes > 0
    first = run(llm)
    assert diff(saved.state, llm.save().state)
    for _ in range(2):  # a saved value stays good
        llm.rewind(saved)
        assert not diff(saved.state, llm.save().state)
        assert run(llm) == first
    state = llm._device.state
    assert not broken(check(state.memory, prefix_cache.pins(state.prefix)))
    stats = llm.stats()
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["swap_bytes_used"] == 0


def test_another_future_from_one_moment(llm):
    llm.add_request([1, 2, 3], PARAMS)
    llm.step()
    saved = llm.save()
    alone = run(llm)
    llm.rewind(saved)
    added = llm.add_request([4] * 30, PARAMS)
    both = run(llm)
    assert both.pop(added)
    assert both == alone  # whoever else comes changes no token


def test_a_stream_goes_on_from_where_it_was_put(llm):
    seen, saved, stream = [], None, llm.stream([[7, 8, 9]], PARAMS)
    for output in stream:
        seen.append(output.outputs[0].token_ids)
        if saved is None and len(seen) == 2:
            saved = llm.save()
        elif saved is not None and len(seen) == 4:
            llm.rewind(saved)
    assert len(seen[4]) == len(seen[2])
    assert seen[4] == seen[2]


def test_a_snapshot_of_another_engine_is_refused(llm):
    other = LLM(tiny.model(), page_size=16, max_num_seqs=4, compilation_cache=False)
    with pytest.raises(ValueError, match=r"'page_size': 8.*'page_size': 16"):
        llm.rewind(other.save())
    with pytest.raises(ValueError, match="rewind takes what save"):
        llm.rewind(5)
    assert not llm.has_unfinished_requests()
