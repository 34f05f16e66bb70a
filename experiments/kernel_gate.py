"""Static gate of the GPU kernels: compile each for A100, H200 and B200 without a GPU, read the SASS.

Every row is one program, compiled ahead of time in a process of its own (a compiler that fails ends
its process), ours and JAX's builtin paged attention side by side. It needs no GPU and no CUDA
installation, only wheels; where they are missing the script says which.

JSON keys: environment; bounds (what ours must keep, and whether it does); refusals (requests that
must be refused before the compiler sees them); index_widths (how wide the compiled page offsets are
for pools around 4 GiB and 2**31 elements); rows, each with
  kernel, arch, baseline (true: JAX's builtin), problem
  registers, spill_bytes      of the attention kernel, by ptxas
  shared_bytes                of its launch
  instructions_per_128_tokens one warp, main loop, scaled to 128 tokens
  warp_instructions_per_128_tokens   the same over all warps of the program
  async_fraction              share of K/V bytes loaded by 16-byte asynchronous copies
  tensor_core                 whether the main loop multiplies on tensor cores; mma: which opcode
  load_amplification          K/V bytes that the loop requests / bytes of the K/V tile
  issue_pressure              time to issue the loop / time to stream its bytes from memory
  temp_bytes                  temporaries of the whole call; pool_bytes: the pool's size
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import aot
import common

# Clocks that these GPUs hold under load: below the boost clock, so the pressure is not flattered.
SUSTAINED_GHZ = {"sm_80": 1.41, "sm_90": 1.755, "sm_100": 1.85}


class Program(NamedTuple):
    """One program to compile. Shapes: B sequences of S tokens, T packed queries (ragged)."""

    kernel: str
    op: str = "decode"  # "decode", "ragged" or "builtin"
    layout: str = "NPKD"
    dtype: str = "bfloat16"  # of q, and of the pages unless kv_dtype is given
    kv_dtype: str = ""
    scales: str = ""  # "", "tensor", "head" or "token"
    features: tuple[str, ...] = ()
    B: int = 32
    H: int = 32
    K: int = 8
    D: int = 128
    P: int = 16
    S: int = 4096
    T: int = 4096
    bound: bool = False  # held to the bounds of the reference problem
    pages: int = 0  # pages in the pool, when not just those of the batch


QUICK = (
    Program("jax builtin decode", "builtin", "KNPD"),
    Program("decode KNPD", layout="KNPD", bound=True),
    Program("decode NPKD", bound=True),
    Program("decode NKPD", layout="NKPD", bound=True),
    Program("decode NP2KD", layout="NP2KD", bound=True),
    Program("decode fp8 e4m3", kv_dtype="float8_e4m3fn", scales="tensor"),
    Program("decode fp8 e5m2", kv_dtype="float8_e5m2", scales="tensor"),
    Program("decode int8", kv_dtype="int8", scales="token"),
    Program("ragged NP2KD", "ragged", "NP2KD"),
    Program("ragged NPKD", "ragged"),
)
FULL = (
    *QUICK,
    Program("jax builtin decode D64", "builtin", "KNPD", D=64),
    Program("decode D64", D=64),
    Program("decode D80", D=80),
    Program("decode D96", D=96),
    Program("decode D256", D=256),
    Program("decode f16", dtype="float16"),
    Program("decode f32", dtype="float32"),
    Program("decode P8", P=8),
    Program("decode P64", P=64),
    Program("decode P256", P=256),
    Program("decode MHA", H=8),
    Program("decode MQA H64", H=64, K=1),
    Program("decode soft cap", features=("soft_cap",)),
    Program("decode window", features=("window",)),
    Program("decode alibi+sinks", features=("alibi", "sinks")),
    Program("decode traced scale", features=("traced_scale",)),
    Program("decode B1 S32k", B=1, S=32768),
    Program("decode fp8 e4m3 token", kv_dtype="float8_e4m3fn", scales="token"),
    Program("ragged KNPD", "ragged", "KNPD"),
    Program("ragged D64", "ragged", D=64),
    Program("ragged D256", "ragged", D=256),
    Program("ragged f32", "ragged", dtype="float32"),
    Program("ragged all features", "ragged", features=("soft_cap", "window", "alibi", "sinks")),
    Program("ragged fp8 e5m2", "ragged", kv_dtype="float8_e5m2", scales="head"),
    Program("ragged decodes only", "ragged", T=32),
)
# 12,288 elements a page row (K 6): a multiplier that appears nowhere else in the program.
WIDTHS = (
    Program("2 GiB bf16", H=24, K=6, pages=87382),
    Program("4 GiB bf16", H=24, K=6, pages=174762),
    Program("above 4 GiB bf16", H=24, K=6, pages=174764),
    Program("2**31 int8", H=24, K=6, kv_dtype="int8", scales="tensor", pages=174762),
    Program("above 2**31 int8", H=24, K=6, kv_dtype="int8", scales="tensor", pages=174764),
    Program("above 2**32 int8", H=24, K=6, kv_dtype="int8", scales="tensor", pages=349526),
)


def num_pages(p: Program) -> int:
    """Pages in the pool: those of B full sequences, if not given."""
    return p.pages or p.B * p.S // p.P


def pool_bytes(p: Program) -> int:
    """Bytes of keys and values in the pool."""
    import jax.numpy as jnp

    size = jnp.dtype(p.kv_dtype or p.dtype).itemsize
    return 2 * num_pages(p) * p.P * p.K * p.D * size


def build(p: Program, arch: str) -> tuple[Any, list[Any]]:
    """The function to compile and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    shape = jax.ShapeDtypeStruct
    N, M = num_pages(p), p.S // p.P
    pool = {
        "KNPD": (p.K, N, p.P, p.D),
        "NPKD": (N, p.P, p.K, p.D),
        "NKPD": (N, p.K, p.P, p.D),
        "NP2KD": (N, p.P, 2 * p.K, p.D),
    }[p.layout]
    pages = shape(pool, jnp.dtype(p.kv_dtype or p.dtype))
    values = None if p.layout == "NP2KD" else pages
    lengths = shape((p.B,), jnp.int32)
    tables = shape((p.B, M), jnp.int32)
    if p.op == "builtin":
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        q = shape((p.B, p.H, p.D), jnp.dtype(p.dtype))
        return lambda *a: paged_attention(*a), [q, pages, values, tables, lengths]

    from pallas_kernels import gpu_decode, gpu_ragged
    from pallas_kernels.options import AttentionOptions

    per_token = {"KNPD": pool[:3], "NKPD": pool[:3]}.get(p.layout, (N, p.P, p.K))
    scale = {"": None, "tensor": (), "head": (p.K,), "token": per_token}[p.scales]
    data = {
        "k_scale": None if scale is None else shape(scale, jnp.float32),
        "v_scale": None if scale is None else shape(scale, jnp.float32),
        "sinks": shape((p.H,), jnp.float32) if "sinks" in p.features else None,
        "alibi_slopes": shape((p.H,), jnp.float32) if "alibi" in p.features else None,
        "traced": shape((), jnp.float32) if "traced_scale" in p.features else None,
    }

    def options(data: dict[str, Any]) -> AttentionOptions:
        traced = data.pop("traced")
        return AttentionOptions(
            sm_scale=p.D**-0.5 if traced is None else traced,
            soft_cap=30.0 if "soft_cap" in p.features else None,
            sliding_window=1024 if "window" in p.features else None,
            kv_layout=p.layout,
            **data,
        )

    gpu = aot.GPUS[arch]
    capability = float("{}.{}".format(*gpu.capability))
    if p.op == "decode":
        q = shape((p.B, p.H, p.D), jnp.dtype(p.dtype))
        run = functools.partial(gpu_decode.decode, num_sms=gpu.sms, compute_capability=capability)
        return lambda q, k, v, t, n, d: run(q, k, v, t, n, options(d)), [
            *(q, pages, values, tables, lengths, data)
        ]
    q = shape((p.T, p.H, p.D), jnp.dtype(p.dtype))
    ragged = functools.partial(gpu_ragged.ragged, compute_capability=capability)
    return lambda q, k, v, n, t, c, s, d: ragged(q, k, v, n, t, c, s, options(d)), [
        *(q, pages, values, lengths, tables),
        *(shape((p.B + 1,), jnp.int32), shape((1,), jnp.int32), data),
    ]


