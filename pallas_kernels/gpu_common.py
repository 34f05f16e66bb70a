"""What the decode and the ragged kernel share: reading paged K/V tiles and the online softmax over them.

Both kernels are one loop over tiles of `block_k` tokens. This file holds that loop (`attend`), the
address arithmetic of every pool layout (`flat_pool`, `_inner_offsets`), the handling of quantised
pages, and the checks of what 32-bit offsets can reach. `docs/kernels.md` walks through it.

Three properties that the compiled code depends on, each seen in the SASS:

* loops are `lax.fori_loop`, which Triton pipelines (cp.async); a `while_loop` it does not;
* the page ids of the next tile are loop state, so that K and V of the next tile can be requested
  before this tile's arithmetic; ids loaded where they are used cost a pipeline stage;
* tiles that every row sees whole (`main`) take no mask; the few others (`edge`) have a loop of
  their own that masks K, V and logits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import layouts
from pallas_kernels.options import AttentionOptions

GPU_LAYOUTS = ("KNPD", "NPKD", "NKPD", "NP2KD")

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# The running maximum starts finite: exp2(-inf - M_INIT) is 0 where exp2(-inf - -inf) would be NaN.
M_INIT = -1e30


class Pool(NamedTuple):
    """Refs of one pool inside a kernel; v is k for the interleaved layout, scales may be None."""

    k: Any  # [rows, elements of a page row], see `flat_pool`
    v: Any
    tables: Any  # [B, M] int32
    k_scale: Any  # [] or [K] or [rows, scales of a page row] float32, or None
    v_scale: Any


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything about a kernel that is known when it is compiled."""

    layout: str
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    block_k: int  # tokens a tile
    dot_dtype: str  # what both matrix products multiply: the query's dtype, float16 if quantised
    k_scale: str  # "none", "tensor", "head" or "token"
    v_scale: str
    soft_cap: float | None
    window: int | None
    alibi: bool
    lanes: bool  # keep the softmax denominator per (row, column), reduce it once after the loop
    interpret: bool


def chunks(head_dim: int) -> tuple[tuple[int, int, int], ...]:
    """Splits a head into (start, width, valid) pieces of power-of-two widths of at least 32.

    96 -> 64 + 32, 128 -> 128, 80 -> 64 + 32 of which 16 are masked: of a piece of 16 columns, 8
    warps would each compute the whole product.
    """
    pieces, start = [], 0
    while start < head_dim:
        left = head_dim - start
        width = max(32, 1 << (left.bit_length() - 1))
        pieces.append((start, width, min(width, left)))
        start += width
    return tuple(pieces)


def scale_kind(scale: Any, num_kv_heads: int) -> str:
    """Names the granularity of a scale operand by its shape."""
    if scale is None:
        return "none"
    if scale.ndim == 0 or scale.size == 1:
        return "tensor"
    if scale.ndim == 1:
        if scale.shape != (num_kv_heads,):
            raise ValueError(f"a scale per head has shape [{num_kv_heads}], got {scale.shape}")
        return "head"
    return "token"


def check_index_width(name: str, pages: Any) -> None:
    """Refuses the one size of array whose element offsets wrap in the compiled kernel.

    Pallas computes offsets in 64 bits only for arrays of more than 2**32 bytes, and a GPU address
    takes a 32-bit offset as signed. Elements of two bytes or more never reach 2**31 below that
    size; elements of one byte do.
    """
    size, itemsize = math.prod(pages.shape), pages.dtype.itemsize
    if size > 2**31 and size * itemsize <= 2**32:
        raise NotImplementedError(
            f"{name} {tuple(pages.shape)} {pages.dtype} has {size} elements: between 2**31 and "
            "2**32 one-byte elements the Pallas kernel's 32-bit offsets would wrap. Use one array "
            'a layer, fewer pages, or implementation="xla"'
        )


