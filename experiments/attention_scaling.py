"""Does paging change the complexity of attention? FLOPs, bytes and time over sequence lengths.

The often quoted claim is that PagedAttention leaves attention's O(n^2) as it is. For lengths from 256
to 16k this counts floating-point operations and bytes in the COMPILED programs (XLA's cost analysis)
and measures their time, for keys and values that lie in one piece and for the same numbers behind a
shuffled block table: for prefill (n queries, causal) and for decode (one query over n tokens).
Both are one computation on one compiler, so the difference is the translation of addresses and
nothing else; the paged one gathers its pages first, which a kernel need not.

JSON keys: environment; geometry; rows, each with phase ("prefill" or "decode"), cache ("contiguous",
"paged", or "library": pallas_kernels, which is timed only), length, flops, bytes, seconds (the
shortest run: other load on a machine only adds; compile time excluded), compile_seconds, temp_bytes, table_bytes (what the block table adds); slopes, the exponent of each
quantity over the longest lengths (2 = quadratic), by phase and cache; table_share_of_kv (bytes of
table per byte of keys and values).
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from typing import Any

import common
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 64, 16
BLOCK = 128  # queries at a time, where a program is timed
ENOUGH_SECONDS = 8.0


def contiguous(q: Any, k: Any, v: Any, *, block: int) -> Any:
    """Causal attention of the last len(q) of len(k) tokens, by blocks of queries; [n, H, D]."""
    import jax
    import jax.numpy as jnp

    n, (total, kv_heads, dim) = q.shape[0], k.shape
    grouped = q.reshape(n // block, block, kv_heads, -1, dim)

    def one(start: Any, rows: Any) -> Any:
        s = jnp.einsum("qkgd,skd->kgqs", rows, k) * dim**-0.5
        seen = jnp.arange(total)[None, :] <= (total - n + start + jnp.arange(block))[:, None]
        p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
        return jnp.einsum("kgqs,skd->qkgd", p, v)

    starts = jnp.arange(n // block, dtype=jnp.int32) * block
    return jax.lax.map(lambda x: one(*x), (starts, grouped)).reshape(q.shape)


def paged(q: Any, k_pages: Any, v_pages: Any, table: Any, *, block: int) -> Any:
    """The same over [N, P, K, D] pages: gather the sequence's pages, then the very same program."""
    k, v = (x[table].reshape(-1, *x.shape[2:]) for x in (k_pages, v_pages))
    return contiguous(q, k, v, block=block)


def library(q: Any, k_pages: Any, v_pages: Any, table: Any) -> Any:
    """What users call: `pallas_kernels`, which on a CPU works page by page without gathering all."""
    import jax.numpy as jnp

    from pallas_kernels import paged_attention, ragged_paged_attention

    n, total = q.shape[0], jnp.full((1,), table.shape[0] * PAGE, jnp.int32)
    shared = dict(kv_layout="NPKD", sm_scale=HEAD_DIM**-0.5, implementation="xla")
    if n == 1:
        return paged_attention(q, k_pages, v_pages, table[None], total, **shared)
    cu = jnp.array([0, n], jnp.int32)
    one = jnp.ones((1,), jnp.int32)
    return ragged_paged_attention(q, (k_pages, v_pages), total, table[None], cu, one, **shared)


