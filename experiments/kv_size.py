"""How large is the KV cache? Bytes of a token and of a request, for the LLaMA family.

The often quoted numbers are 1.3 GB for one LLaMA-13B request and over 40 GB for 32 of them. The
size follows from four numbers of the model: keys and values of one token take
2 * layers * KV heads * head dim * bytes of a number. Models with grouped-query attention (GQA) have
fewer KV heads than query heads, so their cache is smaller by that factor.

GB is 10^9 bytes, GiB 2^30. Quantised types are counted without their scales.

JSON keys:
  models    list of {model, layers, query_heads, kv_heads, head_dim, attention ("MHA", "GQA" or
            "MQA"), mha_factor (how much larger the same model without GQA would be), context,
            bytes_per_token, request_bytes, all_requests_bytes, context_bytes}
            bytes_per_token holds one number a dtype; the others are in the chosen dtype
  quoted    the quoted numbers for LLaMA-13B: {request_gb, requests, all_gb, bytes_per_token,
            tokens_in_request (how long a request of the quoted size is), request_gb_at_tokens,
            all_gb_at_tokens}
  trace     real lengths: {source, requests, mean, median, p99, longest} in tokens, and
            request_gb: {model: {mean, median, p99, longest}}
  config    tokens, requests, dtype, device_gb, seed
"""

import common
import numpy as np
import traces

from paxattn.geometry import KNOWN_MODELS, PageGeometry

# Query heads and longest context, from the models' published configurations.
HEADS_AND_CONTEXT = {
    "llama-7b": (32, 2048),
    "llama-13b": (40, 2048),
    "llama-30b": (52, 2048),
    "llama-65b": (64, 2048),
    "llama-2-7b": (32, 4096),
    "llama-2-13b": (40, 4096),
    "llama-2-70b": (64, 4096),
    "llama-3-8b": (32, 8192),
    "llama-3-70b": (64, 8192),
    "llama-3.1-405b": (128, 131072),
    "llama-3.2-1b": (32, 131072),
    "llama-3.2-3b": (24, 131072),
    "mistral-7b": (32, 32768),
    "tinyllama-1.1b": (32, 2048),
    "qwen2-7b": (28, 32768),
    "smollm2-135m": (9, 8192),
    "smollm2-360m": (15, 8192),
    "smollm2-1.7b": (32, 8192),
    "opt-13b": (40, 2048),
}
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
DEVICE_GB = (24, 40, 80)
QUOTED = {"model": "llama-13b", "request_gb": 1.3, "requests": 32, "all_gb": 40}
KINDS = {"MHA": common.PALETTE[0], "GQA": common.PALETTE[1], "MQA": common.PALETTE[2]}


def options(parser):
    traces.option(parser)
    parser.add_argument("--tokens", type=int, default=2048, help="of a request (default: 2048)")
    parser.add_argument("--requests", type=int, default=32, help="at once (default: 32)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="default: bfloat16")
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(HEADS_AND_CONTEXT),
        choices=sorted(HEADS_AND_CONTEXT),
        metavar="MODEL",
        help=f"default: all of {', '.join(HEADS_AND_CONTEXT)}",
    )


def sizes(model, tokens, requests, dtype):
    """One model's line of the table."""
    layers, kv_heads, head_dim = KNOWN_MODELS[model]
    heads, context = HEADS_AND_CONTEXT[model]
    geometry = PageGeometry.of(model, dtype=dtype)
    kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    return {
        "model": model,
        "layers": layers,
        "query_heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "attention": kind,
        "mha_factor": heads / kv_heads,
        "context": context,
        "bytes_per_token": {d: PageGeometry.of(model, dtype=d).bytes_per_token for d in DTYPES},
        "request_bytes": geometry.request_bytes(tokens),
        "all_requests_bytes": requests * geometry.request_bytes(tokens),
        "context_bytes": geometry.request_bytes(context),
    }