def check_dtype(pages: Any, compute_capability: float | None) -> None:
    """Refuses page dtypes that the GPU's compiler cannot translate (it would end the process)."""
    name = jnp.dtype(pages.dtype).name
    if name == "float8_e4m3fn" and compute_capability is not None and compute_capability < 8.9:
        raise NotImplementedError(
            f"pages of float8_e4m3fn need compute capability 8.9 or later, this GPU has "
            f'{compute_capability}; store int8 or float8_e5m2, or use implementation="xla"'
        )
    known = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
    if name not in known:
        raise NotImplementedError(
            f'the Pallas kernels read pages of {", ".join(known)}, got {name}; use implementation="xla"'
        )


def device_facts(
    compute_capability: float | str | None = None, num_sms: int | None = None
) -> tuple[float | None, int]:
    """The compute capability and SM count to compile for; asks the GPU for what is not given."""
    if jax.default_backend() == "gpu":
        device = jax.devices()[0]
        if compute_capability is None:
            compute_capability = getattr(device, "compute_capability", None)
        num_sms = num_sms or getattr(device, "core_count", None)
    return (None if compute_capability is None else float(compute_capability)), num_sms or 132


def bitcast_pages(pages: jax.Array, kv_dtype: str | None) -> jax.Array:
    """Pages stored as uint16 bits, as the bfloat16 they are (the same bytes)."""
    if pages.dtype == jnp.uint16 and kv_dtype is not None:
        return lax.bitcast_convert_type(pages, jnp.dtype(kv_dtype))
    return pages


def pool_geometry(kv_layout: str, pages: jax.Array) -> layouts.Geometry:
    """The sizes of a pool in one of the layouts that the kernels read."""
    if kv_layout not in GPU_LAYOUTS:
        raise NotImplementedError(
            f"the Pallas kernels read the layouts {', '.join(GPU_LAYOUTS)}, got {kv_layout!r}; "
            'use implementation="xla"'
        )
    return layouts.geometry(pages.shape, kv_layout)


def flat_pool(layout: str, pages: jax.Array) -> jax.Array:
    """Views a pool as [rows, elements]: a row is a page (a head's page for "KNPD"). No copy."""
    rows = pages.shape[0] * (pages.shape[1] if layout == "KNPD" else 1)
    return pages.reshape(rows, -1)


def make_spec(
    options: AttentionOptions, pages: jax.Array, q_dtype: Any, block_k: int, **static: Any
) -> Spec:
    """The static half of a call: shapes, scale granularity and the dtype of the products."""
    num_pages, page_size, num_kv_heads, head_dim = pool_geometry(options.kv_layout, pages)
    quantised = pages.dtype.itemsize == 1
    dot_dtype = jnp.float16 if quantised and q_dtype != jnp.float32 else q_dtype
    return Spec(
        layout=options.kv_layout,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_k=block_k,
        dot_dtype=jnp.dtype(dot_dtype).name,
        k_scale=scale_kind(options.k_scale, num_kv_heads),
        v_scale=scale_kind(options.v_scale, num_kv_heads),
        soft_cap=options.soft_cap,
        window=options.sliding_window,
        alibi=options.alibi_slopes is not None,
        **static,
    )


def pool_operands(
    spec: Spec, k_pages: jax.Array, v_pages: jax.Array | None, tables: jax.Array, options: Any
) -> Pool:
    """The arrays of one pool as the kernels take them."""

    def scale(value: jax.Array | None, kind: str) -> jax.Array | None:
        if kind == "none" or value is None:
            return None
        if kind == "token":
            return flat_pool(spec.layout, value)
        return jnp.asarray(value, jnp.float32).reshape(-1)

    return Pool(
        flat_pool(spec.layout, k_pages),
        None if v_pages is None else flat_pool(spec.layout, v_pages),
        tables,
        scale(options.k_scale, spec.k_scale),
        scale(options.v_scale, spec.v_scale),
    )


def exp2(spec: Spec, x: jax.Array) -> jax.Array:
    """2**x; on a GPU the one instruction that flushes denormals, which a softmax cannot feel."""
    if spec.interpret:
        return jnp.exp2(x)
    (y,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b accumulated in float32; float32 operands are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, precision=precision, allow_tf32=None).astype(jnp.float32)


