"""What a prefix cache saves: prompts found again against pool size, and throughput on shared prefixes.

Three questions, three parts.

1. How much of the prompts is found again, in a pool of what size? Blocks of a trace with `hash_ids`
   (Mooncake's conversations: `--trace FILE`), each request admitted and gone before the next one,
   least recently used first, tails before heads: the policy of `paxattn.prefix_cache`. Without
   such a trace, conversations are drawn whose turns have the lengths of real ShareGPT requests and
   whose every prompt repeats all turns before it; those are a MODEL of reuse.
2. How much faster is the engine when all requests begin alike? Measured: prefixes of 80 and 341
   tokens, one byte budget, three caches: the traditional one that knows each final length (the
   paper's Orca (Oracle): here all requests are equally long, so the longest is the final one),
   pages without sharing, pages with the prefix cache. All must give the same tokens. The paper
   has 1.67x and 3.58x over the Oracle (section 6.4, LLaMA-13B on an A100), where a larger batch
   costs nothing and a skipped prefill costs little; on a CPU it is the other way round.
3. What does it cost when nothing is shared? The same engines on prompts that differ from the first
   token on, in turns; median of the rounds. The
   cost is the host's, about a millisecond a request whatever the model: the small random model of
   `--quick`, which computes a whole step in less, shows it far too large.

JSON keys:
  reuse        {source, block_tokens, requests, pools: [{tokens, gb_13b (of LLaMA-13B's cache, 16
               bits), hit_percent (of full blocks), prefill_saved_percent (of prompt tokens),
               evictions}], limit (the same with a pool without end)}
  throughput   {prefix length: {oracle, paged, prefix_cache: {tokens_per_s, prefill_saved_percent},
               speedup_over_oracle, speedup_over_paged, paper}}
  overhead     {tokens_per_s_off, tokens_per_s_on, cost_percent (median of the rounds), rounds}
  environment, config
"""

import math
import time
from collections import OrderedDict

import common
import matplotlib.pyplot as plt
import models
import numpy as np
import traces

from paxattn.geometry import PageGeometry

PAPER = {80: 1.67, 341: 3.58}
BYTES_13B = PageGeometry.of("llama-13b", 16).bytes_per_token


def options(parser):
    traces.option(parser)
    models.option(parser)
    parser.add_argument(
        "--requests", type=common.positive, help="requests of parts 2 and 3 (default: 32)"
    )
    parser.add_argument(
        "--output", type=common.positive, help="output tokens of each (default: 32)"
    )
    parser.add_argument(
        "--rounds", type=common.positive, default=5, help="rounds of parts 2 and 3 (default: 5)"
    )


# --- 1: reuse ---------------------------------------------------------------------------------


