"""Very many short requests: does a cache of released pages in front of the free list help?

Requests of one to a few pages come and go in every step, so taking and releasing pages is most of
the work. With the cache each scheduler slot keeps the pages that its last request released and
takes them again first (paxattn/page_cache.py). Measured inside one compiled loop, where no other
work hides the cost: transactions on the free list (pages taken from it or put on it) and time for
a request, over cache sizes; and plain Python, one request at a time, as engines with host-side
block pools do it.

In a functional design the free list has no lock to wait for and a batch is one pass, so the claim
"allocation became the bottleneck" has less to bite on; the numbers say how much is left.

JSON keys:
  by_cache   list of {cached_pages_per_row, transactions_per_request, us_per_request, requests}
  python     {us_per_request, cached_us_per_request}: deque and dict, one request at a time
  speedup    time for a request without the cache / with the best one
  transactions_saved_percent    with the largest cache
  config     rows, pages_per_seq, mean_pages, steps, pool_pages
"""

import time

import common
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from batch_allocation import best, python_cycle, python_pool

from paxattn import memory

PAGE_SIZE = 16


def options(parser):
    parser.add_argument("--rows", type=int, default=64, help="scheduler slots (default: 64)")
    parser.add_argument("--tokens", type=int, default=40, help="mean request (default: 40 tokens)")
    parser.add_argument(
        "--steps", type=common.positive, help="steps measured (default: 20,000; --quick 2,000)"
    )


def churn(cached, lengths, pool, width, repeats):
    """Run it: seconds, pages over the free list, and requests."""
    rows = lengths.shape[1]

    def step(carry, length):
        state, moved = carry
        before = state.allocator.num_free
        state = memory.release(state, state.lengths > 0)  # every request lasts one step
        after = state.allocator.num_free
        state, ok = memory.reserve(state, length)
        moved += jnp.abs(after - before) + jnp.abs(after - state.allocator.num_free)
        return (state, moved), ok.all()

    run = jax.jit(
        lambda state, lengths: jax.lax.scan(step, (state, jnp.int32(0)), lengths),
        donate_argnums=0,
    )
    times = []
    for _ in range(repeats + 1):
        state = jax.jit(lambda: memory.init(pool, rows, width, PAGE_SIZE, cached))()
        jax.block_until_ready(state)
        began = time.perf_counter()
        (state, moved), ok = jax.block_until_ready(run(state, lengths))
        times.append(time.perf_counter() - began)
        assert bool(ok.all())
    return min(times[1:]), int(moved), lengths.size


def python_time(lengths, pool, repeats):
    """Seconds for the same requests in plain Python."""
    free, references = python_pool(pool)
    counts = (-(-lengths // PAGE_SIZE)).tolist()

    def once():
        for step in counts:
            python_cycle(free, references, step)

    once()
    return best(once, repeats)


def python_cached_time(lengths, pool, repeats):
    """Seconds for the same requests in plain Python, each slot keeping its pages."""
    free, references = python_pool(pool)
    kept = [[] for _ in range(lengths.shape[1])]
    counts = (-(-lengths // PAGE_SIZE)).tolist()

    def once():
        for step in counts:
            tables = []
            for mine, count in zip(kept, step, strict=True):
                pages = [mine.pop() if mine else free.popleft() for _ in range(count)]
                for page in pages:
                    references[page] += 1
                tables.append(pages)
            for mine, pages in zip(kept, tables, strict=True):
                for page in pages:
                    references[page] -= 1
                    if references[page] == 0:
                        mine.append(page)

    once()
    return best(once, repeats)


def run(args):
    if args.rows < 1 or args.tokens < 1:
        common.fail(f"--rows {args.rows} and --tokens {args.tokens} must be at least 1")
    steps = args.steps or (2000 if args.quick else 20_000)
    rng = np.random.default_rng(args.seed)
    longest = 4 * args.tokens
    lengths = rng.geometric(1 / args.tokens, (steps, args.rows)).clip(1, longest).astype(np.int32)
    width = -(-longest // PAGE_SIZE)
    pool = args.rows * width + 1
    sizes = (0, 2, width) if args.quick else tuple(sorted({0, 1, 2, 4, 8, width}))
    by_cache = []
    for size in common.progress(sizes, "cache sizes"):
        seconds, moved, requests = churn(
            size, jnp.asarray(lengths), pool, width, 2 if args.quick else 5
        )
        by_cache.append(
            {
                "cached_pages_per_row": size,
                "transactions_per_request": moved / requests,
                "us_per_request": 1e6 * seconds / requests,
                "requests": requests,
            }
        )
    few = lengths[: max(1, 8192 // args.rows)]
    python = 1e6 * python_time(few, pool, 5) / few.size
    python_cached = 1e6 * python_cached_time(few, pool, 5) / few.size
    plain = by_cache[0]
    fastest = min(by_cache[1:], key=lambda row: row["us_per_request"])
    speedup = plain["us_per_request"] / fastest["us_per_request"]
    saved = 100 * (1 - by_cache[-1]["transactions_per_request"] / plain["transactions_per_request"])
    common.report(
        common.table(
            ("pages kept by a slot", "free-list transactions / request", "us / request"),
            [
                *[tuple(row.values())[:3] for row in by_cache],
                ("plain Python, 0", plain["transactions_per_request"], python),
                ("plain Python, all", 0.0, python_cached),
            ],
            f"{plain['requests']:,} requests of {args.tokens} tokens on average, "
            f"{args.rows} at a time",
        ),
        "",
        f"The cache saves {saved:.0f}% of the transactions and makes a request {speedup:.2f} times "
        "as fast. "
        + (
            "In a compiled batch a transaction is a few nanoseconds of one vectorised pass, and "
            "there is no lock to wait for: there is little to save, and the cache's own "
            "bookkeeping costs as much or more. It stays off by default."
            if speedup < 1.1
            else "It saves passes over the counts and the free list of the pool."
        ),
    )
    common.write_json(
        args,
        {
            "environment": common.environment(),
            "config": {
                "rows": args.rows,
                "pages_per_seq": width,
                "mean_pages": float((-(-lengths // PAGE_SIZE)).mean()),
                "steps": steps,
                "pool_pages": pool,
                "page_size": PAGE_SIZE,
                "seed": args.seed,
            },
            "by_cache": by_cache,
            "python": {"us_per_request": python, "cached_us_per_request": python_cached},
            "speedup": speedup,
            "transactions_saved_percent": saved,
        },
    )
    draw(args, by_cache, python)


def draw(args, by_cache, python):
    common.style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6))
    names = [str(row["cached_pages_per_row"]) for row in by_cache]
    moved = [row["transactions_per_request"] for row in by_cache]
    times = [row["us_per_request"] for row in by_cache]
    left.bar_label(left.bar(names, moved, color=common.PALETTE[0]), fmt="%.2f", padding=3)
    left.set_xlabel("pages that a scheduler slot keeps")
    left.set_ylabel("pages over the free list for a request")
    left.set_title("Transactions on the free list")
    right.bar_label(right.bar(names, times, color=common.PALETTE[1]), fmt="%.3f", padding=3)
    right.axhline(python, color=common.PALETTE[5], linestyle="--", label="plain Python, one by one")
    right.set_xlabel("pages that a scheduler slot keeps")
    right.set_ylabel("time for a request (µs)")
    right.set_title("Allocation and release, compiled")
    right.set_ylim(0, 1.25 * max(*times, python))
    right.legend(loc="upper right")
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
