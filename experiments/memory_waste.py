"""Where the KV memory goes: Figures 2 and 13 of the PagedAttention paper, by simulation.

Four ways to give memory to requests, on the paper's setting: OPT-13B (819,200 bytes of KV cache a
token), 12 GiB for it on a 40 GB device, at most 2,048 tokens a request, Poisson arrivals.

  orca_max     room for 2,048 tokens for every request, in a buddy arena
  orca_pow2    room for the prompt and the next power of two of the output
  orca_oracle  room for the final length exactly, as if it were known
  paged        pages of 16 tokens, on demand: the functions that the engine runs

Lengths are log-normal with the paper's means (ShareGPT 161.3 and 338.0, Alpaca 19.3 and 58.5).
Their spread is not in the paper; for ShareGPT's outputs it follows from the paper's own figure:
Orca (Max) holds 7 requests, and its "reserved" share of 13.3% is 299 tokens for each, which is
E[n^2] / 2E[n] for output lengths n, so sigma of log(n) is 0.8. One decoding step takes the time
that makes paged batch what the paper says (Little's law: batch = rate * output * step); it does
not matter for the three others, for they are saturated, and their bars are predictions.

With --trace FILE the lengths are those of the file, all requests wait from the start, the longest
possible request is the next power of two of the longest in the file, and the memory grows to hold
at least 8 of those.

JSON keys:
  policies.{orca_max,orca_pow2,orca_oracle,paged}
    used, reserved, internal, external   percent of the KV memory held; they sum to 100
    requests_batched                     requests running, averaged over the steps
    preemptions, requests, events, seconds
    largest_waste_tokens                 paged: the most slots that one request left empty, ever
    free_percent                         paged: pages that no request held, percent of the memory
  paper          the paper's numbers under the same keys, and difference: ours minus the paper's
  alpaca         policies, paper and difference for the second data set (without --trace)
  explanation    where the difference comes from
  config         the setting
"""

import time

import admission
import common
import matplotlib.pyplot as plt
import numpy as np
import simulator
import traces

from paxattn.geometry import KNOWN_MODELS, PageGeometry

NAMES = {
    "orca_max": "Orca (Max)",
    "orca_pow2": "Orca (Pow2)",
    "orca_oracle": "Orca (Oracle)",
    "paged": "paged",
}
PARTS = ("used", "reserved", "internal", "external")
EXPLANATION = (
    "Only Orca (Max) follows from the means and the one spread alone, and it agrees. Pow2 and "
    "Oracle depend on the whole distribution of lengths, which the paper shows only as a "
    "histogram (Figure 11), and on the order of arrivals: log-normal lengths pack a little "
    "better into a buddy arena than the paper's, so less is external. Paged: the paper's 3.7% "
    "of waste is more than half a page for each request (1.6% here at the same page size), so "
    "it contains something else besides, which the paper does not name."
)
PAPER_SHARES = {  # Figure 2
    "orca_max": (20.4, 13.3, 57.3, 8.9),
    "orca_pow2": (26.8, 17.9, 13.6, 41.6),
    "orca_oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, None, None, None),
}
PAPER_BATCHED = {  # Figure 13
    "sharegpt": dict(zip(NAMES, (7.00, 9.81, 13.62, 30.42), strict=True)),
    "alpaca": dict(zip(NAMES, (7.00, 43.24, 72.75, 132.44), strict=True)),
}
RATE = {"sharegpt": 2.0, "alpaca": 30.0}  # requests per second
SIGMA = {"sharegpt": (1.4, 0.8), "alpaca": (0.4, 0.85)}  # of the logarithm: prompt, output
COLORS = dict(zip(PARTS, ("#0072B2", "#E69F00", "#CC79A7", "#BBBBBB"), strict=True))


def options(parser):
    traces.option(parser)
    parser.add_argument("--model", default="opt-13b", choices=sorted(KNOWN_MODELS))
    parser.add_argument("--kv-gib", type=float, default=12.0, help="KV memory (default: 12 GiB)")
    parser.add_argument("--max-len", type=int, default=2048, help="longest request (default: 2048)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page (default: 16)")
    parser.add_argument(
        "--requests", type=common.positive, help="how many (default: 20,000; --quick 1,500)"
    )


