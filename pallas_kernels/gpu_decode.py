"""Decode attention on a GPU: split-K flash decoding over pages, balanced by each sequence's length.

One new query token a sequence reads the whole of its cache, so the kernel is bound by memory
bandwidth, and what matters is that every SM streams pages all the time. Two launches:

1. `_split_kernel`: the tiles of each sequence are cut into work items (`plan`): as many as the
   sequence's share of the GPU, more where it is so long that others would wait for it, one where it
   is short. Every item leaves a normalised float32 partial result and its log-sum-exp. How a
   sequence is cut depends on its own length and on shapes alone, so its result, to the last bit,
   does not depend on what it was batched with.
2. `_merge_kernel`: weighs the partial results of each sequence by their log-sum-exps, adds the
   sink, and writes the output dtype.

The plan is a handful of vector instructions on `lengths`; every program computes it for itself, so
there is no host round trip and no planning launch. (Dao et al., "Flash-Decoding", 2023; the work
items follow the idea of stream-K, Osama et al. 2023.)
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_common as common
from pallas_kernels.options import AttentionOptions

MAX_ROWS = 64  # query heads of one KV head that one program handles
# Of small programs two or three are resident on an SM at a time, of large ones (many heads) one:
# so that about two rounds run, and a tail is at most half a work item.
PROGRAMS_PER_SM, LARGE_PROGRAMS_PER_SM = 4, 2
MAX_TILES = 32  # tiles in one work item, so that one long sequence does not keep all waiting


class Plan(NamedTuple):
    """How the tiles of each sequence are cut into consecutive work items."""

    first_tile: jax.Array  # [B] int32, the first tile inside the sliding window
    tiles: jax.Array  # [B] int32, tiles to read
    size: jax.Array  # [B] int32, tiles in a work item (its last may have fewer)
    parts: jax.Array  # [B] int32, work items
    ends: jax.Array  # [B] int32, running sum of `parts`: row b owns items ends[b]-parts[b]..ends[b]


def plan(lengths: jax.Array, block_k: int, window: int | None, share: int) -> Plan:
    """Cuts each of the sequences of `lengths` [B] int32 tokens into about `share` work items."""
    start = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    first = start // block_k
    tiles = (lengths + block_k - 1) // block_k - first
    size = jnp.clip((tiles + share - 1) // share, 1, MAX_TILES)
    parts = (tiles + size - 1) // size
    return Plan(first, tiles, size, parts, jnp.cumsum(parts))


def max_parts(max_tokens: int, block_k: int, share: int) -> int:
    """The static bound on a sequence's work items: partial results to make room for."""
    tiles = math.ceil(max_tokens / block_k)
    return min(tiles, max(share, math.ceil(tiles / MAX_TILES)))


def _take(vector: jax.Array, index: Any) -> jax.Array:
    """vector[index] for a dynamic index, as a reduction (registers cannot be indexed)."""
    lane = jnp.arange(vector.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(lane == index, vector, 0))


def _load_plan(spec: common.Spec, lengths_ref: Any, batch: int, share: int) -> Any:
    width = max(16, pl.next_power_of_2(batch))
    lane = jnp.arange(width, dtype=jnp.int32)
    lengths = plgpu.load(lengths_ref.at[lane], mask=lane < batch, other=0)
    return lengths, plan(lengths, spec.block_k, spec.window, share)


