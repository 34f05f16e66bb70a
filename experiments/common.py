"""What every experiment shares: its command line, its environment, its files, its figure style.

A script looks like this::

    def run(args):
        ...
        common.write_json(args, {"environment": common.environment(), ...})
        common.write_figure(args, figure)

    if __name__ == "__main__":
        common.main(__doc__, run)

Files appear whole or not at all: each is written beside its final name and moved there, so an
interrupted run never leaves a half-written result.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

T = TypeVar("T")

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Colours that people with colour-blindness can tell apart (Okabe and Ito, 2008)."""


class Failure(Exception):
    """The experiment cannot do its job; the message is the one line that the user reads."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def fail(message: str, code: int = 1) -> NoReturn:
    """End the script with `message` as one line on the error stream and exit code `code`."""
    raise Failure(message, code)


# --- command line -----------------------------------------------------------------------------


def parser(doc: str | None, name: str | None = None) -> argparse.ArgumentParser:
    """The options of every experiment: --out, --seed, --quick.

    Args:
      doc: the script's docstring. Its first paragraph becomes the description; the rest, JSON
        keys included, stands below the options.
      name: the script's name, which also names its files; by default that of the running file.
    """
    text = (doc or "").strip()
    description, _, rest = text.partition("\n\n")
    name = name or Path(sys.argv[0]).stem
    made = argparse.ArgumentParser(
        prog=f"{name}.py",
        description=description,
        epilog=f"example:\n  python experiments/{name}.py --quick --out results/\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="folder for the JSON file and the figure (default: results/)",
    )
    made.add_argument("--seed", type=_seed, default=0, help="seed of all randomness (default: 0)")
    made.add_argument(
        "--quick", action="store_true", help="a first look within seconds, on less data"
    )
    made.add_argument("--debug", action="store_true", help="show the traceback of every error")
    made.set_defaults(script=name)
    return made


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed < 2**32:
        raise argparse.ArgumentTypeError(f"must be in 0..4294967295, got {text}")
    return seed


def positive(text: str) -> int:
    """The type of an option that counts something: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1; got {text}")
    return value


def main(
    doc: str | None,
    run: Callable[[argparse.Namespace], None],
    options: Callable[[argparse.ArgumentParser], None] | None = None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Parse the options, check that results can be written, run, and exit.

    Exit codes: 0 done; 1 the job cannot be done; 2 wrong usage or the results cannot be written;
    130 interrupted. Every expected error is one line on the error stream; anything else is a bug
    and keeps its traceback.

    Args:
      doc: the script's docstring.
      run: does the work, given the parsed options.
      options: adds the script's own options to the parser.
      argv: the words of the command line, by default those of the process.
    """
    made = parser(doc)
    if options is not None:
        options(made)
    args = made.parse_args(argv)
    try:
        check_writable(args)
        run(args)
    except ModuleNotFoundError as error:
        if args.debug or error.name not in ("paxattn", "pallas_kernels", "convert"):
            raise
        _complain(made.prog, f"{error.name} is not installed; run `pip install -e .` first")
        sys.exit(1)
    except Exception as error:
        code = _exit_code(error)
        if code is None or args.debug:
            raise
        _complain(made.prog, str(error))
        sys.exit(code)
    except KeyboardInterrupt:
        _complain(made.prog, "interrupted")
        sys.exit(130)
    sys.exit(0)


def _exit_code(error: Exception) -> int | None:
    """The exit code of an error that a user can cause; None for a bug."""
    if isinstance(error, Failure):
        return error.code
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return 2
    expected = (ValueError, NotImplementedError, FileNotFoundError, PermissionError)
    return 1 if isinstance(error, expected) else None


def _complain(prog: str, message: str) -> None:
    print(f"{prog}: error: {' '.join(message.split())}", file=sys.stderr)


# --- environment ------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Where the numbers come from: hardware, versions and command, ready for JSON."""
    import jax
    import jaxlib

    devices = jax.devices()
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "backend": jax.default_backend(),
        "device": devices[0].device_kind,
        "device_count": len(devices),
        "git_commit": _git_commit(),
        "command": command(),
    }


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command() -> str:
    """The command that a reader types to get these results."""
    words = [_shown(word) for word in sys.argv]
    return shlex.join(["python", *words])