def tile_of(p: Program, kernel: str) -> tuple[int, int]:
    """(tokens a tile, warps) of a launch; ours say so in the kernel's name."""
    if p.op == "builtin":
        return 8 * p.P, 8  # the defaults of pages_per_compute_block and num_warps
    found = re.search(r"_k(\d+)_w(\d+)$", kernel)
    return int(found[1]), int(found[2])


def measure(tools: aot.Tools, p: Program, arch: str) -> dict[str, Any]:
    """Compiles one program and reads one row off it."""
    import jax.numpy as jnp

    fn, args = build(p, arch)
    compiled = aot.compile_for(arch, fn, args)
    wanted = {
        "decode": "paged_decode_split",
        "ragged": "paged_ragged",
        "builtin": "paged_attention",
    }
    name = next(n for n in compiled.ptx if n.startswith(wanted[p.op]))
    assembled = aot.assemble(tools, compiled.ptx[name], arch)
    loop = aot.main_loop(assembled.sass)
    if loop is None:
        raise ValueError(f"no loop found in the code of {name} for {arch}")
    block_k, warps = tile_of(p, name)
    tile = 2 * block_k * p.D * jnp.dtype(p.kv_dtype or p.dtype).itemsize
    threads = 32 * warps
    # Page ids and scales come in single words (the builtin's ids also in wide, synchronous loads):
    # K and V are the wide asynchronous loads where those suffice, else every wide load.
    wide = {key: n * key[1] * threads for key, n in loop.loads.items() if key[1] >= 8}
    asynchronous = sum(size for key, size in wide.items() if key[0])
    moved = asynchronous if asynchronous >= tile else sum(wide.values())
    best = wide.get((True, 16), 0)
    gpu = aot.GPUS[arch]
    issue = loop.instructions * warps / (gpu.sms * 4 * SUSTAINED_GHZ[arch] * 1e9)
    mma = {name: n for name, n in loop.opcodes.items() if name in aot.TENSOR_CORE}
    return {
        "kernel": p.kernel,
        "arch": arch,
        "baseline": p.op == "builtin",
        "problem": f"B{p.B} H{p.H} K{p.K} D{p.D} P{p.P} S{p.S}"
        + (f" T{p.T}" if p.op == "ragged" else "")
        + f" {p.dtype}"
        + (f"/{p.kv_dtype}" if p.kv_dtype else ""),
        "registers": assembled.registers,
        "spill_bytes": assembled.spill_bytes,
        "shared_bytes": compiled.shared_bytes[name] or assembled.static_shared_bytes,
        "instructions_per_128_tokens": loop.instructions * 128 / block_k,
        "warp_instructions_per_128_tokens": loop.instructions * warps * 128 / block_k,
        "async_fraction": best / moved if moved else 0.0,
        "tensor_core": bool(mma),
        "mma": mma,
        "load_amplification": moved / tile,
        "issue_pressure": issue / (tile / gpu.bandwidth),
        "temp_bytes": compiled.temp_bytes,
        "pool_bytes": pool_bytes(p),
        "tokens_per_tile": block_k,
        "warps": warps,
    }


