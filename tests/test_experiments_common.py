"""What every experiment shares: whole files, one-line errors, exit codes, readable tables."""

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

import common

EXPERIMENTS = Path(common.__file__).parent

DOC = """Measure nothing at all.

JSON keys: `x`, in tokens.
"""


def run_main(run, argv, capsys, options=None):
    """(exit code, standard output, standard error) of a script."""
    with pytest.raises(SystemExit) as caught:
        common.main(DOC, run, options, argv)
    said = capsys.readouterr()
    return caught.value.code, said.out, said.err


@pytest.fixture
def args(tmp_path):
    return argparse.Namespace(out=tmp_path, script="demo", seed=0, quick=False)


def test_options(capsys):
    parser = common.parser(DOC, "demo")
    args = parser.parse_args([])
    assert (args.out, args.seed, args.quick) == (Path("results"), 0, False)
    args = parser.parse_args(["--out", "x", "--seed", "7", "--quick"])
    assert (args.out, args.seed, args.quick) == (Path("x"), 7, True)
    shown = parser.format_help()
    assert "Measure nothing at all." in shown
    assert "python experiments/demo.py --quick" in shown
    assert "JSON keys: `x`" in shown
    for wrong in ("-1", "4294967296", "x"):
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(["--seed", wrong])
        assert caught.value.code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (common.Failure("it is\nnot possible"), 1),
        (common.Failure("it is not possible", 3), 3),
        (ValueError("it is not possible"), 1),
        (NotImplementedError("it is not possible"), 1),
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "it is not possible"), 2),
    ],
)
def test_expected_errors_are_one_line(tmp_path, capsys, error, code):
    def run(args):
        raise error

    got, _, said = run_main(run, ["--out", str(tmp_path)], capsys)
    assert got == code
    assert said.count("\n") == 1
    assert "interrupted" in said if code == 130 else "it is not possible" in said


def test_bugs_keep_their_traceback(tmp_path):
    def run(args):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        common.main(DOC, run, None, ["--out", str(tmp_path)])

    def refuse(args):
        raise ValueError("shown whole")

    with pytest.raises(ValueError, match="shown whole"):
        common.main(DOC, refuse, None, ["--out", str(tmp_path), "--debug"])


def test_own_options_and_success(tmp_path, capsys):
    def run(args):
        common.report(f"{args.rows} {args.seed}")

    code, out, _ = run_main(
        run,
        ["--rows", "3", "--out", str(tmp_path)],
        capsys,
        lambda parser: parser.add_argument("--rows", type=int),
    )
    assert (code, out) == (0, "3 0\n")


def test_an_unwritable_folder_is_found_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    ran = []
    code, _, said = run_main(ran.append, ["--out", str(tmp_path / "file" / "r")], capsys)
    assert (code, ran) == (2, [])
    assert "cannot write to" in said
    assert "--out DIR" in said


def test_a_full_disk_is_found_before_the_work(tmp_path, capsys, monkeypatch):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(common.tempfile, "TemporaryFile", lambda dir: Full())
    ran = []
    code, _, said = run_main(ran.append, ["--out", str(tmp_path)], capsys)
    assert (code, ran) == (2, [])
    assert "No space left on device" in said


def test_json_is_written_whole(args):
    result = {"x": np.float32(1.5), "y": [np.arange(3)], "path": Path("a"), "text": "Größe"}
    path = common.write_json(args, result)
    assert path == args.out / "demo.json"
    read = json.loads(path.read_text(encoding="utf-8"))
    assert read == {"x": 1.5, "y": [[0, 1, 2]], "path": "a", "text": "Größe"}
    assert os.listdir(args.out) == ["demo.json"]


def test_json_takes_jax_arrays_and_refuses_nan(args):
    import jax.numpy as jnp

    path = common.write_json(args, {"x": jnp.arange(2), "y": jnp.float32(0.5)})
    before = path.read_text()
    assert json.loads(before) == {"x": [0, 1], "y": 0.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        common.write_json(args, {"x": float("nan")})
    assert path.read_text() == before


def test_a_write_that_fails_keeps_the_old_file(args, monkeypatch):
    path = common.write_json(args, {"x": 1})

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(common.os, "fsync", full)
    with pytest.raises(common.Failure, match="No space left") as caught:
        common.write_json(args, {"x": 2})
    assert caught.value.code == 2
    assert json.loads(path.read_text()) == {"x": 1}
    assert os.listdir(args.out) == ["demo.json"]


_INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.path.insert(0, sys.argv.pop())
import common
def run(args):
    with common.atomic(args.out / "x.json") as temporary:
        temporary.write_text("half")
        print("half", flush=True)
        time.sleep(300)
common.main("Doc.", run)
"""


def test_interrupt_leaves_nothing_half_written(tmp_path):
    command = [sys.executable, "-c", _INTERRUPTED, "--out", str(tmp_path), str(EXPERIMENTS)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert said.endswith("error: interrupted\n")
    assert os.listdir(tmp_path) == []


def test_figure_names_its_command_and_is_closed(args, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", [os.path.join(os.getcwd(), "experiments/demo.py"), "--seed", "3"]
    )
    assert common.command() == "python experiments/demo.py --seed 3"
    common.style()
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    axes.plot([0, 1], [0, 1])
    path = common.write_figure(args, figure)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert any("python experiments/demo.py --seed 3" in t.get_text() for t in figure.texts)
    assert plt.get_fignums() == []
    assert os.listdir(args.out) == ["demo.png"]


def test_environment_is_complete_and_plain():
    found = common.environment()
    keys = {"cpu", "cores", "memory_gib", "os", "python", "jax", "jaxlib", "numpy", "device"}
    assert keys <= found.keys()
    assert found["cores"] >= 1
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    json.dumps(found)


def test_table():
    shown = common.table(
        ["what", "n"],
        [
            ["a", 1234567],
            ["bb", 0.000123456],
            ["c", 12.3456],
            ["d", None],
            ["e", 98765.4],
            ["f", 0.0],
        ],
        title="T",
    )
    assert shown.splitlines() == [
        "T",
        "what          n",
        "---------------",
        "a     1,234,567",
        "bb     0.000123",
        "c         12.35",
        "d             -",
        "e        98,765",
        "f           0.0",
    ]


def test_progress_is_no_bar_outside_a_terminal(capsys):
    assert list(common.progress(range(3), "x")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")
    with common.bar(3000, "serving", "token") as bar:
        bar.update(3000)
    assert capsys.readouterr() == ("serving (3,000 tokens) ...\n", "")


def test_help_starts_without_jax():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", EXPERIMENTS / "make_sharegpt_lengths.py", "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "example:" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"jax", "flax", "matplotlib", "transformers"}  # seconds each
