"""Aligned or not: what a page's address costs, in bytes moved and in time.

Memory moves in fixed pieces: a GPU in sectors of 32 bytes and lines of 128, a CPU in lines of 64. A
row that starts inside a piece ends inside another one, so one piece more is moved for the same data.
It is often advised to align each block to 64 or 128 bytes. Here:

  counted   The kernel reads one head of a page row by row, 32 lanes a load, each lane the widest
            power of two (16 bytes at most) that the address allows. The sectors and lines that its
            loads touch are counted exactly, for pages at each offset from a 128-byte boundary.
  measured  On this machine's CPU: random pages gathered by NumPy and read by a loop that XLA
            compiled. Only the offset differs: same bytes, same distance between pages.
  compiled  Where the compiler of kernel_gate.py is installed: this project's decode kernel, compiled
            for an H200, with rows that are and are not a multiple of 16 bytes.
  refused   Pages that paxattn.PageGeometry refuses, and what reading them would move.

What only a GPU can show: the time. Sectors are counted as each load asks for them; the L1 cache may
serve the second request for a piece that two loads share, and the L2 cache the one for a line that
two heads share. So "requested" is the most that can be moved, "distinct" (each piece once for a
head) what moves if L1 never forgets, and a page's lines once for all heads what moves if L2 does
not either.

JSON keys:
  counted    list of {rows, row_bytes, row_stride, offset, load_bytes (a lane's), loads, useful_bytes,
             requested_sector_bytes, distinct_sector_bytes, requested_line_bytes,
             distinct_line_bytes}: for one head of one page of 16 tokens; page_bytes and
             page_line_bytes: all its heads, each line once
  header     the same, averaged over pages that a 16-byte header precedes, as an allocator that
             keeps its own notes there would place them
  measured   list of {reader ("numpy" or "xla"), row_bytes, offset, ns_per_row, against_aligned}
  compiled   {reason (why nothing was compiled, or null), rows: list of {head_dim, row_bytes,
             async_fraction (of the bytes, loaded by 16-byte asynchronous copies),
             instructions_per_128_tokens, registers}}
  refused    list of {model, dtype, page_size, page_bytes, reason, next_good_page_size,
             extra_lines_percent}
  known_models_refused, known_models_checked    how many of the known models' pages (page sizes 1
             to 256, 16 and 8 bits) the geometry refuses
  config     page_size, offsets, repeats, seed
"""

import sys
import time
from pathlib import Path

import common
import numpy as np

from paxattn.geometry import KNOWN_MODELS, PageGeometry

SECTOR, LINE, LANES = 32, 128, 32
PAGE_SIZE = 16
OFFSETS = (0, 8, 16, 32, 48, 64, 80, 96, 112)
CPU_OFFSETS = (0, 16, 32, 48, 64)
CPU_ROWS = (64, 128, 256, 4096)
# name, KV heads, head dim, bytes of a number, whether a page keeps each head's rows together
PATTERNS = (
    ("D 64, 16 bits, NPKD", 8, 64, 2, False),
    ("D 128, 16 bits, NPKD", 8, 128, 2, False),
    ("D 128, 8 bits, NPKD", 8, 128, 1, False),
    ("D 128, 16 bits, NKPD", 8, 128, 2, True),
)


# --- counted ----------------------------------------------------------------------------------


def touched(addresses, size, piece):
    """Pieces of `piece` bytes that reads of `size` bytes at `addresses` touch, each once."""
    first, last = addresses // piece, (addresses + size - 1) // piece
    return len(np.unique(np.concatenate([first, last])))


def count(start, rows, row_bytes, row_stride):
    """What one head of a page at byte address `start` moves.

    A warp's load covers 32 consecutive words of the rows laid end to end, as the kernel's tile
    [tokens, head dim] does.

    Args:
      start: byte address of the first row.
      rows: tokens in the page.
      row_bytes: one head of one token.
      row_stride: bytes from a row to the next.
    """
    word = int(
        np.gcd.reduce([16, start, row_bytes, row_stride] if rows > 1 else [16, start, row_bytes])
    )
    at = np.arange(0, rows * row_bytes, word)
    addresses = start + at // row_bytes * row_stride + at % row_bytes  # [words]
    loads = [addresses[i : i + LANES] for i in range(0, len(addresses), LANES)]
    counts = {"load_bytes": word, "loads": len(loads), "useful_bytes": rows * row_bytes}
    for name, piece in (("sector", SECTOR), ("line", LINE)):
        requested = sum(touched(load, word, piece) for load in loads)
        counts[f"requested_{name}_bytes"] = requested * piece
        counts[f"distinct_{name}_bytes"] = touched(addresses, word, piece) * piece
    return counts