def against_the_quoted(tokens):
    """The quoted size, and what it says about the length of the request."""
    geometry = PageGeometry.of(QUOTED["model"])
    return {
        **QUOTED,
        "bytes_per_token": geometry.bytes_per_token,
        "tokens_in_request": int(QUOTED["request_gb"] * 1e9 // geometry.bytes_per_token),
        "tokens": tokens,
        "all_gb_quoted_size": QUOTED["requests"] * QUOTED["request_gb"],
        "request_gb_at_tokens": geometry.request_bytes(tokens) / 1e9,
        "all_gb_at_tokens": QUOTED["requests"] * geometry.request_bytes(tokens) / 1e9,
    }


def of_trace(trace, models, dtype):
    """Sizes of requests of real lengths."""
    total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    lengths = {
        "mean": float(total.mean()),
        "median": float(np.median(total)),
        "p99": float(np.percentile(total, 99)),
        "longest": int(total.max()),
    }
    per_token = {model: PageGeometry.of(model, dtype=dtype).bytes_per_token for model in models}
    return {
        "source": trace.source,
        "requests": len(trace),
        **lengths,
        "request_gb": {
            model: {name: length * each / 1e9 for name, length in lengths.items()}
            for model, each in per_token.items()
        },
    }


def run(args):
    for name in ("tokens", "requests"):
        if getattr(args, name) < 1:
            common.fail(f"--{name} must be at least 1, got {getattr(args, name)}")
    real = of_trace(traces.of(args), args.models, args.dtype)
    rows = [sizes(model, args.tokens, args.requests, args.dtype) for model in args.models]
    quoted = against_the_quoted(args.tokens)
    headers = (
        *("model", "attention", "heads", "KiB/token f32", "16 bits", "8 bits"),
        *(f"{args.tokens:,} tokens, GB", f"{args.requests} of them, GB", "full context, GB"),
        f"real mean ({real['mean']:.0f}), GB",
    )
    common.report(
        common.table(
            headers,
            [
                (
                    row["model"],
                    row["attention"]
                    + (f" 1/{row['mha_factor']:g}" if row["mha_factor"] > 1 else ""),
                    f"{row['query_heads']}/{row['kv_heads']}",
                    *(f"{row['bytes_per_token'][d] / 1024:,.1f}" for d in DTYPES),
                    f"{row['request_bytes'] / 1e9:.3f}",
                    f"{row['all_requests_bytes'] / 1e9:.1f}",
                    f"{row['context_bytes'] / 1e9:.2f}",
                    f"{real['request_gb'][row['model']]['mean']:.3f}",
                )
                for row in rows
            ],
            f"KV cache in {args.dtype}; GB = 10^9 bytes; real lengths: {real['source']}",
        ),
        "",
        f"Quoted for LLaMA-13B: {quoted['request_gb']} GB a request, over {quoted['all_gb']} GB for "
        f"{quoted['requests']}. A token is {quoted['bytes_per_token']:,} bytes in 16 bits, so "
        f"{quoted['request_gb']} GB is a request of {quoted['tokens_in_request']:,} tokens, and "
        f"{quoted['requests']} of those are {quoted['all_gb_quoted_size']:.1f} GB: the claim holds. "
        f"At {args.tokens:,} tokens a request is {quoted['request_gb_at_tokens']:.2f} GB, and "
        f"{quoted['requests']} are {quoted['all_gb_at_tokens']:.1f} GB.",
    )
    config = {
        "tokens": args.tokens,
        "requests": args.requests,
        "dtype": args.dtype,
        "device_gb": DEVICE_GB,
        "seed": args.seed,
    }
    common.write_json(
        args,
        {
            "environment": common.environment(),
            "config": config,
            "models": rows,
            "quoted": quoted,
            "trace": real,
        },
    )
    draw(args, rows)


def draw(args, rows):
    common.style()
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 7.6), width_ratios=(1.1, 1))
    ordered = sorted(rows, key=lambda row: row["bytes_per_token"][args.dtype])
    places = np.arange(len(ordered))
    kib = [row["bytes_per_token"][args.dtype] / 1024 for row in ordered]
    colors = [KINDS[row["attention"]] for row in ordered]
    whole = [k * row["mha_factor"] for k, row in zip(kib, ordered, strict=True)]
    left.barh(places, whole, color="white", edgecolor="#999999", linestyle="--", height=0.7)
    left.barh(places, kib, color=colors, height=0.7)
    ink = {"MHA": "white", "GQA": "black", "MQA": "black"}
    for place, size, row in zip(places, kib, ordered, strict=True):
        text = f"{size:,.0f}" if size >= 100 else f"{size:.4g}"
        color = ink[row["attention"]]
        left.text(size * 0.93, place, text, ha="right", va="center", fontsize=12, color=color)
    left.set_yticks(places, [row["model"] for row in ordered], fontsize=12)
    left.set(xscale="log", xlabel=f"KiB of KV cache a token, {args.dtype} (log scale)")
    left.set_xlim(min(kib) / 4, max(whole) * 1.5)
    left.grid(axis="y", visible=False)
    kinds = [kind for kind in KINDS if any(row["attention"] == kind for row in rows)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=KINDS[kind]) for kind in kinds]
    names = list(kinds)
    if "GQA" in kinds:
        handles.append(plt.Rectangle((0, 0), 1, 1, fc="white", ec="#999999", ls="--"))
        names.append("the same without GQA")
    left.legend(
        handles, names, loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=3, fontsize=13
    )
    left.set_title("One token")

    shown = [m for m in ("llama-65b", "llama-13b", "llama-7b", "llama-3-8b") if m in args.models]
    shown = shown or args.models[:4]
    most = 2 * args.requests
    counts = np.arange(1, most + 1)
    by_name = {row["model"]: row for row in rows}
    for model, style in zip(shown, ("-", "--", "-.", ":"), strict=False):
        one = by_name[model]["request_bytes"] / 1e9
        right.plot(counts, one * counts, style, label=f"{model}: {one:.2f} GB each")
    top = max(by_name[m]["request_bytes"] for m in shown) / 1e9 * most
    limit = min(top, 140) if max(DEVICE_GB) < top else max(max(DEVICE_GB) * 1.4, top)
    for size in DEVICE_GB:
        right.axhline(size, color="#555555", linewidth=1.2)
        right.text(most, size + limit / 100, f"{size} GB device", ha="right", fontsize=12)
    if QUOTED["model"] in shown:
        right.plot(
            *(QUOTED["requests"], QUOTED["requests"] * QUOTED["request_gb"]),
            "D",
            color="black",
            markersize=10,
            label=f"quoted: {QUOTED['requests']} x {QUOTED['request_gb']} GB (llama-13b)",
        )
    right.set(xlabel=f"requests of {args.tokens:,} tokens at once", ylabel="KV cache (GB)")
    right.set(xlim=(0, most), ylim=(0, limit))
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=12)
    right.set_title("Many requests")
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
