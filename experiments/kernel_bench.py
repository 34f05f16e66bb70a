"""How fast the GPU kernels stream the cache: GB/s of keys and values, as a share of copy bandwidth.

On a GPU, in this order: correctness of every variant against float32 (nothing is timed before); the
bandwidth of a plain copy; decode over B {1,8,32,128} x S {1k,4k,32k} x D {64,128} x P {16,64} with
shuffled block tables and a pool larger than the L2 cache, repeated inside one compiled program; and
beside it JAX's builtin paged attention with its k_splits swept, cuDNN's paged attention where
installed, and attention over contiguous keys and values as the bound. It stops starting new cases
when --budget seconds are over (default 420), so that all ends within 8 minutes.

On a CPU it runs tiny sizes through JAX's interpreter: that shows that all works, and the seconds it
prints are NOT timings of anything.

JSON keys: environment; timings (false on a CPU); correctness, each {variant, error, tolerance, ok};
copy_bytes_per_second; rows, each {B, S, D, P, implementation, setting, seconds, kv_bytes,
bytes_per_second, of_copy, error}; skipped (cases not run, with the reason).
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import numpy as np

KV_HEADS, GROUPS = 8, 4
POOL_BYTES = 512 << 20  # larger than every L2 cache so far
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}


def options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    parser.add_argument("--budget", type=float, default=420, help="seconds (default: 420)")
    parser.add_argument(
        "--repeats", type=int, default=20, help="calls in one program (default: 20)"
    )


def batch(case: dict[str, int], seed: int, dtype: str, gpu: bool) -> dict[str, Any]:
    """Random queries and pages, a shuffled table over a pool that does not fit into L2."""
    import jax
    import jax.numpy as jnp

    B, S, D, P = (case[key] for key in "BSDP")
    pages = B * S // P
    page_bytes = 2 * P * KV_HEADS * D * jnp.dtype(dtype).itemsize
    num_pages = max(pages, POOL_BYTES // page_bytes if gpu else 0) + 1
    rng = np.random.default_rng(seed)
    table = (rng.permutation(num_pages - 1)[:pages] + 1).astype(np.int32).reshape(B, -1)
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (num_pages, P, KV_HEADS, D)
    return {
        "q": jax.random.normal(keys[0], (B, KV_HEADS * GROUPS, D), jnp.dtype(dtype)),
        "k": jax.random.normal(keys[1], shape, jnp.dtype(dtype)),
        "v": jax.random.normal(keys[2], shape, jnp.dtype(dtype)),
        "table": jnp.asarray(table),
        "lengths": jnp.full((B,), S, jnp.int32),
    }


def exact(x: dict[str, Any]) -> Any:
    """Attention in float32 by plain XLA, [B, H, D]; one sequence at a time."""
    import jax

    from pallas_kernels import paged_attention

    def one(row: Any) -> Any:
        q, table, length = row
        return paged_attention(
            *(q[None].astype(np.float32), x["k"], x["v"], table[None], length[None]),
            kv_layout="NPKD",
            sm_scale=q.shape[-1] ** -0.5,
            implementation="xla",
        )[0]

    return jax.jit(lambda *rows: jax.lax.map(one, rows))(x["q"], x["table"], x["lengths"])


def candidates(x: dict[str, Any], gpu: bool) -> Iterator[tuple[str, str, Callable[..., Any], Any]]:
    """(name, setting, function of (q, *arrays), arrays) of all that can run here."""
    import jax.numpy as jnp

    from pallas_kernels import paged_attention

    D = x["q"].shape[-1]
    scale = D**-0.5
    own = functools.partial(
        paged_attention,
        kv_layout="NPKD",
        sm_scale=scale,
        implementation="pallas" if gpu else "interpret",
    )
    paged = (x["k"], x["v"], x["table"], x["lengths"])
    yield "pallas_kernels", "default", own, paged
    if not gpu:
        return
    head_first = jnp.transpose(x["k"], (2, 0, 1, 3)), jnp.transpose(x["v"], (2, 0, 1, 3))
    from jax.experimental.pallas.ops.gpu import paged_attention as builtin

    width = x["table"].shape[1]
    for splits in (1, 4, 16, 32):
        if width % (8 * splits) == 0:
            run = functools.partial(builtin.paged_attention, k_splits=splits)
            yield (
                "jax builtin",
                f"k_splits={splits}",
                lambda q, *rest, run=run: run(q * jnp.asarray(scale, q.dtype), *rest),
                (*head_first, x["table"], x["lengths"]),
            )
    try:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType
        from jax._src.cudnn.fused_attention_stablehlo import paged_attention as cudnn
    except ImportError:
        pass
    else:
        B, width = x["table"].shape
        pages = B * width  # it wants a pool of exactly the batch's pages
        dense = x["table"].reshape(-1)
        fresh = jnp.arange(pages, dtype=jnp.int32)[::-1].reshape(B, 1, width, 1)
        pool = [x[name][dense][::-1] for name in "kv"]
        ones = jnp.ones((B,), jnp.int32)
        yield (
            "cuDNN paged",
            "",
            lambda q, k, v, n, t: cudnn(
                q[:, None], k, v, ones, n, t, t, scale=scale, mask_type=MaskType.PADDING
            )[:, 0],
            (*pool, x["lengths"], fresh),
        )
    contiguous = [
        x[name][x["table"]].reshape(x["table"].shape[0], -1, KV_HEADS, D) for name in "kv"
    ]
    import jax

    yield (
        "contiguous SDPA",
        "cudnn",
        lambda q, k, v: jax.nn.dot_product_attention(
            q[:, None], k, v, scale=scale, implementation="cudnn"
        )[:, 0],
        tuple(contiguous),
    )


def seconds_per_call(fn: Callable[..., Any], q: Any, arrays: Any, repeats: int) -> float:
    """Time of one call inside a compiled loop in which each call depends on the last."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def loop(q: Any, *given: Any) -> Any:
        step = jnp.asarray(1e-6, q.dtype)
        return jax.lax.fori_loop(0, repeats, lambda _, q: q + step * fn(q, *given), q)

    jax.block_until_ready(loop(q, *arrays))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(loop(q, *arrays))
        best = min(best, time.perf_counter() - start)
    return best / repeats


