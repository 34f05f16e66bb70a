"""preemption.py and chunked_prefill.py end to end on a small random model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def run(script, out, *words):
    command = [sys.executable, str(ROOT / "experiments" / f"{script}.py"), "--quick"]
    done = subprocess.run(
        [*command, "--out", str(out), *words], capture_output=True, text=True, timeout=300
    )
    return done


def result(script, out, *words):
    done = run(script, out, *words)
    assert done.returncode == 0, done.stderr
    assert (out / f"{script}.png").stat().st_size > 10_000
    return json.loads((out / f"{script}.json").read_text())


def test_preemption(tmp_path):
    words = ("--page-size", "16", "--requests", "4", "--tokens", "64", "--rounds", "1")
    got = result("preemption", tmp_path, *words)
    (alone,) = got["one_sequence"]
    assert alone["pages"] == 4
    assert alone["bytes"] == 4 * 16 * 2 * 4 * 2 * 64 * 4  # pages, tokens, k and v, layers, heads
    assert min(alone["out_ms"], alone["in_ms"], alone["recompute_ms"]) > 0
    (engine,) = got["engine"]
    assert engine["identical_outputs"] is True
    assert engine["modes"]["recompute"]["pages_swapped_out"] == 0
    assert engine["modes"]["recompute"]["preemptions"] > 0
    assert engine["modes"]["swap"]["pages_swapped_out"] > 0


def test_chunked_prefill(tmp_path):
    words = ("--streams", "2", "--length", "200", "--budget", "64", "--rounds", "1")
    got = result("chunked_prefill", tmp_path, *words)
    assert got["identical_outputs"] is True
    assert set(got["budgets"]) == {"none", "64"}
    for budget in got["budgets"].values():
        assert 0 < budget["gap_ms"]["median"] <= budget["gap_ms"]["max"]
        assert budget["ttft_s"] > 0


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("preemption", ("--tokens", "3"), "--tokens must be at least 8; got 3"),
        ("chunked_prefill", ("--budget", "1"), "--budget must be at least 16 tokens; got 1"),
        ("chunked_prefill", ("--length", "9000"), "more than the model's"),
    ],
)
def test_bad_options_are_one_line(tmp_path, script, words, message):
    done = run(script, tmp_path, *words)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
