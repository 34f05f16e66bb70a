"""Interrupts, observers that raise, several callers, odd inputs: nothing is lost, nothing is wrong."""

import numpy as np
import pytest
import tiny

from paxattn import LLM, BeamSearchParams, SamplingParams

PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of an 8-token page: k and v, layers, heads, dim, float32
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
PROMPTS = [[1], [2], [3], [4], list(range(1, 101))]


@pytest.fixture
def engine(loaded):
    options = {"page_size": 8, "max_num_seqs": 8, "compilation_cache": False}
    return lambda **other: LLM(loaded, **{**options, **other})


def result(output):
    return [(c.token_ids, c.cumulative_logprob) for c in output.outputs]


def test_copies_that_a_chunked_prompt_will_need_are_kept_from_the_decoders(engine):
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 4
    params.append(SamplingParams(n=4, temperature=1, seed=1, max_tokens=4, ignore_eos=True))
    want = [[c.token_ids for c in o.outputs] for o in engine().generate(PROMPTS, params)]
    llm = engine(kv_cache_bytes=PAGE * 23, max_num_batched_tokens=16)
    got = [[c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS, params)]
    assert got == want


def test_pages_of_a_prompt_that_was_preempted_half_way_are_not_found(engine):
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 4 + [GREEDY]
    want = engine().generate(PROMPTS, params)[-1].outputs[0]
    llm = engine(max_num_batched_tokens=16, kv_cache_bytes=PAGE * 19, enable_prefix_caching=True)
    got = llm.generate(PROMPTS, params)[-1].outputs[0]
    assert llm.stats()["preemptions"] > 0
    assert got.token_ids == want.token_ids
    assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-4)


def test_a_call_that_has_said_its_last_word_disturbs_no_other(engine):
    llm = engine()
    first = llm.stream([[1, 2]], SamplingParams(temperature=0, max_tokens=1))
    assert next(first).finished
    second = llm.stream([[3, 4]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    next(second)
    assert list(first) == []
    first.close()
    *_, last = second
    assert last.finished
    assert len(last.outputs[0].token_ids) == 30


def test_an_open_call_keeps_others_out(engine):
    llm = engine()
    stream = llm.stream([[3, 4]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    next(stream)
    for other in (
        lambda: llm.generate([[1]], GREEDY),
        lambda: llm.add_request([1], GREEDY),
        llm.step,
        lambda: llm.beam_search([[1]]),
    ):
        with pytest.raises(RuntimeError, match="another call"):
            other()
    stream.close()
    assert llm.generate([[1]], GREEDY)[0].finished


def test_an_observer_that_raises_leaves_nothing_uncomputed_behind(engine):
    prompt = list(range(1, 50))
    want = result(engine().generate([prompt], GREEDY)[0])
    llm = engine(enable_prefix_caching=True)

    def broken(event, state):
        raise ArithmeticError("observer")

    llm.observer = broken
    with pytest.raises(ArithmeticError, match="observer"):
        llm.generate([prompt], GREEDY)
    llm.observer = None
    got = result(llm.generate([prompt], GREEDY)[0])
    assert got[0][0] == want[0][0]
    assert got[0][1] == pytest.approx(want[0][1], abs=1e-4)
    assert llm.stats()["prefix_hits"] == 0


def test_an_interrupt_between_the_books_and_the_device(engine, monkeypatch):
    llm = engine(enable_prefix_caching=True)
    prompt = list(range(1, 50))
    want = result(llm.generate([prompt], GREEDY)[0])
    for name in ("place", "finish"):
        with monkeypatch.context() as patch:

            def interrupted(*args):
                raise KeyboardInterrupt

            patch.setattr(llm._scheduler, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([prompt[::-1]], GREEDY)
        assert result(llm.generate([prompt], GREEDY)[0])[0][0] == want[0][0]
    stats = llm.stats()
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def test_a_stream_closed_between_two_steps_keeps_the_cached_prompts(engine):
    llm = engine(enable_prefix_caching=True)
    prompt = list(range(1, 50))
    stream = llm.stream([prompt], GREEDY)
    next(stream)
    stream.close()
    llm.generate([prompt], GREEDY)
    assert llm.stats()["prefix_hits"] == 6


def test_swapped_pages_stay_within_their_budget(engine):
    llm = engine(kv_cache_bytes=PAGE * 15, preemption="swap", swap_bytes=PAGE * 9)
    most = []
    llm.observer = lambda event, state: most.append(llm.stats()["swap_bytes_used"])
    llm.generate(tiny.prompts(), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert 0 < max(most) <= PAGE * 9


def test_a_rewind_takes_the_count_of_requests_back(engine):
    llm = engine()
    sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)  # no seed of its own
    saved, seen = llm.save(), []
    for _ in range(2):
        llm.rewind(saved)
        number = llm.add_request([1, 2, 3], sampled)
        while llm.has_unfinished_requests():
            outputs = llm.step()
        seen.append((number, result(outputs[0])))
    assert seen[0] == seen[1]


def test_numbers_of_numpy_and_beyond_32_bits(engine):
    llm = engine()
    base = dict(max_tokens=4, temperature=1.0, seed=3)
    want = result(llm.generate([[1, 2]], SamplingParams(**base))[0])
    for other in (dict(seed=np.int64(3)), dict(top_k=2**31), dict(max_tokens=np.int32(4))):
        assert result(llm.generate([[1, 2]], SamplingParams(**{**base, **other}))[0]) == want
    long = SamplingParams(min_tokens=2**31, max_tokens=2**31, temperature=0)
    assert len(llm.generate([[1] * 250], long)[0].outputs[0].token_ids) == 6
    assert SamplingParams(stop_token_ids=np.array([1, 2])).stop_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: SamplingParams(stop=5), "stop must be a list"),
        (lambda llm: SamplingParams(stop_token_ids=5), "stop_token_ids must be a list"),
        (lambda llm: SamplingParams(temperature=2e-38), "too small to divide by"),
        (lambda llm: llm.generate(np.array(5)), "prompts must be"),
        (lambda llm: llm.generate(b"abc"), "prompts must be"),
        (lambda llm: llm.add_request(5), "a prompt is a text"),
        (lambda llm: llm.generate([{"prompt": [1], "cache_salt": "\ud800"}]), "valid Unicode"),
        (lambda llm: BeamSearchParams(early_stopping=1), "early_stopping must be"),
        (lambda llm: BeamSearchParams(length_penalty=2000.0), "length_penalty must be"),
        (lambda llm: BeamSearchParams(n=True), "n must be"),
    ],
)
def test_odd_inputs_are_named(call, message, engine):
    with pytest.raises(ValueError, match=message):
        call(engine())