# int8 -> float16 four at a time: with its sign bit flipped, a byte below 0x64 is 1024 + 128 + x.
_INT8_TO_F16 = """{
.reg .b32 t, bias;
mov.b32 bias, 0x64806480;
xor.b32 t, $2, 0x80808080;
prmt.b32 $0, t, 0x64646464, 0x4140;
prmt.b32 $1, t, 0x64646464, 0x4342;
sub.f16x2 $0, $0, bias;
sub.f16x2 $1, $1, bias;
}"""


def widen(spec: Spec, x: jax.Array, one: jax.Array | None) -> jax.Array:
    """A tile in the products' dtype; exact, for float16 and bfloat16 hold every stored value.

    `one` is a 1 that the compiler does not know to be one. Multiplying V by it keeps Triton from
    moving the conversion behind the change of register layout, where it would have to fetch V from
    shared memory byte by byte (64 loads a tile instead of 8).
    """
    if x.dtype == spec.dot_dtype:
        return x
    if spec.interpret or spec.dot_dtype != "float16" or x.dtype != jnp.int8:
        wide = x.astype(spec.dot_dtype)
    else:
        (wide,) = plgpu.elementwise_inline_asm(
            _INT8_TO_F16,
            args=[x],
            constraints="=&r,=&r,r",
            pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float16)],
        )
    return wide if one is None else wide * one


def load_query(spec: Spec, q_ref: Any, token: Any, head: Any, ok: jax.Array) -> Any:
    """Rows of q as a tuple of chunks in the products' dtype, and a factor that undoes their scaling.

    token and head: [R] int32 or scalars, ok: [R] bool. For quantised pages the products are in
    float16, whose range is smaller than bfloat16's: each row is divided by its largest value.
    """
    token = token[:, None] if jnp.ndim(token) else token
    pieces = []
    for start, width, valid in chunks(spec.head_dim):
        d = jnp.arange(width, dtype=jnp.int32)[None, :]
        mask = ok[:, None] & (d < valid) if valid < width else ok[:, None]
        at = q_ref.at[token, head[:, None], start + d]
        shape = (ok.shape[0], width)
        other = jnp.zeros((), q_ref.dtype)
        pieces.append(plgpu.load(at, mask=jnp.broadcast_to(mask, shape), other=other))
    if pieces[0].dtype == spec.dot_dtype:
        return tuple(pieces), None
    wide = [p.astype(jnp.float32) for p in pieces]
    top = jnp.abs(wide[0]).max(axis=1)
    for p in wide[1:]:
        top = jnp.maximum(top, jnp.abs(p).max(axis=1))
    top = jnp.where(top > 0, top, 1.0)
    return tuple((p / top[:, None]).astype(spec.dot_dtype) for p in wide), top[:, None]


def load_scalar(spec_kind: str, ref: Any, head: jax.Array) -> Any:
    """A scale of the whole tensor or of one head as a scalar, else None."""
    if spec_kind == "tensor":
        return ref[0]
    if spec_kind == "head":
        return ref[head]
    return None


def _inner_offsets(spec: Spec, offset: jax.Array, head: Any, *, is_v: bool, unit: int) -> jax.Array:
    """Element offset inside a page row of a token at `offset`; `unit` is D for K/V, 1 for scales."""
    K, P = spec.num_kv_heads, spec.page_size
    if spec.layout == "KNPD":
        return offset * unit
    if spec.layout == "NKPD":
        return (head * P + offset) * unit
    if spec.layout == "NP2KD" and unit > 1:
        return (offset * (2 * K) + 2 * head + int(is_v)) * unit
    return (offset * K + head) * unit


class _Tile(NamedTuple):
    page: jax.Array  # [block_k] or scalar int32: physical page ids
    first: Any  # offset of the tile inside its page where a page holds several tiles, else 0


