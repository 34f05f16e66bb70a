"""`add_request` and `step`: requests that arrive while others run."""

import pytest
import tiny

from paxattn import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny.model(), page_size=8, max_num_seqs=4, compilation_cache=False)


def test_arrival_changes_no_token(llm):
    prompts = tiny.prompts(6)
    want = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    left = list(prompts)
    ids, done = [llm.add_request(left.pop(0), GREEDY)], {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                done[output.request_id] = output.outputs[0].token_ids
        if left:
            ids.append(llm.add_request(left.pop(0), GREEDY))
    assert [done[i] for i in ids] == want
    assert llm.step() == []
    assert llm.stats()["pages_free"] == llm.stats()["pages_total"]


def test_a_bad_request_is_refused_and_nothing_is_queued(llm):
    for prompt, message in (([], "empty"), ([999], "outside the vocabulary"), ([1] * 300, "256")):
        with pytest.raises(ValueError, match=message):
            llm.add_request(prompt, GREEDY)
    with pytest.raises(ValueError, match="sampling_params must be a SamplingParams"):
        llm.add_request([1], 0.7)
    assert not llm.has_unfinished_requests()


def test_generate_does_not_mix_with_queued_requests(llm):
    llm.add_request([1, 2], GREEDY)
    with pytest.raises(RuntimeError, match="another call"):
        llm.generate([[1]], GREEDY)
    while llm.has_unfinished_requests():
        llm.step()


def test_a_failed_step_gives_everything_back(llm, monkeypatch):
    llm.add_request([1, 2], GREEDY)
    monkeypatch.setattr(llm._loop, "_prefill", lambda chunks: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.step()
    assert not llm.has_unfinished_requests()
    assert llm.stats()["pages_free"] == llm.stats()["pages_total"]
