"""What a long prompt does to those who are decoding: whole, or in chunks beside their steps.

Some requests stream. Then long prompts arrive. Without a token budget a prompt is computed first,
up to 512 tokens a program, and every stream stands still meanwhile; with
`LLM(max_num_batched_tokens=...)` each step computes one chunk of the prompt and one token of every
stream. Measured: the gaps between two tokens of a stream while the prompts are computed, and the
time until the prompts' own first tokens, which chunks make longer. Rounds in turns; all tokens must
be the same, whatever the budget.

JSON keys:
  budgets       {name: {gap_ms: {median, p99, max} (between tokens of a stream, while prompts are
                computed), ttft_s (median, of the long prompts), seconds (of a round, median)}}
  longest_gap_ratio  longest gap without a budget / with each one
  identical_outputs
  environment, config
"""

import itertools
import time

import common
import matplotlib.pyplot as plt
import models
import numpy as np


def options(parser):
    models.option(parser)
    parser.add_argument("--streams", type=common.positive, help="default: 8; quick: 4")
    parser.add_argument("--prompts", type=common.positive, help="long ones (default: 2; quick: 1)")
    parser.add_argument(
        "--length", type=common.positive, help="of each (default: 1000; quick: 400)"
    )
    parser.add_argument(
        "--budget", type=common.positive, nargs="+", help="default: 64 128 256; quick: 64"
    )
    parser.add_argument("--rounds", type=common.positive, help="default: 4; quick: 2")


def one_round(llm, streams, longs, before, output):
    """Serves streams, and the long prompts once every stream has `before` tokens."""
    from paxattn import SamplingParams

    stream = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    long = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    ids = [llm.add_request(p, stream) for p in streams]
    count = dict.fromkeys(ids, 0)
    times = {i: [] for i in ids}
    arrived, first, answers = {}, {}, {}
    start = time.perf_counter()
    while llm.has_unfinished_requests():
        outputs = llm.step()
        now = time.perf_counter()
        for o in outputs:
            answers[o.request_id] = o.outputs[0].token_ids
            if o.request_id in count:
                count[o.request_id] = len(o.outputs[0].token_ids)
                times[o.request_id].append(now)
            else:
                first.setdefault(o.request_id, now)
        if not arrived and min(count.values()) >= before:
            arrived = {llm.add_request(p, long): time.perf_counter() for p in longs}
    seconds = time.perf_counter() - start
    begin, end = min(arrived.values()), max(first.values())
    gaps = []
    for moments in times.values():
        # Gaps that overlap the time in which a long prompt was computed.
        gaps += [b - a for a, b in itertools.pairwise(moments) if b > begin and a < end]
    waits = [first[i] - arrived[i] for i in arrived]
    order = sorted(answers, key=int)
    return gaps, waits, seconds, [answers[i] for i in order]


def run(args):
    from paxattn import LLM

    quick = args.quick
    streams = args.streams or (4 if quick else 8)
    count = args.prompts or (1 if quick else 2)
    length = args.length or (400 if quick else 1000)
    budgets = args.budget or ([64] if quick else [64, 128, 256])
    rounds = args.rounds or (2 if quick else 4)
    if min(budgets) < 16:
        common.fail(f"--budget must be at least 16 tokens; got {min(budgets)}")
    model = models.choose(args)
    steps = 4  # of one streaming program
    output = 4 * steps + count * length // (min(budgets) // 2) + 8
    longest = max(length + 8, 24 + output)
    if longest > model.config.max_position_embeddings:
        common.fail(
            f"--length {length} needs sequences of {longest} tokens, more than the model's "
            f"{model.config.max_position_embeddings}"
        )
    pages = (streams + count) * -(-longest // 16)
    rng = np.random.default_rng(args.seed)
    draw_prompt = lambda n: rng.integers(1, model.config.vocab_size, n).tolist()  # noqa: E731
    short, long = [draw_prompt(16) for _ in range(streams)], [draw_prompt(length)] * count
    settings = {"none": None, **{str(b): b for b in budgets}}
    llms = {
        name: LLM(
            model,
            dtype=args.dtype,
            kv_cache_bytes=models.kv_bytes(model, 16, pages, args.dtype),
            max_model_len=longest,
            max_num_seqs=streams + count,
            max_num_batched_tokens=budget,
        )
        for name, budget in settings.items()
    }
    gaps = {name: [] for name in llms}
    waits = {name: [] for name in llms}
    seconds = {name: [] for name in llms}
    answers = {}
    for i in common.progress(range(rounds + 1), "rounds"):
        for name, llm in llms.items():
            g, w, s, answers[name] = one_round(llm, short, long, 2 * steps, output)
            if i:  # the first round compiles
                gaps[name] += g
                waits[name] += w
                seconds[name].append(s)
    same = all(a == answers["none"] for a in answers.values())
    if not same:
        common.fail("chunks gave other tokens than whole prompts: this is a bug, please report it")
    result = {
        name: {
            "gap_ms": {
                "median": 1e3 * float(np.median(gaps[name])),
                "p99": 1e3 * float(np.percentile(gaps[name], 99)),
                "max": 1e3 * float(np.max(gaps[name])),
            },
            "ttft_s": float(np.median(waits[name])),
            "seconds": float(np.median(seconds[name])),
        }
        for name in llms
    }
    whole = result["none"]["gap_ms"]["max"]
    ratio = {name: whole / r["gap_ms"]["max"] for name, r in result.items() if name != "none"}
    common.report(
        common.table(
            ["budget, tokens", "gap median ms", "p99", "longest", "first token s", "round s"],
            [
                (
                    name,
                    *(r["gap_ms"][k] for k in ("median", "p99", "max")),
                    r["ttft_s"],
                    r["seconds"],
                )
                for name, r in result.items()
            ],
            f"{model.source}: {streams} streams while {count} prompt(s) of {length} tokens are "
            f"computed; {rounds} rounds; identical tokens",
        )
    )
    common.write_json(
        args,
        {
            "budgets": result,
            "longest_gap_ratio": ratio,
            "identical_outputs": same,
            "environment": common.environment(),
            "config": {
                "model": str(model.source),
                "dtype": args.dtype,
                "streams": streams,
                "prompts": count,
                "length": length,
                "output": output,
                "rounds": rounds,
                "seed": args.seed,
                "quick": quick,
            },
        },
    )
    draw(args, gaps, result)


def draw(args, gaps, result):
    common.style()
    figure, (left, right) = plt.subplots(1, 2)
    for name, values in gaps.items():
        ordered = np.sort(1e3 * np.asarray(values))
        label = "prompts first" if name == "none" else f"budget {name}"
        left.plot(ordered, 100 * np.arange(1, len(ordered) + 1) / len(ordered), label=label)
    left.set(xlabel="gap between tokens (ms)", ylabel="gaps at most so long (%)")
    left.set(xlim=(0, None), ylim=(0, 101))
    left.set_title("Streams, prompts arriving")
    left.legend(fontsize=12)
    names = list(result)
    right.bar(names, [result[n]["ttft_s"] for n in names], color=common.PALETTE[2])
    right.set(xlabel="token budget of a step", ylabel="s until the long prompts' first token")
    right.set_title("What it costs the prompts")
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
