"""What PagedAttention does to memory: one model, one byte budget, the same requests, both caches.

A real LLaMA (by default SmolLM2-135M-Instruct) serves requests of real lengths (by default ShareGPT's)
twice: from the traditional cache, which reserves the longest possible sequence for each request, and
from the paged one. Everything that the table shows is measured in that run.

Prompts are random token ids of the trace's lengths; a request ends at the trace's output length.
Memory shares are taken at every decode step, weighted by time, from the first decode step until no
request waits any more: later there is no demand to fill the memory with. (`*_whole_run` has all.)

JSON keys (DIR/contiguous_vs_paged.json):
  environment, config       hardware, versions, model, trace, budget, requests, seed, command
  contiguous, paged         one object a cache:
    token_utilization_mean    share of the KV budget that holds tokens, mean while requests wait
    token_utilization_peak    and its highest value
    token_utilization_mean_whole_run
    internal_waste            share held by requests that will never use it
    reserved_waste            share held by requests that will use it later
    external_waste            share that no waiting request can be given although nobody holds it
    free                      share on the free list (paged) or in empty rows
    max_concurrent            most requests with memory at once
    mean_concurrent           their mean while requests wait
    output_tokens, output_tokens_per_s, seconds, compile_seconds
                              compilation is apart: each program ran once before the clock started
    decode_step_ms            mean time of a decode step
    preemptions               requests put back because pages ran out, and replayed
    replayed_tokens           tokens decoded again after that
  identical_outputs         both caches gave every request the same tokens
  brief                     the numbers often quoted for LLaMA-13B on a GPU, for comparison
"""

import argparse
import math
import os
import time
from pathlib import Path

import common
import models
import numpy as np
import traces

# Often quoted for LLaMA-13B on a data centre GPU, traditional -> paged.
QUOTED = {
    "token_utilization": (0.60, 0.95),
    "max_concurrent": (24, 38),
    "output_tokens_per_s": (1200, 1850),
    "fragmentation": (0.25, 0.05),
}
SIDES = {"contiguous": "reserve-max", "paged": "paged"}


def options(parser) -> None:
    traces.option(parser)
    models.option(parser)
    parser.add_argument(
        "--requests", type=common.positive, help="how many of the trace's (default: 24)"
    )
    parser.add_argument(
        "--max-model-len",
        type=common.positive,
        help="longest sequence, which the traditional cache reserves (default: 1024)",
    )
    parser.add_argument("--page-size", type=common.positive, default=16)
    parser.add_argument(
        "--kv-sequences",
        type=_at_least_one,
        default=3.5,
        help="KV budget, in sequences of the longest length (default: 3.5: budgets are seldom a "
        "multiple, and the traditional cache cannot use the rest)",
    )
    parser.add_argument("--max-num-seqs", type=common.positive, default=32)


def _at_least_one(text: str) -> float:
    if not 1 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a finite number of at least 1, got {text}: with less, the traditional cache "
            "has no room for a single request"
        )
    return value


def run(args) -> None:
    import jax

    from paxattn import LLM

    longest = args.max_model_len or 1024
    count = args.requests or 24
    trace = choose_requests(args, longest, count)
    model = models.choose(args)
    if longest > model.config.max_position_embeddings:
        common.fail(
            f"--max-model-len {longest} is more than the {model.config.max_position_embeddings} "
            f"positions of {model.source}"
        )
    rng = np.random.default_rng(args.seed)
    prompts = [
        rng.integers(0, model.config.vocab_size, n).tolist() for n in trace.prompt_tokens.tolist()
    ]
    outputs = trace.output_tokens.tolist()
    budget = kv_budget(model, args, longest)
    results, tokens = {}, {}
    for side, cache in SIDES.items():
        llm = LLM(
            model,
            dtype=args.dtype,
            page_size=args.page_size,
            kv_cache_bytes=budget,
            max_model_len=longest,
            max_num_seqs=args.max_num_seqs,
            cache=cache,
            preemption="recompute",  # swapped pages would be memory beside the budget
            seed=args.seed,
        )
        compile_seconds = warm_up(llm, prompts, side)
        results[side], tokens[side] = serve(llm, prompts, outputs, budget, side)
        results[side]["compile_seconds"] = compile_seconds
        del llm
    result = {
        "environment": common.environment(),
        "config": {
            "model": Path(model.source).name,
            "dtype": str(np.dtype(jax.tree.leaves(model.params)[0].dtype))
            if args.dtype == "auto"
            else args.dtype,
            "trace": trace.source,
            "requests": count,
            "prompt_tokens": int(trace.prompt_tokens.sum()),
            "output_tokens": int(trace.output_tokens.sum()),
            "kv_budget_bytes": budget,
            "max_model_len": longest,
            "page_size": args.page_size,
            "max_num_seqs": args.max_num_seqs,
            "seed": args.seed,
        },
        **results,
        "identical_outputs": tokens["contiguous"] == tokens["paged"],
        "quoted_llama_13b": {k: list(v) for k, v in QUOTED.items()},
    }
    path = common.write_json(args, result)
    figure = draw(result)
    common.report("", describe(result), "", explain(result), "", f"wrote {path} and {figure(args)}")
    if not result["identical_outputs"]:
        common.fail("the two caches gave different tokens: this is a bug, please report it")


