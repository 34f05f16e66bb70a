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

Beside them, what the engine itself saves: `LLM.beam_search` answers a few instructions, and its
pages and table entries are counted in every step. The language model is far smaller than the
paper's.

JSON keys:
  saved_percent  {alpaca, sharegpt: {parallel, beam: {n: percent}}}
  engine         {model, requests, output_tokens, saved_percent: {n: percent}}: beams, measured
  paper          the same from figure 15, where it gives numbers
  mean_tokens    {alpaca, sharegpt: {prompt, output}}
  environment, config
"""

import common
import matplotlib.pyplot as plt
import models
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


INSTRUCTIONS = (
    "Explain to a child why the sky is blue.",
    "Write a short poem about a river in autumn.",
    "List three ways to use less energy at home.",
    "Describe how bread is made, step by step.",
    "What is the difference between a fruit and a vegetable?",
    "Suggest a name for a small bakery, and say why it fits.",
)


def options(parser):
    models.option(parser)
    parser.add_argument(
        "--page-size", type=common.positive, default=16, help="tokens in a page (default: 16)"
    )
    parser.add_argument("--requests", type=common.positive, help="of each data set (default: 500)")
    parser.add_argument(
        "--beam-requests", type=common.positive, help="that beams search for (default: 60)"
    )
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


def engine_beams(model, dtype, page_size, output, seed):
    """Percent that the engine's own beam search saves, by width."""
    from paxattn import LLM, BeamSearchParams

    if model.tokenizer is None:
        rng = np.random.default_rng(seed)
        prompts = rng.integers(1, model.config.vocab_size, (len(INSTRUCTIONS), 20)).tolist()
    else:
        prompts = [[{"role": "user", "content": text}] for text in INSTRUCTIONS]
    found = {}
    for n in common.progress(SIZES, "the engine's beams"):
        # Room for one request: what several requests share is another matter.
        llm = LLM(model, dtype=dtype, page_size=page_size, max_num_seqs=n, max_model_len=256)
        params = BeamSearchParams(beam_width=n, max_tokens=output, ignore_eos=True)
        refused = [o.error for o in llm.beam_search(prompts, params) if o.error]
        if refused:
            common.fail(refused[0])
        found[n] = 100 * llm.stats()["memory_saved_mean"]
    return {
        "model": str(model.source),
        "requests": len(prompts),
        "output_tokens": output,
        "saved_percent": found,
    }


def saved(pairs):
    entries, pages = np.sum(list(pairs), axis=0)
    return 100 * (1 - pages / entries)


def run(args):
    requests = args.requests or (60 if args.quick else 500)
    searched = min(requests, args.beam_requests or (8 if args.quick else 60))
    model = models.choose(args, **models.TINY)
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
    engine = engine_beams(model, args.dtype, args.page_size, 12 if args.quick else 58, args.seed)
    rows = []
    for kind, found in results.items():
        for method, values in found.items():
            paper = PAPER[kind][method]
            for n in SIZES:
                shown = paper[n] if isinstance(paper, dict) else paper
                rows.append((f"{kind}, {method}, n={n}", values[n], shown))
    for n, value in engine["saved_percent"].items():
        rows.append((f"the engine's beams, {engine['output_tokens']} tokens, n={n}", value, None))
    common.report(
        common.table(
            ["", "saved %", "paper %"], rows, f"KV memory saved, pages of {args.page_size} tokens"
        ),
        "",
        "Parallel sampling follows from the lengths alone; Alpaca's and ShareGPT's beams follow a model "
        "(see --help); the engine's are measured.",
    )
    common.write_json(
        args,
        {
            "saved_percent": results,
            "engine": engine,
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
    draw(args, results, engine["saved_percent"])


def draw(args, results, engine):
    common.style()
    figure, axes = plt.subplots(1, 2, sharey=True)
    titles = {"parallel": "Parallel sampling", "beam": "Beam search"}
    names = {"alpaca": "Alpaca's lengths", "sharegpt": "ShareGPT's lengths"}
    for axis, (method, title) in zip(axes, titles.items(), strict=True):
        note = ", modelled" if method == "beam" else ""
        bars = {label + note: results[kind][method] for kind, label in names.items()}
        if method == "beam":
            bars["the engine's, measured"] = engine
        for i, (label, values) in enumerate(bars.items()):
            at = np.arange(len(SIZES)) + 0.28 * (i - 0.5)
            axis.bar(at, [values[n] for n in SIZES], 0.26, label=label)
        values = list(PAPER["alpaca"][method].values())
        axis.plot(np.arange(len(SIZES)) - 0.14, values, "kD", label="paper, Alpaca")
        axis.set_xticks(range(len(SIZES)), SIZES)
        axis.set(xlabel="sequences of a request", title=title, ylim=(0, 119))
        axis.set_yticks(range(0, 101, 20))
        axis.legend(loc="upper left", fontsize=12)
    axes[0].set_ylabel("KV memory saved (%)")
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