def offset_width(p: Program, arch: str) -> dict[str, Any]:
    """How wide the compiled kernel computes page * elements_of_a_page."""
    row = p.P * p.K * p.D
    fn, args = build(p, arch)
    try:
        compiled = aot.compile_for(arch, fn, args)
    except NotImplementedError as refusal:
        return {"pool": p.kernel, "elements": num_pages(p) * row, "refused": str(refusal)}
    ptx = next(text for name, text in compiled.ptx.items() if "paged_decode_split" in name)
    # Only the page's multiplier is looked for: the row's size, times the element's where fused.
    size = pool_bytes(p) // (2 * num_pages(p) * row)
    number = rf"(?:{row}|{row * size})\b"
    wide = len(re.findall(rf"(?:mul|mad)\.(?:lo\.[su]64|wide\.[su]32)[^;]*, {number}", ptx))
    narrow = len(re.findall(rf"(?:mul|mad)\.lo\.[su]32[^;]*, {number}", ptx))
    return {
        "pool": p.kernel,
        "elements": num_pages(p) * row,
        "bytes": num_pages(p) * row * size,
        "multiplications_64_bit": wide,
        "multiplications_32_bit": narrow,
        "offset_bits": 64 if wide and not narrow else 32,
        "offsets_fit": (wide > 0 and narrow == 0) or num_pages(p) * row <= 2**31,
    }