def choose_requests(args, longest: int, count: int):
    """`count` requests of the trace that fit the longest sequence, chosen by the seed."""
    trace = traces.fitting(traces.of(args), longest)
    if len(trace) < count:
        common.fail(
            f"{args.trace or 'the default trace'} has only {len(trace)} requests of at most "
            f"{longest} tokens; ask for fewer with --requests or raise --max-model-len"
        )
    return traces.sample(trace, count, args.seed)


def kv_budget(model, args, longest: int) -> int:
    """Bytes of `--kv-sequences` sequences of the longest length, and the null page."""
    from paxattn import PageGeometry

    c = model.config
    import jax

    dtype = jax.tree.leaves(model.params)[0].dtype if args.dtype == "auto" else args.dtype
    geometry = PageGeometry(c.num_layers, c.num_kv_heads, c.head_dim, args.page_size, dtype)
    return int(args.kv_sequences * longest) * geometry.bytes_per_token + geometry.page_bytes


def warm_up(llm, prompts, side: str) -> float:
    """Compiles every program that the run will use; returns the seconds that it took."""
    from paxattn import SamplingParams

    started = time.perf_counter()
    sizes = llm.batch_sizes()
    lengths = [n for n in (20, 100, 400) if n + 2 <= llm.capacity.max_model_len]
    vocabulary = llm.config.vocab_size
    with common.bar(len(lengths) + len(sizes), f"{side}: compiling", unit="program") as bar:
        for n in lengths:
            llm.generate([[n % vocabulary] * n], SamplingParams(temperature=0, max_tokens=2))
            bar.update()
        for size in sizes:
            one = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            llm.generate([[1 % vocabulary]] * size, one)
            bar.update()
    return time.perf_counter() - started


def serve(llm, prompts, outputs, budget: int, side: str) -> tuple[dict, list]:
    """Serves all requests; returns the measurements and every request's tokens."""
    from paxattn import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]
    llm.history = []
    compiled = llm.stats()["compiled_programs"]
    done: dict[int, list[int]] = {}
    started = time.perf_counter()
    with common.bar(sum(outputs), f"{side}: serving", unit="token") as bar:
        for output in llm.completed(prompts, params):
            done[int(output.request_id)] = output.outputs[0].token_ids
            bar.update(len(output.outputs[0].token_ids))
    seconds = time.perf_counter() - started
    final = {
        i: len(p) + len(done[i]) - 1 for i, p in enumerate(prompts)
    }  # a request's last token is never stored
    shares = memory_shares(llm.history, final, llm.capacity, budget_tokens(llm, budget))
    generated = sum(len(t) for t in done.values())
    decodes = [h for h in llm.history if h.kind == "decode"]
    steps = sum(h.steps for h in decodes)
    emitted = sum(sum(h.stored_after) - sum(h.stored_before) for h in decodes)
    new_in_decode = sum(h.new_tokens for h in decodes)
    result = {
        **shares,
        "output_tokens": generated,
        "output_tokens_per_s": generated / seconds,
        "seconds": seconds,
        "decode_step_ms": 1e3 * sum(h.seconds for h in decodes) / max(steps, 1),
        "decode_steps": steps,
        "prefill_seconds": sum(h.seconds for h in llm.history if h.kind == "prefill"),
        "preemptions": llm.history[-1].preemptions,
        "replayed_tokens": emitted - new_in_decode,
        "compiled_while_serving": llm.stats()["compiled_programs"] - compiled,
    }
    return result, [done[i] for i in sorted(done)]


