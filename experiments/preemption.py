"""When pages run out: compute a sequence again, or swap its pages to host memory? Over page sizes.

Two measurements, as in section 7.3 of the PagedAttention paper.

1. One sequence: milliseconds to copy its pages out and back in, and to compute its keys and values
   again (a prefill of all its tokens), for each page size. Recomputation hardly depends on the page
   size; swapping moves one small piece a page and layer where pages are small.
2. The engine: the same requests in a pool that is too small for them, with `preemption=`
   "recompute", "swap" and "auto" (by measured cost); rounds in turns, medians. All must give the
   same tokens. Recomputing includes the replay of the tokens that were generated already, which
   makes a preempted sequence's tokens exactly those of an undisturbed run.

On a CPU "host memory" is the same memory, so swapping is a copy; on a GPU it crosses the bus.

JSON keys:
  one_sequence  [{page_size, tokens, pages, bytes, out_ms, in_ms, recompute_ms}]
  engine        [{page_size, pages, modes: {recompute, swap, auto: {tokens_per_s, preemptions,
                pages_swapped_out}}, identical_outputs}]
  environment, config
"""

import time

import common
import matplotlib.pyplot as plt
import models
import numpy as np

MODES = ("recompute", "swap", "auto")


def options(parser):
    models.option(parser)
    parser.add_argument(
        "--page-size",
        type=common.positive,
        nargs="+",
        help="default: 4 8 16 32 64 128; quick: 8 32",
    )
    parser.add_argument(
        "--tokens", type=common.positive, help="of the one sequence (default: 256; quick: 128)"
    )
    parser.add_argument(
        "--requests", type=common.positive, help="of the engine (default: 12; quick: 6)"
    )
    parser.add_argument(
        "--output", type=common.positive, help="tokens of each (default: 64; quick: 24)"
    )
    parser.add_argument("--rounds", type=common.positive, help="default: 5; quick: 2")


# --- 1: one sequence --------------------------------------------------------------------------


