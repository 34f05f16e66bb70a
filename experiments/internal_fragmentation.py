"""Reserved and never used: the request that needs 10 slots of 2,048, and real request lengths.

Each request of a trace gets memory for its whole life; what it has not used when it ends is its
internal waste. Three ways: the longest request for all, the next power of two, pages on demand.

JSON keys:
  example    the request of 10 tokens: {needed, contiguous_slots, contiguous_wasted, paged_slots,
             paged_wasted}
  policies.{reserve_max,power_of_two,paged}
    wasted_percent       wasted slots in percent of all slots given out
    wasted_mean, wasted_median, wasted_max    slots wasted by a request
  config     trace, requests, longest, page_size
"""

import admission
import common
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import traces

from paxattn import accounting, contiguous, memory

NAMES = {
    "reserve_max": "longest request",
    "power_of_two": "next power of two",
    "paged": "pages on demand",
}


def options(parser):
    traces.option(parser)
    parser.add_argument(
        "--max-len", type=common.positive, help="slots reserved by reserve-max (default: 2048)"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page (default: 16)")


def example(longest, page_size, tokens=10):
    """The request of 10 tokens in both caches, by the functions that the engine runs."""
    width = -(-longest // page_size)
    paged = memory.init(width + 1, 1, width, page_size)
    fixed = contiguous.init(width + 1, 1, width, page_size)
    paged, _ = memory.reserve(paged, jnp.array([tokens], jnp.int32))
    fixed, _ = contiguous.reserve(fixed, jnp.array([tokens], jnp.int32))
    left = accounting.of_paged(paged)
    whole = accounting.of_reserve_max(fixed, width + 1, jnp.array([tokens], jnp.int32))
    return {
        "needed": tokens,
        "contiguous_slots": int(whole.held),
        "contiguous_wasted": int(whole.internal),
        "paged_slots": int(left.held),
        "paged_wasted": int(left.internal),
    }


def paged_slots(total, page_size):
    """Slots of the pages that each request holds in the end: from the allocator, in batches."""
    batch, width = 256, -(-int(total.max()) // page_size)

    @jax.jit
    def hold(lengths):
        state = memory.init(batch * width + 1, batch, width, page_size)
        state, ok = memory.reserve(state, lengths)
        return memory.held_pages(state), ok.all()

    slots = []
    for start in range(0, len(total), batch):
        part = total[start : start + batch]
        lengths = np.zeros(batch, np.int32)
        lengths[: len(part)] = part
        pages, ok = hold(lengths)
        assert bool(ok)
        slots.append(np.asarray(pages)[: len(part)] * page_size)
    return np.concatenate(slots)


def run(args):
    trace = traces.of(args)
    if args.quick:
        trace = traces.head(trace, 500)
    total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    longest = args.max_len or 2 ** max(11, int(total.max() - 1).bit_length())
    if total.max() > longest:
        row = int(total.argmax())
        common.fail(f"request {row} has {total[row]:,} tokens: raise --max-len above that")
    output = jnp.asarray(trace.output_tokens, jnp.int32)
    pow2 = trace.prompt_tokens + np.asarray(admission.power_of_two(output), np.int64)
    owned = {
        "reserve_max": np.full_like(total, longest),
        "power_of_two": np.minimum(pow2, longest),
        "paged": paged_slots(total, args.page_size),
    }
    results = {}
    for name, slots in owned.items():
        wasted = slots - total
        results[name] = {
            "wasted_percent": 100 * wasted.sum() / slots.sum(),
            "wasted_mean": wasted.mean(),
            "wasted_median": float(np.median(wasted)),
            "wasted_max": int(wasted.max()),
        }
    assert results["paged"]["wasted_max"] < args.page_size
    ten = example(longest, args.page_size)
    common.report(
        f"A request of {ten['needed']} tokens: {ten['contiguous_wasted']:,} of "
        f"{ten['contiguous_slots']:,} slots wasted when the longest is reserved, "
        f"{ten['paged_wasted']} of {ten['paged_slots']} in pages.",
        "",
        common.table(
            ("memory for", "wasted %", "mean slots", "median", "most"),
            [(NAMES[name], *values.values()) for name, values in results.items()],
            f"{len(trace):,} requests of {trace.source}, when each ends",
        ),
    )
    config = {
        "trace": trace.source,
        "requests": len(trace),
        "longest": longest,
        "page_size": args.page_size,
        "seed": args.seed,
    }
    common.write_json(
        args,
        {
            "environment": common.environment(),
            "config": config,
            "example": ten,
            "policies": results,
        },
    )
    draw(args, owned, total, results, ten)


def draw(args, owned, total, results, ten):
    common.style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6), width_ratios=(1, 1.5))
    wasted = (ten["contiguous_wasted"], ten["paged_wasted"])
    bars = left.bar(("longest\nreserved", "pages"), wasted, color=common.PALETTE[:2], width=0.6)
    left.bar_label(bars, labels=[f"{w:,} wasted" for w in wasted], padding=3)
    left.set_yscale("log")
    left.set_ylim(1, 4 * ten["contiguous_slots"])
    left.set_ylabel("slots wasted (log scale)")
    left.set_title(f"One request of {ten['needed']} tokens")
    for (name, slots), style in zip(owned.items(), ("-", "--", "-."), strict=True):
        waste = np.sort(slots - total)
        share = 100 * np.arange(1, len(waste) + 1) / len(waste)
        label = f"{NAMES[name]}: {results[name]['wasted_percent']:.1f}% wasted"
        right.plot(np.maximum(waste, 0.5), share, style, label=label)
    right.set(xscale="log", xlabel="slots that a request never used (0 drawn at 0.5)")
    right.set_ylabel("requests with at most so many (%)")
    right.set_ylim(0, 142)
    right.set_yticks(range(0, 101, 20))
    right.set_title("Waste when a request ends")
    right.legend(loc="upper left", fontsize=13)
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