# --- bounds -----------------------------------------------------------------------------------


def bounds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ours must keep at the reference problem, with what was found."""
    held = {p.kernel for p in FULL if p.bound}
    base = {r["arch"]: r for r in rows if r["kernel"] == "jax builtin decode"}
    checks = []

    def check(row: dict[str, Any], what: str, found: Any, limit: Any, ok: bool) -> None:
        checks.append(
            {
                "kernel": row["kernel"],
                "arch": row["arch"],
                "bound": what,
                "found": found,
                "limit": limit,
                "ok": bool(ok),
            }
        )

    for row in rows:
        if row["baseline"]:
            continue
        check(row, "no spills", row["spill_bytes"], 0, row["spill_bytes"] == 0)
        temps, pool = row["temp_bytes"], row["pool_bytes"]
        # A copy of K or V alone is half a pool.
        check(row, "no copy of the pool", temps, pool // 4, temps < pool // 4)
        if "float32" not in row["problem"]:
            check(row, "tensor cores", row["tensor_core"], True, row["tensor_core"])
        if row["kernel"].startswith("ragged NP") and row["arch"] == "sm_90":
            check(row, "wgmma", row["mma"], "HGMMA", "HGMMA" in row["mma"])
        if row["kernel"] == "decode fp8 e4m3" and row["arch"] == "sm_90":
            found = row["issue_pressure"]
            check(row, "issue pressure", found, 0.60, found <= 0.60)
        if row["kernel"] not in held:
            continue
        check(row, "registers", row["registers"], 128, row["registers"] <= 128)
        found = row["async_fraction"]
        check(row, "16-byte async loads", found, 1.0, found == 1.0)
        found = row["load_amplification"]
        check(row, "bytes loaded / minimum", found, 1.02, 0.999 <= found <= 1.02)
        if row["arch"] in base:
            for key, share in (
                ("instructions_per_128_tokens", 1.0),
                ("warp_instructions_per_128_tokens", 1.0),
                ("temp_bytes", 0.25),
            ):
                limit = base[row["arch"]][key] * share
                check(row, f"{key} <= {share:g} x builtin", row[key], limit, row[key] <= limit)
    return checks


# --- processes --------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    """The gate's own options."""
    parser.add_argument(
        "--plugin-path",
        type=Path,
        metavar="DIR",
        help="folder of the wheels installed with pip --target, if they are not in this Python",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=list(aot.GPUS),
        help="GPUs to compile for (default: all; with --quick sm_90)",
    )
    parser.add_argument("--only", metavar="TEXT", help="only kernels whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time (default: 2)")
    parser.add_argument("--child", metavar="JSON", help=argparse.SUPPRESS)


def child(args: argparse.Namespace) -> None:
    """One compilation, in this process; prints its row as one line of JSON."""
    tools = aot.find_tools(args.plugin_path)
    aot.prepare_process(tools)
    order = json.loads(args.child)
    order["program"]["features"] = tuple(order["program"]["features"])
    p, arch = Program(**order["program"]), order["arch"]
    if order["task"] == "width":
        row = offset_width(p, arch)
    elif order["task"] == "refusal":
        try:
            fn, shapes = build(p, arch)
            aot.compile_for(arch, fn, shapes)
            row = {"refused": None}
        except NotImplementedError as refusal:
            row = {"refused": str(refusal)}
    else:
        row = measure(tools, p, arch)
    print("ROW " + json.dumps(row), flush=True)