def copy_bandwidth(repeats: int, size: int) -> float:
    """Bytes per second of reading and writing a large array."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros((size // 4,), jnp.float32)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda _, x: x + 1.0, x))
    jax.block_until_ready(loop(x))
    start = time.perf_counter()
    jax.block_until_ready(loop(x))
    return 2 * size * repeats / (time.perf_counter() - start)


def relative(found: Any, want: Any) -> float:
    """Relative Frobenius error."""
    found, want = (np.asarray(x, np.float64) for x in (found, want))
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


def correctness(gpu: bool, seed: int) -> list[dict[str, Any]]:
    """Every variant against float32, before anything is timed."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import paged_attention, ragged_paged_attention

    implementation = "pallas" if gpu else "interpret"
    found = []

    def add(variant: str, out: Any, want: Any, tolerance: float) -> None:
        error = relative(out, want)
        found.append(
            {"variant": variant, "error": error, "tolerance": tolerance, "ok": error <= tolerance}
        )

    case = {"B": 3, "S": 512 if gpu else 64, "D": 128 if gpu else 64, "P": 16}
    everything = {
        "sinks": jnp.linspace(-1.0, 1.0, KV_HEADS * GROUPS),
        "alibi_slopes": jnp.linspace(0.01, 0.2, KV_HEADS * GROUPS),
        "sliding_window": 100 if gpu else 30,
    }
    for dtype in TOLERANCE if gpu else ("bfloat16",):
        x = batch(case, seed, dtype, gpu)
        lengths = jnp.asarray([case["S"], 1, case["S"] // 2 + 3], jnp.int32)
        for name, extra in (("plain", {}), ("all features", {**everything, "soft_cap": 20.0})):
            cap = extra.pop("soft_cap", None)
            shared = dict(kv_layout="NPKD", sm_scale=case["D"] ** -0.5, **extra)
            args = (x["k"], x["v"], x["table"], lengths)
            decode = functools.partial(paged_attention, attn_logits_soft_cap=cap, **shared)
            wide = x["q"].astype(jnp.float32)
            want = jax.jit(functools.partial(decode, implementation="xla"))(wide, *args)
            out = jax.jit(functools.partial(decode, implementation=implementation))(x["q"], *args)
            add(f"decode {dtype} {name}", out, want, TOLERANCE[dtype])
            rows = (case["S"] // 2, 1, 7)
            cu = jnp.asarray(np.cumsum([0, *rows]), jnp.int32)
            q = jax.random.normal(
                jax.random.key(seed), (sum(rows), *x["q"].shape[1:]), x["q"].dtype
            )
            lengths_ragged = jnp.asarray([case["S"], 1, 40], jnp.int32)
            ragged = functools.partial(ragged_paged_attention, soft_cap=cap, **shared)
            args = ((x["k"], x["v"]), lengths_ragged, x["table"], cu, jnp.array([3], jnp.int32))
            want = jax.jit(functools.partial(ragged, implementation="xla"))(
                q.astype(jnp.float32), *args
            )
            out = jax.jit(functools.partial(ragged, implementation=implementation))(q, *args)
            add(f"ragged {dtype} {name}", out, want, TOLERANCE[dtype])
    stored = ["int8"]
    if gpu:
        capability = float(getattr(jax.devices()[0], "compute_capability", "0"))
        stored += ["float8_e5m2"] + (["float8_e4m3fn"] if capability >= 8.9 else [])
    for dtype in stored:
        x = batch(case, seed, "bfloat16", gpu)
        pages = [
            jnp.round(x[n].astype(jnp.float32) * 30).astype(jnp.int8)
            if dtype == "int8"
            else x[n].astype(jnp.dtype(dtype))
            for n in "kv"
        ]
        scale = jnp.full((), 1 / 30 if dtype == "int8" else 1.0, jnp.float32)
        run = functools.partial(paged_attention, kv_layout="NPKD", sm_scale=case["D"] ** -0.5)
        args = (*pages, x["table"], x["lengths"], scale, scale)
        wide = x["q"].astype(jnp.float32)
        want = jax.jit(functools.partial(run, implementation="xla"))(wide, *args)
        out = jax.jit(functools.partial(run, implementation=implementation))(x["q"], *args)
        add(f"decode {dtype}", out, want, TOLERANCE["bfloat16"])
    return found


def cases(gpu: bool, quick: bool) -> list[dict[str, int]]:
    """The grid, the reference problem first."""
    if not gpu:
        return [{"B": 2, "S": 64, "D": 64, "P": 16}]
    grid = [
        {"B": B, "S": S, "D": D, "P": P}
        for D in (128, 64)
        for P in (16, 64)
        for S in (4096, 1024, 32768)
        for B in (32, 8, 1, 128)
    ]
    return grid[:3] if quick else grid


def run(args: argparse.Namespace) -> None:
    """Checks, measures, writes JSON and figure."""
    import jax

    started = time.perf_counter()
    gpu = jax.default_backend() == "gpu"
    if not gpu:
        common.report(
            f"No GPU here (JAX sees {jax.default_backend()}): tiny sizes in JAX's interpreter. "
            "These are not timings."
        )
    checks = correctness(gpu, args.seed)
    common.report(
        common.table(
            ("variant", "relative error", "tolerance", "ok"),
            [[c["variant"], f"{c['error']:.1e}", f"{c['tolerance']:.0e}", c["ok"]] for c in checks],
        ),
        "",
    )
    wrong = [c for c in checks if not c["ok"]]
    copy = copy_bandwidth(20 if gpu else 1, (2 << 30) if gpu else (64 << 20))
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for case in common.progress([] if wrong else cases(gpu, args.quick), "case"):
        if time.perf_counter() - started > args.budget:
            skipped.append({**case, "reason": f"the {args.budget:g} s of --budget were over"})
            continue
        rows += bench(case, args, gpu, copy, skipped)
    common.write_json(
        args,
        {
            "environment": common.environment(),
            "seed": args.seed,
            "timings": gpu,
            "correctness": checks,
            "copy_bytes_per_second": copy,
            "rows": rows,
            "skipped": skipped,
        },
    )
    title = "" if gpu else "interpreted, NOT timings"
    heads = ("implementation", "setting", "B", "S", "D", "P", "us", "GB/s", "% of copy", "error")
    common.report(
        common.table(
            heads,
            [
                [
                    *(r["implementation"], r["setting"], r["B"], r["S"], r["D"], r["P"]),
                    1e6 * r["seconds"] if gpu else None,
                    r["bytes_per_second"] / 1e9 if gpu else None,
                    100 * r["of_copy"] if gpu else None,
                    f"{r['error']:.1e}",
                ]
                for r in rows
            ],
            title,
        )
    )
    if wrong:
        common.fail(f"{len(wrong)} variants are wrong, first {wrong[0]['variant']}: {wrong[0]}")
    if rows:
        common.write_figure(args, draw(rows) if gpu else draw_errors(checks))
    bad = [r for r in rows if r["implementation"] == "pallas_kernels" and not r["error"] < 1e-2]
    if bad:
        common.fail(f"{len(bad)} results are wrong, first {bad[0]}")


def bench(
    case: dict[str, int], args: argparse.Namespace, gpu: bool, copy: float, skipped: list[Any]
) -> list[dict[str, Any]]:
    """All implementations on one case."""
    import jax

    size = 2 * case["B"] * case["S"] * KV_HEADS * case["D"] * 2
    room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) if gpu else 0
    if gpu and 5 * size > room:
        reason = f"the pool and its peers' copies need {5 * size / 2**30:.0f} GiB"
        skipped.append({**case, "reason": reason})
        return []
    x = batch(case, args.seed, "bfloat16", gpu)
    want = exact(x)
    rows = []
    for name, setting, fn, arrays in candidates(x, gpu):
        try:
            error = relative(jax.jit(fn)(x["q"], *arrays), want)
            seconds = seconds_per_call(fn, x["q"], arrays, args.repeats if gpu else 1)
        except Exception as problem:  # a peer that cannot do a case must not end the run
            if name == "pallas_kernels":
                raise
            skipped.append({**case, "implementation": name, "reason": str(problem)[:200]})
            continue
        rows.append(
            {
                **case,
                "implementation": name,
                "setting": setting,
                "seconds": seconds,
                "kv_bytes": size,
                "bytes_per_second": size / seconds if gpu else None,
                "of_copy": size / seconds / copy if gpu else None,
                "error": error,
            }
        )
    return rows


def draw(rows: list[dict[str, Any]]) -> Any:
    """Share of copy bandwidth by case; of settings the best."""
    common.style()
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(14, 6.5))
    labels = list(dict.fromkeys(_label(r) for r in rows))
    names = list(dict.fromkeys(r["implementation"] for r in rows))
    for i, name in enumerate(names):
        best: dict[str, float] = {}
        for r in rows:
            if r["implementation"] == name:
                best[_label(r)] = max(best.get(_label(r), 0.0), 100 * r["of_copy"])
        width = 0.8 / len(names)
        axis.bar(
            [labels.index(label) + (i - (len(names) - 1) / 2) * width for label in best],
            list(best.values()),
            width,
            label=name,
        )
    axis.set_xticks(range(len(labels)), labels, fontsize=11, rotation=90 if len(labels) > 8 else 0)
    axis.set_ylabel("KV bytes/s, % of copy")
    axis.set_title("Decode: how fast the cache is read")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axis.grid(axis="x", visible=False)
    return figure


def _label(row: dict[str, Any]) -> str:
    return f"B{row['B']} S{row['S']}\nD{row['D']} P{row['P']}"


def draw_errors(checks: list[dict[str, Any]]) -> Any:
    """What a CPU can show: the error of every variant beside its tolerance."""
    common.style()
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(11, 1.5 + 0.7 * len(checks)))
    names = [c["variant"] for c in checks]
    axis.barh(names, [c["error"] for c in checks], color=common.PALETTE[0], label="error")
    axis.plot(
        [c["tolerance"] for c in checks],
        names,
        "|",
        markersize=26,
        color="black",
        label="tolerance",
    )
    axis.set_xscale("log")
    axis.set_xlim(1e-5, 3e-2)
    axis.set_xlabel("relative error against float32")
    axis.set_title("GPU kernels, interpreted on a CPU (no timings)")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


if __name__ == "__main__":
    common.main(__doc__, run, options)
