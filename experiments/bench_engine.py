"""The engine's speed on this machine beside what a user would pick instead, in one interleaved run.

Workload W1: 32 requests with prompts of 16-200 and outputs of 16-200 tokens, all there at the start.
Workload W2: 200 requests with ShareGPT's lengths and Poisson arrivals. Greedy, end-of-sequence
tokens ignored, the same weights for every system. Each system is a process of its own that stays
alive, serves the whole workload once to warm up and then takes its turn in each repetition (ours,
peer, ours, peer, ...), so that all see the same machine.

Peers: transformers `generate` on static batches with left padding, transformers continuous batching,
and vLLM's CPU build if `--peer-python` names an interpreter that has it. A peer that cannot start is
named in the output and left out.

JSON keys (DIR/bench_engine.json):
  environment, config
  runs                      one object for each workload and dtype:
    workload, dtype
    ours, peers               a system, or one for each peer's name:
      output_tokens_per_s       {"repetitions": [...], "median": x}
      ttft_ms                   time to first token {"median", "p99"}, over requests and repetitions
      time_between_tokens_ms    the same, of each request's mean time between its tokens
      peak_memory_bytes         most resident memory while serving
      compile_s                 the warm-up's seconds beyond those of a median repetition
      load_s, first_token_s     from the process's start to the model loaded, to a first token
      other_cpu_share           share of the machine's CPU time that other processes took, each
                                repetition
      same_as_transformers      share of requests with transformers' (static) tokens, and share of
                                tokens before the first difference
    ratios                    ours / peer, of the medians, by peer
    ratios_by_repetition      the same in each repetition
    startup                   seconds from `python` to a first token, compilation cache cold and warm
  The first run's workload, dtype, ours, peers and ratios also stand at the top.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import traces

WORKERS = Path(__file__).with_name("bench_workers.py")
ROOT = Path(__file__).resolve().parent.parent
PEERS = ("transformers_static", "transformers_continuous", "vllm")
NAMES = {
    "paxattn": "paxattn",
    "transformers_static": "transformers, static batch",
    "transformers_continuous": "transformers, continuous",
    "vllm": "vLLM (CPU)",
}


def options(parser) -> None:
    traces.option(parser)
    parser.add_argument("--model", help="Hugging Face folder or hub id, GGUF file or checkpoint")
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["bfloat16", "float32"],
        choices=("float32", "bfloat16"),
        help="one run for each (default: both)",
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        default=["W1"],
        choices=("W1", "W2"),
        help="W1: random lengths, all at once; W2: ShareGPT lengths that arrive one by one (default: W1)",
    )
    parser.add_argument(
        "--repetitions", type=common.positive, help="of each system (default: 4; quick: 2)"
    )
    parser.add_argument(
        "--requests", type=common.positive, help="default: 32 in W1, 200 in W2; quick: 4"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, help="W2: requests a second (default: 1)"
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        default=list(PEERS),
        choices=PEERS,
        help="systems to compare with, none for ours alone (default: all that start)",
    )
    parser.add_argument(
        "--peer-python",
        metavar="INTERPRETER",
        help="a Python that has vLLM's CPU build; without it vLLM is left out",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=common.positive,
        default=32,
        help="sequences at once, of every system (default: 32)",
    )
    parser.add_argument(
        "--max-model-len",
        type=common.positive,
        default=2048,
        help="most tokens of a sequence (default: 2048)",
    )


def run(args) -> None:
    repetitions = args.repetitions or (2 if args.quick else 4)
    if args.peer_python and not shutil.which(args.peer_python):
        common.fail(
            f"--peer-python: {args.peer_python!r} is no program here; give the path of a Python "
            "interpreter that has vllm installed, or leave it out to do without vLLM"
        )
    if args.trace and "W2" not in args.workload:
        common.fail(f"--trace: only W2 takes request lengths from {args.trace}; add --workload W2")
    from convert import load

    model = load(args.model, "auto", progress=True)
    longest = min(args.max_model_len, model.config.max_position_embeddings)
    # All of them first: a trace that cannot be read must not cost the first workload's time.
    works = {w: make_workload(args, w, model.config.vocab_size, longest) for w in args.workload}
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in args.dtype:
            folder = Path(scratch) / dtype
            hugging_face_folder(model, dtype, folder)
            for workload, work in works.items():
                runs.append(measure(args, workload, dtype, folder, longest, work, repetitions))
    first = {k: runs[0][k] for k in ("workload", "dtype", "ours", "peers", "ratios")}
    result = {
        "environment": common.environment(),
        "config": {
            "model": Path(model.source).name,
            "repetitions": repetitions,
            "requests": args.requests,
            "max_num_seqs": args.max_num_seqs,
            "max_model_len": longest,
            "rate": args.rate,
            "seed": args.seed,
        },
        **first,
        "runs": runs,
    }
    path = common.write_json(args, result)
    figure = draw(args, runs)
    common.report("", *(describe(r) + "\n" for r in runs), f"wrote {path} and {figure}")


# --- workloads ----------------------------------------------------------------------------------


def make_workload(args, name: str, vocabulary: int, longest: int) -> dict[str, Any]:
    """{"requests": [(prompt ids, output tokens)], "arrivals": seconds or None}, by the seed."""
    rng = np.random.default_rng(args.seed)
    if name == "W1":
        count = args.requests or (4 if args.quick else 32)
        top = min(200, longest // 2)
        low = min(16, top)
        prompts = rng.integers(low, top + 1, count)
        outputs = rng.integers(low, top + 1, count)
        arrivals = None
    else:
        count = args.requests or (4 if args.quick else 200)
        trace = traces.sample(traces.fitting(traces.of(args), longest), count, args.seed)
        prompts, outputs = trace.prompt_tokens, trace.output_tokens
        arrivals = traces.poisson_arrivals(count, args.rate, args.seed).tolist()
    if args.quick:
        outputs = np.minimum(outputs, 12)
    requests = [
        (rng.integers(0, vocabulary, p).tolist(), int(o))
        for p, o in zip(prompts, outputs, strict=True)
    ]
    return {"requests": requests, "arrivals": arrivals}


def hugging_face_folder(model, dtype: str, folder: Path) -> None:
    """Writes the loaded weights as transformers and vLLM read them, so that all have the same."""
    import ml_dtypes
    from safetensors.numpy import save_file

    from convert.names import targets

    wanted = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    tensors = {}
    for target in targets(model.config, "hf"):
        array = model.params
        for key in target.path:
            array = array[key]
        at = 0
        for source in target.sources:
            rows = source.shape[0]
            tensors[source.name] = np.ascontiguousarray(
                np.asarray(array)[at : at + rows].astype(wanted)
            )
            at += rows
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hugging_face_config(model.config, dtype)))


def hugging_face_config(c, dtype: str) -> dict[str, Any]:
    """config.json of a model.

    Raises:
      Failure: it has parts that this plain LLaMA description cannot say.
    """
    if c.rope_scaling is not None or c.sliding_window is not None:
        common.fail("this benchmark takes LLaMAs without RoPE scaling and sliding windows")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": c.tie_word_embeddings,
        "attention_bias": c.attention_bias,
        "mlp_bias": c.mlp_bias,
        "bos_token_id": 0,
        "eos_token_id": list(c.eos_token_ids) or 0,
        "torch_dtype": dtype,
    }


# --- systems in processes -----------------------------------------------------------------------


class Worker:
    """A running system. `first_token_s` counts from the start of its process."""

    def __init__(self, name: str, python: str, config: dict, environment: dict | None = None):
        self.name = name
        began = time.perf_counter()
        paths = [str(ROOT)] if name == "paxattn" else []
        old = os.environ.get("PYTHONPATH")
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
        if paths:
            env["PYTHONPATH"] = os.pathsep.join(paths + ([old] if old else []))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(WORKERS), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=env,
        )
        try:
            self.ready = self._ask(config)
        except RuntimeError:
            self.close()
            raise
        self.ready["first_token_s"] = time.perf_counter() - began

    def _ask(self, value) -> dict:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(value) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines() or ["no message"]
            raise RuntimeError(f"{self.name} stopped: {said[-1]}")
        return json.loads(line)

    def serve(self, work: dict) -> dict:
        """One repetition, with the share of the CPU that other processes took meanwhile."""
        before, own_before = cpu_seconds(), process_seconds(self._process.pid)
        answer = self._ask(work)
        after, own_after = cpu_seconds(), process_seconds(self._process.pid)
        answer["other_cpu_share"] = None
        if before and after and after[1] > before[1]:
            busy, total = after[0] - before[0], after[1] - before[1]
            own = own_after - own_before
            answer["other_cpu_share"] = min(1.0, max(0.0, (busy - own) / total))
        return answer

    def close(self) -> None:
        process = self._process
        if process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._errors.close()


def cpu_seconds() -> tuple[float, float] | None:
    """(busy, total) CPU seconds of all processes since boot; None where /proc is missing."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    ticks = np.array(words, float) / os.sysconf("SC_CLK_TCK")
    idle = ticks[3] + ticks[4]
    return float(ticks.sum() - idle), float(ticks.sum())