def _tile_pages(spec: Spec, tables: Any, row: Any, tile: Any, end: Any | None) -> jax.Array:
    """Physical pages of a tile's tokens; reads no entry at or past `end` tokens (None: none is)."""
    P, BN = spec.page_size, spec.block_k
    if P % BN == 0:
        return tables[row, tile // (P // BN)]
    lane = jnp.arange(BN, dtype=jnp.int32)
    if BN % P == 0:  # lane // P is the same in every tile: hoisted out of the loop
        index = tile * (BN // P) + lane // P
        ok = None if end is None else index * P < end
    else:
        index = (tile * BN + lane) // P
        ok = None if end is None else tile * BN + lane < end
    at = tables.at[row, index]
    if ok is None:
        return plgpu.load(at)
    return plgpu.load(at, mask=ok, other=0)


def _token_offsets(spec: Spec, tile: Any) -> jax.Array:
    """Offset inside its page of each token of a tile, [block_k] int32."""
    P, BN = spec.page_size, spec.block_k
    lane = jnp.arange(BN, dtype=jnp.int32)
    if P % BN == 0:
        return (tile % (P // BN)) * BN + lane
    return lane % P if BN % P == 0 else (tile * BN + lane) % P


def _load_tile(
    spec: Spec, ref: Any, page: Any, offset: Any, head: Any, ok: Any, one: Any
) -> tuple[jax.Array, ...]:
    """The chunks [block_k, width] of a K tile (one: None) or a V tile; not ok reads as zero."""
    rows = page + head * spec.num_pages if spec.layout == "KNPD" else page
    rows = rows[:, None] if jnp.ndim(rows) else rows
    base = _inner_offsets(spec, offset, head, is_v=one is not None, unit=spec.head_dim)
    out = []
    for start, width, valid in chunks(spec.head_dim):
        d = jnp.arange(width, dtype=jnp.int32)[None, :]
        mask = None if ok is None else ok[:, None]
        if valid < width:
            mask = d < valid if mask is None else mask & (d < valid)
        at = ref.at[rows, base[:, None] + (d + start)]
        if mask is None:
            out.append(plgpu.load(at))
        else:
            mask = jnp.broadcast_to(mask, (spec.block_k, width))
            out.append(plgpu.load(at, mask=mask, other=jnp.zeros((), ref.dtype)))
    return tuple(widen(spec, x, one) for x in out)


def _load_token_scales(
    spec: Spec, ref: Any, page: jax.Array, offset: jax.Array, head: Any, ok: Any
) -> jax.Array:
    """[block_k] float32 scales of a tile's tokens."""
    rows = page + head * spec.num_pages if spec.layout == "KNPD" else page
    at = ref.at[rows, _inner_offsets(spec, offset, head, is_v=False, unit=1)]
    if ok is None:
        return plgpu.load(at).astype(jnp.float32)
    return plgpu.load(at, mask=ok, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)


class Rows(NamedTuple):
    """The query rows of one program."""

    q: tuple[jax.Array, ...]  # chunks [R, width]
    scale: Any  # scalar or [R, 1] float32: sm_scale * log2(e), all constant scales included
    position: Any  # [R, 1] int32 or scalar: position of each query in its sequence
    slope: Any  # [R, 1] float32 ALiBi slopes times log2(e), or None


class Range(NamedTuple):
    """The tiles [start, stop) of one program; those of [main_start, main_stop) need no mask."""

    start: Any
    main_start: Any
    main_stop: Any
    stop: Any


def tile_range(spec: Spec, start: Any, stop: Any, first: Any, last: Any) -> Range:
    """Splits [start, stop) by what the queries at positions first..last (inclusive) see.

    A tile needs no mask when every query sees all of it: its last token is at most `first`, and its
    first token is later than `last - window`.
    """
    BN = spec.block_k
    lo = start
    if spec.window is not None:
        seen = jnp.maximum(last - spec.window + 1, 0)
        lo = jnp.minimum(jnp.maximum(start, (seen + BN - 1) // BN), stop)
    hi = jnp.maximum(lo, jnp.minimum(stop, (first + 1) // BN))
    return Range(start, lo, hi, stop)


def attend(
    spec: Spec, pool: Pool, table_row: Any, head: Any, rows: Rows, tiles: Range, length: Any
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Online softmax of `rows` over `tiles` of the sequence in row `table_row` of the block tables.

    Per tile: s = q k^T; m' = max(m, max s); a = 2^(m - m'); p = 2^(s - m'); l = l a + sum p;
    acc = acc a + p v. All float32 but the products' operands. (Milakov and Gimelshein 2018;
    Dao 2023, algorithm 1.)

    Returns:
      acc: chunks [R, width] float32, not yet divided by l; m, l: [R] float32, m in log2 units.
    """
    BN = spec.block_k
    R = rows.q[0].shape[0]
    lane = jnp.arange(BN, dtype=jnp.int32)[None, :]
    one = jnp.where(length > 0, 1.0, 0.0).astype(spec.dot_dtype)

    def logits(k: tuple[jax.Array, ...], tile: Any, page: Any, offset: Any, ok: Any) -> jax.Array:
        s = dot(rows.q[0], k[0].T)
        for qc, kc in zip(rows.q[1:], k[1:], strict=True):
            s = s + dot(qc, kc.T)
        s = s * rows.scale
        if spec.k_scale == "token":
            s = s * _load_token_scales(spec, pool.k_scale, page, offset, head, ok)[None, :]
        if spec.soft_cap is not None:
            cap = spec.soft_cap * LOG2E  # tanh(y) = 1 - 2 / (1 + e^2y), in log2 units throughout
            s = cap - (2.0 * cap) / (1.0 + exp2(spec, s * (2.0 / spec.soft_cap)))
        if spec.alibi:
            s = s + rows.slope * (tile * BN + lane - rows.position).astype(jnp.float32)
        return s

    def step(tile: Any, carry: Any, page: Any, *, masked: bool) -> Any:
        acc, m, l = carry
        offset = _token_offsets(spec, tile)
        ok = tile * BN + lane[0] < length if masked else None
        k = _load_tile(spec, pool.k, page, offset, head, ok, None)
        v_ref = pool.k if pool.v is None else pool.v
        v = _load_tile(spec, v_ref, page, offset, head, ok, one)
        s = logits(k, tile, page, offset, ok)
        if masked:
            token = tile * BN + lane
            seen = (token <= rows.position) & (token < length)
            if spec.window is not None:
                seen = seen & (token > rows.position - spec.window)
            s = jnp.where(jnp.broadcast_to(seen, (R, BN)), s, -jnp.inf)
        m_next = jnp.maximum(m, s.max(axis=1))
        a = exp2(spec, m - m_next)
        p = exp2(spec, s - m_next[:, None])
        l = l * a[:, None] + p if spec.lanes else l * a + p.sum(axis=1)
        if spec.v_scale == "token":
            p = p * _load_token_scales(spec, pool.v_scale, page, offset, head, ok)[None, :]
        p = p.astype(spec.dot_dtype)
        acc = tuple(x * a[:, None] + dot(p, vc) for x, vc in zip(acc, v, strict=True))
        return acc, m_next, l

    def edge(tile: Any, carry: Any) -> Any:
        page = _tile_pages(spec, pool.tables, table_row, tile, length)
        return step(tile, carry, page, masked=True)

    def main(tile: Any, carry: Any) -> Any:
        state, page = carry
        state = step(tile, state, page, masked=False)
        following = jnp.minimum(tile + 1, tiles.main_stop - 1)
        return state, _tile_pages(spec, pool.tables, table_row, following, None)

    carry = (
        tuple(jnp.zeros((R, width), jnp.float32) for _, width, _ in chunks(spec.head_dim)),
        jnp.full((R,), M_INIT, jnp.float32),
        jnp.zeros((R, BN) if spec.lanes else (R,), jnp.float32),
    )
    # In ascending order, so that a row's bits do not depend on the block that it happens to be in.
    if spec.window is not None:
        carry = lax.fori_loop(tiles.start, tiles.main_start, edge, carry)
    ids = _tile_pages(spec, pool.tables, table_row, tiles.main_start, length)
    carry, _ = lax.fori_loop(tiles.main_start, tiles.main_stop, main, (carry, ids))
    acc, m, l = lax.fori_loop(tiles.main_stop, tiles.stop, edge, carry)
    return acc, m, l.sum(axis=1) if spec.lanes else l


def finish(acc: tuple[jax.Array, ...], m: jax.Array, l: jax.Array) -> Any:
    """Normalised chunks and the log-sum-exp in log2 units; a row without keys gives 0 and -inf."""
    seen = l > 0
    inverse = jnp.where(seen, 1.0 / jnp.where(seen, l, 1.0), 0.0)
    lse = jnp.where(seen, m + jnp.log2(jnp.where(seen, l, 1.0)), -jnp.inf)
    return tuple(x * inverse[:, None] for x in acc), lse


def add_sink(acc: Any, m: Any, l: Any, sinks_ref: Any, heads: Any, ok: Any) -> Any:
    """Adds each head's sink, a logit without a value, to rows that saw a key."""
    if sinks_ref is None:
        return acc, m, l
    sink = plgpu.load(sinks_ref.at[heads], mask=ok, other=0.0) * LOG2E
    m_next = jnp.maximum(m, sink)
    a, b = jnp.exp2(m - m_next), jnp.exp2(sink - m_next)
    seen = l > 0
    scaled = jax.tree.map(lambda x: x * a[:, None], acc)
    return scaled, m_next, jnp.where(seen, l * a + b, 0.0)


def split_scale(value: Any) -> tuple[float | None, jax.Array | None]:
    """A Python number stays static (first); an array becomes a [1] float32 operand (second)."""
    if isinstance(value, (int, float, np.number)):
        return float(value), None
    return None, jnp.asarray(value, jnp.float32).reshape(1)


def prepare_pages(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    kv_dtype: str | None,
    compute_capability: float | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Checks what the kernels can read, and names the bits of uint16 pages."""
    k_pages = bitcast_pages(k_pages, kv_dtype)
    v_pages = None if v_pages is None else bitcast_pages(v_pages, kv_dtype)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages is not None:
            check_dtype(pages, compute_capability)
            check_index_width(name, pages)
    return k_pages, v_pages


class Tiles(NamedTuple):
    """How a program is shaped."""

    block_k: int  # tokens a tile
    num_warps: int
    num_stages: int  # buffers of K and V + 1


def choose_tiles(
    rows: int,
    head_dim: int,
    kv_dtype: Any,
    q_dtype: Any,
    compute_capability: float | None,
    asked: tuple[int | None, int | None, int | None],
) -> Tiles:
    """Tile sizes that compile without spills for every GPU (`experiments/kernel_gate.py`).

    asked: (block_k, num_warps, num_stages) as the caller gave them; block_k is rounded down to a
    power of two of at least 16, because every array in a kernel has such a size.
    """
    width = sum(w for _, w, _ in chunks(head_dim))
    even = width & (width - 1) == 0
    old = compute_capability is not None and compute_capability < 9  # products held in registers
    if q_dtype == jnp.float32:  # products without tensor cores hold their operands in registers
        tiles = Tiles(32 if width <= 128 and rows <= 16 else 16, 8, 2)
    elif width > 128:
        tiles = Tiles(64, 8, 2) if rows <= 16 else Tiles(32, 8, 3)
    elif jnp.dtype(kv_dtype).itemsize == 1:
        tiles = Tiles(64, 4, 2) if rows <= 16 else Tiles(32 if old and rows > 64 else 64, 8, 3)
    elif rows <= 16:
        tiles = Tiles(128, 8, 2) if even else Tiles(64, 4, 2)
    elif old and rows > 64 and width > 64:
        tiles = Tiles(32, 8, 3)
    else:
        tiles = Tiles(64, 8, 2 if rows == 64 else 3)
    block_k, num_warps, num_stages = asked
    if block_k is not None:
        block_k = min(256, max(16, 1 << (int(block_k).bit_length() - 1)))
    return Tiles(*(a or t for a, t in zip((block_k, num_warps, num_stages), tiles, strict=True)))
