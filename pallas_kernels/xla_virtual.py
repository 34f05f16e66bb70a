"""Decode attention for the CPU's page layout "NKDP": neither products nor gathered keys.

Scores are written as an array over ALL pages, F[b, n, k, g, p] = sum_d q[b, k, g, d] * K[n, k, d, p],
the sum spelled out term by term, and the block table then gathers from F. XLA fuses the expression
into the gather: F never exists, only the table's pages are computed, each read once from the pool
where it lies, in vectors over p. Weights times V likewise, in vectors over d.

Rows are taken longest first in small groups, each group with its own number of chunks: work grows
with the tokens present, not with the batch times its longest sequence, and a row's arithmetic is the
same in every batch.

On 2 cores (3 KV heads of 64, 3 queries each, P = 16, float32 and bfloat16 alike) this takes half the
time of the chunk loop in `xla_decode`. It rests on XLA's fusion, so a test watches the size of the
compiled program's temporaries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import layouts
from pallas_kernels.options import AttentionOptions
from pallas_kernels.reference import safe_ids, visible
from pallas_kernels.xla_decode import (
    Softmax,
    add,
    bend,
    chunk_range,
    empty,
    finish,
    pad_tables,
    weigh,
)

# By measurement, 32 rows of 50-350 or of 1,024 tokens, in vectors of 512 bits: chunks of 64 or 256,
# or groups of 2 or 8 rows, take 1.0 to 1.4 times as long.
CHUNK_TOKENS = 128
GROUP_ROWS = 4
MAX_TERMS = 256  # D + P terms are spelled out; past this the program takes too long to compile


def applies(q: jax.Array, k_pages: jax.Array, options: AttentionOptions) -> bool:
    """Whether this form is the fast one for a call."""
    if options.kv_layout != "NKDP" or k_pages.dtype not in (jnp.float32, jnp.uint16):
        return False
    return sum(k_pages.shape[2:]) <= MAX_TERMS


def decode(
    q: jax.Array,  # [B, H, D]
    k_pages: jax.Array,  # [N, K, D, P] float32, or uint16 bits of bfloat16
    v_pages: jax.Array,  # [N, K, P, D]
    block_tables: jax.Array,  # [B, M] int32
    lengths: jax.Array,  # [B] int32
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:  # [B, H, D] like q, [B, H] float32
    """One query token a sequence: the last of `lengths` tokens."""
    geo = layouts.geometry(k_pages.shape, options.kv_layout)
    batch, heads, head_dim = q.shape
    pages = max(1, CHUNK_TOKENS // geo.page_size)
    group = min(GROUP_ROWS, batch)
    # Longest first, so that neighbours in a group are alike; one sort serves every layer.
    order = jnp.argsort(-lengths)
    padding = -batch % group

    def sorted_rows(x: jax.Array) -> jax.Array:
        return jnp.pad(x[order], ((0, padding), *((0, 0) for _ in x.shape[1:])))

    rows = (
        sorted_rows(q.astype(jnp.float32).reshape(batch, geo.num_kv_heads, -1, head_dim)),
        sorted_rows(pad_tables(block_tables, pages)),
        sorted_rows(lengths),
    )

    def body(i: jax.Array, state: Softmax) -> Softmax:
        q, tables, lens = (jax.lax.dynamic_slice_in_dim(x, i * group, group) for x in rows)
        new = _group(q, k_pages, v_pages, tables, lens, pages, geo, options)
        return Softmax(
            *(
                jax.lax.dynamic_update_slice_in_dim(x, y, i * group, axis=0)
                for x, y in zip(state, new, strict=True)
            )
        )

    groups = -(-jnp.sum(lengths > 0, dtype=jnp.int32) // group)
    state = jax.lax.fori_loop(0, groups, body, empty(rows[0].shape[:3], head_dim))
    sinks = None if options.sinks is None else options.sinks.reshape(1, *rows[0].shape[1:3])
    out, lse = finish(state, sinks)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(batch, dtype=order.dtype))
    return out[place].reshape(q.shape).astype(q.dtype), lse[place].reshape(batch, heads)


def _group(
    q: jax.Array,  # [W, K, G, D] float32
    k_pages: jax.Array,
    v_pages: jax.Array,
    tables: jax.Array,  # [W, M] int32, M whole chunks
    lengths: jax.Array,  # [W] int32
    pages: int,
    geo: layouts.Geometry,
    options: AttentionOptions,
) -> Softmax:
    """The softmax state of a few rows after all their chunks."""
    width, kv_heads, groups, head_dim = q.shape
    size = geo.page_size
    q_heads = q[:, None]
    first, last = chunk_range(lengths - 1, lengths, pages * size, tables, pages, options)
    row = jnp.arange(width, dtype=jnp.uint32)[:, None]
    column = jnp.arange(pages, dtype=jnp.uint32)[None, :]

    def step(i: jax.Array, state: Softmax) -> Softmax:
        # Without the barrier XLA moves the widening of bfloat16 out of the loop, and widens the
        # whole pool.
        k_all, v_all, i = jax.lax.optimization_barrier((k_pages, v_pages, i))
        ids = jax.lax.dynamic_slice_in_dim(tables, i * pages, pages, axis=1)
        ids, page_ok = safe_ids(ids, geo.num_pages)
        at = ids.astype(jnp.uint32)
        position = i * pages * size + jnp.arange(pages * size, dtype=jnp.int32)
        mask = visible(position[None, :], lengths[:, None] - 1, options.sliding_window)
        mask &= jnp.repeat(page_ok, size, axis=1)  # [B, C*P]

        scores = _sum(
            q_heads[..., d, None] * _widen(k_all[:, :, d, :])[None, :, :, None, :]
            for d in range(head_dim)
        )  # [W, N, K, G, P], virtual
        s = scores.at[row, at].get(mode="promise_in_bounds")  # [W, C, K, G, P]
        s = s.transpose(0, 2, 3, 1, 4).reshape(width, kv_heads, groups, pages * size)
        distance = position[None, :] - (lengths[:, None] - 1)
        s = bend(s, distance[:, None, None, :], ids, options, (1, kv_heads, groups, 1))
        weights = weigh(state, s, mask[:, None, None, :], ids, options)

        p = weights.p.reshape(width, kv_heads, groups, pages, size).transpose(0, 3, 1, 2, 4)
        p = p[:, :, None]  # [W, C, 1, K, G, P]
        live = mask.reshape(width, pages, 1, 1, 1, size)
        values = _sum(
            # Dead slots may hold NaN: V itself must go, not only its weight.
            p[..., j, None]
            * jnp.where(
                live[..., j, None], _widen(v_all[:, :, j, :])[None, None, :, :, None, :], 0.0
            )
            for j in range(size)
        )  # [W, C, N, K, G, D], virtual
        taken = values.at[row, column, at].get(mode="promise_in_bounds")  # [W, C, K, G, D]
        return add(state, weights, jnp.sum(taken, axis=1))

    return jax.lax.fori_loop(first, last, step, empty((width, kv_heads, groups), head_dim))


def _widen(pages: jax.Array) -> jax.Array:
    """Float32 numbers of pages that hold float32 or the bits of bfloat16."""
    if pages.dtype == jnp.uint16:
        # In integers, so that it vectorises: a bfloat16 is the upper half of a float32.
        bits = pages.astype(jnp.uint32) << 16
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    return pages


def _sum(terms) -> jax.Array:  # type: ignore[no-untyped-def]
    """Sums terms as four independent chains, so that no addition waits for the one before."""
    chains: list[jax.Array | None] = [None] * 4
    for i, term in enumerate(terms):
        so_far = chains[i % 4]
        chains[i % 4] = term if so_far is None else so_far + term
    total = None
    for chain in chains:
        if chain is not None:
            total = chain if total is None else total + chain
    assert total is not None
    return total