def process_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- measuring ----------------------------------------------------------------------------------


def measure(args, workload, dtype, folder, longest, work, repetitions) -> dict[str, Any]:
    """All systems on one workload in one dtype."""
    config = {
        "model": str(folder),
        "hf_model": str(folder),
        "dtype": dtype,
        "threads": common.usable_cores(),
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": longest,
        "first": work["requests"][0][0][:20],
    }
    workers: dict[str, Worker] = {}
    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as cache:
        own_cache = {"JAX_COMPILATION_CACHE_DIR": cache}
        try:
            try:
                cold = Worker("paxattn", sys.executable, config, own_cache)
                startup = {"cold_s": cold.ready["first_token_s"]}
                cold.close()
                workers["paxattn"] = Worker("paxattn", sys.executable, config, own_cache)
            except RuntimeError as error:
                common.fail(str(error))
            startup["warm_s"] = workers["paxattn"].ready["first_token_s"]
            for name in args.peers:
                try:
                    workers[name] = start_peer(name, args.peer_python, config)
                except RuntimeError as error:
                    absent[name] = str(error)
                    common.report(f"left out: {error}")
            answers = rounds(workers, work, repetitions, f"{workload} {dtype}")
        finally:
            for worker in workers.values():
                worker.close()
    tokens = sum(n for _, n in work["requests"])
    reference = answers.get("transformers_static", [None])[-1]
    systems = {
        name: summary(answers[name], tokens, work, workers[name].ready, reference)
        for name in workers
    }
    ours = systems.pop("paxattn")
    rate = lambda s: s["output_tokens_per_s"]  # noqa: E731
    return {
        "workload": workload,
        "dtype": dtype,
        "requests": len(work["requests"]),
        "output_tokens": tokens,
        "ours": ours,
        "peers": systems,
        "absent": absent,
        "ratios": {n: rate(ours)["median"] / rate(s)["median"] for n, s in systems.items()},
        "ratios_by_repetition": {
            n: [
                a / b
                for a, b in zip(rate(ours)["repetitions"], rate(s)["repetitions"], strict=True)
            ]
            for n, s in systems.items()
        },
        "startup": startup,
    }