def _shown(word: str) -> str:
    """A path below the working directory relative to it: shorter, and true on other machines."""
    here = os.getcwd() + os.sep
    return word[len(here) :] if word.startswith(here) else word


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _git_commit() -> str | None:
    """The project's commit, "-dirty" appended where files differ; None outside a repository."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


# --- files ------------------------------------------------------------------------------------


def path_of(args: argparse.Namespace, suffix: str) -> Path:
    """`DIR/<script><suffix>`, for example `results/memory_waste.json`."""
    return args.out / f"{args.script}{suffix}"


def check_writable(args: argparse.Namespace, need_bytes: int = 4 * 2**20) -> None:
    """Make the output folder and prove, before any long work, that results can be written there.

    Raises:
      Failure: (exit code 2) the folder cannot be made or written, or has less than `need_bytes`
        of space.
    """
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.out) as probe:
            probe.write(bytes(need_bytes))
            probe.flush()
    except OSError as error:
        _cannot_write(args.out, error)


def _cannot_write(path: Path, error: OSError) -> NoReturn:
    reason = error.strerror or str(error)
    fail(f"cannot write to {path}: {reason}; choose another folder with --out DIR", code=2)


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path that takes the name `path` when the block ends well, and goes otherwise.

    Raises:
      Failure: (exit code 2) the folder cannot be written or is full.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        with open(temporary, "rb") as done:
            os.fsync(done.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _cannot_write(path, error)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(args: argparse.Namespace, result: dict[str, Any]) -> Path:
    """Write `result` to `DIR/<script>.json`, whole or not at all; returns the path.

    NumPy and JAX scalars and arrays become numbers and lists.

    Raises:
      ValueError: a value is NaN or infinite, which JSON has no word for.
      Failure: the file cannot be written (exit code 2).
    """
    text = json.dumps(_plain(result), indent=2, allow_nan=False, ensure_ascii=False)
    path = path_of(args, ".json")
    with atomic(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy and JAX, scalars and arrays
        return value.tolist()
    return value


def write_figure(args: argparse.Namespace, figure: Any, suffix: str = ".png") -> Path:
    """Write a matplotlib figure to `DIR/<script><suffix>` with its command as caption; closes it.

    Raises:
      Failure: the file cannot be written (exit code 2).
    """
    import matplotlib.pyplot as plt

    figure.text(
        *(0.995, -0.012, f"drawn by: {command()}"),
        ha="right",
        va="top",
        fontsize=9,
        family="monospace",
        color="#555555",
    )
    path = path_of(args, suffix)
    try:
        with atomic(path) as temporary:
            figure.savefig(temporary, bbox_inches="tight", pad_inches=0.15)
    finally:
        plt.close(figure)
    return path


# --- what the user sees -----------------------------------------------------------------------


def style() -> None:
    """Slide-sized fonts, the colour-blind safe palette and plain axes for the figures to come.

    Uses matplotlib's file-only backend: no display is needed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "figure.figsize": (11, 6.2),
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "font.size": 15,
            "axes.titlesize": 18,
            "axes.labelsize": 16,
            "legend.fontsize": 14,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#DDDDDD",
            "lines.linewidth": 2.5,
            "axes.prop_cycle": plt.cycler(color=PALETTE),
            "svg.hashsalt": "paxattn",
        }
    )


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> str:
    """A text table: first column left, the others right; floats to four significant digits."""
    cells = [[str(h) for h in headers], *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([*([title] if title else []), lines[0], rule, *lines[1:]])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float | np.floating):
        if not math.isfinite(value):
            return str(value)
        digits = 3 - math.floor(math.log10(abs(value))) if value else 1
        return f"{value:,.{min(max(digits, 0), 6)}f}"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def progress(items: Iterable[T], label: str, total: int | None = None) -> Iterable[T]:
    """`items` with a progress bar on a terminal; no output elsewhere (logs, CI, pipes)."""
    from tqdm import tqdm

    return tqdm(items, desc=label, total=total, disable=not sys.stderr.isatty(), leave=False)


def bar(total: int, label: str, unit: str = "it") -> Any:
    """A tqdm bar to `update(n)` by hand; where the error stream is no terminal, one line at once."""
    from tqdm import tqdm

    silent = not sys.stderr.isatty()
    if silent:
        report(f"{label} ({total:,} {unit}{'' if total == 1 else 's'}) ...")
    return tqdm(total=total, desc=label, unit=unit, disable=silent, dynamic_ncols=True)


def report(*lines: Any) -> None:
    """Print results at once, even into a pipe."""
    print(*lines, sep="\n", flush=True)
