"""The main experiment, on its small model: the same tokens from both caches, shares that add up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "experiments" / "contiguous_vs_paged.py"


def run(*words):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_quick_run(tmp_path):
    done = run("--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "contiguous_vs_paged.json").read_text())
    assert (tmp_path / "contiguous_vs_paged.png").stat().st_size > 10_000
    assert result["identical_outputs"] is True
    keys = ("token_utilization_mean", "internal_waste", "reserved_waste", "external_waste", "free")
    for side in ("contiguous", "paged"):
        assert sum(result[side][key] for key in keys) == pytest.approx(1)
    assert result["paged"]["token_utilization_mean"] >= 0.95
    assert result["contiguous"]["token_utilization_mean"] < 0.5
    assert result["contiguous"]["max_concurrent"] == 3
    assert result["paged"]["output_tokens"] == result["contiguous"]["output_tokens"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--requests", "0"), "--requests: must be an integer of at least 1; got 0"),
        (("--kv-sequences", "nan"), "--kv-sequences: must be a finite number"),
        (("--quick", "--max-model-len", "4096"), "more than the 2048 positions"),
        (("--requests", "5000"), "has only"),
        (("--trace", "nowhere.csv"), "nowhere.csv: no such trace file"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, words, says):
    done = run(*words, "--out", str(tmp_path))
    assert done.returncode != 0
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