def spawn(args: argparse.Namespace, task: str, p: Program, arch: str) -> dict[str, Any]:
    """Runs `child` in a process of its own; a dead compiler becomes an error in the row."""
    order = json.dumps({"task": task, "program": p._asdict(), "arch": arch})
    command = [sys.executable, __file__, "--child", order, "--out", str(args.out)]
    if args.plugin_path:
        command += ["--plugin-path", str(args.plugin_path)]
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    for line in done.stdout.splitlines():
        if line.startswith("ROW "):
            return json.loads(line[4:])
    said = [line for line in done.stderr.splitlines() if "rror" in line] or ["no message"]
    return {"kernel": p.kernel, "arch": arch, "error": f"exit {done.returncode}: {said[-1][:200]}"}


def draw(rows: list[dict[str, Any]]) -> Any:
    """Ours as a share of JAX's builtin, and how far from issue-bound each variant is."""
    common.style()
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(15, 7), gridspec_kw={"width_ratios": (1, 1.1)}
    )
    base = {r["arch"]: r for r in rows if r["kernel"] == "jax builtin decode"}
    ours = [r for r in rows if r["kernel"] == "decode NPKD" and r["arch"] in base]
    keys = {
        "registers": "registers",
        "shared_bytes": "shared\nmemory",
        "instructions_per_128_tokens": "instructions",
        "temp_bytes": "temporaries",
    }
    for i, row in enumerate(ours):
        shares = [row[key] / base[row["arch"]][key] for key in keys]
        places = [j + (i - (len(ours) - 1) / 2) * 0.27 for j in range(len(keys))]
        bars = left.bar(places, shares, 0.25, label=aot.GPUS[row["arch"]].name)
        left.bar_label(bars, [f"{s:.2f}" for s in shares], fontsize=11, padding=3)
    left.axhline(1, color="black", linewidth=1.5, linestyle="--")
    left.set_xticks(range(len(keys)), keys.values())
    left.set_ylabel("ours / JAX's builtin")
    left.set_title("bf16 decode, B32 H32 K8 D128 P16 S4096")
    left.set_ylim(0, 1.4)
    left.legend(loc="upper right", fontsize=12)
    left.grid(axis="x", visible=False)

    decodes = [r for r in rows if not r["kernel"].startswith("ragged") and r["tensor_core"]]
    names = list(dict.fromkeys(r["kernel"] for r in decodes))
    for i, arch in enumerate(dict.fromkeys(r["arch"] for r in decodes)):
        of = {r["kernel"]: r["issue_pressure"] for r in decodes if r["arch"] == arch}
        right.scatter(
            [100 * of[n] for n in names if n in of],
            [names.index(n) for n in names if n in of],
            s=90,
            color=common.PALETTE[i],
            label=aot.GPUS[arch].name,
            marker="os^"[i],
        )
    right.axvline(100, color="black", linewidth=1.5, linestyle="--")
    right.set_yticks(range(len(names)), names, fontsize=12)
    right.invert_yaxis()
    right.set_xlim(0, 115)
    right.set_xlabel("time to issue / time to stream, %")
    right.set_title("below 100 %: bound by memory")
    right.legend(fontsize=12, loc="upper right")
    return figure