def replay(blocks, lengths, block_tokens, capacity):
    """Hits, misses, evictions and saved tokens of a trace in a pool of `capacity` blocks.

    blocks: each request's block ids, where equal ids mean equal text up to and with the block.
    """
    cached = OrderedDict()  # the next to evict stands first
    hits = misses = evictions = 0
    for ids, length in zip(blocks, lengths, strict=True):
        could, full = (length - 1) // block_tokens, length // block_tokens
        known = 0
        while known < full and ids[known] in cached:
            known += 1
        found = min(known, could)
        need = -(-length // block_tokens) - found
        if need > capacity - found:  # it will never fit: refused
            misses += could
            continue
        hits, misses = hits + found, misses + could - found
        for block in reversed(ids[:found]):  # in use now: not to be evicted
            cached.move_to_end(block)
        while len(cached) + need > capacity:
            cached.popitem(last=False)
            evictions += 1
        held = ids[:found] + (ids[found:full] if known == found else ())
        for block in reversed(held):
            cached[block] = True
            cached.move_to_end(block)
    saved = hits * block_tokens
    return {"hits": hits, "misses": misses, "evictions": evictions, "saved_tokens": saved}


def conversations(seed, count, block_tokens=16):
    """Block ids and lengths of drawn conversations, each turn after all turns before it."""
    table = traces.read(traces.SHAREGPT_LENGTHS)
    rng = np.random.default_rng(seed)
    open_, blocks, lengths, fresh = [], [], [], 0
    for _ in range(count):
        if not open_ or rng.random() < 0.25:
            open_.append(([], 0))
        at = int(rng.integers(max(0, len(open_) - 40), len(open_)))
        ids, length = open_[at]
        turn = int(rng.integers(len(table)))
        length += int(table.prompt_tokens[turn])
        ids = ids[:]
        while len(ids) * block_tokens < length:
            ids.append(fresh)
            fresh += 1
        blocks.append(tuple(ids))
        lengths.append(length)
        # What is said next replaces the last, partial block.
        open_[at] = (ids[: length // block_tokens], length + int(table.output_tokens[turn]))
    return blocks, lengths


def reuse(args):
    block_tokens, source = 512, None
    if args.trace:
        trace = traces.read(args.trace)
        if trace.hash_ids is None or not any(trace.hash_ids):
            common.fail(
                f"{args.trace} has no hash_ids, so nothing in it can be found again: give a "
                "Mooncake trace (JSON lines), or no --trace for drawn conversations"
            )
        blocks, lengths, source = trace.hash_ids, trace.prompt_tokens.tolist(), trace.source
    else:
        block_tokens, source = 16, f"drawn conversations of ShareGPT lengths (seed {args.seed})"
        blocks, lengths = conversations(args.seed, 500 if args.quick else 8000)
    if args.quick:
        blocks, lengths = blocks[:2000], lengths[:2000]
    distinct = len({b for ids in blocks for b in ids})
    longest = max(-(-n // block_tokens) for n in lengths)
    sizes = np.unique(np.geomspace(longest, max(distinct, longest + 1), 8).astype(int)).tolist()
    total = sum(lengths)

    def row(capacity):
        found = replay(blocks, lengths, block_tokens, capacity)
        asked = max(1, found["hits"] + found["misses"])
        return {
            "hit_percent": 100 * found["hits"] / asked,
            "prefill_saved_percent": 100 * found["saved_tokens"] / total,
            "evictions": found["evictions"],
        }

    pools = [
        {
            "tokens": size * block_tokens,
            "gb_13b": size * block_tokens * BYTES_13B / 1e9,
            **row(size),
        }
        for size in common.progress(sizes, "pools")
    ]
    return {
        "source": source,
        "block_tokens": block_tokens,
        "requests": len(blocks),
        "pools": pools,
        "limit": row(distinct + longest),
    }


# --- 2 and 3: the engine ----------------------------------------------------------------------


def engines(model, longest, rows, requests):
    """Three caches with one byte budget: room for `rows` requests of final length `longest`."""
    import jax

    from paxattn import LLM

    c = model.config
    dtype = jax.tree.leaves(model.params)[0].dtype
    page = PageGeometry(c.num_layers, c.num_kv_heads, c.head_dim, 16, dtype).page_bytes
    budget = (rows * math.ceil(longest / 16) + 1) * page
    common_ = {"max_model_len": longest, "max_num_seqs": requests, "kv_cache_bytes": budget}
    return {
        "oracle": LLM(model, cache="reserve-max", **common_),
        "paged": LLM(model, **common_),
        "prefix_cache": LLM(model, enable_prefix_caching=True, **common_),
    }


def serve(llm, prompts, output):
    from paxattn import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    answers = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    return answers, time.perf_counter() - started


def random_prompts(rng, model, count, length):
    return rng.integers(1, model.config.vocab_size, (count, length)).tolist()


def throughput(model, prefix, setting, rounds, rng):
    """One prefix length: output tokens a second of each cache, in turns, with the same tokens."""
    requests, tail, output = setting["requests"], setting["tail"], setting["output"]
    llms = engines(model, prefix + tail + output, setting["rows"], requests)
    seconds = {name: [] for name in llms}
    saved = dict.fromkeys(llms, 0)
    for i in range(rounds + 1):  # the first one compiles; each has a prefix that nobody knows yet
        head = random_prompts(rng, model, 1, prefix)[0]
        prompts = [head + t for t in random_prompts(rng, model, requests, tail)]
        answers = {}
        for name, llm in llms.items():
            before = llm.stats()["prefix_saved_tokens"]
            answers[name], took = serve(llm, prompts, output)
            if i:
                seconds[name].append(took)
                saved[name] += llm.stats()["prefix_saved_tokens"] - before
        if any(a != answers["paged"] for a in answers.values()):
            common.fail("the caches gave different tokens: this is a bug, please report it")
    total = rounds * requests * (prefix + tail)
    found = {
        name: {
            "tokens_per_s": requests * output / float(np.median(seconds[name])),
            "prefill_saved_percent": 100 * saved[name] / total,
        }
        for name in llms
    }
    fast = found["prefix_cache"]["tokens_per_s"]
    found["speedup_over_oracle"] = fast / found["oracle"]["tokens_per_s"]
    found["speedup_over_paged"] = fast / found["paged"]["tokens_per_s"]
    found["paper"] = PAPER.get(prefix)
    return found, llms


def overhead(model, llms, length, setting, rounds, rng):
    """Cost of the prefix cache where nothing is shared: the two engines in turns."""
    seconds = {"paged": [], "prefix_cache": []}
    requests, output = setting["requests"], setting["output"]
    for i in range(rounds + 1):
        prompts = random_prompts(rng, model, requests, length)
        for name in seconds if i % 2 else reversed(seconds):
            _, took = serve(llms[name], prompts, output)
            if i:  # the first round may still compile
                seconds[name].append(took)
    ratios = np.asarray(seconds["prefix_cache"]) / np.asarray(seconds["paged"])
    rate = {name: requests * output / float(np.median(s)) for name, s in seconds.items()}
    return {
        "tokens_per_s_off": rate["paged"],
        "tokens_per_s_on": rate["prefix_cache"],
        "cost_percent": 100 * (float(np.median(ratios)) - 1),
        "cost_percent_rounds": (100 * (ratios - 1)).tolist(),
        "rounds": rounds,
    }


# --- the script -------------------------------------------------------------------------------


def run(args):
    found_again = reuse(args)
    common.report(
        common.table(
            ["pool, tokens", "GB of LLaMA-13B", "hits %", "prefill saved %", "evictions"],
            [
                (
                    f"{p['tokens']:,}",
                    p["gb_13b"],
                    p["hit_percent"],
                    p["prefill_saved_percent"],
                    p["evictions"],
                )
                for p in found_again["pools"]
            ],
            f"{found_again['source']}: {found_again['requests']:,} requests",
        ),
        "",
    )
    model = models.choose(args, **models.TINY)
    setting = {
        "requests": args.requests or (12 if args.quick else 32),
        "output": args.output or (8 if args.quick else 32),
        "tail": 12 if args.quick else 40,
        "rows": 4 if args.quick else 8,
    }
    rng = np.random.default_rng(args.seed)
    measured = {}
    for prefix in PAPER:
        measured[prefix], llms = throughput(model, prefix, setting, args.rounds, rng)
        if prefix == min(PAPER):
            length = prefix + setting["tail"]
            cost = overhead(model, llms, length, setting, args.rounds, rng)
    common.report(
        common.table(
            ["prefix", "oracle tok/s", "paged", "prefix cache", "x oracle", "paper", "saved %"],
            [
                (
                    f"{prefix} tokens",
                    m["oracle"]["tokens_per_s"],
                    m["paged"]["tokens_per_s"],
                    m["prefix_cache"]["tokens_per_s"],
                    m["speedup_over_oracle"],
                    m["paper"],
                    m["prefix_cache"]["prefill_saved_percent"],
                )
                for prefix, m in measured.items()
            ],
            f"measured, {model.config.num_layers} layers, {setting['requests']} requests, median "
            f"of {args.rounds} rounds",
        ),
        "",
        f"nothing shared: {cost['tokens_per_s_off']:,.1f} tokens/s without, "
        f"{cost['tokens_per_s_on']:,.1f} with the cache: it costs {cost['cost_percent']:.1f}% "
        f"(median of {cost['rounds']} rounds)",
    )
    common.write_json(
        args,
        {
            "reuse": found_again,
            "throughput": measured,
            "overhead": cost,
            "environment": common.environment(),
            "config": {
                **setting,
                "model": str(model.source),
                "page_size": 16,
                "seed": args.seed,
                "quick": args.quick,
            },
        },
    )
    draw(args, found_again, measured)


def draw(args, found_again, measured):
    common.style()
    figure, (left, right) = plt.subplots(1, 2)
    pools = found_again["pools"]
    gb = [p["gb_13b"] for p in pools]
    left.plot(gb, [p["hit_percent"] for p in pools], "o-", label="full blocks found again")
    left.plot(gb, [p["prefill_saved_percent"] for p in pools], "s-", label="prefill saved")
    left.set(xscale="log", xlabel="pool (GB of LLaMA-13B's cache)", ylabel="%", ylim=(0, 100))
    left.set_title("Reuse against pool size")
    left.legend()
    names = {"oracle": "final length known", "paged": "pages", "prefix_cache": "pages + prefix"}
    for i, (name, label) in enumerate(names.items()):
        at = np.arange(len(measured)) + 0.27 * (i - 1)
        right.bar(at, [m[name]["tokens_per_s"] for m in measured.values()], 0.25, label=label)
    right.set_xticks(range(len(measured)), [f"{p} tokens" for p in measured])
    right.set(xlabel="shared prefix", ylabel="output tokens/s (measured)")
    right.set_title("Throughput on a shared prefix")
    right.legend()
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
