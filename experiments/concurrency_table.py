"""The often quoted table at LLaMA-13B's scale: utilisation, concurrent requests, throughput.

The claim, for LLaMA-13B, traditional cache -> paged: memory utilisation ~60% -> ~95%, concurrent
requests 24 -> 38, throughput 1200 -> 1850 tokens/s, fragmentation ~25% -> under 5%. Here the same
quantities come from the real allocators, without the model: real request lengths wait in a queue
that never runs dry, and whatever fits runs.

Throughput is a MODEL, not a measurement (contiguous_vs_paged.py measures one): a decoding step
reads all weights and all keys and values once, at the device's memory bandwidth, so
tokens/s = requests / ((weights + KV bytes in use) / bandwidth).

Two parts. First: a 40 GB device, what is left beside the weights, and each way to reserve. Then:
which memory and which reservation give the claim's 24 and 38. With ShareGPT's lengths that is
11.6 GB, and the reservation that gives 24 holds tokens in only a third of its memory. With the
longer conversations of the Azure trace (requests up to 2,048 tokens) the claim's utilisation comes
out too: 1,810 slots for each request in 35.6 GB, 24 requests at 60%, and 39 at 98% on pages.

JSON keys:
  policies.{reserve_max,orca_pow2,orca_oracle,paged}
    utilization_percent      tokens held, percent of the KV memory, averaged over steps
    concurrent               requests running, averaged over steps
    reserved_percent, internal_percent, external_percent, free_percent   of the KV memory
    modelled_tokens_per_s    from the model above
  claim     the numbers quoted above
  matched   {kv_gb, capacity_tokens, reservation_slots, longer_percent (requests that such a
            reservation is too short for), contiguous: {...}, paged: {...}}
  config
"""

import admission
import common
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import simulator
import traces

from paxattn.geometry import KNOWN_MODELS, PageGeometry

CLAIM = {
    "contiguous": {"utilization_percent": 60, "concurrent": 24, "tokens_per_s": 1200},
    "paged": {"utilization_percent": 95, "concurrent": 38, "tokens_per_s": 1850},
}
NAMES = {
    "reserve_max": "longest reserved",
    "orca_pow2": "next power of two",
    "orca_oracle": "final length known",
    "paged": "pages on demand",
}


def options(parser):
    traces.option(parser)
    parser.add_argument("--model", default="llama-13b", choices=sorted(KNOWN_MODELS))
    parser.add_argument("--device-gb", type=float, default=40.0, help="device memory (10^9 bytes)")
    parser.add_argument("--weights-gb", type=float, default=26.0, help="weights (10^9 bytes)")
    parser.add_argument("--usable", type=float, default=0.95, help="usable share of the device")
    parser.add_argument(
        "--bandwidth-gb", type=float, default=1555.0, help="GB/s (A100 40 GB: 1555)"
    )
    parser.add_argument("--max-len", type=int, default=2048, help="longest request (default: 2048)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page (default: 16)")


def measure(args, policy, prompt, output, bytes_per_token):
    """One policy under a queue that never runs dry."""
    result = simulator.run(policy, prompt, output)
    slots = result.slots(waiting=True)
    total = sum(slots.values()) or 1
    used = slots["used"] / total
    concurrent = result.mean_running(waiting=True)
    read = args.weights_gb * 1e9 + used * policy.capacity * bytes_per_token
    return {
        "utilization_percent": 100 * used,
        "concurrent": concurrent,
        **{
            f"{p}_percent": 100 * slots[p] / total
            for p in ("reserved", "internal", "external", "free")
        },
        "modelled_tokens_per_s": concurrent / (read / (args.bandwidth_gb * 1e9)),
    }