def drawn(like, requests, seed, longest):
    """Lengths with the paper's means, and the spread that its bars imply."""
    rng = np.random.default_rng(seed)
    means, sigmas = traces.PAPER_MEANS[like], SIGMA[like]
    prompt = traces.lognormal(requests, means[0], sigmas[0], rng, longest // 2)
    output = traces.lognormal(requests, means[1], sigmas[1], rng, longest)
    return prompt, np.minimum(output, longest - prompt)


def step_seconds(like):
    """One decoding step, from the paper's own batch by Little's law."""
    return PAPER_BATCHED[like]["paged"] / (RATE[like] * traces.PAPER_MEANS[like][1])


def policies(capacity, rows, longest, page_size):
    pages = capacity // page_size
    paged = admission.paged(pages + 1, rows, longest, page_size, watermark=pages // 100)
    return {**admission.orca(capacity, rows, longest), "paged": paged}


def simulate(chosen, prompt, output, arrival=None):
    """Each policy's numbers."""
    results = {}
    for name, policy in chosen.items():
        began = time.perf_counter()
        result = simulator.run(policy, prompt, output, arrival)
        seconds = time.perf_counter() - began
        # the baselines' external waste is memory that a waiting request cannot get
        waiting = name != "paged"
        last = None if waiting or arrival is None else int(arrival[-1])
        share = result.percent(waiting)
        assert abs(sum(share.values()) - 100) < 1e-9
        events = result.events
        results[name] = {
            **share,
            "requests_batched": result.mean_running(waiting or arrival is None, last),
            "preemptions": int(events.preempted.sum()),
            "requests": int(events.left.sum()),
            "events": int((events.steps + events.left + events.admitted > 0).sum()),
            "seconds": seconds,
        }
        if name == "paged":
            assert events.waste.max() < policy.page_size
            slots = result.slots()
            results[name]["largest_waste_tokens"] = int(events.waste.max())
            results[name]["free_percent"] = 100 * slots["free"] / sum(slots.values())
    return results


def compared(results, like):
    """The paper's numbers and ours minus the paper's."""
    paper, difference = {}, {}
    for name, ours in results.items():
        shares = PAPER_SHARES[name] if like == "sharegpt" else (None,) * 4
        known = dict(zip(PARTS, shares, strict=True))
        known["requests_batched"] = PAPER_BATCHED[like][name]
        paper[name] = known
        difference[name] = {k: None if v is None else ours[k] - v for k, v in known.items()}
    return {"paper": paper, "difference": difference}


def show(title, results, paper=None):
    rows = []
    for name, ours in results.items():
        known = (paper or {}).get(name, {})
        cells = []
        for key in (*PARTS, "requests_batched"):
            theirs = known.get(key)
            cells.append(f"{ours[key]:.1f}" + (f" ({theirs:.1f})" if theirs is not None else ""))
        rows.append((NAMES[name], *cells))
    note = " (in brackets: the paper's)" if paper else ""
    headers = ("", "used %", "reserved %", "internal %", "external %", "batched")
    common.report("", common.table(headers, rows, f"{title}{note}"))


def draw(args, title, main, extra):
    common.style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6.4), width_ratios=(1.35, 1))
    paper = main.get("paper")
    width = 0.38 if paper else 0.6
    for i, name in enumerate(NAMES):
        bars = [(i - (width / 2 if paper else 0), main["policies"][name], 1.0)]
        if paper:
            bars.append((i + width / 2 + 0.02, paper[name], 0.5))
        for x, values, alpha in bars:
            bottom = 0.0
            for part in PARTS:
                height = values[part] or 0.0
                label = part if i == 0 and alpha == 1 else None
                left.bar(
                    *(x, height, width),
                    bottom=bottom,
                    color=COLORS[part],
                    alpha=alpha,
                    edgecolor="white",
                    label=label,
                )
                if height >= 5:
                    dark = part == "used" and alpha == 1
                    left.text(
                        *(x, bottom + height / 2, f"{height:.1f}"),
                        ha="center",
                        va="center",
                        fontsize=12,
                        color="white" if dark else "black",
                    )
                bottom += height
    left.set_xticks(range(len(NAMES)), NAMES.values(), fontsize=14)
    left.set_ylabel("share of the KV memory held (%)")
    left.set_ylim(0, 100)
    left.set_title(title)
    left.legend(
        ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.09), columnspacing=1.2, handlelength=1
    )

    series = [("this simulation", main["policies"], "#0072B2")]
    if paper:
        series = [("ShareGPT", main["policies"], "#0072B2"), ("in the paper", paper, "#99C7E0")]
        series += [
            ("Alpaca", extra["policies"], "#D55E00"),
            ("in the paper", extra["paper"], "#EEBF99"),
        ]
    width = 0.8 / len(series)
    for j, (label, values, color) in enumerate(series):
        at = np.arange(len(NAMES)) + (j - (len(series) - 1) / 2) * width
        heights = [values[name]["requests_batched"] for name in NAMES]
        bars = right.bar(at, heights, width, label=label, color=color)
        right.bar_label(bars, fmt="%.0f", fontsize=9 if paper else 12, padding=2)
    right.margins(y=0.08)
    right.set_xticks(range(len(NAMES)), [n.replace(" ", "\n") for n in NAMES.values()], fontsize=14)
    right.set_ylabel("requests batched (mean)")
    right.set_title("Requests in the batch")
    right.legend(loc="upper left")
    common.write_figure(args, figure)