def _split_kernel(
    inputs: Any,
    out_ref: Any,  # [W, H, D] float32
    lse_ref: Any,  # [W, H] float32, log2 units
    *,
    spec: common.Spec,
    groups: int,
    rows: int,
    batch: int,
    share: int,
    sm_scale: float | None,
) -> None:
    """Work item program_id(1) of query heads program_id(0)."""
    head_program, item = pl.program_id(0), pl.program_id(1)
    lengths, work = _load_plan(spec, inputs["lengths"], batch, share)
    row = jnp.sum((work.ends <= item).astype(jnp.int32))

    @pl.when(row < batch)
    def _() -> None:
        head_blocks = pl.cdiv(groups, rows)
        kv_head = head_program // head_blocks
        member = (head_program % head_blocks) * rows + jnp.arange(rows, dtype=jnp.int32)
        in_group = member < groups
        heads = kv_head * groups + member

        length = _take(lengths, row)
        tiles, parts = _take(work.tiles, row), _take(work.parts, row)
        part = item - (_take(work.ends, row) - parts)
        first = _take(work.first_tile, row)
        size = _take(work.size, row)
        start = first + part * size
        stop = jnp.minimum(first + tiles, start + size)

        q, q_scale = common.load_query(spec, inputs["q"], row, heads, in_group)
        scale = sm_scale if sm_scale is not None else inputs["sm_scale"][0]
        scale = scale * common.LOG2E
        k_scale = common.load_scalar(spec.k_scale, inputs["pool"].k_scale, kv_head)
        scale = scale if k_scale is None else scale * k_scale
        scale = scale if q_scale is None else scale * q_scale
        slope = None
        if spec.alibi:
            slope = plgpu.load(inputs["alibi"].at[heads], mask=in_group, other=0.0)
            slope = slope[:, None] * common.LOG2E
        acc, m, l = common.attend(
            spec,
            inputs["pool"],
            row,
            kv_head,
            common.Rows(q, scale, length - 1, slope),
            common.tile_range(spec, start, stop, length - 1, length - 1),
            length,
        )
        acc, lse = common.finish(acc, m, l)
        v_scale = common.load_scalar(spec.v_scale, inputs["pool"].v_scale, kv_head)
        for x, (at, width, valid) in zip(acc, common.chunks(spec.head_dim), strict=True):
            d = jnp.arange(width, dtype=jnp.int32)[None, :]
            mask = jnp.broadcast_to(in_group[:, None] & (d < valid), x.shape)
            x = x if v_scale is None else x * v_scale
            plgpu.store(out_ref.at[item, heads[:, None], d + at], x, mask=mask)
        plgpu.store(lse_ref.at[item, heads], lse, mask=in_group)


def _merge_kernel(
    inputs: Any,
    out_ref: Any,  # [B, H, D]
    lse_ref: Any,  # [B, H] float32, natural logarithm
    *,
    spec: common.Spec,
    num_heads: int,
    rows: int,
    batch: int,
    share: int,
) -> None:
    """Sequence program_id(1), query heads program_id(0) * rows and following."""
    row = pl.program_id(1)
    _, work = _load_plan(spec, inputs["lengths"], batch, share)
    stop = _take(work.ends, row)
    width = pl.next_power_of_2(spec.head_dim)
    heads = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    d = jnp.arange(width, dtype=jnp.int32)[None, :]
    head_ok = heads < num_heads
    mask = jnp.broadcast_to(head_ok[:, None] & (d < spec.head_dim), (rows, width))

    def add(item: Any, carry: Any) -> Any:
        acc, m, l = carry
        x = plgpu.load(inputs["out"].at[item, heads[:, None], d], mask=mask, other=0.0)
        lse = plgpu.load(inputs["lse"].at[item, heads], mask=head_ok, other=common.M_INIT)
        m_next = jnp.maximum(m, lse)
        a, b = jnp.exp2(m - m_next), jnp.exp2(lse - m_next)
        return acc * a[:, None] + x * b[:, None], m_next, l * a + b

    start = stop - _take(work.parts, row)
    carry = (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), common.M_INIT, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    acc, m, l = jax.lax.fori_loop(start, stop, add, carry)
    acc, m, l = common.add_sink(acc, m, l, inputs["sinks"], heads, head_ok)
    (out,), lse = common.finish((acc,), m, l)
    plgpu.store(out_ref.at[row, heads[:, None], d], out.astype(out_ref.dtype), mask=mask)
    plgpu.store(lse_ref.at[row, heads], lse * common.LN2, mask=head_ok)