def pages_policy(capacity, rows, longest, page_size):
    pages = capacity // page_size
    return admission.paged(pages + 1, rows, longest, page_size, watermark=pages // 100)


def run(args):
    geometry = PageGeometry.of(args.model, args.page_size)
    per_token = geometry.bytes_per_token
    trace = traces.fitting(traces.of(args), args.max_len)
    if len(trace) == 0:
        common.fail(f"no request of the trace has at most {args.max_len} tokens: raise --max-len")
    if args.quick:
        trace = traces.head(trace, 800)
    prompt, output = trace.prompt_tokens, trace.output_tokens
    kv_bytes = (args.usable * args.device_gb - args.weights_gb) * 1e9
    capacity = int(kv_bytes / per_token)
    if capacity < args.max_len:
        common.fail(
            f"{kv_bytes / 1e9:.1f} GB are left for the cache, {max(capacity, 0):,} tokens, less than "
            f"one request of {args.max_len:,}: raise --device-gb or lower --max-len"
        )
    rows, longest = 128, args.max_len
    chosen = admission.orca(capacity, rows, longest)
    del chosen["orca_max"]
    policies = {
        "reserve_max": admission.reserved(
            "reserve_max", lambda p, f: jnp.int32(longest), capacity, rows, "first"
        ),
        **chosen,
        "paged": pages_policy(capacity, rows, longest, args.page_size),
    }
    results = {
        name: measure(args, policy, prompt, output, per_token) for name, policy in policies.items()
    }

    # concurrency grows with the memory, so one step of proportion finds the claim's 38
    wanted = CLAIM["paged"]["concurrent"]
    size = int(capacity * wanted / results["paged"]["concurrent"])
    paged = measure(
        args, pages_policy(size, rows, longest, args.page_size), prompt, output, per_token
    )
    slots = size // CLAIM["contiguous"]["concurrent"]
    total = prompt.astype(np.int64) + output
    short = total <= slots
    if not short.any():
        common.fail(f"no request fits in {slots} slots: this trace has no such table")
    fixed = admission.reserved("fixed", lambda p, f: jnp.int32(slots), size, rows, "first")
    contiguous = measure(args, fixed, prompt[short], output[short], per_token)
    matched = {
        "kv_gb": size * per_token / 1e9,
        "capacity_tokens": size,
        "reservation_slots": slots,
        "longer_percent": 100 * float((~short).mean()),
        "contiguous": contiguous,
        "paged": paged,
    }
    show(args, trace, capacity, per_token, results, matched)
    common.write_json(
        args,
        {
            "environment": common.environment(),
            "config": {
                "model": args.model,
                "bytes_per_token": per_token,
                "device_gb": args.device_gb,
                "weights_gb": args.weights_gb,
                "usable": args.usable,
                "bandwidth_gb_per_s": args.bandwidth_gb,
                "capacity_tokens": capacity,
                "max_len": longest,
                "page_size": args.page_size,
                "trace": trace.source,
                "requests": len(trace),
                "seed": args.seed,
            },
            "policies": results,
            "claim": CLAIM,
            "matched": matched,
        },
    )
    draw(args, results, matched)


def show(args, trace, capacity, per_token, results, matched):
    headers = ("", "util. %", "concurrent", "reserved %", "internal %", "external %", "tokens/s*")

    def line(name, r):
        parts = (r[f"{p}_percent"] for p in ("reserved", "internal", "external"))
        shown = (r["utilization_percent"], r["concurrent"], *parts, r["modelled_tokens_per_s"])
        return (name, *(f"{value:,.1f}" for value in shown))

    common.report(
        common.table(
            headers,
            [line(NAMES[name], r) for name, r in results.items()],
            f"{args.model}, {capacity * per_token / 1e9:.1f} GB of KV cache ({capacity:,} tokens), "
            f"{len(trace):,} requests of {trace.source}",
        ),
        "* modelled from memory bandwidth, not measured",
        "",
        common.table(
            headers,
            [
                ("claim: traditional", "60", "24", *("", "", ""), "1,200"),
                line("reservation that gives 24", matched["contiguous"]),
                ("claim: paged", "95", "38", *("", "", ""), "1,850"),
                line("pages that give 38", matched["paged"]),
            ],
            f"The claim comes out at {matched['kv_gb']:.1f} GB and {matched['reservation_slots']:,} "
            "slots for each request",
        ),
        f"{matched['longer_percent']:.0f}% of the requests are longer than such a reservation and "
        "cannot run in it at all; "
        f"with the longest ({args.max_len:,}) reserved, {results['reserve_max']['concurrent']:.0f} "
        "requests run, not 24.",
    )


def draw(args, results, matched):
    common.style()
    figure, axes = plt.subplots(1, 3, figsize=(15, 6))
    keys = (
        ("utilization_percent", "tokens held (% of KV memory)", "Utilisation"),
        ("concurrent", "requests running (mean)", "Concurrent requests"),
        ("modelled_tokens_per_s", "tokens/s (modelled)", "Throughput (model)"),
    )
    claimed = ("utilization_percent", "concurrent", "tokens_per_s")
    colors = ("#D55E00", "#E69F00", "#CC79A7", "#0072B2", "#E8A87C", "#7FB8DA")
    labels = [*NAMES.values(), "24: matched", "38: matched"]
    for axis, (key, unit, title), claim in zip(axes, keys, claimed, strict=True):
        values = [r[key] for r in results.values()]
        values += [matched["contiguous"][key], matched["paged"][key]]
        bars = axis.barh(labels, values, color=colors)
        for bar, value, dark in zip(bars, values, (1, 0, 1, 1, 0, 0), strict=True):
            middle = (bar.get_width() / 2, bar.get_y() + bar.get_height() / 2)
            axis.text(
                *(*middle, f"{value:,.0f}"),
                ha="center",
                va="center",
                fontsize=14,
                color="white" if dark else "black",
            )
        for side, row in (("contiguous", 4), ("paged", 5)):
            axis.plot([CLAIM[side][claim]] * 2, [row - 0.4, row + 0.4], "k--", linewidth=2)
        axis.invert_yaxis()
        axis.set_xlabel(unit)
        axis.set_title(title)
        axis.margins(x=0.12)
        if axis is not axes[0]:
            axis.set_yticklabels([])
    axes[2].plot([], [], "k--", linewidth=2, label="the claim")
    axes[2].legend(loc="upper right")
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