def of_pattern(pattern, offset):
    """One head of a page whose start lies `offset` bytes past a 128-byte boundary."""
    name, heads, dim, itemsize, together = pattern
    row = dim * itemsize
    stride = row if together else heads * row
    counts = count(1024 * LINE + offset, PAGE_SIZE, row, stride)
    page = PAGE_SIZE * heads * row
    return {
        "rows": name,
        "row_bytes": row,
        "row_stride": stride,
        "offset": offset,
        **counts,
        "page_bytes": page,
        "page_line_bytes": (-(-(offset + page) // LINE) - offset // LINE) * LINE,
    }


def with_header(pattern, header=16):
    """The mean over the offsets at which pages stand that a header precedes."""
    name, heads, dim, itemsize, _ = pattern
    step = PAGE_SIZE * heads * dim * itemsize + header
    places = {(header + i * step) % LINE for i in range(LINE)}
    each = [of_pattern(pattern, int(place)) for place in places]
    numbers = [key for key in each[0] if key not in ("rows", "offset")]
    return {
        "rows": name,
        "header_bytes": header,
        **{key: float(np.mean([one[key] for one in each])) for key in numbers},
    }


def extra(counts, key):
    """Percent moved beyond the useful bytes."""
    useful = counts["page_bytes" if key == "page_line_bytes" else "useful_bytes"]
    return 100 * (counts[key] / useful - 1)


# --- compiled ---------------------------------------------------------------------------------


def compiled(args):
    """The decode kernel's loads for head dims of 16 bits whose rows are 16-byte multiples, or not."""
    import aot
    import kernel_gate

    path, rows = list(sys.path), []
    try:
        aot.find_tools(args.plugin_path)
    except aot.MissingTools as missing:
        return {"reason": " ".join(str(missing).split()), "rows": rows}
    finally:
        sys.path[:] = path  # the compiler is for the processes that compile
    for dim in (128, 100) if args.quick else (128, 96, 100, 90):
        program = kernel_gate.Program(f"decode D{dim}", D=dim)
        found = kernel_gate.spawn(args, "row", program, "sm_90")
        if "error" in found:
            return {"reason": found["error"], "rows": rows}
        keys = ("async_fraction", "instructions_per_128_tokens", "registers")
        rows.append({"head_dim": dim, "row_bytes": 2 * dim, **{key: found[key] for key in keys}})
    return {"reason": None, "rows": rows}


# --- refused ----------------------------------------------------------------------------------


def refusal(layers, heads, dim, page_size, dtype):
    """The geometry's message for a page; None for a page that it accepts."""
    try:
        PageGeometry(layers, heads, dim, page_size, dtype)
    except ValueError as error:
        return str(error)
    return None


def refused():
    """Examples: small pages in 8 bits, and head dims that are no power of two."""
    examples = [
        ("smollm2-135m", *KNOWN_MODELS["smollm2-135m"], 1, "float8_e4m3fn"),
        ("smollm2-360m", *KNOWN_MODELS["smollm2-360m"], 1, "float8_e4m3fn"),
        ("1 KV head of 80", 24, 1, 80, 1, "bfloat16"),
        ("1 KV head of 80", 24, 1, 80, 4, "float8_e4m3fn"),
        ("1 KV head of 96", 24, 1, 96, 1, "bfloat16"),
    ]
    rows = []
    for name, layers, heads, dim, size, dtype in examples:
        message = refusal(layers, heads, dim, size, dtype)
        assert message is not None
        good = next(p for p in range(size, 1025) if refusal(layers, heads, dim, p, dtype) is None)
        page = size * heads * dim * np.dtype(dtype_of(dtype)).itemsize
        lines = [touched(np.arange(i * page, (i + 1) * page), 1, LINE) for i in range(LINE)]
        rows.append(
            {
                "model": name,
                "dtype": dtype,
                "page_size": size,
                "page_bytes": page,
                "reason": message,
                "next_good_page_size": good,
                "extra_lines_percent": 100 * (float(np.mean(lines)) * LINE / page - 1),
            }
        )
    return rows


def dtype_of(name):
    import jax.numpy as jnp

    return jnp.dtype(name)


def known_models():
    """How many pages of the known models are refused, and how many there are."""
    verdicts = [
        refusal(*shape, 2**power, dtype) is not None
        for shape in KNOWN_MODELS.values()
        for power in range(9)
        for dtype in ("bfloat16", "float8_e4m3fn")
    ]
    return sum(verdicts), len(verdicts)


# --- measured ---------------------------------------------------------------------------------


def aligned_bytes(size, alignment=4096):
    """`size` bytes that start on a multiple of `alignment`, written so that they are really there."""
    raw = np.ones(size + alignment, np.uint8)
    skip = -raw.ctypes.data % alignment
    return raw[skip : skip + size]


def distance(row_bytes):
    """Bytes from a row to the next: a multiple of 64, and no power of two, for two addresses with
    the same low 12 bits may delay each other on a CPU."""
    return 2 * row_bytes + 192


def numpy_reader(memory, row_bytes, offset):
    """Gathers rows by NumPy: a copy of each to a new place."""
    step = distance(row_bytes)
    floats = memory[offset : offset + (len(memory) - offset) // 4 * 4].view(np.float32)
    there = (len(memory) - offset) // step
    rows = np.lib.stride_tricks.as_strided(floats, (there, row_bytes // 4), (step, 4))
    return lambda chosen: rows[chosen]


def xla_reader(pool, row_bytes, offset):
    """Sums rows by a compiled loop that reads each in place."""
    import jax
    from jax import lax

    step, width = distance(row_bytes) // 4, row_bytes // 4

    def read(pool, chosen):
        def one(total, i):
            return total + lax.dynamic_slice(pool, (i * step + offset // 4,), (width,)), None

        return lax.scan(one, jax.numpy.zeros(width), chosen, unroll=16)[0]

    compiled = jax.jit(read)
    return lambda chosen: jax.block_until_ready(compiled(pool, chosen))


def best_interleaved(calls, choices, repeats):
    """The least seconds of each call; in turns, so that all see the same machine.

    No call reads the rows that the one before it has brought into the cache.
    """
    for call in calls.values():
        call(choices[0])
    best = dict.fromkeys(calls, float("inf"))
    at = 0
    for turn in range(repeats):
        keys = list(calls)
        keys = keys[turn % len(keys) :] + keys[: turn % len(keys)]
        for key in keys:
            at = (at + 1) % len(choices)
            began = time.perf_counter()
            calls[key](choices[at])
            best[key] = min(best[key], time.perf_counter() - began)
    return best


def measured(pool_bytes, repeats, seed):
    """Nanoseconds a row for every reader, size of row, and offset."""
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    memory = aligned_bytes(pool_bytes)
    pool = jnp.asarray(memory.view(np.float32))
    results = []
    for row_bytes in common.progress(CPU_ROWS, "row sizes"):
        there = pool_bytes // distance(row_bytes) - 1
        number = min(2**21 // row_bytes, 16_384)  # 1 or 2 MiB in a call
        choices = [rng.integers(0, there, number, np.int32) for _ in range(16)]
        on_device = [jnp.asarray(chosen) for chosen in choices]
        for reader, make, source, given in (
            ("numpy", numpy_reader, memory, choices),
            ("xla", xla_reader, pool, on_device),
        ):
            calls = {offset: make(source, row_bytes, offset) for offset in CPU_OFFSETS}
            best = best_interleaved(calls, given, repeats)
            results += [
                {
                    "reader": reader,
                    "row_bytes": row_bytes,
                    "offset": offset,
                    "ns_per_row": seconds / number * 1e9,
                    "against_aligned": seconds / best[0],
                }
                for offset, seconds in best.items()
            ]
    return results


# --- the script -------------------------------------------------------------------------------


def options(parser):
    parser.add_argument(
        "--plugin-path", type=Path, metavar="DIR", help="of the compiler, as in kernel_gate.py"
    )
    parser.add_argument(
        "--pool-mib", type=int, help="memory that is read from (default: 256; quick: 96)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        help="measurements of which the best counts (default: 300; quick: 60)",
    )


def run(args):
    pool_mib = (96 if args.quick else 256) if args.pool_mib is None else args.pool_mib
    repeats = (60 if args.quick else 300) if args.repeats is None else args.repeats
    if not 1 <= pool_mib <= 2048:
        common.fail(f"--pool-mib must be in 1..2048, got {pool_mib}")
    if repeats < 1:
        common.fail(f"--repeats must be at least 1, got {repeats}")
    counted = [of_pattern(pattern, offset) for pattern in PATTERNS for offset in OFFSETS]
    header = [with_header(pattern) for pattern in PATTERNS]
    on_gpu = compiled(args)
    times = measured(pool_mib * 2**20, repeats, args.seed)
    bad = refused()
    refused_known, checked_known = known_models()
    report(counted, header, times, on_gpu, bad, (refused_known, checked_known))
    common.write_json(
        args,
        {
            "environment": common.environment(),
            "config": {
                "page_size": PAGE_SIZE,
                "offsets": OFFSETS,
                "pool_mib": pool_mib,
                "repeats": repeats,
                "seed": args.seed,
            },
            "counted": counted,
            "header": header,
            "measured": times,
            "compiled": on_gpu,
            "refused": bad,
            "known_models_refused": refused_known,
            "known_models_checked": checked_known,
        },
    )
    draw(args, counted, times)


def report(counted, header, times, on_gpu, bad, known):
    shown = [c for c in counted if c["offset"] in (0, 8, 16, 32, 64)]
    keys = ("requested_sector_bytes", "requested_line_bytes")
    keys += ("distinct_line_bytes", "page_line_bytes")
    rows = [
        (c["rows"], c["offset"], c["load_bytes"], c["loads"], *(f"{extra(c, k):.1f}" for k in keys))
        for c in shown
    ]
    rows += [
        (
            h["rows"],
            "header",
            f"{h['load_bytes']:g}",
            f"{h['loads']:g}",
            *(f"{extra(h, k):.1f}" for k in keys),
        )
        for h in header
    ]
    heads = ("one head of a page", "offset, B", "B a lane", "loads", "sectors +%", "lines +%")
    common.report(
        common.table(
            (*heads, "once a head +%", "once a page +%"),
            rows,
            "Counted: bytes moved beyond the useful ones, by the page's offset from 128 bytes (16 tokens, 8 KV heads)",
        ),
        "",
        common.table(
            ("reader", "row, B", "aligned, ns", *(f"+{o} B" for o in CPU_OFFSETS[1:])),
            [
                (
                    reader,
                    size,
                    by[0]["ns_per_row"],
                    *(f"{100 * (by[o]['against_aligned'] - 1):+.0f}%" for o in CPU_OFFSETS[1:]),
                )
                for reader in ("numpy", "xla")
                for size in CPU_ROWS
                for by in [
                    {
                        t["offset"]: t
                        for t in times
                        if t["reader"] == reader and t["row_bytes"] == size
                    }
                ]
            ],
            "Measured on this CPU (lines of 64 bytes): time of a row at each offset",
        ),
        "",
        common.table(
            (
                "head dim",
                "row, B",
                "16-byte async copies",
                "instructions / 128 tokens",
                "registers",
            ),
            [
                (
                    *(c["head_dim"], c["row_bytes"], f"{100 * c['async_fraction']:.0f}%"),
                    *(round(c["instructions_per_128_tokens"]), c["registers"]),
                )
                for c in on_gpu["rows"]
            ],
            "Compiled for an H200 (nothing ran)"
            + (f": not here, {on_gpu['reason']}" if on_gpu["reason"] else ""),
        ),
        "",
        common.table(
            ("refused", "dtype", "page size", "page, B", "lines +%", "next good"),
            [
                (
                    *(b["model"], b["dtype"], b["page_size"], b["page_bytes"]),
                    *(f"{b['extra_lines_percent']:.1f}", b["next_good_page_size"]),
                )
                for b in bad
            ],
            "Pages that the geometry refuses, and what reading them would move",
        ),
        "",
        f"Of the known models' pages ({known[1]} of them: page sizes 1 to 256, 16 and 8 bits) "
        f"{known[0]} are refused: the rule costs nothing there, and it spares the kernels from "
        "loads narrower than 16 bytes and from pages that share a line. Sectors matter up to 32 "
        "bytes of alignment, lines up to 128. Counted once for all heads a page has one line more, "
        "however large it is: a misaligned pool asks the caches for more, and memory for hardly "
        "anything unless pages are small or the caches forget.",
    )


def draw(args, counted, times):
    common.style()
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 6.8))
    worst = [c for c in counted if c["offset"] == 16]
    bars = {
        "32-byte sectors, each load": "requested_sector_bytes",
        "128-byte lines, each load": "requested_line_bytes",
        "128-byte lines, once a head": "distinct_line_bytes",
        "128-byte lines, once a page": "page_line_bytes",
    }
    places = np.arange(len(worst))
    for i, (label, key) in enumerate(bars.items()):
        more = [extra(c, key) for c in worst]
        drawn = left.bar(places + (i - 1.5) * 0.21, more, 0.19, label=label)
        left.bar_label(
            drawn, [f"{m:.2g}" if m < 1 else f"{m:.3g}" for m in more], fontsize=11, padding=2
        )
    left.set_xticks(places, [c["rows"].replace(", N", "\nN") for c in worst], fontsize=13)
    left.set_ylabel("bytes moved beyond the useful ones (%)")
    left.set_title("Counted from the loads: pages 16 bytes off")
    left.grid(axis="x", visible=False)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=13)

    styles = (("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"))
    for size, (line, marker), color in zip(CPU_ROWS, styles, common.PALETTE, strict=False):
        mine = [t for t in times if t["reader"] == "xla" and t["row_bytes"] == size]
        change = [100 * (t["against_aligned"] - 1) for t in mine]
        label = f"{size:,} bytes a page"
        right.plot(CPU_OFFSETS, change, line, marker=marker, color=color, label=label, markersize=9)
    right.axhline(0, color="black", linewidth=1)
    right.set_xticks(CPU_OFFSETS)
    right.set(xlabel="page's offset from a 64-byte boundary (bytes)")
    right.set_ylabel("time against aligned (%)")
    low, high = right.get_ylim()
    right.set_ylim(min(low, -10), max(high, 30))
    right.set_title("Measured: random pages on this CPU")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
