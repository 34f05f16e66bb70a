"""Ragged attention in plain XLA: a loop over blocks of query rows, each with its own chunks of keys.

A block is BLOCK_ROWS consecutive positions of ONE sequence, and begins at a multiple of BLOCK_ROWS;
chunks of keys begin at fixed positions too. So a token's arithmetic is the same however the batch
is packed and the prompt is cut, and work grows with the tokens present, not with T, B or M.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import layouts
from pallas_kernels.options import AttentionOptions
from pallas_kernels.reference import clean_cu, safe_ids, visible
from pallas_kernels.xla_decode import (
    CHUNK_TOKENS,
    add,
    bend,
    chunk_range,
    empty,
    finish,
    gather_chunk,
    pad_tables,
    weigh,
)

# Query positions a block, and blocks in one iteration. Prefills of SmolLM2-135M in bfloat16 on 2 cores
# take 1.1 times as long with four blocks of 32 or two of 64, 1.2 with one of 128, 1.3 with sixteen of
# 32: scores should stay in a core's cache.
BLOCK_ROWS = 64
LANES = 1


class Plan(NamedTuple):
    """Which blocks of query rows there are."""

    ends: jax.Array  # [B] int32: blocks of sequences 0..b
    start: jax.Array  # [B] int32: position of a sequence's first query
    stop: jax.Array  # [B] int32: one past its last; start where there is none
    first_row: jax.Array  # [B] int32: row of q of its first query


def plan_blocks(
    kv_lens: jax.Array,  # [B] int32
    cu_q_lens: jax.Array,  # [B + 1] int32
    num_seqs: jax.Array,  # [] int32
) -> Plan:
    """Cuts every sequence's queries into blocks aligned to positions."""
    cu = clean_cu(cu_q_lens, num_seqs)
    q_lens = cu[1:] - cu[:-1]
    live = (jnp.arange(kv_lens.shape[0], dtype=jnp.int32) < num_seqs) & (q_lens > 0)
    stop = jnp.where(live, kv_lens, 0)
    start = jnp.where(live, kv_lens - q_lens, 0)
    blocks = jnp.where(live, -(-stop // BLOCK_ROWS) - start // BLOCK_ROWS, 0)
    return Plan(jnp.cumsum(blocks, dtype=jnp.int32), start, stop, cu[:-1])


class Block(NamedTuple):
    """LANES blocks of query rows."""

    sequence: jax.Array  # [W] int32
    position: jax.Array  # [W, R] int32
    row: jax.Array  # [W] int32: row of q of each block's first position; may be negative
    live: jax.Array  # [W, R] bool


def take_blocks(plan: Plan, index: jax.Array) -> Block:
    """The blocks number `index` [W]; past the last one, blocks without a live row."""
    batch = plan.ends.shape[0]
    sequence = jnp.searchsorted(plan.ends, index, side="right").astype(jnp.int32)
    exists = sequence < batch
    sequence = jnp.minimum(sequence, batch - 1)
    start, stop = plan.start[sequence], plan.stop[sequence]
    before = jnp.where(sequence > 0, plan.ends[sequence - 1], 0)
    block_start = (start // BLOCK_ROWS + index - before) * BLOCK_ROWS
    position = block_start[:, None] + jnp.arange(BLOCK_ROWS, dtype=jnp.int32)[None, :]
    live = exists[:, None] & (position >= start[:, None]) & (position < stop[:, None])
    row = jnp.where(exists, plan.first_row[sequence] + block_start - start, 0)
    return Block(sequence, position, row, live)


def ragged(
    q: jax.Array,  # [T, H, D]
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    kv_lens: jax.Array,  # [B] int32
    page_indices: jax.Array,  # [B, M] int32
    cu_q_lens: jax.Array,  # [B + 1] int32
    num_seqs: jax.Array,  # [] int32
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:  # [T, H, D] like q, [T, H] float32
    """The last q_len tokens of each sequence, packed one after another."""
    geo = layouts.geometry(k_pages.shape, options.kv_layout)
    tokens, heads, head_dim = q.shape
    pages = max(1, CHUNK_TOKENS // geo.page_size)
    tables = pad_tables(page_indices, pages)
    plan = plan_blocks(kv_lens, cu_q_lens, num_seqs)
    # Blocks overhang their sequence's rows on both sides: margins make every slice in range.
    margins = ((BLOCK_ROWS, BLOCK_ROWS), (0, 0), (0, 0))
    padded_q = jnp.pad(q.astype(jnp.float32), margins)
    out = jnp.zeros((tokens + 2 * BLOCK_ROWS, heads, head_dim), jnp.float32)
    lse = jnp.full((tokens + 2 * BLOCK_ROWS, heads), -jnp.inf, jnp.float32)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = carry
        block = take_blocks(plan, i * LANES + jnp.arange(LANES, dtype=jnp.int32))
        rows = [
            jax.lax.dynamic_slice_in_dim(padded_q, block.row[w] + BLOCK_ROWS, BLOCK_ROWS)
            for w in range(LANES)
        ]
        new_out, new_lse = attend_blocks(
            jnp.stack(rows), block, k_pages, v_pages, tables, pages, geo, options
        )
        for w in range(LANES):
            at = block.row[w] + BLOCK_ROWS
            out = _merge_rows(out, new_out[w], block.live[w], at)
            lse = _merge_rows(lse, new_lse[w], block.live[w], at)
        return out, lse

    trips = -(-plan.ends[-1] // LANES)
    out, lse = jax.lax.fori_loop(0, trips, body, (out, lse))
    inside = slice(BLOCK_ROWS, BLOCK_ROWS + tokens)
    return out[inside].astype(q.dtype), lse[inside]


def attend_blocks(
    q: jax.Array,  # [W, R, H, D] float32
    block: Block,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    tables: jax.Array,  # [B, M] int32, M whole chunks
    pages: int,
    geo: layouts.Geometry,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:  # [W, R, H, D] float32, [W, R, H] float32
    """Online softmax of each block over the chunks of keys that its last row sees."""
    lanes, block_rows, heads, head_dim = q.shape
    kv_heads, groups = geo.num_kv_heads, heads // geo.num_kv_heads
    q_heads = q.reshape(lanes, block_rows, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    row_tables = tables[block.sequence]  # [W, M]
    chunk = pages * geo.page_size
    # The first live row sees the earliest key of a window, the last one the latest.
    newest = jnp.max(jnp.where(block.live, block.position + 1, 0), axis=1)  # [W]
    oldest = jnp.min(jnp.where(block.live, block.position, jnp.iinfo(jnp.int32).max), axis=1)
    first, last = chunk_range(oldest, newest, chunk, tables, pages, options)

    def step(i: jax.Array, state):  # type: ignore[no-untyped-def]
        ids = jax.lax.dynamic_slice_in_dim(row_tables, i * pages, pages, axis=1)
        ids, page_ok = safe_ids(ids, geo.num_pages)
        key = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        # A chunk's keys past the block's newest row may be dead slots for all its rows.
        usable = jnp.repeat(page_ok, geo.page_size, axis=1) & (key[None, :] < newest[:, None])
        mask = visible(key[None, None, :], block.position[:, :, None], options.sliding_window)
        mask &= usable[:, None, :] & block.live[:, :, None]
        k, v = gather_chunk(k_pages, v_pages, ids, usable, options)
        s = _product("wkgrd,wkcd->wkgrc", q_heads, k)
        distance = key[None, None, :] - block.position[:, :, None]
        s = bend(s, distance[:, None, None], ids, options, (1, kv_heads, groups, 1, 1))
        weights = weigh(state, s, mask[:, None, None], ids, options)
        return add(state, weights, _product("wkgrc,wkcd->wkgrd", weights.p, v))

    rows = (lanes, kv_heads, groups, block_rows)
    state = jax.lax.fori_loop(first, last, step, empty(rows, head_dim))
    sinks = None if options.sinks is None else options.sinks.reshape(1, kv_heads, groups, 1)
    out, lse = finish(state, sinks)
    out = out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
    return out, lse.transpose(0, 3, 1, 2).reshape(q.shape[:3])


def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """In the type of y, which comes from pages; sums and result are float32."""
    return jnp.einsum(axes, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


def _merge_rows(all_rows: jax.Array, new: jax.Array, live: jax.Array, at: jax.Array) -> jax.Array:
    """Writes the live rows of a block at `at`, in place."""
    old = jax.lax.dynamic_slice_in_dim(all_rows, at, BLOCK_ROWS)
    keep = live.reshape(-1, *(1,) * (new.ndim - 1))
    return jax.lax.dynamic_update_slice_in_dim(all_rows, jnp.where(keep, new, old), at, axis=0)
