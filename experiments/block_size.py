"""How large should a page be? Waste against bookkeeping, for page sizes from 1 to 256 tokens.

A large page leaves more of its last page empty; a small one makes the block table longer, the
allocator busier and attention's reads shorter. For each page size:

  waste        requests run through the memory (the engine's own allocator, compiled, no model):
               slots that hold no token, and how many requests fit at once
  tables       bytes of a block table, and its share of the KV cache that it describes
  allocator    one compiled call that reserves pages for 32 prompts and releases them; one that
               appends a token to 32 sequences
  attention    one layer's paged attention of pallas_kernels, measured
  throughput   a small random LLaMA in the engine, a KV budget that is too small for all requests

over lengths like ShareGPT's (or a --trace) and like Alpaca's. A size that the geometry refuses for
--model, because its pages would be misaligned, is shown as refused and never recommended.

The recommended size is the largest whose throughput is within 10% of the best for both kinds: beyond
it fewer requests fit, below it only the bookkeeping grows. The PagedAttention paper (Section 7.2)
found 16 to 128 best for ShareGPT and 16 to 32 for Alpaca, and chose 16.

JSON keys:
  by_page_size   list of {page_size, refused (the reason, or null), page_bytes, table_bytes,
                 table_percent, reserve_release_us, append_us, attention_ms, and for each kind of
                 lengths ("sharegpt", "alpaca") {waste_percent, requests_batched, preemptions,
                 tokens_per_s, tokens_per_step (output tokens a decode step: steps that recompute
                 a preempted request count, the machine's load does not)}}; null where it was not measured
  recommended    {page_size, rule, waste_percent: {sharegpt, alpaca}}; page_size is null when
                 every size is refused
  near_best      for each kind of lengths the page sizes within 10% of the best throughput
  paper          what the paper found
  refused        list of {model, dtype, page_size, reason}: every known model, 16 and 8 bits
  config         model, dtype, memory_tokens, requests, attention, engine, seed
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import common
import numpy as np
import traces

from paxattn.geometry import KNOWN_MODELS, PageGeometry

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUICK_SIZES = (4, 16, 256)
ENGINE_QUICK = (16, 256)
LONGEST = 2048
KINDS = ("sharegpt", "alpaca")
PAPER = {
    "sharegpt": [16, 128],
    "alpaca": [16, 32],
    "default": 16,
    "where": "PagedAttention paper, Section 7.2: best page sizes, smallest to largest",
}
SLACK = 1.10  # "as good as the best": within 10%, about what a shared machine's times repeat to


def options(parser):
    traces.option(parser)
    parser.add_argument("--model", default="llama-13b", choices=sorted(KNOWN_MODELS))
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16", "float8_e4m3fn"),
        help="of the model's KV cache (default: bfloat16)",
    )
    parser.add_argument(
        "--page-sizes", type=int, nargs="+", metavar="P", help="default: 1 2 4 .. 256; quick: fewer"
    )
    parser.add_argument(
        "--memory-tokens", type=int, help="of the simulated memory (default: 8192; quick: 4096)"
    )
    parser.add_argument("--requests", type=int, help="simulated (default: 400; quick: 200)")
    parser.add_argument(
        "--engine-requests", type=int, help="of the throughput, 0 for none (default: 48; quick: 24)"
    )


# --- without a model --------------------------------------------------------------------------


def refusal(model, page_size, dtype):
    """The geometry's message for a page; None for a page that it accepts."""
    try:
        PageGeometry.of(model, page_size, dtype)
    except ValueError as error:
        return str(error)
    return None


