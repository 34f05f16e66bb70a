"""Runs every experiment of this folder and writes one HTML report that needs nothing else.

The report, DIR/all.html, holds each script's question, command, table, figures (inline), results and
environment; it opens without a network and can be mailed. Pages that a script writes are linked, and
lie beside it. An experiment that fails does not keep the others from running: its error stands in
the report, and the exit status is 1. One that cannot run on this machine (no GPU, no compiler for
one) is skipped and says why.

Every script is a process of its own. Its files land in DIR beside the report.

JSON keys:
  experiments   list of {name, question, status ("done", "failed" or "skipped"), reason (one line,
                null when done), seconds, exit_code, command, files}
  done, failed, skipped   how many
  seconds       for all
"""

import importlib.metadata
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import html_report

FOLDER = Path(__file__).resolve().parent
# Worth reading in this order; whatever else is found follows by name.
ORDER = (
    *("kv_size", "contiguous_vs_paged", "memory_waste", "concurrency_table"),
    *("internal_fragmentation", "external_fragmentation", "dynamic_growth", "block_size"),
    *("batch_allocation", "page_churn", "alignment", "attention_scaling"),
    *("sharing", "prefix_cache", "preemption", "chunked_prefill", "memory_movie"),
    *("bench_engine", "profile_step"),
)
NO_EXPERIMENTS = {"all", "common", "make_sharegpt_lengths"}


def options(parser):
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these experiments only")
    parser.add_argument("--skip", nargs="+", metavar="NAME", default=[], help="all but these")
    parser.add_argument(
        "--timeout", type=float, default=3600, help="seconds for one experiment (default: 3600)"
    )
    parser.add_argument(
        "--plugin-path", type=Path, metavar="DIR", help="of the GPU compiler, see kernel_gate.py"
    )
    parser.add_argument("--list", action="store_true", help="show what would run, and end")


# --- what there is ----------------------------------------------------------------------------


def discover(folder):
    """Scripts that end in `common.main`, in reading order."""
    found = [
        path.stem
        for path in sorted(folder.glob("*.py"))
        if path.stem not in NO_EXPERIMENTS and "common.main(__doc__" in path.read_text("utf-8")
    ]
    return [n for n in ORDER if n in found] + [n for n in found if n not in ORDER]


def choose(folder, only, skip):
    """The experiments to run; unknown names are errors."""
    found = discover(folder)
    for name in [*(only or []), *skip]:
        if name not in found:
            common.fail(f"no experiment {name!r}; there are: {', '.join(found)}")
    return [n for n in found if (only is None or n in only) and n not in skip]


def question(folder, name):
    """The first paragraph of a script's docstring."""
    text = (folder / f"{name}.py").read_text("utf-8").partition('"""')[2].partition('"""')[0]
    return " ".join(text.strip().partition("\n\n")[0].split())


def obstacle(folder, name, plugin_path):
    """Why an experiment cannot run here, in one line; None where it can."""
    if name == "kernel_gate":
        return no_compiler(folder, plugin_path)
    if name == "kernel_bench":
        return no_gpu()
    return None


def no_compiler(folder, plugin_path):
    """Why kernels cannot be compiled for a GPU."""
    where = "None" if plugin_path is None else f"pathlib.Path({str(plugin_path)!r})"
    probe = asked(
        f"import pathlib, sys; sys.path.insert(0, {str(folder)!r}); "
        f"import aot; aot.find_tools({where})"
    )
    if probe.returncode == 0:
        return None
    said = probe.stderr.strip().rpartition("MissingTools: ")[2]
    return " ".join(said.split()) or "its compiler cannot be loaded"


def no_gpu():
    """Why nothing can run on a GPU."""
    backend = (asked("import jax; print(jax.default_backend())").stdout.split() or ["nothing"])[-1]
    return None if backend == "gpu" else f"needs a GPU; JAX sees {backend} here"


