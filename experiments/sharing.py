"""How much KV memory sharing saves: parallel sampling and beam search, as in the paper's figure 15.

Every sequence of a request (sample or beam) has a table of pages; a page that stands in several
tables is there once. The saving is 1 - pages / table entries, over all steps of all requests.

Parallel sampling shares the prompt's full pages; the partial one is copied when the first token is
written. Beam search shares whatever two beams have in common: when a beam is continued twice, its
full pages are shared and the partial one is copied, when it is not continued, its pages go.

Lengths are drawn with the means of the paper's data sets (Alpaca 19.3 in, 58.5 out; ShareGPT 161.3
in, 338.0 out). For parallel sampling nothing else matters, and the result is a fact of those
lengths. Beams follow a MODEL: each step gives each beam random log-probabilities, and the k best of
all continuations go on; how alike beams stay depends on how sharp a model's predictions are
(`--sharpness`; greater is sharper).

JSON keys:
  saved_percent  {alpaca, sharegpt: {parallel, beam: {n: percent}}}
  paper          the same from figure 15, where it gives numbers
  mean_tokens    {alpaca, sharegpt: {prompt, output}}
  environment, config
"""

import common
import matplotlib.pyplot as plt
import numpy as np
import traces

SIZES = (2, 4, 6)
PAPER = {
    "alpaca": {
        "parallel": {2: 6.09, 4: 8.53, 6: 9.79},
        "beam": {2: 37.56, 4: 53.13, 6: 55.16},
    },
    "sharegpt": {"parallel": "16.2 to 30.5", "beam": "44.3 to 66.3"},
}


def options(parser):
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page (default: 16)")
    parser.add_argument("--requests", type=int, help="of each data set (default: 500)")
    parser.add_argument("--beam-requests", type=int, help="that beams search for (default: 60)")
    parser.add_argument(
        "--sharpness", type=float, default=2.0, help="spread of the beams' logits (default: 2)"
    )


def parallel(prompt, output, samples, page):
    """Table entries and pages of n samples, summed over the steps of one request."""
    stored = prompt + np.arange(1, output + 1)  # tokens of each sample after each step
    entries = samples * int(np.sum(-(-stored // page)))
    return entries, entries - (samples - 1) * (prompt // page) * output


def beam(prompt, output, beams, page, sharpness, rng, choices=20):
    """The same for a beam search whose scores are random."""
    columns = -(-(prompt + output) // page)
    table = np.zeros((beams, columns), np.int64)
    full, next_page = prompt // page, 1
    table[:, :full] = np.arange(1, full + 1)
    next_page += full
    scores = np.full(beams, -np.inf)
    scores[0] = 0.0  # the first step continues the prompt alone
    entries = pages = 0
    for length in range(prompt, prompt + output):
        logits = sharpness * rng.standard_normal((beams, choices))
        logits -= np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
        total = (scores[:, None] + logits).reshape(-1)
        best = np.argpartition(-total, beams - 1)[:beams]
        parents, scores = best // choices, total[best]
        table = table[parents]
        at = length // page  # where the new token goes
        if length % page == 0 or length == prompt:  # a new page each, or a copy of the prompt's
            table[:, at] = next_page + np.arange(beams)
            next_page += beams
        else:
            repeated = np.ones(beams, bool)
            repeated[np.unique(parents, return_index=True)[1]] = False
            table[repeated, at] = next_page + np.arange(repeated.sum())
            next_page += int(repeated.sum())
        held = table[:, : at + 1]
        entries += held.size
        pages += len(np.unique(held))
    return entries, pages


def saved(pairs):
    entries, pages = np.sum(list(pairs), axis=0)
    return 100 * (1 - pages / entries)


def run(args):
    requests = args.requests or (60 if args.quick else 500)
    searched = min(requests, args.beam_requests or (8 if args.quick else 60))
    for name, value in (("--page-size", args.page_size), ("--requests", requests)):
        if value < 1:
            common.fail(f"{name} must be at least 1; got {value}")
    results, means = {}, {}
    for kind in PAPER:
        trace = traces.drawn(kind, requests, args.seed)
        lengths = list(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
        means[kind] = {
            "prompt": float(trace.prompt_tokens.mean()),
            "output": float(trace.output_tokens.mean()),
        }
        rng = np.random.default_rng(args.seed)
        results[kind] = {
            "parallel": {
                n: saved(parallel(p, o, n, args.page_size) for p, o in lengths) for n in SIZES
            },
            "beam": {
                n: saved(
                    beam(p, o, n, args.page_size, args.sharpness, rng)
                    for p, o in common.progress(lengths[:searched], f"{kind}, {n} beams")
                )
                for n in SIZES
            },
        }
    rows = []
    for kind, found in results.items():
        for method, values in found.items():
            paper = PAPER[kind][method]
            for n in SIZES:
                shown = paper[n] if isinstance(paper, dict) else paper
                rows.append((f"{kind}, {method}, n={n}", values[n], shown))
    common.report(
        common.table(
            ["", "saved %", "paper %"], rows, f"KV memory saved, pages of {args.page_size} tokens"
        ),
        "",
        "Parallel sampling follows from the lengths alone; beams follow a model (see --help).",
    )
    common.write_json(
        args,
        {
            "saved_percent": results,
            "paper": PAPER,
            "mean_tokens": means,
            "environment": common.environment(),
            "config": {
                "page_size": args.page_size,
                "requests": requests,
                "beam_requests": searched,
                "sharpness": args.sharpness,
                "seed": args.seed,
                "quick": args.quick,
            },
        },
    )
    draw(args, results)


def draw(args, results):
    common.style()
    figure, axes = plt.subplots(1, 2, sharey=True)
    titles = {"parallel": "Parallel sampling", "beam": "Beam search (modelled)"}
    for axis, (method, title) in zip(axes, titles.items(), strict=True):
        for i, (kind, label) in enumerate({"alpaca": "Alpaca", "sharegpt": "ShareGPT"}.items()):
            at = np.arange(len(SIZES)) + 0.3 * (i - 0.5)
            axis.bar(at, [results[kind][method][n] for n in SIZES], 0.28, label=label)
        values = list(PAPER["alpaca"][method].values())
        at = np.arange(len(SIZES)) - 0.15
        axis.plot(at, values, "kD", label="paper, Alpaca")
        axis.set_xticks(range(len(SIZES)), SIZES)
        axis.set(xlabel="sequences of a request", title=title)
    axes[0].set_ylabel("KV memory saved (%)")
    axes[0].legend()
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
