"""Traces: each kind of file, what is refused and where, and the drawn lengths."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

import traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
118.5,ChatGPT,417,276,693,Conversation log
"""
MOONCAKE = (
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n'
)
SHAREGPT = [
    {
        "id": "a",
        "conversations": [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "d e"}],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "no human first"}]},
    {"id": "c", "conversations": []},
    {"id": "d", "conversations": [{"from": "user", "value": "x"}, {"from": "gpt", "value": ""}]},
    {
        "id": "e",
        "conversations": [
            {"from": "human", "value": "one two"},
            {"from": "gpt", "value": "three"},
            {"from": "human", "value": "not counted"},
        ],
    },
]


def words(texts):
    return [len(text.split()) for text in texts]


@pytest.fixture
def read(tmp_path):
    def reader(text):
        path = tmp_path / "trace"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return traces.read(path, words)

    return reader


def lengths(trace):
    return list(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def test_azure(read):
    trace = read(AZURE)
    assert lengths(trace) == [(374, 44), (396, 109)]
    # 50.995169 - 46.680590, in whole microseconds.
    np.testing.assert_allclose(trace.arrival_s, [0.0, 4.314579], atol=1e-6)
    assert (trace.prompt_tokens.dtype, trace.arrival_s.dtype) == (np.int32, np.float64)
    assert trace.source == "Azure trace trace"
    assert trace.hash_ids is None


def test_azure_2024_has_time_zones(read):
    trace = read(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n"
    )
    np.testing.assert_allclose(trace.arrival_s, [0.0, 0.99007], atol=1e-6)


def test_mooncake(read):
    trace = read(MOONCAKE)
    assert lengths(trace) == [(6758, 500), (7322, 490)]
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert trace.hash_ids == ((0, 1), (0, 14))


def test_burstgpt_leaves_failed_calls_out(read):
    trace = read(BURST)
    assert lengths(trace) == [(472, 18), (417, 276)]
    assert trace.arrival_s.tolist() == [0.0, 113.5]
    assert trace.dropped == 1


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt(read, lines, indent):
    if lines:
        text = "\n".join(json.dumps(item, indent=indent) for item in SHAREGPT)
    else:
        text = json.dumps(SHAREGPT, indent=indent)
    trace = read(text)
    assert lengths(trace) == [(3, 2), (2, 1)]
    assert trace.dropped == 1  # "d", whose answer is empty
    assert trace.arrival_s is None


def test_own_table(read):
    trace = read("# a note\n\nprompt_tokens,output_tokens\n3,4\n 5 , 6\n7.0,8\n")
    assert lengths(trace) == [(3, 4), (5, 6), (7, 8)]
    assert trace.arrival_s is None
    trace = read('output_tokens,arrival_s,prompt_tokens\n4,9.5,"3"\n6,2,5\n')
    assert lengths(trace) == [(5, 6), (3, 4)]  # in order of arrival
    assert trace.arrival_s.tolist() == [0.0, 7.5]


def test_windows_line_ends_and_byte_order_mark(read):
    assert lengths(read("\ufeffprompt_tokens,output_tokens\r\n3,4\r\n")) == [(3, 4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the trace is empty"),
        (" \n\n", "the trace is empty"),
        ("# only a note\n", "the trace is empty"),
        ("[]", "the trace is empty"),
        ("prompt_tokens,output_tokens\n", "no usable request"),
        ("prompt_tokens,output_tokens\n4,0\n0,4\n", r"no usable request \(2 without"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"input_length": ' + "1" * 5000 + "}", "not readable as JSON"),
        ('{"conversations": [{"from": "human", "value": "\\ud800"}]}', "no valid Unicode"),
        ("prompt_tokens,output_tokens\n" + '"' + "1" * 200_000 + '",2\n', "not readable as CSV"),
        ("prompt_tokens,prompt_tokens,output_tokens\n5,6,3\n", "prompt_tokens is there 2 times"),
        ("prompt_tokens,output_tokens,arrival_s\n5,3,1e308\n", "arrival_s must be a number up to"),
        ("a,b\n1,2\n", r"line 1: expected a header with the columns .*ContextTokens"),
        (AZURE + "2023-11-16 18:15:51,12\n", r"line 4: expected 3 columns, got 2"),
        (AZURE + "yesterday,12,3\n", r"line 4: TIMESTAMP must be a date and time.*'yesterday'"),
        (AZURE + "2023-11-16 18:15:51,-1,3\n", r"line 4: ContextTokens must be.*'-1'"),
        ("ContextTokens,GeneratedTokens\n1,2\n", "line 1: expected the column TIMESTAMP"),
        (BURST + "9,m,x,1,1,l\n", r"line 5: Request tokens must be a whole number.*'x'"),
        (BURST + "nan,m,1,1,1,l\n", "line 5: Timestamp must be a number"),
        ("prompt_tokens,output_tokens\n1,2\n\n1.5,2\n", r"line 4: prompt_tokens .*'1\.5'"),
        ("prompt_tokens,output_tokens\n1,99999999999\n", "line 2: output_tokens"),
        (MOONCAKE + "{oops}\n", "line 3: not JSON"),
        (MOONCAKE + '{"timestamp": 1}\n', "line 3: input_length must be.*None"),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": true, "output_length": 1}',
            "line 3: input_l",
        ),
        (MOONCAKE.replace("[0, 14]", '"x"'), "line 2: hash_ids must be a list"),
        (MOONCAKE.replace("1500", "null"), "line 2: timestamp must be a number"),
        ('{"a": 1}', r"line 1: expected `conversations` \(ShareGPT\).*got the keys a"),
        ("[1]", "line 1: expected a JSON object, got int"),
        ('[\n{"conversations": []}\n{', r"line 3: .*expected , or \]"),
        ('[\n{"conversations": []},\n', "line 3: the JSON array is not closed"),
        ('[{"conversations": []}]', "no conversation begins with a human and a gpt turn"),
        ('[{"conversations": []},\n{"conversations": 3}]', "line 2: .*list of turns, got '3'"),
        ('[{"conversations": [3, 4]}]', "line 1: expected a turn"),
        ('[\n\n{"conversations": [{"from": "human"}]}]', "line 3: expected a turn"),
        (b"\xff\xfe\x00binary", "not readable as a text file"),
    ],
)
def test_bad_lines_are_named(read, tmp_path, text, said):
    with pytest.raises(ValueError, match=said) as caught:
        read(text)
    assert str(caught.value).startswith(str(tmp_path / "trace"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="no such trace file"):
        traces.read(tmp_path / "nothing")
    with pytest.raises(ValueError, match="not readable"):
        traces.read(tmp_path)


def test_the_shipped_table():
    parser = argparse.ArgumentParser()
    traces.option(parser)
    trace = traces.of(parser.parse_args([]))
    assert len(trace) == 2000
    assert trace.prompt_tokens.min() >= 4
    assert trace.output_tokens.min() >= 4
    assert (trace.prompt_tokens + trace.output_tokens).max() <= 2048
    assert trace.output_tokens.mean() == pytest.approx(307.0, abs=0.1)


def test_choosing(read):
    trace = read("prompt_tokens,output_tokens,arrival_s\n1,1,0\n2,2,1\n3,3,2\n4,4,3\n")
    assert lengths(traces.head(trace, 2)) == [(1, 1), (2, 2)]
    assert len(traces.head(trace, 99)) == 4
    assert lengths(traces.fitting(trace, 4)) == [(1, 1), (2, 2)]
    drawn = traces.sample(trace, 3, seed=1)
    assert lengths(drawn) == lengths(traces.sample(trace, 3, seed=1))
    assert sorted(set(lengths(drawn))) == lengths(drawn)
    assert drawn.arrival_s.tolist() == [float(p - 1) for p, _ in lengths(drawn)]
    with pytest.raises(ValueError, match="has 4 requests, 5 were asked for"):
        traces.sample(trace, 5, seed=0)


def test_hash_ids_follow_their_request(read):
    kept = traces.take(read(MOONCAKE), np.array([1]))
    assert kept.hash_ids == ((0, 14),)


@pytest.mark.parametrize(("like", "means"), traces.PAPER_MEANS.items())
def test_drawn_lengths_have_the_papers_means(like, means):
    trace = traces.drawn(like, 100_000, seed=3)
    # The standard error is below 1% for both; the output loses a little where it is cut.
    assert trace.prompt_tokens.mean() == pytest.approx(means[0], rel=0.02)
    assert trace.output_tokens.mean() == pytest.approx(means[1], rel=0.02)
    assert min(trace.prompt_tokens.min(), trace.output_tokens.min()) >= 1
    assert (trace.prompt_tokens + trace.output_tokens).max() <= 2048
    again = traces.drawn(like, 100_000, seed=3)
    np.testing.assert_array_equal(trace.prompt_tokens, again.prompt_tokens)


def test_drawing_refuses():
    with pytest.raises(ValueError, match="like must be one of sharegpt, alpaca"):
        traces.drawn("x", 3, 0)
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="between 1 and longest=10"):
        traces.lognormal(3, 11.0, 1.0, rng, 10)
    with pytest.raises(ValueError, match="rate must be positive"):
        traces.poisson_arrivals(3, 0.0, 0)


def test_poisson_arrivals():
    times = traces.poisson_arrivals(200_000, 4.0, seed=0)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() >= 0
    # Exponential gaps: mean and standard deviation are both 1 / rate.
    assert gaps.mean() == pytest.approx(0.25, rel=0.01)
    assert gaps.std() == pytest.approx(0.25, rel=0.01)
    assert len(traces.poisson_arrivals(0, 1.0, seed=0)) == 0