def start_peer(name: str, peer_python: str | None, config: dict) -> Worker:
    if name == "vllm" and not peer_python:
        raise RuntimeError("vllm: pass --peer-python INTERPRETER, a Python that has it")
    return Worker(name, peer_python if name == "vllm" else sys.executable, config)


def rounds(workers, work, repetitions: int, label: str) -> dict[str, list[dict]]:
    """Answers of every system: the warm-up first, then the interleaved repetitions."""
    answers: dict[str, list[dict]] = {}
    with common.bar((repetitions + 1) * len(workers), label, unit="run") as bar:
        for name, worker in workers.items():
            answers[name] = [warmed_up(worker, work)]
            bar.update()
        for _ in range(repetitions):
            for name, worker in workers.items():
                answers[name].append(worker.serve(work))
                bar.update()
    return answers


def warmed_up(worker: Worker, work: dict) -> dict:
    """The first answer; its facts are those after the last warm-up.

    Requests that arrive while programs compile pile up, and do not meet those of a steady stream: then
    the workload is served until nothing is compiled, but four times at most.
    """
    first = worker.serve(work)
    facts = first["facts"]
    again = 3 if work["arrivals"] and "compiled_programs" in facts else 0
    for _ in range(again):
        before, facts = facts, worker.serve(work)["facts"]
        if facts["compiled_programs"] == before["compiled_programs"]:
            break
    return {**first, "facts": facts}