def arrays(length: int, queries: int, seed: int) -> dict[str, tuple[Any, ...]]:
    """Equal keys and values in one piece and in shuffled pages of a pool twice as large."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((queries, HEADS, HEAD_DIM)).astype(np.float32)
    k, v = rng.standard_normal((2, length, KV_HEADS, HEAD_DIM)).astype(np.float32)
    pages = length // PAGE
    table = (rng.permutation(2 * pages)[:pages] + 1).astype(np.int32)
    pools = np.zeros((2, 2 * pages + 1, PAGE, KV_HEADS, HEAD_DIM), np.float32)
    pools[0, table], pools[1, table] = (x.reshape(-1, *pools.shape[2:]) for x in (k, v))
    return {"contiguous": (q, k, v), "paged": (q, *pools, table)}


def count(fn: Any, args: tuple[Any, ...]) -> dict[str, float]:
    """FLOPs and bytes of a compiled program that has no loop; it is compiled and not run."""
    import jax

    cost = jax.jit(fn).lower(*args).compile().cost_analysis()
    return {"flops": cost["flops"], "bytes": cost["bytes accessed"]}


def measure(fn: Any, args: tuple[Any, ...], repeats: int) -> tuple[dict[str, float], Any]:
    """Time of a program: short ones run many times, runs of many seconds once."""
    import jax

    args = tuple(jax.device_put(x) for x in args)
    start = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile()
    compile_seconds = time.perf_counter() - start
    seconds: list[float] = []
    while sum(seconds) < ENOUGH_SECONDS and (len(seconds) < repeats or sum(seconds) < 0.2):
        start = time.perf_counter()
        out = jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - start)
    row = {
        "seconds": min(seconds),
        "compile_seconds": compile_seconds,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }
    return row, out


def slope(lengths: list[int], values: list[float]) -> float | None:
    """Exponent b of value ~ length**b, between the two longest lengths."""
    if len(lengths) < 2 or min(values[-2:]) <= 0:
        return None
    return math.log(values[-1] / values[-2]) / math.log(lengths[-1] / lengths[-2])


def options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    parser.add_argument(
        "--longest", type=common.positive, help="longest length (default 16384, --quick 2048)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="least timed runs of each (default: 3)"
    )


def run(args: argparse.Namespace) -> None:
    """Counts, checks that all agree, writes JSON and figure."""
    longest = args.longest or (2048 if args.quick else 16384)
    if longest < 256 or longest & (longest - 1):
        common.fail(f"--longest must be a power of two of at least 256, got {longest}")
    if args.repeats < 1:
        common.fail(f"--repeats must be at least 1, got {args.repeats}")
    lengths = [256 << i for i in range((longest // 256).bit_length())]
    rows = []
    for length in common.progress(lengths, "length"):
        for phase, queries in (("prefill", length), ("decode", 1)):
            given = arrays(length, queries, args.seed)
            outs = {}
            for cache, fn in (("contiguous", contiguous), ("paged", paged), ("library", library)):
                inputs = given["contiguous" if cache == "contiguous" else "paged"]
                timed, whole = fn, None
                if cache != "library":
                    timed = functools.partial(fn, block=min(BLOCK, queries))
                    whole = functools.partial(fn, block=queries)
                row, outs[cache] = measure(timed, inputs, args.repeats)
                # The library's loop has a number of rounds that no cost analysis knows.
                none = {"flops": None, "bytes": None}
                row |= none if whole is None else count(whole, inputs)
                row["table_bytes"] = 0 if cache == "contiguous" else 4 * length // PAGE
                rows.append({"phase": phase, "cache": cache, "length": length, **row})
            for cache in ("paged", "library"):
                worst = float(np.abs(np.asarray(outs[cache] - outs["contiguous"])).max())
                if not worst < 1e-3:
                    common.fail(f"{cache} {phase} differs from contiguous by {worst} at {length}")
    slopes = {
        phase: {
            cache: {
                key: slope(lengths, [r[key] for r in rows if (r["phase"], r["cache"]) == which])
                for key in ("flops", "bytes", "seconds")
                if cache != "library" or key == "seconds"
            }
            for cache in ("contiguous", "paged", "library")
            for which in [(phase, cache)]
        }
        for phase in ("prefill", "decode")
    }
    kv_bytes = 2 * 4 * KV_HEADS * HEAD_DIM
    result = {
        "environment": common.environment(),
        "seed": args.seed,
        "geometry": {"H": HEADS, "K": KV_HEADS, "D": HEAD_DIM, "P": PAGE, "dtype": "float32"},
        "table_share_of_kv": 4 / PAGE / kv_bytes,
        "slopes": slopes,
        "rows": rows,
    }
    common.write_json(args, result)
    common.report(
        common.table(
            ("phase", "cache", "length", "GFLOP", "MB", "ms"),
            [
                [
                    *(r["phase"], r["cache"], r["length"]),
                    None if r["flops"] is None else r["flops"] / 1e9,
                    None if r["bytes"] is None else r["bytes"] / 1e6,
                    1e3 * r["seconds"],
                ]
                for r in rows
            ],
        ),
        "",
        *(
            f"{phase}: FLOPs grow with length**{got['contiguous']['flops']:.2f} contiguous, "
            f"**{got['paged']['flops']:.2f} paged"
            for phase, got in slopes.items()
            if got["paged"]["flops"] is not None
        ),
    )
    common.write_figure(args, draw(rows, slopes))


def draw(rows: list[dict[str, Any]], slopes: dict[str, Any]) -> Any:
    """Three panels: FLOPs, bytes and time over length, on logarithmic axes."""
    common.style()
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(17, 6.4))
    looks = {"contiguous": ("o-", 9), "paged": ("x--", 11), "library": ("s:", 6)}
    for axis, (key, label, unit) in zip(
        axes,
        (
            ("flops", "FLOPs, counted (G)", 1e9),
            ("bytes", "bytes accessed, counted (MB)", 1e6),
            ("seconds", "time, measured (ms)", 1e-3),
        ),
        strict=True,
    ):
        for colour, phase in zip(common.PALETTE, ("prefill", "decode"), strict=False):
            for cache, (style, size) in looks.items():
                mine = [r for r in rows if (r["phase"], r["cache"]) == (phase, cache)]
                mine = [r for r in mine if r[key] is not None]
                if not mine:
                    continue
                axis.plot(
                    [r["length"] for r in mine],
                    [r[key] / unit for r in mine],
                    style,
                    color=colour,
                    markersize=size,
                    markeredgewidth=2,
                    alpha=0.85,
                    label=f"{phase}, {cache}",
                )
            grows = slopes[phase]["paged"][key]
            if grows is not None and key != "seconds":  # a machine's noise has no exponent
                last = [r for r in rows if (r["phase"], r["cache"]) == (phase, "paged")][-1]
                axis.annotate(
                    f"$n^{{{grows:.2f}}}$",
                    (last["length"], last[key] / unit),
                    xytext=(-48, 12 if phase == "decode" else -2),
                    textcoords="offset points",
                    fontsize=15,
                    color=colour,
                )
        axis.set(xscale="log", yscale="log", xlabel="sequence length n (tokens)", title=label)
        axis.set_xscale("log", base=2)
        ticks = sorted({r["length"] for r in rows})[:: 2 if len(rows) > 30 else 1]
        axis.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
    axes[2].legend(fontsize=11, loc="upper left")
    figure.suptitle("Paging leaves attention's complexity unchanged: prefill n², decode n")
    return figure


if __name__ == "__main__":
    common.main(__doc__, run, options)