def run(args):
    geometry = PageGeometry.of(args.model, args.page_size)
    capacity = int(args.kv_gib * 2**30) // geometry.bytes_per_token
    count = args.requests or (1500 if args.quick else 20_000)
    config = {
        "model": args.model,
        "bytes_per_token": geometry.bytes_per_token,
        "page_size": args.page_size,
        "seed": args.seed,
    }
    if args.trace:
        trace = traces.of(args)
        if args.quick:
            trace = traces.head(trace, count)
        prompt, output = trace.prompt_tokens, trace.output_tokens
        total = prompt.astype(np.int64) + output
        longest = 2 ** int(total.max() - 1).bit_length()
        capacity = max(capacity, 8 * longest)
        rows = int(min(512, max(16, 3 * capacity // total.mean())))
        chosen = policies(capacity, rows, longest, args.page_size)
        main = {"policies": simulate(chosen, prompt, output)}
        extra = {}
        title = f"Where KV memory goes: {args.trace.name}"
        show(title, main["policies"])
        config |= {"trace": trace.source, "requests": len(trace), "dropped": trace.dropped}
        config |= {"mean_length": float(total.mean()), "rows": rows}
    else:
        longest = args.max_len
        if capacity < longest:
            common.fail(
                f"{args.kv_gib} GiB hold {capacity:,} tokens of {args.model}, less than one "
                f"request of {longest:,}: raise --kv-gib or lower --max-len"
            )
        found = {}
        shared = policies(capacity, 320, longest, args.page_size) if args.quick else None
        for like, rows in (("sharegpt", 64), ("alpaca", 320)):
            chosen = shared or policies(capacity, rows, longest, args.page_size)
            prompt, output = drawn(like, count, args.seed, longest)
            seconds = traces.poisson_arrivals(count, RATE[like], args.seed)
            arrival = (seconds / step_seconds(like)).astype(np.int64)
            results = simulate(chosen, prompt, output, arrival)
            found[like] = {"policies": results, **compared(results, like)}
            show(f"{like}, {RATE[like]:g} requests/s", results, found[like]["paper"])
        main, extra = found["sharegpt"], found["alpaca"]
        title = "Where KV memory goes (pale: the paper)"
        config |= {
            "requests": count,
            "requests_per_second": RATE,
            "step_seconds": {like: step_seconds(like) for like in RATE},
            "log_sigma": SIGMA,
        }
    config |= {"capacity_tokens": capacity, "longest": longest}
    result = {"environment": common.environment(), "config": config, **main}
    if extra:
        result["alpaca"] = extra
        result["explanation"] = EXPLANATION
        common.report("", EXPLANATION)
    common.write_json(args, result)
    draw(args, title, main, extra)


if __name__ == "__main__":
    common.main(__doc__, run, options)
