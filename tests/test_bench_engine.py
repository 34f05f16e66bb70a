"""The engine's benchmark: its workloads, its arithmetic, and that peers see the same weights."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

import bench_engine as bench
import bench_workers


def arguments(**changes):
    return argparse.Namespace(**{"seed": 0, "quick": False, "requests": None, **changes})


def test_w1_is_the_same_for_the_same_seed():
    work = bench.make_workload(arguments(), "W1", 1000, 2048)
    assert work == bench.make_workload(arguments(), "W1", 1000, 2048)
    assert work != bench.make_workload(arguments(seed=1), "W1", 1000, 2048)
    assert work["arrivals"] is None
    assert len(work["requests"]) == 32
    for prompt, outputs in work["requests"]:
        assert 16 <= len(prompt) <= 200
        assert 16 <= outputs <= 200
        assert 0 <= min(prompt) <= max(prompt) < 1000


def test_w2_has_real_lengths_and_arrivals():
    work = bench.make_workload(arguments(rate=2.0, trace=None), "W2", 1000, 512)
    assert len(work["requests"]) == len(work["arrivals"]) == 200
    assert all(len(p) + n <= 512 for p, n in work["requests"])
    assert work["arrivals"] == sorted(work["arrivals"])
    assert work["arrivals"][-1] / 199 == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize(
    ("workload", "says"), [(["W1"], "add --workload W2"), (["W1", "W2"], "no such trace file")]
)
def test_a_bad_trace_is_refused_before_anything_is_measured(monkeypatch, workload, says):
    monkeypatch.setattr("convert.load", lambda *_, **__: tiny.model())
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    args = arguments(
        workload=workload,
        trace=Path("missing.json"),
        repetitions=1,
        peer_python=None,
        model="tiny",
        dtype=["float32"],
        max_model_len=2048,
        rate=1.0,
    )
    with pytest.raises((bench.common.Failure, ValueError), match=says):
        bench.run(args)


def test_summary_by_hand():
    def answer(seconds):
        results = [([1, 2, 3], 0.5, 1.5), ([4], 2.0, 2.0)]
        facts = {"compiled_programs": 5}
        return {
            "seconds": seconds,
            "results": results,
            "facts": facts,
            "peak_bytes": 10,
            "other_cpu_share": 0.1,
        }

    reference = {"results": [([1, 9, 3],), ([4],)]}
    work = {"requests": [([7], 3), ([8], 1)]}
    got = bench.summary([answer(9.0), answer(2.0), answer(4.0)], 4, work, {}, reference)
    assert got["output_tokens_per_s"] == {"repetitions": [2.0, 1.0], "median": 1.5}
    assert got["compile_s"] == 6.0  # 9 - the median of 2 and 4
    assert got["ttft_ms"]["median"] == 1250.0
    assert got["time_between_tokens_ms"] == {"median": 500.0, "p99": 500.0}
    assert got["same_as_transformers"] == {"requests": 0.5, "tokens": 0.5}
    assert got["compiled_after_warm_up"] == 0


@pytest.mark.parametrize(
    ("programs", "arrivals", "served"),
    [
        ([3, 3], [0.0], 2),  # once more shows that nothing compiles
        ([3, 5, 5, 5], [0.0], 3),
        ([1, 2, 3, 4, 5], [0.0], 4),  # and then that is that
        ([3, 5], None, 1),  # all requests are there at once: one run meets all programs
        ([None, None], [0.0], 1),  # a peer says nothing of its programs
    ],
)
def test_warm_up_goes_on_while_programs_compile(programs, arrivals, served):
    answers = [
        {"seconds": i, "facts": {} if n is None else {"compiled_programs": n}}
        for i, n in enumerate(programs)
    ]
    left = iter(answers)
    worker = SimpleNamespace(serve=lambda work: next(left))
    answer = bench.warmed_up(worker, {"arrivals": arrivals})
    assert len(answers) - len(list(left)) == served
    assert answer == {"seconds": 0, "facts": answers[served - 1]["facts"]}


def test_transformers_reads_the_folder_as_the_same_model(tmp_path):
    torch = pytest.importorskip("torch", reason="torch (of the test extra) runs the peer")
    import transformers

    loaded = tiny.model()
    bench.hugging_face_folder(loaded, "float32", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    prompt = tiny.prompts()[1]
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert out[0, len(prompt) :].tolist() == tiny.greedy(loaded, prompt, 5)


def test_cpu_time_of_a_process_grows_and_is_part_of_the_machines(tmp_path):
    if bench.cpu_seconds() is None:
        pytest.skip("no /proc/stat on this system")
    import os

    before, own = bench.cpu_seconds(), bench.process_seconds(os.getpid())
    until = own + 0.2
    while bench.process_seconds(os.getpid()) < until:
        np.linalg.svd(np.ones((50, 50)))
    after = bench.cpu_seconds()
    assert after[0] - before[0] >= 0.15
    # A tick (1/100 s) of room: the counts are large sums in floating point, and the kernel corrects
    # its idle time in hindsight.
    assert after[1] - before[1] >= after[0] - before[0] - 0.015


def test_a_system_that_cannot_start_says_why():
    pytest.importorskip("torch")  # the peer is transformers, which runs on it
    with pytest.raises(RuntimeError, match=r"transformers_static stopped: .*missing"):
        bench.Worker(
            "transformers_static",
            sys.executable,
            {"hf_model": "/missing/model", "dtype": "float32", "threads": 1},
        )
    with pytest.raises(RuntimeError, match="--peer-python"):
        bench.start_peer("vllm", None, {})


def test_the_engine_is_driven_by_arrivals_and_gives_its_usual_tokens():
    from paxattn import LLM, SamplingParams

    loaded = tiny.model()
    options = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 128}
    serve = bench_workers.paxattn({"model": loaded, **options})
    requests = [(p, 3 + i) for i, p in enumerate(tiny.prompts(3, longest=20))]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    want = LLM(loaded, **options).generate([p for p, _ in requests], params)
    for arrivals in (None, [0.0, 0.0, 0.3]):
        got = serve(requests, arrivals)
        assert [tokens for tokens, _, _ in got] == [o.outputs[0].token_ids for o in want]
        assert all(0 < first <= last for _, first, last in got)