def bookkeeping(model, page_size, dtype):
    """Bytes of a page and of the block table of the longest request."""
    layers, heads, dim = KNOWN_MODELS[model]
    aligned = PageGeometry(layers, heads, dim, 128, dtype)  # bytes of a token, whatever the page
    table = 4 * -(-LONGEST // page_size)
    return {
        "page_bytes": page_size * aligned.bytes_per_token,
        "table_bytes": table,
        "table_percent": 100 * table / (LONGEST * aligned.bytes_per_token),
    }


def simulated(lengths, page_size, memory_tokens):
    """Waste and concurrency of each kind of lengths, in one memory."""
    import admission
    import simulator

    pages = memory_tokens // page_size
    rows = 256  # more than fit: memory is the limit
    policy = admission.paged(pages + 1, rows, LONGEST, page_size, watermark=pages // 50)
    found = {}
    for kind, trace in lengths.items():
        result = simulator.run(policy, trace.prompt_tokens, trace.output_tokens, label=kind)
        assert result.events.waste.max() < page_size
        waited = bool(result.window(True).any())
        share = result.percent(waited)
        found[kind] = {
            "waste_percent": share["internal"],
            "requests_batched": result.mean_running(waited),
            "preemptions": int(result.events.preempted.sum()),
        }
    return found


# --- measured ---------------------------------------------------------------------------------


def in_pairs(call, items, label):
    """`call` of each item, two at a time: compiling uses one core."""
    with ThreadPoolExecutor(2) as pool:
        return list(common.progress(pool.map(call, items), label, len(items)))


def in_turns(calls, repeats):
    """The least seconds of each call, taken in turns so that all see the same machine."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for key, call in calls.items():
            began = time.perf_counter()
            call()
            best[key] = min(best[key], time.perf_counter() - began)
    return best


APPENDS = 64


def allocator_calls(page_size, rows=32, prompt=161):
    """A batch of prompts in and out; and the same with `APPENDS` tokens more for each."""
    import jax
    import jax.numpy as jnp

    from paxattn import memory

    width = -(-LONGEST // page_size)
    lengths = jnp.full(rows, prompt, jnp.int32)
    active = jnp.ones(rows, bool)

    @partial(jax.jit, donate_argnums=0)
    def live(state, appends):
        state, _ = memory.reserve(state, lengths)
        state = jax.lax.fori_loop(
            0, appends, lambda _, state: memory.append(state, active)[0], state
        )
        return memory.release(state, active)

    start = jax.jit(lambda: memory.init(rows * width + 1, rows, width, page_size))
    box = [jax.block_until_ready(live(start(), 0))]

    def call(appends):
        box[0] = jax.block_until_ready(live(box[0], appends))

    return partial(call, 0), partial(call, APPENDS)


def attention_call(page_size, batch, context, heads=9, kv_heads=3, dim=64, seed=0):
    """One layer's decode attention over pages in a random order."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import paged_attention
    from paxattn import kv_pool

    width = -(-context // page_size)
    pages = batch * width + 1
    pool = kv_pool.init(1, pages, page_size, kv_heads, dim, jnp.float32)
    rng = np.random.default_rng(seed)
    keys, values = (jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (*pool.k, *pool.v))
    queries = jnp.asarray(rng.standard_normal((batch, heads, dim)), jnp.float32)
    tables = jnp.asarray(rng.permutation(pages - 1).reshape(batch, width) + 1, jnp.int32)
    lengths = jnp.full(batch, context, jnp.int32)

    @jax.jit
    def attend(queries, keys, values, tables, lengths):
        return paged_attention(
            queries, keys, values, tables, lengths, kv_layout=pool.layout, sm_scale=dim**-0.5
        )

    inputs = (queries, keys, values, tables, lengths)
    jax.block_until_ready(attend(*inputs))
    return lambda: jax.block_until_ready(attend(*inputs))


def small_model(layers, seed):
    """A random LLaMA in the form that `convert.load` returns."""
    import jax

    from paxattn import LlamaConfig
    from paxattn.llama import init_params

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64 * layers,
        intermediate_size=128 * layers,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=512,
    )
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(seed))
    return SimpleNamespace(config=config, params=params, tokenizer=None, source="random")


def engine_setting(args):
    """Sizes of the throughput measurement."""
    if args.quick:  # prompts this short need one prefill program only
        return {"layers": 1, "rows": 8, "budget_tokens": 512, "longest": 256, "prompt": 8}
    return {"layers": 2, "rows": 32, "budget_tokens": 2048, "longest": 512, "prompt": 256}


def engine_requests(kind, trace, count, setting, seed):
    """Random prompts and parameters; lengths of the kind, cut to what the small model holds."""
    from paxattn import SamplingParams

    rng = np.random.default_rng(seed)
    prompts = np.minimum(trace.prompt_tokens[:count], setting["prompt"])
    outputs = np.minimum(trace.output_tokens[:count], setting["longest"] - prompts)
    params = [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in outputs]
    return [rng.integers(1, 256, n).tolist() for n in prompts], params


def decode_steps(history):
    """Decode steps of all program runs; they do not depend on how busy the machine is."""
    return sum(record.steps for record in history if record.kind == "decode")


def throughput(sizes, lengths, count, setting, repeats, seed):
    """Output tokens a second and a decode step at each page size, for each kind of lengths."""
    import jax.numpy as jnp

    from paxattn import LLM

    model = small_model(setting["layers"], seed)
    config = model.config
    engines = {}
    for size in sizes:
        shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        geometry = PageGeometry(*shape, size, jnp.float32)
        engines[size] = LLM(
            model,
            page_size=size,
            kv_cache_bytes=setting["budget_tokens"] * geometry.bytes_per_token
            + geometry.page_bytes,
            max_model_len=setting["longest"],
            max_num_seqs=setting["rows"],
            compilation_cache=False,
        )
    found = {size: {} for size in sizes}
    for kind, trace in lengths.items():
        prompts, params = engine_requests(kind, trace, count, setting, seed)
        total = sum(p.max_tokens for p in params)

        def serve(size, prompts=prompts, params=params):
            return [o.outputs[0].token_ids for o in engines[size].generate(prompts, params)]

        answers = in_pairs(serve, sizes, f"{kind}: compiling the engine")
        if any(answer != answers[0] for answer in answers):
            common.fail("page sizes changed the engine's tokens: this is a bug, please report it")
        for engine in engines.values():
            engine.history = []
        seconds = in_turns({size: lambda s=size: serve(s) for size in sizes}, repeats)
        for size in sizes:
            found[size][kind] = {
                "tokens_per_s": total / seconds[size],
                "tokens_per_step": repeats * total / decode_steps(engines[size].history),
            }
    return found


# --- the script -------------------------------------------------------------------------------


def near_best(rows, kind, measure):
    """Page sizes within 10% of the best; None where nothing was measured."""
    values = {row["page_size"]: row[kind][measure] for row in rows if row["refused"] is None}
    values = {size: value for size, value in values.items() if value is not None}
    if not values:
        return None
    return [size for size, value in values.items() if value * SLACK >= max(values.values())]


def recommend(rows):
    """The largest page size that is about as good as the best for every kind of lengths.

    Bookkeeping only falls with the page size, so the largest one that costs nothing is best. Good
    is the engine's throughput or, where none was measured, the number of requests that fit.
    """
    near = {kind: near_best(rows, kind, "tokens_per_s") for kind in KINDS}
    measure, words = "tokens_per_s", "throughput"
    if not any(near.values()):
        measure, words = "requests_batched", "number of requests that fit"
        near = {kind: near_best(rows, kind, measure) for kind in KINDS}
    rule = f"largest page size whose {words} is within 10% of the best for all lengths"
    sets = [set(sizes) for sizes in near.values() if sizes]
    common_sizes = set.intersection(*sets) if sets else set()
    if sets and not common_sizes:
        rule = f"no page size is within 10% of the best {words} for all lengths; the best for the short"
        common_sizes = {max(sets[-1])}
    if not common_sizes:
        return {"page_size": None, "rule": rule, "waste_percent": None}
    size = max(common_sizes)
    chosen = next(row for row in rows if row["page_size"] == size)
    waste = {kind: chosen[kind]["waste_percent"] for kind in KINDS}
    return {"page_size": size, "rule": rule, "waste_percent": waste}


def settings(args):
    """The options, with the defaults of --quick or of the whole run, checked."""
    chosen = args.page_sizes or (QUICK_SIZES if args.quick else PAGE_SIZES)
    sizes = sorted(set(chosen))
    if not all(1 <= size <= LONGEST for size in sizes):
        common.fail(f"--page-sizes must be in 1..{LONGEST}, got {' '.join(map(str, chosen))}")
    if args.memory_tokens is None:
        args.memory_tokens = 4096 if args.quick else 8192
    if args.memory_tokens < LONGEST + max(sizes):
        common.fail(
            f"--memory-tokens must be at least {LONGEST + max(sizes):,}, the longest request and a "
            f"page of {max(sizes)}; got {args.memory_tokens:,}"
        )
    count = (200 if args.quick else 400) if args.requests is None else args.requests
    served = args.engine_requests
    served = (24 if args.quick else 48) if served is None else served
    if count < 1 or served < 0:
        common.fail(f"--requests must be at least 1 and --engine-requests 0, got {count}, {served}")
    return sizes, count, served


def run(args):
    sizes, count, served = settings(args)
    lengths = {kind: traces.drawn(kind, count, args.seed, LONGEST) for kind in KINDS}
    if args.trace:
        real = traces.fitting(traces.of(args), LONGEST)
        if len(real) == 0:
            common.fail(f"{args.trace} has no request of at most {LONGEST:,} tokens")
        lengths["sharegpt"] = traces.head(real, count)
    batch, context = (8, 512) if args.quick else (16, 1024)

    def without_a_model(size):
        return {
            "page_size": size,
            "refused": refusal(args.model, size, args.dtype),
            **bookkeeping(args.model, size, args.dtype),
            **simulated(lengths, size, args.memory_tokens),
        }

    def to_measure(size):
        return (attention_call(size, batch, context, seed=args.seed), *allocator_calls(size))

    rows = in_pairs(without_a_model, sizes, "page sizes: waste")
    made = in_pairs(to_measure, sizes, "page sizes: compiling")
    attend, allocate, grow = (dict(zip(sizes, c, strict=True)) for c in zip(*made, strict=True))
    repeats = 10 if args.quick else 30
    timed = [in_turns(calls, repeats) for calls in (attend, allocate, grow)]
    measurable = [row["page_size"] for row in rows if row["refused"] is None]
    if args.quick and not args.page_sizes:
        measurable = [size for size in measurable if size in ENGINE_QUICK]
    setting = engine_setting(args)
    kinds = KINDS[1:] if args.quick else KINDS
    speeds = {}
    if served and measurable:
        some = {kind: lengths[kind] for kind in kinds}
        speeds = throughput(measurable, some, served, setting, 2 if args.quick else 3, args.seed)
    for row in rows:
        size = row["page_size"]
        row["attention_ms"] = timed[0][size] * 1e3
        row["reserve_release_us"] = timed[1][size] * 1e6
        row["append_us"] = max(timed[2][size] - timed[1][size], 0) / APPENDS * 1e6
        for kind in KINDS:
            for key in ("tokens_per_s", "tokens_per_step"):
                row[kind][key] = speeds.get(size, {}).get(kind, {}).get(key)
    result = {
        "environment": common.environment(),
        "config": {
            "model": args.model,
            "dtype": args.dtype,
            "memory_tokens": args.memory_tokens,
            "requests": count,
            "lengths": {kind: trace.source for kind, trace in lengths.items()},
            "attention": {"batch": batch, "context": context, "heads": 9, "kv_heads": 3, "dim": 64},
            "engine": {**setting, "requests": served},
            "seed": args.seed,
        },
        "by_page_size": rows,
        "recommended": recommend(rows),
        "near_best": {kind: near_best(rows, kind, "tokens_per_s") for kind in KINDS},
        "paper": PAPER,
        "refused": [
            {"model": model, "dtype": dtype, "page_size": size, "reason": reason}
            for model in KNOWN_MODELS
            for dtype in ("bfloat16", "float8_e4m3fn")
            for size in sizes
            if (reason := refusal(model, size, dtype))
        ],
    }
    describe(args, result)
    common.write_json(args, result)
    draw(args, result)


def describe(args, result):
    rows = result["by_page_size"]
    heads = ("page size", "waste %, ShareGPT", "Alpaca", "batched, ShareGPT", "Alpaca")
    heads += ("table B", "reserve us", "append us", "attention ms")
    heads += ("tokens/s, ShareGPT", "Alpaca", "tokens/step, ShareGPT", "Alpaca", "")
    share, alpaca = KINDS
    common.report(
        common.table(
            heads,
            [
                (
                    row["page_size"],
                    *(f"{row[kind]['waste_percent']:.2f}" for kind in KINDS),
                    *(f"{row[kind]['requests_batched']:.1f}" for kind in KINDS),
                    row["table_bytes"],
                    f"{row['reserve_release_us']:.0f}",
                    f"{row['append_us']:.1f}",
                    f"{row['attention_ms']:.2f}",
                    *(
                        None
                        if row[kind]["tokens_per_s"] is None
                        else round(row[kind]["tokens_per_s"])
                        for kind in KINDS
                    ),
                    *(row[kind]["tokens_per_step"] for kind in KINDS),
                    "" if row["refused"] is None else "refused",
                )
                for row in rows
            ],
            f"KV cache of {args.model} in {args.dtype}, {args.memory_tokens:,} tokens of memory",
        )
    )
    chosen = result["recommended"]
    if chosen["page_size"] is None:
        common.report("", f"Every size is refused: {rows[0]['refused']}")
    else:
        waste = chosen["waste_percent"]
        common.report(
            "",
            f"Recommended: {chosen['page_size']} tokens ({chosen['rule']}); it wastes "
            f"{waste[share]:.1f}% of the memory held with ShareGPT-like lengths, "
            f"{waste[alpaca]:.1f}% with Alpaca-like ones.",
        )
    for kind, near in result["near_best"].items():
        low, high = PAPER[kind]
        ours = "not measured" if near is None else ", ".join(map(str, near))
        common.report(f"Within 10% of the best throughput, {kind}: {ours}; paper: {low} to {high}.")
    common.report(
        "The paper explains its loss at small pages by reads that do not fill the GPU; here attention "
        "gathers many pages at once, so small pages lose less. Large pages lose in both for the same "
        "reason: fewer requests fit. Only a GPU can show where its own optimum lies."
    )
    for bad in result["refused"]:
        common.report(f"Refused: page size {bad['page_size']}, {bad['model']} in {bad['dtype']}.")


def draw(args, result):
    common.style()
    import matplotlib.pyplot as plt

    rows = result["by_page_size"]
    sizes = [row["page_size"] for row in rows]
    figure, axes = plt.subplots(1, 3, figsize=(17, 6.4))
    looks = {"sharegpt": ("ShareGPT-like", "-", "o"), "alpaca": ("Alpaca-like", "--", "s")}
    for kind, (label, line, marker) in looks.items():
        waste = [row[kind]["waste_percent"] for row in rows]
        axes[0].plot(sizes, waste, line, marker=marker, markersize=9, label=label)
        points = [
            (row["page_size"], row[kind]["tokens_per_s"])
            for row in rows
            if row[kind]["tokens_per_s"] is not None
        ]
        if points:
            color = common.PALETTE[list(looks).index(kind)]
            axes[2].plot(
                *zip(*points, strict=True),
                line,
                marker=marker,
                markersize=9,
                color=color,
                label=label,
            )
    axes[0].set(ylabel="slots held without a token (%)", title="Waste")
    fastest = {key: min(row[key] for row in rows) for key in ("attention_ms", "reserve_release_us")}
    looks = {
        "attention_ms": ("attention", "-", "o"),
        "reserve_release_us": ("allocator", "--", "s"),
    }
    for i, (key, (label, line, marker)) in enumerate(looks.items(), 2):
        ratio = [row[key] / fastest[key] for row in rows]
        unit = key.rpartition("_")[2].replace("us", "µs")
        label = f"{label} (best {fastest[key]:.3g} {unit})"
        color = common.PALETTE[i]
        axes[1].plot(sizes, ratio, line, marker=marker, markersize=9, color=color, label=label)
    axes[1].set(ylabel="time / the best page size's", title="Time", yscale="log")
    axes[1].set_ylim(0.9, None)
    ticks = [t for t in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if t < axes[1].get_ylim()[1]]
    axes[1].set_yticks(ticks, [f"{t:g}x" for t in ticks])
    axes[1].minorticks_off()
    axes[2].set(ylabel="output tokens/s", title="Throughput, small model")
    axes[2].set_ylim(0, 1.08 * axes[2].get_ylim()[1])
    axes[2].yaxis.set_major_formatter("{x:,.0f}")
    chosen = result["recommended"]["page_size"]
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes], fontsize=13)
        axis.set_xlabel("page size (tokens)")
        if chosen:
            axis.axvline(chosen, color="#555555", linewidth=1.5, linestyle=":")
        for row in rows:
            if row["refused"]:
                axis.axvspan(row["page_size"] / 1.3, row["page_size"] * 1.3, color="#DDDDDD", lw=0)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15))
    refused = " (grey: refused, misaligned)" if any(row["refused"] for row in rows) else ""
    figure.suptitle(f"Page size: the dotted one, {chosen}, is recommended{refused}", fontsize=20)
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
