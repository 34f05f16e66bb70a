"""One vectorised batch allocation against one request at a time.

The allocator's reserve + release for a batch of requests of 1 to 3 pages, in three ways:

  one batch     one compiled call for the whole batch
  one by one    the same functions, one compiled call for each request
  plain Python  a deque of pages and a dict of counts, as Python engines keep them
  vLLM          vLLM's BlockPool, where it can be imported

against the batch size (in a pool of 1M pages) and against the pool's size (for 256 requests). The
claim: the cost of a batch grows with the batch, and not with the pool.

JSON keys:
  by_batch   list of {batch, pages, one_batch_us, one_by_one_us, python_us, vllm_us}: microseconds
             for the whole batch, best of several; null where it was not measured
  by_pool    list of {pool_pages, one_batch_us, temporary_bytes}: the temporary memory that the
             compiled call needs
"""

import collections
import time

import common
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from paxattn import memory

PAGES_PER_SEQ = 4
PAGE_SIZE = 16


def best(call, repeats):
    """The least of so many times, seconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def cycle(state, lengths):
    """Pages for a batch, and back."""
    state, ok = memory.reserve(state, lengths)
    return memory.release(state, ok)


def batch_time(pool, lengths, repeats):
    """Seconds of one compiled call for the batch, and its temporary bytes."""
    state = memory.init(pool, len(lengths), PAGES_PER_SEQ, PAGE_SIZE)
    call = jax.jit(cycle, donate_argnums=0).lower(state, lengths).compile()
    box = [call(state, lengths)]

    def once():
        box[0] = call(box[0], lengths)
        jax.block_until_ready(box[0])

    assert int(memory.free_pages(box[0])) == pool - 1
    return best(once, repeats), call.memory_analysis().temp_size_in_bytes


def one_by_one_time(pool, lengths, repeats):
    """Seconds of a compiled call for each request."""
    one = memory.init(pool, 1, PAGES_PER_SEQ, PAGE_SIZE)
    call = jax.jit(cycle, donate_argnums=0).lower(one, lengths[:1]).compile()
    each = [lengths[i : i + 1] for i in range(len(lengths))]
    box = [one]

    def once():
        state = box[0]
        for length in each:
            state = call(state, length)
        box[0] = jax.block_until_ready(state)

    once()
    return best(once, repeats)


def python_pool(pool):
    """Free pages and reference counts, as a host-side block pool keeps them."""
    return collections.deque(range(1, pool)), dict.fromkeys(range(pool), 0)


def python_cycle(free, references, counts):
    """Pages for a batch, one request at a time, and back."""
    tables = []
    for count in counts:
        pages = [free.popleft() for _ in range(count)]
        for page in pages:
            references[page] += 1
        tables.append(pages)
    for pages in tables:
        for page in pages:
            references[page] -= 1
            if references[page] == 0:
                free.append(page)


def python_time(pool, counts, repeats):
    """Seconds of the same in plain Python."""
    free, references = python_pool(pool)
    once = lambda: python_cycle(free, references, counts)  # noqa: E731
    once()
    return best(once, repeats)


def vllm_time(pool, counts, repeats):
    """Seconds of vLLM's BlockPool; None where vLLM is not installed or has another interface."""
    try:
        from vllm.v1.core.block_pool import BlockPool

        blocks = BlockPool(pool, False, PAGE_SIZE)
    except Exception:  # whatever an optional package may raise
        return None

    def once():
        tables = [blocks.get_new_blocks(count) for count in counts]
        for pages in tables:
            blocks.free_blocks(pages)

    once()
    return best(once, repeats)


def run(args):
    rng = np.random.default_rng(args.seed)
    batches = (1, 16, 256, 1024) if args.quick else (1, 4, 16, 64, 256, 1024, 4096)
    pools = (1_000, 100_000, 1_000_000) if args.quick else (1_000, 10_000, 100_000, 10**6, 10**7)
    repeats = 5 if args.quick else 30
    by_batch, by_pool = [], []
    for batch in common.progress(batches, "batch sizes"):
        counts = rng.integers(1, 4, batch)
        lengths = jnp.asarray(counts * PAGE_SIZE, jnp.int32)
        whole, _ = batch_time(1_000_000, lengths, repeats)
        few = max(1, repeats * 16 // max(batch, 16))
        one = one_by_one_time(1_000_000, lengths, min(few, repeats)) if batch <= 1024 else None
        python = python_time(1_000_000, counts.tolist(), repeats)
        vllm = vllm_time(100_000, counts.tolist(), few)
        by_batch.append(
            {
                "batch": batch,
                "pages": int(counts.sum()),
                "one_batch_us": whole * 1e6,
                "one_by_one_us": None if one is None else one * 1e6,
                "python_us": python * 1e6,
                "vllm_us": None if vllm is None else vllm * 1e6,
            }
        )
    lengths = jnp.asarray(rng.integers(1, 4, 256) * PAGE_SIZE, jnp.int32)
    for pool in common.progress(pools, "pool sizes"):
        seconds, temporary = batch_time(pool, lengths, repeats)
        entry = {"pool_pages": pool, "one_batch_us": seconds * 1e6, "temporary_bytes": temporary}
        by_pool.append(entry)

    common.report(
        common.table(
            ("requests", "pages", "one batch, us", "one by one, us", "Python, us", "vLLM, us"),
            [tuple(row.values()) for row in by_batch],
            "reserve + release, a pool of 1,000,000 pages",
        ),
        "",
        common.table(
            ("pool, pages", "one batch, us", "temporary bytes"),
            [tuple(row.values()) for row in by_pool],
            "256 requests, one batch",
        ),
    )
    config = {"pages_per_request": "1 to 3", "repeats": repeats, "seed": args.seed}
    common.write_json(
        args,
        {
            "environment": common.environment(),
            "config": config,
            "by_batch": by_batch,
            "by_pool": by_pool,
        },
    )
    draw(args, by_batch, by_pool)


def draw(args, by_batch, by_pool):
    common.style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6), sharey=True)
    labels = {
        "one_by_one_us": "one compiled call a request",
        "vllm_us": "vLLM's BlockPool",
        "python_us": "plain Python lists",
        "one_batch_us": "one compiled call for all",
    }
    for (key, label), marker in zip(labels.items(), "s^vo", strict=True):
        points = [(row["batch"], row[key]) for row in by_batch if row[key] is not None]
        if points:
            color = "black" if key == "one_batch_us" else None
            left.plot(*zip(*points, strict=True), marker=marker, label=label, color=color)
    left.set(xscale="log", yscale="log", xlabel="requests in the batch")
    left.set_ylabel("time for the batch (µs)")
    left.set_title("Cost against the batch (1M pages)")
    left.legend()
    pools = [row["pool_pages"] for row in by_pool]
    right.plot(pools, [row["one_batch_us"] for row in by_pool], "o-", color="black")
    right.set(xscale="log", xlabel="pages in the pool")
    right.set_title("Cost against the pool (256 requests)")
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run)