def summary(answers, tokens, work, ready, reference) -> dict[str, Any]:
    """The numbers of one system."""
    warm, *timed = answers
    for answer in answers:
        for (_, n), (got, *_) in zip(work["requests"], answer["results"], strict=True):
            if len(got) != n:
                common.fail(f"a system gave {len(got)} tokens where {n} were asked for")
    rates = [tokens / a["seconds"] for a in timed]
    first = [1e3 * r[1] for a in timed for r in a["results"]]
    between = [
        1e3 * (r[2] - r[1]) / (len(r[0]) - 1) for a in timed for r in a["results"] if len(r[0]) > 1
    ]
    facts = timed[-1]["facts"]
    if "compiled_programs" in facts:
        facts = {
            **facts,
            "compiled_after_warm_up": facts["compiled_programs"]
            - warm["facts"]["compiled_programs"],
        }
    peaks = [a["peak_bytes"] for a in timed if a["peak_bytes"]]
    return {
        "output_tokens_per_s": {"repetitions": rates, "median": float(np.median(rates))},
        "ttft_ms": middle(first),
        "time_between_tokens_ms": middle(between),
        "peak_memory_bytes": max(peaks) if peaks else None,
        "compile_s": max(0.0, warm["seconds"] - float(np.median([a["seconds"] for a in timed]))),
        **ready,
        "other_cpu_share": [a["other_cpu_share"] for a in timed],
        "same_as_transformers": None if reference is None else agreement(timed[-1], reference),
        **facts,
    }


def middle(values) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99))}


def agreement(answer, reference) -> dict[str, float]:
    """Share of requests with the same tokens, and of tokens before the first difference."""
    whole, before, total = 0, 0, 0
    for (ours, *_), (theirs, *_) in zip(answer["results"], reference["results"], strict=True):
        same = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours)
        )
        whole += same == len(ours)
        before += same
        total += len(ours)
    return {"requests": whole / len(answer["results"]), "tokens": before / total}


# --- what the user sees -------------------------------------------------------------------------


def describe(run: dict) -> str:
    rows = []
    for name, s in [("paxattn", run["ours"]), *run["peers"].items()]:
        same, shares = s["same_as_transformers"], s["other_cpu_share"]
        rows.append(
            [
                NAMES[name],
                s["output_tokens_per_s"]["median"],
                run["ratios"].get(name),
                s["ttft_ms"]["median"],
                s["time_between_tokens_ms"]["median"],
                s["time_between_tokens_ms"]["p99"],
                s["peak_memory_bytes"] and s["peak_memory_bytes"] / 2**20,
                None if same is None else f"{same['requests']:.0%}",
                "-" if None in shares else f"{min(shares):.0%}-{max(shares):.0%}",
            ]
        )
    startup = run["startup"]
    title = (
        f"{run['workload']}, {run['dtype']}: {run['requests']} requests, "
        f"{run['output_tokens']:,} output tokens; from `python` to a first token "
        f"{startup['cold_s']:.1f} s, then {startup['warm_s']:.1f} s from the compilation cache"
    )
    headers = [
        "",
        "tokens/s",
        "ours/it",
        "first, ms",
        "between, ms",
        "p99",
        "peak MiB",
        "same tokens",
        "others' CPU",
    ]
    missing = [f"left out: {NAMES[n]} ({why})" for n, why in run["absent"].items()]
    return "\n".join([common.table(headers, rows, title), *missing])


def draw(args, runs) -> Path:
    """Bars: output tokens/s of each system, every repetition as a point."""
    common.style()
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(runs), figsize=(7 * len(runs) + 2, 6), squeeze=False)
    for axis, run in zip(axes[0], runs, strict=True):
        systems = [("paxattn", run["ours"]), *run["peers"].items()]
        for x, (name, s) in enumerate(systems):
            rates = s["output_tokens_per_s"]
            colour = common.PALETTE[0] if name == "paxattn" else common.PALETTE[4]
            axis.bar(x, rates["median"], color=colour, width=0.65)
            axis.plot([x] * len(rates["repetitions"]), rates["repetitions"], "k.", ms=9)
            axis.text(x, 0, f"{rates['median']:.0f}", ha="center", va="bottom", color="white")
        axis.set_xticks(range(len(systems)), [NAMES[n].replace(", ", ",\n") for n, _ in systems])
        axis.tick_params(axis="x", labelsize=12)
        axis.grid(visible=False, axis="x")
        axis.set(
            title=f"{run['workload']}, {run['dtype']}", ylabel="output tokens/s", ylim=(0, None)
        )
    figure.suptitle(
        f"The same {runs[0]['requests']} requests on {common.usable_cores()} CPU cores", fontsize=20
    )
    return common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