def decode(
    q: jax.Array,  # [B, H, D]
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_tables: jax.Array,  # [B, M] int32
    lengths: jax.Array,  # [B] int32
    options: AttentionOptions,
    *,
    interpret: bool = False,
    block_k: int | None = None,
    pages_per_compute_block: int | None = None,
    block_h: int | None = None,
    k_splits: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    num_sms: int | None = None,
    compute_capability: float | str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The Pallas kernel behind `paged_attention`; arguments are as checked there.

    Args:
      interpret: run in JAX's interpreter, on any device.
      block_k: tokens a tile, a power of two from 16; or pages_per_compute_block pages.
      block_h: accepted for JAX's callers; the rows of a program follow from the group size.
      k_splits: work items to cut a sequence into; by default the SMs that fall to one sequence.
      num_warps, num_stages: Triton's; the default was chosen by the static gate.
      num_sms, compute_capability: of the GPU compiled for, when it is not the one at hand.

    Returns:
      out [B, H, D] in q's dtype, lse [B, H] float32 (natural logarithm).

    Raises:
      NotImplementedError: a dtype, layout or size that the kernel does not do.
    """
    del block_h
    capability, num_sms = common.device_facts(compute_capability, num_sms)
    k_pages, v_pages = common.prepare_pages(k_pages, v_pages, options.kv_dtype, capability)
    batch, num_heads, head_dim = q.shape
    page_size = common.pool_geometry(options.kv_layout, k_pages).page_size
    groups = num_heads // common.pool_geometry(options.kv_layout, k_pages).num_kv_heads
    most = 32 if q.dtype == jnp.float32 else MAX_ROWS
    rows = min(most, max(16, pl.next_power_of_2(groups)))
    if block_k is None and pages_per_compute_block is not None:
        block_k = pages_per_compute_block * page_size
    block_k, num_warps, num_stages = common.choose_tiles(
        rows, head_dim, k_pages.dtype, q.dtype, capability, (block_k, num_warps, num_stages)
    )
    spec = common.make_spec(options, k_pages, q.dtype, block_k, lanes=True, interpret=interpret)

    head_programs = spec.num_kv_heads * pl.cdiv(groups, rows)
    per_sm = PROGRAMS_PER_SM if rows <= 16 else LARGE_PROGRAMS_PER_SM
    share = k_splits or pl.cdiv(num_sms * per_sm, head_programs * batch)
    items = batch * max_parts(block_tables.shape[1] * page_size, block_k, share)
    if items > 65535:
        raise NotImplementedError(
            f"{items} work items (batch {batch}) exceed the 65535 of a CUDA grid; split the batch "
            'or use implementation="xla"'
        )

    sm_scale, scale_operand = common.split_scale(options.sm_scale)
    shared: dict[str, Any] = dict(spec=spec, batch=batch, share=share)
    out, lse = pl.pallas_call(
        functools.partial(_split_kernel, groups=groups, rows=rows, sm_scale=sm_scale, **shared),
        grid=(head_programs, items),
        out_shape=(
            jax.ShapeDtypeStruct((items, num_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((items, num_heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=f"paged_decode_split_m{rows}_k{block_k}_w{num_warps}",
    )(
        {
            "q": q,
            "pool": common.pool_operands(spec, k_pages, v_pages, block_tables, options),
            "lengths": lengths,
            "sm_scale": scale_operand,
            "alibi": options.alibi_slopes,
        }
    )
    merge_rows = min(8, pl.next_power_of_2(num_heads))
    return pl.pallas_call(
        functools.partial(_merge_kernel, num_heads=num_heads, rows=merge_rows, **shared),
        grid=(pl.cdiv(num_heads, merge_rows), batch),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, num_heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_decode_merge",
    )({"out": out, "lse": lse, "lengths": lengths, "sinks": options.sinks})