def asked(code):
    """Python run in a process of its own, which gives back what it takes (a GPU, say)."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


# --- running ----------------------------------------------------------------------------------


def command_of(folder, name, args):
    """The words after the interpreter."""
    words = [str(folder / f"{name}.py"), "--out", str(args.out), "--seed", str(args.seed)]
    if args.plugin_path is not None and name in ("kernel_gate", "alignment"):
        words += ["--plugin-path", str(args.plugin_path)]
    return words + ["--quick"] * args.quick


def shown(words):
    """A command as a reader types it, with paths below the working directory relative to it."""
    here = os.getcwd() + os.sep
    return shlex.join(["python", *(word.removeprefix(here) for word in words)])


def run_one(folder, name, args, tick):
    """Runs one experiment; returns what the report says of it."""
    words = command_of(folder, name, args)
    known = {"name": name, "question": question(folder, name), "command": shown(words)}
    reason = obstacle(folder, name, args.plugin_path)
    if reason:
        return {**known, "status": "skipped", "reason": reason, "seconds": 0.0, "files": []}
    path = os.pathsep.join(filter(None, [str(folder.parent), os.environ.get("PYTHONPATH")]))
    began, wall = time.perf_counter(), time.time()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=out, stderr=err, env={**os.environ, "PYTHONPATH": path}
        )
        try:
            code = wait(process, args.timeout, tick)
        except BaseException:
            process.kill()
            process.wait()
            raise
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    files = [p for p in sorted(args.out.glob(f"{name}*")) if made_since(p, name, wall)]
    return {
        **known,
        "status": "done" if code == 0 else "failed",
        "reason": None if code == 0 else why(code, texts[1], args.timeout),
        "seconds": time.perf_counter() - began,
        "exit_code": code,
        "output": texts[0],
        "errors": texts[1],
        "files": [p.name for p in files],
    }


def wait(process, timeout, tick):
    """The exit code; None where the time is over (the process is then ended)."""
    began = time.perf_counter()
    while True:
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            passed = time.perf_counter() - began
            tick(passed)
            if passed > timeout:
                process.kill()
                process.wait()
                return None


def made_since(path, name, wall):
    """Whether this run wrote a file: one of an earlier run must not pass for its result."""
    mine = path.stem == name or path.name.startswith(f"{name}_") or path.name.startswith(f"{name}.")
    return mine and path.is_file() and path.stat().st_mtime >= wall - 1


def why(code, errors, timeout):
    """A failure in one line."""
    if code is None:
        return f"took longer than {timeout:g} s and was ended; see --timeout"
    lines = [line for line in errors.splitlines() if line.strip()]
    return f"exit code {code}: {lines[-1].strip()[:300] if lines else 'no message'}"


# --- the script -------------------------------------------------------------------------------


def environment_here():
    """Where this runs, without touching the devices: they belong to the experiments."""
    facts = {
        "cpu": common._cpu_name(),
        "cores": common.usable_cores(),
        "memory_gib": common._memory_gib(),
        "python": sys.version.split()[0],
    }
    for package in ("jax", "jaxlib", "flax", "numpy", "transformers"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return {**facts, "git_commit": common._git_commit(), "command": common.command()}


def draw(args, entries):
    """How long each experiment took, and how it ended."""
    common.style()
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(11, 1.8 + 0.45 * len(entries)))
    looks = {"done": common.PALETTE[0], "failed": common.PALETTE[5], "skipped": "#BBBBBB"}
    for place, entry in enumerate(entries):
        axis.barh(place, entry["seconds"], color=looks[entry["status"]], height=0.7)
        ending = "" if entry["status"] == "done" else f", {entry['status']}"
        axis.text(entry["seconds"], place, f"  {entry['seconds']:.0f}{ending}", va="center")
    axis.set_yticks(range(len(entries)), [entry["name"] for entry in entries])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * max(1.0, *(entry["seconds"] for entry in entries)))
    axis.set(xlabel="time (s)", title="Every experiment, and how long it took")
    axis.grid(axis="y", visible=False)
    common.write_figure(args, figure)


def run(args, folder=FOLDER):
    names = choose(folder, args.only, args.skip)
    if args.list:
        common.report(*(f"{name}: {question(folder, name)}" for name in names))
        return
    if not names:
        common.fail("nothing is left to run; see --only and --skip")
    if not args.timeout > 0:
        common.fail(f"--timeout must be positive, got {args.timeout:g}")
    began = time.perf_counter()
    entries = []
    with common.bar(len(names), "experiments", unit="script") as bar:
        for i, name in enumerate(names, 1):
            bar.set_postfix_str(name)
            tick = lambda s, name=name: bar.set_postfix_str(f"{name} {s:.0f} s")  # noqa: E731
            entry = run_one(folder, name, args, tick)
            entries.append(entry)
            bar.update()
            with bar.external_write_mode():
                ending = entry["reason"] or f"{entry['seconds']:.0f} s"
                common.report(f"[{i}/{len(names)}] {name}: {entry['status']}, {ending}")
    seconds = time.perf_counter() - began
    environment = environment_here()
    path = common.path_of(args, ".html")
    with common.atomic(path) as temporary:
        temporary.write_text(
            html_report.page(args, entries, environment, seconds), encoding="utf-8"
        )
    counts = {s: sum(e["status"] == s for e in entries) for s in ("done", "failed", "skipped")}
    texts = ("output", "errors")
    plain = [{k: v for k, v in entry.items() if k not in texts} for entry in entries]
    common.write_json(
        args,
        {"environment": environment, "experiments": plain, **counts, "seconds": seconds},
    )
    draw(args, entries)
    common.report(
        "",
        common.table(
            ("experiment", "status", "seconds"),
            [(e["name"], e["status"], f"{e['seconds']:.1f}") for e in entries],
        ),
        "",
        f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)",
    )
    if counts["failed"]:
        bad = [e for e in entries if e["status"] == "failed"]
        common.fail(
            f"{len(bad)} of {len(entries)} experiments failed: {', '.join(e['name'] for e in bad)}"
        )


if __name__ == "__main__":
    common.main(__doc__, run, options)
