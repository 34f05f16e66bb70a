"""The static gate: its reading of SASS by hand-written code, and one real compilation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

import aot
import kernel_gate

ROOT = Path(__file__).resolve().parent.parent


def sass(*lines):
    """nvdisasm's way of writing: labels at the line's start, addresses in comments."""
    out = []
    for number, line in enumerate(lines):
        out.append(line if line.startswith(".L_") else f"        /*{16 * number:04x}*/   {line} ;")
    return "\n".join(out)


LOOPS = sass(
    "MOV R1, c[0x0][0x28]",
    ".L_x_1:",  # masked: longer, the same matrix products
    "LDGSTS.E.BYPASS.128 [R0], desc[UR18][R30.64]",
    "ISETP.GE.AND P1, PT, R4, R5, PT",
    "HMMA.16816.F32.BF16 R36, R28, R32, RZ",
    "IADD3 R4, R4, 0x1, RZ",
    "@P1 BRA `(.L_x_1)",
    ".L_x_2:",  # main, with a wait placed out of line that jumps back into it
    "LDGSTS.E.BYPASS.128 [R0], desc[UR18][R30.64]",
    "LDG.E R7, desc[UR18][R32.64]",
    "@!P2 BRA `(.L_x_4)",
    ".L_x_3:",
    "HMMA.16816.F32.BF16 R36, R28, R32, RZ",
    "@P0 BRA `(.L_x_2)",
    "STG.E [R2.64], R36",
    "EXIT",
    ".L_x_4:",
    "SYNCS.PHASECHK R9",
    "BRA `(.L_x_3)",
    ".L_x_5:",
    "BRA `(.L_x_5)",
)


def test_loops_by_hand():
    found = sorted(loop.instructions for loop in aot.loops(LOOPS))
    assert found == [5, 7]
    assert [aot.tensor_ops(loop) for loop in aot.loops(LOOPS)] == [1, 1]


def test_the_main_loop_is_the_shortest_with_most_matrix_products():
    loop = aot.main_loop(LOOPS)
    assert loop.instructions == 5
    assert loop.loads == {(True, 16): 1}
    assert aot.main_loop(sass("MOV R1, R2", "EXIT")) is None


def row(**fields):
    base = {
        "kernel": "decode NPKD",
        "arch": "sm_90",
        "baseline": False,
        "problem": "bfloat16",
        "registers": 110,
        "spill_bytes": 0,
        "instructions_per_128_tokens": 260.0,
        "warp_instructions_per_128_tokens": 2080.0,
        "async_fraction": 1.0,
        "tensor_core": True,
        "mma": {"HMMA": 32},
        "load_amplification": 1.0,
        "issue_pressure": 0.2,
        "temp_bytes": 10,
        "pool_bytes": 1000,
    }
    return {**base, **fields}


BUILTIN = row(
    kernel="jax builtin decode",
    baseline=True,
    instructions_per_128_tokens=300.0,
    warp_instructions_per_128_tokens=2400.0,
    temp_bytes=100,
)


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({}, None),
        ({"spill_bytes": 4}, "no spills"),
        ({"registers": 129}, "registers"),
        ({"async_fraction": 0.99}, "16-byte async loads"),
        ({"load_amplification": 1.03}, "bytes loaded / minimum"),
        ({"tensor_core": False}, "tensor cores"),
        ({"temp_bytes": 26}, "temp_bytes <= 0.25 x builtin"),
        ({"temp_bytes": 300}, "no copy of the pool"),
        ({"instructions_per_128_tokens": 301.0}, "instructions_per_128_tokens <= 1 x builtin"),
        ({"kernel": "ragged NPKD"}, "wgmma"),
        ({"kernel": "decode fp8 e4m3", "issue_pressure": 0.61}, "issue pressure"),
    ],
)
def test_every_bound_can_be_missed(fields, bound):
    missed = [c["bound"] for c in kernel_gate.bounds([BUILTIN, row(**fields)]) if not c["ok"]]
    assert missed == [] if bound is None else bound in missed


def gate(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "kernel_gate.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )


def test_missing_wheels_are_named_in_one_line(tmp_path):
    try:
        aot.find_tools()
    except aot.MissingTools:
        pass
    else:
        pytest.skip("the compiler's wheels are installed here")
    done = gate("--out", str(tmp_path))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "pip install --no-deps jax-cuda12-plugin==" in done.stderr


def test_a_real_compilation(tmp_path):
    """One kernel of ours and JAX's builtin, for an H200, by the compiler that a GPU would use."""
    try:
        aot.find_tools()
    except aot.MissingTools as missing:
        pytest.skip(str(missing))
    done = gate("--only", "decode KNPD", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "kernel_gate.json").read_text())
    (ours,) = result["rows"]
    assert (ours["kernel"], ours["arch"]) == ("decode KNPD", "sm_90")
    assert ours["spill_bytes"] == 0
    assert ours["registers"] <= 128
    assert ours["async_fraction"] == 1.0
    assert ours["tensor_core"]
    assert all(c["ok"] for c in result["bounds"])
