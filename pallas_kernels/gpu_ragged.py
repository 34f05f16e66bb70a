"""Ragged attention on a GPU: prefill chunks and decodes of many sequences in one launch, causal.

Queries of all sequences are packed one after another. A program handles a block of `block_q` query
tokens of ONE sequence with all query heads of one KV head: the rows of its matrix products are
(query, head) pairs, so that grouped-query attention fills them. It walks the pages from the first
that the block's window reaches to the last that its last query sees; the tiles before the first
query's position need no mask.

Which block belongs to which sequence is worked out inside the compiled program (`map_blocks`) from
`cu_q_lens`, with a bound on the number of blocks that is known from the shapes: T // block_q + B + 1.
Programs beyond the real number of blocks end at once. The rows past the last sequence are handled as
one more sequence without keys, which writes their zeros.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import gpu_common as common
from pallas_kernels.options import AttentionOptions


class BlockMap(NamedTuple):
    """Sequences with the padding as sequence B, and which of them each block of queries serves."""

    sequence: jax.Array  # [blocks] int32; B is the padding, B + 1 nothing
    first: jax.Array  # [blocks] int32, first query of the block, counted in its sequence
    q_start: jax.Array  # [B + 1] int32, first row of q of each sequence
    q_len: jax.Array  # [B + 1] int32
    kv_len: jax.Array  # [B + 1] int32


def map_blocks(
    kv_lens: jax.Array,  # [B] int32
    cu_q_lens: jax.Array,  # [B + 1] int32
    num_seqs: jax.Array,  # [] int32
    *,
    num_rows: int,
    block_q: int,
) -> BlockMap:
    """Cuts every sequence's queries into blocks of `block_q`; no block holds two sequences."""
    batch = kv_lens.shape[0]
    index = jnp.arange(batch + 1, dtype=jnp.int32)
    starts = cu_q_lens[jnp.minimum(index, num_seqs)]  # entries past num_seqs are not believed
    ends = jnp.append(starts[1:], jnp.int32(num_rows))
    q_len = ends - starts
    live = jnp.append(index[:-1] < num_seqs, False)
    kv_len = jnp.where(live, jnp.append(kv_lens, jnp.int32(0)), 0)
    blocks = (q_len + block_q - 1) // block_q
    last = jnp.cumsum(blocks)
    bound = num_rows // block_q + batch + 1
    block = jnp.arange(bound, dtype=jnp.int32)
    sequence = jnp.searchsorted(last, block, side="right").astype(jnp.int32)
    owner = jnp.minimum(sequence, batch)
    first = (block - (last[owner] - blocks[owner])) * block_q
    return BlockMap(sequence, first, starts, q_len, kv_len)