def run(args: argparse.Namespace) -> None:
    """Compiles all, writes the table, the JSON and the figure, and checks the bounds."""
    if args.child:
        child(args)
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    path = list(sys.path)
    try:
        aot.find_tools(args.plugin_path)
    except aot.MissingTools as missing:
        common.fail(str(missing))
    sys.path[:] = path  # the compiler is for the processes that compile
    archs = args.arch or (["sm_90"] if args.quick else list(aot.GPUS))
    programs = [p for p in (QUICK if args.quick else FULL) if (args.only or "") in p.kernel]
    if not programs:
        common.fail(f"no kernel's name contains {args.only!r}; see the table of a full run")
    refused = Program("decode fp8 e4m3 on sm_80", kv_dtype="float8_e4m3fn", scales="tensor")
    orders = [
        ("row", p, arch)
        for p in programs
        for arch in archs
        if not (arch == "sm_80" and "e4m3" in p.kv_dtype)
    ]
    if args.only is None and not args.quick:
        orders += [("width", p, "sm_90") for p in WIDTHS] + [("refusal", refused, "sm_80")]
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        results = list(
            common.progress(
                pool.map(lambda order: spawn(args, *order), orders), "compile", len(orders)
            )
        )
    by_task: dict[str, list[Any]] = {"row": [], "width": [], "refusal": []}
    for (task, p, arch), result in zip(orders, results, strict=True):
        if task == "refusal" and "error" not in result:
            result = {"request": p.kernel, "arch": arch, **result}
        by_task[task].append(result)
    rows = [r for r in by_task["row"] if "error" not in r]
    checks = bounds(rows)
    common.write_json(
        args,
        {
            "environment": common.environment(),
            "seed": args.seed,
            "quick": args.quick,
            "bounds": checks,
            "refusals": by_task["refusal"],
            "index_widths": by_task["width"],
            "errors": [r for group in by_task.values() for r in group if "error" in r],
            "rows": rows,
        },
    )
    report(rows, by_task)
    if {"jax builtin decode", "decode NPKD"} <= {r["kernel"] for r in rows}:
        common.write_figure(args, draw(rows))
    verdict(checks, by_task)


def report(rows: list[dict[str, Any]], by_task: dict[str, list[Any]]) -> None:
    """Prints the table."""
    heads = ("kernel", "arch", "regs", "spill B", "smem KiB", "instr/128", "x warps", "async")
    heads += ("MMA", "amplif.", "issue %", "temp MiB")
    common.report(
        common.table(
            heads,
            [
                [
                    r["kernel"],
                    r["arch"],
                    r["registers"],
                    r["spill_bytes"],
                    round(r["shared_bytes"] / 1024),
                    round(r["instructions_per_128_tokens"]),
                    round(r["warp_instructions_per_128_tokens"]),
                    f"{r['async_fraction']:.2f}",
                    ",".join(r["mma"]) or "-",
                    f"{r['load_amplification']:.2f}",
                    round(100 * r["issue_pressure"]),
                    f"{r['temp_bytes'] / 2**20:.2f}",
                ]
                for r in rows
            ],
            "Compiled ahead of time; nothing ran",
        )
    )
    for w in (w for w in by_task["width"] if "error" not in w):
        bits = "refused" if "refused" in w else f"{w['offset_bits']}-bit page offsets"
        common.report(f"pool {w['pool']}: {w['elements']:,} elements: {bits}")
    for r in (r for r in by_task["refusal"] if "error" not in r):
        common.report(f"{r['request']}: {'refused' if r['refused'] else 'NOT refused'}")


def verdict(checks: list[dict[str, Any]], by_task: dict[str, list[Any]]) -> None:
    """Ends the script with an error where a bound is missed or a program does not compile."""
    missed = [c for c in checks if not c["ok"]]
    errors = [r for group in by_task.values() for r in group if "error" in r]
    unsafe = [w for w in by_task["width"] if "offsets_fit" in w and not w["offsets_fit"]]
    accepted = [r for r in by_task["refusal"] if "error" not in r and not r["refused"]]
    common.report(f"{len(checks) - len(missed)} of {len(checks)} bounds kept")
    if errors:
        first = errors[0]
        common.fail(f"{len(errors)} did not compile, first {first['kernel']}: {first['error']}")
    if unsafe:
        common.fail(f"32-bit page offsets wrap for the pool {unsafe[0]['pool']}")
    if accepted:
        common.fail(f"{accepted[0]['request']} should have been refused")
    if missed:
        c = missed[0]
        common.fail(
            f"{len(missed)} bounds missed, first: {c['kernel']} on {c['arch']}: {c['bound']}: "
            f"{c['found']}, limit {c['limit']}"
        )


if __name__ == "__main__":
    common.main(__doc__, run, options)