def budget_tokens(llm, budget: int) -> float:
    return budget / llm.capacity.bytes_per_page * llm.capacity.page_size


def memory_shares(history, final: dict[int, int], capacity, slots: float) -> dict:
    """Splits the budget's token slots at every decode step; shares of the budget.

    Args:
      history: the engine's step records.
      final: tokens that each request holds at its end.
      capacity: the engine's sizes.
      slots: token slots in the budget.
    """
    rows = []  # (seconds, waiting, used, reserved, internal, held, concurrent)
    for record in history:
        if record.kind != "decode":
            continue
        before, after = np.array(record.stored_before), np.array(record.stored_after)
        ends = np.array([final[i] for i in record.requests])
        for step in range(1, record.steps + 1):
            stored = np.minimum(before + step, after)
            held = held_slots(stored, capacity)
            will_use = np.maximum(np.minimum(ends, held), stored)
            rows.append(
                (
                    record.seconds / record.steps,
                    record.waiting > 0,
                    stored.sum(),
                    (will_use - stored).sum(),
                    (held - will_use).sum(),
                    held.sum(),
                    len(stored),
                )
            )
    table = np.array(rows, float)
    seconds, waits, used, reserved, internal, held, concurrent = table.T
    external = np.zeros_like(used)
    if capacity.reserved:  # a remainder too small for another reservation serves nobody
        external += slots - capacity.max_rows * capacity.pages_per_seq * capacity.page_size
    demand = waits > 0 if waits.any() else np.ones_like(waits, bool)
    mean = lambda x: float(np.average(x[demand], weights=seconds[demand]))  # noqa: E731
    return {
        "token_utilization_mean": mean(used / slots),
        "token_utilization_peak": float((used / slots).max()),
        "token_utilization_mean_whole_run": float(np.average(used / slots, weights=seconds)),
        "internal_waste": mean(internal / slots),
        "reserved_waste": mean(reserved / slots),
        "external_waste": mean(external / slots),
        "free": mean((slots - held - external) / slots),
        "allocated_utilization_mean": mean(used / held),
        "max_concurrent": int(concurrent.max()),
        "mean_concurrent": mean(concurrent),
        "seconds_with_requests_waiting": float(seconds[waits > 0].sum()),
        "timeline": thin(np.cumsum(seconds), used / slots, held / slots, concurrent),
    }