def _kernel(
    inputs: Any,
    out_ref: Any,  # [T, H, D]
    lse_ref: Any,  # [T, H] float32, natural logarithm
    *,
    spec: common.Spec,
    groups: int,
    rows: int,
    block_q: int,
    heads_per_block: int,
    batch: int,
    sm_scale: float | None,
) -> None:
    """Query block program_id(1) of query heads program_id(0)."""
    head_program, block = pl.program_id(0), pl.program_id(1)
    blocks: BlockMap = inputs["blocks"]
    sequence = blocks.sequence[block]

    @pl.when(sequence <= batch)
    def _() -> None:
        head_blocks = pl.cdiv(groups, heads_per_block)
        kv_head = head_program // head_blocks
        lane = jnp.arange(rows, dtype=jnp.int32)
        member = (head_program % head_blocks) * heads_per_block + lane % heads_per_block
        heads = kv_head * groups + member

        q_len, kv_len = blocks.q_len[sequence], blocks.kv_len[sequence]
        first = blocks.first[block]
        query = first + lane // heads_per_block
        ok = (query < q_len) & (member < groups) & (lane < block_q * heads_per_block)
        tokens = blocks.q_start[sequence] + query
        before = kv_len - q_len  # tokens whose queries are not here
        position = before + query
        position_first = before + first
        position_last = jnp.minimum(before + first + block_q, kv_len) - 1

        q, q_scale = common.load_query(spec, inputs["q"], tokens, heads, ok)
        scale = sm_scale if sm_scale is not None else inputs["sm_scale"][0]
        scale = scale * common.LOG2E
        k_scale = common.load_scalar(spec.k_scale, inputs["pool"].k_scale, kv_head)
        scale = scale if k_scale is None else scale * k_scale
        scale = scale if q_scale is None else scale * q_scale
        slope = None
        if spec.alibi:
            slope = plgpu.load(inputs["alibi"].at[heads], mask=ok, other=0.0)
            slope = slope[:, None] * common.LOG2E

        start = jnp.int32(0)
        if spec.window is not None:
            start = jnp.maximum(position_first - spec.window + 1, 0) // spec.block_k
        stop = jnp.maximum((position_last + spec.block_k) // spec.block_k, start)
        acc, m, l = common.attend(
            spec,
            inputs["pool"],
            jnp.minimum(sequence, batch - 1),
            kv_head,
            common.Rows(q, scale, position[:, None], slope),
            common.tile_range(spec, start, stop, position_first, position_last),
            kv_len,
        )
        acc, m, l = common.add_sink(acc, m, l, inputs["sinks"], heads, ok)
        acc, lse = common.finish(acc, m, l)
        v_scale = common.load_scalar(spec.v_scale, inputs["pool"].v_scale, kv_head)
        for x, (at, width, valid) in zip(acc, common.chunks(spec.head_dim), strict=True):
            d = jnp.arange(width, dtype=jnp.int32)[None, :]
            mask = jnp.broadcast_to(ok[:, None] & (d < valid), x.shape)
            x = x if v_scale is None else x * v_scale
            at = out_ref.at[tokens[:, None], heads[:, None], d + at]
            plgpu.store(at, x.astype(out_ref.dtype), mask=mask)
        plgpu.store(lse_ref.at[tokens, heads], lse * common.LN2, mask=ok)


def ragged(
    q: jax.Array,  # [T, H, D]
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    kv_lens: jax.Array,  # [B] int32
    page_indices: jax.Array,  # [B, M] int32
    cu_q_lens: jax.Array,  # [B + 1] int32
    num_seqs: jax.Array,  # [] or [1] int32
    options: AttentionOptions,
    *,
    interpret: bool = False,
    block_k: int | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    compute_capability: float | str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The Pallas kernel behind `ragged_paged_attention`; arguments are as checked there.

    Args:
      interpret: run in JAX's interpreter, on any device.
      block_k: tokens a tile, a power of two from 16; or num_kv_pages_per_block pages.
      num_queries_per_block: query tokens a program handles; by default as many as make 128 rows
        with the heads of a group, fewer where the batch has fewer tokens a sequence.
      num_warps, num_stages: Triton's; the default was chosen by the static gate.
      compute_capability: of the GPU compiled for, when it is not the one at hand.

    Returns:
      out [T, H, D] in q's dtype, lse [T, H] float32 (natural logarithm).

    Raises:
      NotImplementedError: a dtype, layout or size that the kernel does not do.
    """
    capability, _ = common.device_facts(compute_capability)
    k_pages, v_pages = common.prepare_pages(k_pages, v_pages, options.kv_dtype, capability)
    num_rows, num_heads, head_dim = q.shape
    batch = kv_lens.shape[0]
    geometry = common.pool_geometry(options.kv_layout, k_pages)
    groups = num_heads // geometry.num_kv_heads

    wanted = num_queries_per_block or pl.cdiv(num_rows, batch)
    old = capability is not None and capability < 9
    crowded = old and options.soft_cap is not None and options.alibi_slopes is not None
    most = 32 if q.dtype == jnp.float32 else 64 if head_dim > 128 or crowded else 128
    heads_per_block = min(groups, most)
    rows = min(most, max(16, pl.next_power_of_2(min(wanted, most) * heads_per_block)))
    block_q = rows // heads_per_block
    if block_k is None and num_kv_pages_per_block is not None:
        block_k = num_kv_pages_per_block * geometry.page_size
    if rows <= 16 and q.dtype != jnp.float32 and head_dim <= 128:
        # One position a row costs registers that the decode kernel's tile of 128 does not leave.
        block_k, num_warps = block_k or 64, num_warps or 4
    block_k, num_warps, num_stages = common.choose_tiles(
        rows, head_dim, k_pages.dtype, q.dtype, capability, (block_k, num_warps, num_stages)
    )
    spec = common.make_spec(
        options, k_pages, q.dtype, block_k, lanes=rows <= 32, interpret=interpret
    )
    blocks = map_blocks(
        kv_lens, cu_q_lens, num_seqs.reshape(()), num_rows=num_rows, block_q=block_q
    )
    bound = blocks.sequence.shape[0]
    if bound > 65535:
        raise NotImplementedError(
            f"{bound} blocks of queries ({num_rows} tokens) exceed the 65535 of a CUDA grid; split "
            'the batch or use implementation="xla"'
        )
    sm_scale, scale_operand = common.split_scale(options.sm_scale)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            spec=spec,
            groups=groups,
            rows=rows,
            block_q=block_q,
            heads_per_block=heads_per_block,
            batch=batch,
            sm_scale=sm_scale,
        ),
        grid=(geometry.num_kv_heads * pl.cdiv(groups, heads_per_block), bound),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((num_rows, num_heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=f"paged_ragged_m{rows}_k{block_k}_w{num_warps}",
    )(
        {
            "q": q,
            "pool": common.pool_operands(spec, k_pages, v_pages, page_indices, options),
            "blocks": blocks,
            "sm_scale": scale_operand,
            "alibi": options.alibi_slopes,
            "sinks": options.sinks,
        }
    )