def one_sequence(model, llm, page_size, tokens, rounds):
    """Out, in and again: medians over `rounds`, after one that compiles."""
    import jax

    from paxattn import SamplingParams, kv_pool, memory, swap

    c, plan = model.config, llm.capacity
    pool = kv_pool.init(
        c.num_layers, plan.num_pages, page_size, c.num_kv_heads, c.head_dim, llm.dtype
    )
    state = memory.init(plan.num_pages, 1, plan.pages_per_seq, page_size)
    state, _ = memory.reserve(state, np.asarray([tokens], np.int32))
    pages = -(-tokens // page_size)
    take = jax.jit(kv_pool.take_pages)
    put = jax.jit(kv_pool.put_pages, donate_argnums=0)
    times = {"out": [], "in": [], "again": []}
    prompt = [1 + i % (c.vocab_size - 1) for i in range(tokens)]
    for i in range(rounds + 1):
        start = time.perf_counter()
        group = jax.jit(swap.pages_of)(state, np.ones(1, bool))
        contents = jax.device_get(take(pool, group.pages[:pages]))
        out = time.perf_counter() - start
        start = time.perf_counter()
        pool = jax.block_until_ready(put(pool, group.pages[:pages], contents))
        back = time.perf_counter() - start
        llm.history = []
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
        again = sum(h.seconds for h in llm.history)
        if i:
            for name, value in zip(times, (out, back, again), strict=True):
                times[name].append(1e3 * value)
    llm.history = None
    return {
        "page_size": page_size,
        "tokens": tokens,
        "pages": pages,
        "bytes": sum(x.nbytes for x in jax.tree.leaves(contents)),
        "out_ms": float(np.median(times["out"])),
        "in_ms": float(np.median(times["in"])),
        "recompute_ms": float(np.median(times["again"])),
    }


# --- 2: the engine ----------------------------------------------------------------------------


def engine(llms, prompts, output, rounds):
    """Output tokens a second with each way of preemption, in turns."""
    from paxattn import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    seconds = {mode: [] for mode in llms}
    answers, counts = {}, {}
    for i in range(rounds + 1):
        for mode, llm in llms.items():
            before = llm.stats()
            start = time.perf_counter()
            answers[mode] = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
            took = time.perf_counter() - start
            if i:  # the first round compiles
                seconds[mode].append(took)
                after = llm.stats()
                names = ("preemptions", "pages_swapped_out")
                counts[mode] = {name: after[name] - before[name] for name in names}
    same = all(a == answers["recompute"] for a in answers.values())
    if not same:
        common.fail("the ways of preemption gave different tokens: this is a bug, please report it")
    return {
        "modes": {
            mode: {
                "tokens_per_s": len(prompts) * output / float(np.median(seconds[mode])),
                **counts[mode],
            }
            for mode in llms
        },
        "identical_outputs": same,
    }


# --- the script -------------------------------------------------------------------------------


def run(args):
    from paxattn import LLM

    sizes = args.page_size or ([8, 32] if args.quick else [4, 8, 16, 32, 64, 128])
    tokens = args.tokens or (128 if args.quick else 256)
    requests = args.requests or (6 if args.quick else 12)
    output = args.output or (24 if args.quick else 64)
    rounds = args.rounds or (2 if args.quick else 5)
    for name, value, least in (
        ("tokens", tokens, 8),
        ("requests", requests, 2),
        ("output", output, 2),
    ):
        if value < least:
            common.fail(f"--{name} must be at least {least}; got {value}")
    model = models.choose(args)
    rng = np.random.default_rng(args.seed)
    lengths = rng.integers(tokens // 4, tokens // 2, requests)
    prompts = [rng.integers(1, model.config.vocab_size, n).tolist() for n in lengths]
    longest = max(tokens + 2, int(lengths.max()) + output)
    alone, together = [], []
    for size in common.progress(sizes, "page sizes"):
        # Two thirds of what all requests need at their ends: some must go.
        need = sum(-(-(int(n) + output) // size) for n in lengths)
        pages = max(2 * need // 3, -(-longest // size))
        made = {
            mode: LLM(
                model,
                dtype=args.dtype,
                page_size=size,
                kv_cache_bytes=models.kv_bytes(model, size, pages, args.dtype),
                max_model_len=longest,
                max_num_seqs=requests,
                preemption=mode,
            )
            for mode in MODES
        }
        alone.append(one_sequence(model, made["recompute"], size, tokens, rounds))
        measured = engine(made, prompts, output, rounds)
        together.append({"page_size": size, "pages": pages, **measured})
    common.report(
        common.table(
            ["page size", "pages", "MiB", "out ms", "in ms", "out+in ms", "recompute ms"],
            [
                (
                    str(r["page_size"]),
                    r["pages"],
                    r["bytes"] / 2**20,
                    r["out_ms"],
                    r["in_ms"],
                    r["out_ms"] + r["in_ms"],
                    r["recompute_ms"],
                )
                for r in alone
            ],
            f"{model.source}: one sequence of {tokens} tokens",
        ),
        "",
        common.table(
            ["page size", *(f"{m} tok/s" for m in MODES), "preemptions", "pages swapped (swap)"],
            [
                (
                    str(r["page_size"]),
                    *(r["modes"][m]["tokens_per_s"] for m in MODES),
                    r["modes"]["swap"]["preemptions"],
                    r["modes"]["swap"]["pages_swapped_out"],
                )
                for r in together
            ],
            f"the engine, {requests} requests of {lengths.min()}-{lengths.max()} + {output} tokens, "
            "two thirds of the pages that they need; identical tokens",
        ),
    )
    common.write_json(
        args,
        {
            "one_sequence": alone,
            "engine": together,
            "environment": common.environment(),
            "config": {
                "model": str(model.source),
                "dtype": args.dtype,
                "tokens": tokens,
                "requests": requests,
                "output": output,
                "rounds": rounds,
                "seed": args.seed,
                "quick": args.quick,
            },
        },
    )
    draw(args, alone, together)


def draw(args, alone, together):
    common.style()
    figure, (left, right) = plt.subplots(1, 2)
    sizes = [r["page_size"] for r in alone]
    left.plot(sizes, [r["recompute_ms"] for r in alone], "o-", label="compute again")
    left.plot(sizes, [r["out_ms"] + r["in_ms"] for r in alone], "s-", label="swap out + in")
    left.plot(sizes, [r["out_ms"] for r in alone], "^--", label="swap out")
    left.plot(sizes, [r["in_ms"] for r in alone], "v--", label="swap in")
    left.set(xscale="log", yscale="log", xlabel="page size (tokens)", ylabel="ms")
    left.set_title(f"One sequence of {alone[0]['tokens']} tokens")
    for i, mode in enumerate(MODES):
        at = np.arange(len(sizes)) + 0.27 * (i - 1)
        right.bar(at, [r["modes"][mode]["tokens_per_s"] for r in together], 0.25, label=mode)
    right.set_xticks(range(len(sizes)), [str(s) for s in sizes])
    right.set(xlabel="page size (tokens)", ylabel="output tokens/s (measured)")
    right.set_title("Engine, pool too small")
    left.set_xticks(sizes, [str(s) for s in sizes])
    left.minorticks_off()
    left.legend(fontsize=12)
    right.set_ylim(top=1.2 * right.get_ylim()[1])  # room for the legend
    right.legend(fontsize=12, loc="upper center", ncols=len(MODES))
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
