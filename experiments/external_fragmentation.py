"""Memory that is free and cannot be used: 30% free, and a request cannot be placed.

Requests of real lengths come and go in an arena where each gets one piece of its final length
(first fit, or --fit best). The script looks for the moment at which a request waits although the
free memory is several times what it needs, draws the memory map up to there as a picture and as
an animation, and runs the same requests on pages: there a request waits only if the free pages
are really fewer than it needs.

In both, a request gets memory for its final length when it starts, as if that were known, and the
queue is never empty: the best case for the arena. What is lost here is lost to holes alone.

JSON keys:
  contiguous  requests, refused_steps_percent (steps at which the head of the queue waited),
              refused_with_enough_free (times a request was refused although enough memory was
              free in total), free_percent_mean, largest_hole_percent_mean (while one waits),
              external_fragmentation_mean (1 - largest hole / free)
  worst       the picture's moment: {step, free_percent, free_slots, largest_hole, needed}
  paged       refused_with_enough_free (0), free_percent_mean, requests
  config
Files: external_fragmentation.png, external_fragmentation.gif (the arena beside the pages).
"""

import common
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import traces
from matplotlib.colors import ListedColormap

from paxattn import arena, memory


def options(parser):
    traces.option(parser)
    parser.add_argument("--fit", choices=("first", "best"), default="first")
    parser.add_argument(
        "--capacity",
        type=common.positive,
        help="token slots (default: 8192, or 4 times the longest request of a --trace)",
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page (default: 16)")
    parser.add_argument(
        "--requests", type=common.positive, help="how many (default: 2000; --quick 300)"
    )


def serve(store, try_place, free, measure, total, output, rows):
    """Serve the queue step by step; yields (step, store, rows' requests, what the head needs)."""
    request, until = np.full(rows, -1), np.zeros(rows, np.int64)
    head, step = 0, 0
    while head < len(total) or (request >= 0).any():
        waits = 0
        while head < len(total):
            idle = np.flatnonzero(request < 0)
            if not len(idle):
                break
            placed, ok = try_place(store, int(idle[0]), int(total[head]))
            if not ok:
                waits = int(total[head])
                break
            store = placed
            request[idle[0]], until[idle[0]] = head, step + output[head]
            head += 1
        yield step, store, request.copy(), waits, measure(store)
        running = request >= 0
        if running.any():
            step = int(until[running].min())  # nothing changes before someone ends
        done = running & (until <= step)
        store = free(store, done)
        request[done] = -1


def contiguous(capacity, rows, fit, total, output):
    place = jax.jit(lambda s, r, n: arena.place(s, r, n, fit))

    def try_place(state, row, size):
        state, ok = place(state, row, size)
        return state, bool(ok)

    look = jax.jit(lambda s: (arena.total_free(s), arena.largest_hole(s), s.start, s.size))
    free = jax.jit(arena.free)
    return serve(
        arena.init(capacity, rows),
        try_place,
        lambda s, mask: free(s, jnp.asarray(mask)),
        lambda s: tuple(np.asarray(x) for x in look(s)),
        *(total, output, rows),
    )


def paged(capacity, rows, page_size, total, output):
    width = -(-int(total.max()) // page_size)

    @jax.jit
    def place(state, row, size):
        wanted = jnp.where(jnp.arange(rows, dtype=jnp.int32) == row, size, state.lengths)
        state, ok = memory.reserve(state, wanted)
        return state, ok.all()

    def try_place(state, row, size):
        state, ok = place(state, row, size)
        return state, bool(ok)

    look = jax.jit(lambda s: (memory.free_pages(s), s.block_tables))
    release = jax.jit(memory.release)
    return serve(
        memory.init(capacity // page_size + 1, rows, width, page_size),
        try_place,
        lambda s, mask: release(s, jnp.asarray(mask)),
        lambda s: tuple(np.asarray(x) for x in look(s)),
        *(total, output, rows),
    )


def arena_map(capacity, cells, request, start, size):
    """Which request holds each cell of memory (``[cells]``; 0 is free)."""
    owner = np.zeros(capacity, np.int64)
    for row in np.flatnonzero(request >= 0):
        owner[start[row] : start[row] + size[row]] = 1 + request[row] % 6
    return owner[np.linspace(0, capacity - 1, cells).astype(int)]


def page_map(pages, cells, request, tables):
    owner = np.zeros(pages + 1, np.int64)
    for row in np.flatnonzero(request >= 0):
        owner[tables[row][tables[row] > 0]] = 1 + request[row] % 6
    return owner[1 + np.linspace(0, pages - 1, cells).astype(int)]


def run(args):
    trace = traces.of(args)
    count = args.requests or (300 if args.quick else 2000)
    trace = traces.head(trace, count)
    total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    output = np.maximum(trace.output_tokens.astype(np.int64), 1)
    if args.capacity is None:
        args.capacity = max(8192, 4 * 2 ** int(total.max() - 1).bit_length())
    if total.max() > args.capacity:
        row = int(total.argmax())
        common.fail(
            f"request {row} has {total[row]:,} tokens, more than the arena's {args.capacity:,}: "
            "raise --capacity"
        )
    rows, cells = 96, 512
    steps, waited, kinds = [], [], []
    frames, free_share, hole_share = [], [], []
    refused = 0
    worst = None
    for step, _, request, waits, (free, hole, start, size) in common.progress(
        contiguous(args.capacity, rows, args.fit, total, output), "arena"
    ):
        steps.append(step)
        waited.append(waits)
        kinds.append(request)
        free_share.append(int(free) / args.capacity)
        hole_share.append(int(hole) / args.capacity)
        frames.append(arena_map(args.capacity, cells, request, start, size))
        refused += waits > 0 and waits <= free
        if waits and waits <= free and (worst is None or free > worst["free_slots"]):
            worst = {
                "step": step,
                "event": len(steps) - 1,
                "free_percent": 100 * int(free) / args.capacity,
                "free_slots": int(free),
                "largest_hole": int(hole),
                "needed": waits,
            }
    steps, waited = np.array(steps), np.array(waited)
    passed = np.diff(steps, append=steps[-1])
    waiting = waited > 0
    weight = passed[waiting].sum() or 1
    free_share, hole_share = np.array(free_share), np.array(hole_share)
    contiguous_result = {
        "requests": len(trace),
        "refused_steps_percent": 100 * passed[waiting].sum() / max(passed.sum(), 1),
        "refused_with_enough_free": refused,
        "free_percent_mean": 100 * (free_share * passed)[waiting].sum() / weight,
        "largest_hole_percent_mean": 100 * (hole_share * passed)[waiting].sum() / weight,
        "external_fragmentation_mean": (
            ((1 - hole_share / np.maximum(free_share, 1e-9)) * passed)[waiting].sum() / weight
        ),
    }

    pages = args.capacity // args.page_size
    page_steps, page_frames, page_free = [], [], []
    page_refused = 0
    for step, _, request, waits, (free, tables) in common.progress(
        paged(args.capacity, rows, args.page_size, total, output), "pages"
    ):
        needed = -(-waits // args.page_size)
        page_refused += waits > 0 and needed <= free
        page_steps.append(step)
        page_free.append((int(free) / pages, waits > 0))
        page_frames.append(page_map(pages, cells, request, tables))
    page_steps = np.array(page_steps)
    page_passed = np.diff(page_steps, append=page_steps[-1])
    share, held_up = (np.array(x) for x in zip(*page_free, strict=True))
    weight = page_passed[held_up].sum() or 1
    paged_result = {
        "requests": len(trace),
        "refused_with_enough_free": page_refused,
        "free_percent_mean": 100 * (share * page_passed)[held_up].sum() / weight,
    }
    assert page_refused == 0

    common.report(
        common.table(
            ("while a request waits", f"arena, {args.fit} fit", "pages"),
            [
                (
                    "free, % of the memory",
                    contiguous_result["free_percent_mean"],
                    paged_result["free_percent_mean"],
                ),
                ("largest hole, %", contiguous_result["largest_hole_percent_mean"], None),
                ("refused with enough free", refused, page_refused),
            ],
            f"{len(trace):,} requests of {trace.source} through {args.capacity:,} slots",
        )
    )
    if worst is None:
        common.report("No request was refused with enough memory free: try more requests.")
    else:
        common.report(
            "",
            f"Step {worst['step']:,}: {worst['free_percent']:.0f}% of the memory "
            f"({worst['free_slots']:,} slots) is free, the largest hole has "
            f"{worst['largest_hole']:,}, and a request of {worst['needed']:,} waits.",
        )
    config = {
        "trace": trace.source,
        "capacity": args.capacity,
        "fit": args.fit,
        "page_size": args.page_size,
        "seed": args.seed,
    }
    common.write_json(
        args,
        {
            "environment": common.environment(),
            "config": config,
            "contiguous": contiguous_result,
            "worst": worst,
            "paged": paged_result,
        },
    )
    moment = worst["event"] if worst else len(frames) - 1
    at = int(np.searchsorted(page_steps, steps[moment]))
    draw(args, steps, np.array(frames), moment, free_share, hole_share, page_frames, at, worst)
    animate(args, steps, frames, free_share, waited, page_steps, page_frames, moment)


COLORS = ListedColormap(["#FFFFFF", *common.PALETTE[:6]])


def draw(args, steps, frames, moment, free_share, hole_share, page_frames, at, worst):
    common.style()
    first = max(0, moment - 160)
    last = min(len(frames), moment + 40)
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6.4), width_ratios=(1.5, 1))
    edges = np.append(steps[first:last], steps[min(last, len(steps) - 1)] + 1)
    left.pcolormesh(
        edges,
        np.linspace(0, args.capacity, frames.shape[1] + 1),
        frames[first:last].T,
        cmap=COLORS,
        vmin=-0.5,
        vmax=6.5,
        rasterized=True,
    )
    left.axvline(steps[moment], color="black", linestyle="--")
    left.set_xlabel("decoding step")
    left.set_ylabel("address (token slot)")
    left.set_title("Who holds which memory (white: free)")
    left.grid(False)
    if worst:
        right.bar(
            ("free\nin all", "largest\nhole", "request\nneeds"),
            (worst["free_slots"], worst["largest_hole"], worst["needed"]),
            color=("#0072B2", "#E69F00", "#D55E00"),
            width=0.6,
        )
        right.bar_label(right.containers[0], fmt="{:,.0f}", padding=3)
        right.set_ylabel("token slots")
        right.set_title(f"At the dashed line: {worst['free_percent']:.0f}% is free")
        right.margins(y=0.1)
    else:
        right.plot(steps, 100 * free_share, label="free")
        right.plot(steps, 100 * hole_share, label="largest hole")
        right.set_xlabel("decoding step")
        right.set_ylabel("share of the memory (%)")
        right.legend()
    common.write_figure(args, figure)


def animate(args, steps, frames, free_share, waited, page_steps, page_frames, moment):
    """The arena and the pages side by side, as a GIF that stops at the worst moment."""
    from matplotlib.animation import FuncAnimation, PillowWriter

    count = 24 if args.quick else 60
    shown = np.unique(np.linspace(max(0, moment - 4 * count), moment, count).astype(int))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), dpi=80)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    figure.text(
        0.99, 0.015, f"drawn by: {common.command()}", ha="right", fontsize=8, color="#555555"
    )
    images = []
    names = (f"arena, {args.fit} fit", f"pages of {args.page_size}")
    for axis, title in zip(axes, names, strict=True):
        blank = np.zeros((16, 32))
        images.append(axis.imshow(blank, cmap=COLORS, vmin=-0.5, vmax=6.5, aspect="auto"))
        axis.set_xticks([])
        axis.set_yticks([])
        axis.grid(False)
        axis.set_title(title)
        for spine in axis.spines.values():
            spine.set_visible(True)
    note = figure.suptitle(" ", fontsize=15)

    def frame(i):
        event = shown[min(i, len(shown) - 1)]
        at = min(int(np.searchsorted(page_steps, steps[event])), len(page_frames) - 1)
        images[0].set_data(frames[event].reshape(16, 32))
        images[1].set_data(page_frames[at].reshape(16, 32))
        wait = f"; a request of {waited[event]:,} waits" if waited[event] else ""
        note.set_text(
            f"step {steps[event]:,}: {100 * free_share[event]:.0f}% of the arena free{wait}"
        )
        return images

    animation = FuncAnimation(figure, frame, frames=len(shown) + 10)
    with common.atomic(common.path_of(args, ".gif")) as path:
        animation.save(path, writer=PillowWriter(fps=6))
    plt.close(figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