def held_slots(stored: np.ndarray, capacity) -> np.ndarray:
    if capacity.reserved:
        return np.full_like(stored, capacity.pages_per_seq * capacity.page_size)
    return -(-stored // capacity.page_size) * capacity.page_size


def thin(seconds, used, held, concurrent, points: int = 400) -> dict:
    """The course of a run at `points` moments."""
    at = np.unique(np.linspace(0, len(seconds) - 1, points).astype(int))
    pick = lambda x: np.round(x[at], 4).tolist()  # noqa: E731
    return {
        "seconds": pick(seconds),
        "used": pick(used),
        "held": pick(held),
        "concurrent": pick(concurrent),
    }


def describe(result: dict) -> str:
    """The table: quoted numbers beside the measured ones, traditional -> paged."""
    c, p = result["contiguous"], result["paged"]
    percent = lambda x: f"{100 * x:.1f}%"  # noqa: E731
    number = lambda x: f"{x:,.0f}"  # noqa: E731

    def waste(side):
        return side["internal_waste"] + side["reserved_waste"] + side["external_waste"]

    def row(name, a, b, show, quoted=("", ""), gain=True):
        ratio = f"{b / a - 1:+.0%}" if gain and a else ""
        return [name, quoted[0], quoted[1], show(a), show(b), ratio]

    rows = [
        row(
            "memory that holds tokens",
            *(c["token_utilization_mean"], p["token_utilization_mean"]),
            percent,
            ("~60%", "~95%"),
        ),
        row(
            "concurrent requests (most)",
            *(c["max_concurrent"], p["max_concurrent"]),
            number,
            ("24", "38"),
        ),
        row(
            "output tokens/s",
            *(c["output_tokens_per_s"], p["output_tokens_per_s"]),
            number,
            ("1,200", "1,850"),
        ),
        row("fragmentation (all waste)", waste(c), waste(p), percent, ("~25%", "<5%"), False),
        row(
            "  internal, never used", c["internal_waste"], p["internal_waste"], percent, gain=False
        ),
        row(
            "  reserved, used later", c["reserved_waste"], p["reserved_waste"], percent, gain=False
        ),
        row("  external", c["external_waste"], p["external_waste"], percent, gain=False),
        row("free", c["free"], p["free"], percent, gain=False),
        row("decode step, ms", c["decode_step_ms"], p["decode_step_ms"], number, gain=False),
        row("preemptions", c["preemptions"], p["preemptions"], number, gain=False),
    ]
    config = result["config"]
    title = (
        f"{config['model']}, {config['dtype']}, {config['requests']} requests, KV budget "
        f"{config['kv_budget_bytes'] / 2**20:,.0f} MiB, identical outputs: "
        f"{'yes' if result['identical_outputs'] else 'NO'}"
    )
    headers = ["", "quoted: reserved", "quoted: paged", "reserved", "paged", "change"]
    return common.table(headers, rows, title)


def explain(result: dict) -> str:
    """Where the measured numbers differ from the quoted ones, and why."""
    c, p, config = result["contiguous"], result["paged"], result["config"]
    mean = (config["prompt_tokens"] + config["output_tokens"]) / config["requests"]
    more = p["max_concurrent"] / c["max_concurrent"]
    faster = p["output_tokens_per_s"] / c["output_tokens_per_s"]
    return (
        f"Quoted: LLaMA-13B on a GPU. Here a request ends with {mean:,.0f} tokens on average while the "
        f"traditional cache keeps\n{config['max_model_len']:,} for it, so that cache holds tokens in "
        f"{c['token_utilization_mean']:.0%} of its memory; the quoted 60% needs requests that fill "
        f"more of\ntheir reservation. Hence {more:.1f}x the requests at once here, not 1.6x. "
        f"Output tokens/s: {faster:.1f}x.\nA step reads the weights once for its whole batch; here, on "
        f"{os.cpu_count()} CPU cores, it took {c['decode_step_ms']:.0f} ms with the small batches of "
        f"the\ntraditional cache and {p['decode_step_ms']:.0f} ms with the large ones of the paged one."
    )


def draw(result: dict):
    """The figure: memory over time for both caches, and how the budget is divided."""
    common.style()
    import matplotlib.pyplot as plt

    blue, orange, green, pink = common.PALETTE[:4]
    figure, axes = plt.subplots(1, 3, figsize=(16, 6), width_ratios=(1.25, 1.25, 1))
    longest = max(result[s]["timeline"]["seconds"][-1] for s in SIDES)
    for axis, side in zip(axes, SIDES, strict=False):
        line = result[side]["timeline"]
        seconds = np.array(line["seconds"])
        used, held = 100 * np.array(line["used"]), 100 * np.array(line["held"])
        axis.fill_between(seconds, held, color=orange, alpha=0.45, lw=0, label="held, no token")
        axis.fill_between(seconds, used, color=blue, lw=0, label="holds tokens")
        axis.set(
            xlim=(0, longest),
            ylim=(0, 104),
            xlabel="time decoding (s)",
            ylabel="share of the KV budget (%)",
            title=f"{side}: {result[side]['output_tokens_per_s']:.0f} tokens/s",
        )
    # Below the axis: inside, it would hide what the cache holds towards the end.
    axes[0].legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), ncols=2)
    parts = [
        ("token_utilization_mean", "holds tokens", blue),
        ("reserved_waste", "reserved for later", green),
        ("internal_waste", "never used", orange),
        ("external_waste", "external", pink),
        ("free", "free", "#CCCCCC"),
    ]
    bottom = np.zeros(2)
    for key, label, colour in parts:
        heights = np.array([100 * result[s][key] for s in SIDES])
        axes[2].bar(list(SIDES), heights, bottom=bottom, color=colour, label=label, width=0.6)
        for x, (height, base) in enumerate(zip(heights, bottom, strict=True)):
            if height >= 4:
                dark = colour == blue
                axes[2].text(
                    *(x, base + height / 2, f"{height:.0f}%"),
                    ha="center",
                    va="center",
                    color="white" if dark else "black",
                )
        bottom += heights
    axes[2].set(
        ylim=(0, 104), ylabel="share of the KV budget (%)", title="mean while requests wait"
    )
    axes[2].grid(visible=False)
    axes[2].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    config = result["config"]
    figure.suptitle(
        f"{config['model']}: the same {config['requests']} requests, the same "
        f"{config['kv_budget_bytes'] / 2**20:,.0f} MiB of KV memory",
        fontsize=20,
    )
    return lambda args: common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
