"""The readable specification of attention over pages: gather, mask, softmax, weighted sum, in float32.

In the words of the paper: for each query token, for each logical page, the physical page is
`block_table[logical]`; score its keys, take the softmax over all of them, sum their values. Ragged
attention is decode attention in which each query token has the table of its sequence and a length
that ends at itself. Memory is O(T * M * P): for tests and small models. Differentiable by JAX alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import layouts
from pallas_kernels.options import AttentionOptions

_HIGHEST = jax.lax.Precision.HIGHEST


def decode(
    q: jax.Array,  # [B, H, D]
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_tables: jax.Array,  # [B, M] int32
    lengths: jax.Array,  # [B] int32
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:  # [B, H, D] like q, [B, H] float32
    """One query token a sequence: the last of `lengths` tokens."""
    geo = layouts.geometry(k_pages.shape, options.kv_layout)
    batch, heads, head_dim = q.shape
    groups = heads // geo.num_kv_heads

    ids, page_ok = safe_ids(block_tables, geo.num_pages)  # [B, M]
    position = jnp.arange(block_tables.shape[1] * geo.page_size, dtype=jnp.int32)[None, :]  # [1, S]
    mask = visible(position, lengths[:, None] - 1, options.sliding_window)
    mask &= jnp.repeat(page_ok, geo.page_size, axis=1)  # [B, S]

    k, v = layouts.gather_kv(k_pages, v_pages, ids, options.kv_layout, options.kv_dtype)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)  # [B, S, K, D]
    k_scale = layouts.gather_scales(options.k_scale, ids, options.kv_layout)
    v_scale = layouts.gather_scales(options.v_scale, ids, options.kv_layout)
    k = k if k_scale is None else k * k_scale[..., None]
    v = v if v_scale is None else v * v_scale[..., None]
    # A slot that nobody wrote may hold NaN, and 0 * NaN is NaN: remove K and V, not only logits.
    k = jnp.where(mask[..., None, None], k, 0.0)
    v = jnp.where(mask[..., None, None], v, 0.0)

    q_heads = q.astype(jnp.float32).reshape(batch, geo.num_kv_heads, groups, head_dim)
    s = jnp.einsum("bkgd,bskd->bkgs", q_heads, k, precision=_HIGHEST) * options.sm_scale
    if options.soft_cap is not None:
        s = options.soft_cap * jnp.tanh(s / options.soft_cap)
    if options.alibi_slopes is not None:
        distance = (position - (lengths[:, None] - 1)).astype(jnp.float32)  # <= 0 where visible
        slopes = options.alibi_slopes.reshape(1, geo.num_kv_heads, groups, 1)
        s = s + slopes * distance[:, None, None, :]
    s = jnp.where(mask[:, None, None, :], s, -jnp.inf)  # [B, K, G, S]

    sinks = None
    if options.sinks is not None:
        sinks = options.sinks.reshape(1, geo.num_kv_heads, groups)
    weights, lse = softmax(s, sinks)
    out = jnp.einsum("bkgs,bskd->bkgd", weights, v, precision=_HIGHEST)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, heads)


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
    rows = query_rows(q.shape[0], kv_lens, cu_q_lens, num_seqs)
    lengths = jnp.where(rows.live, rows.position + 1, 0)
    return decode(q, k_pages, v_pages, page_indices[rows.sequence], lengths, options)


class QueryRows(NamedTuple):
    """Whose token each row of a packed q is."""

    sequence: jax.Array  # [T] int32, in range
    position: jax.Array  # [T] int32, in its sequence
    live: jax.Array  # [T] bool: False past the last sequence


def query_rows(
    num_rows: int,
    kv_lens: jax.Array,  # [B] int32
    cu_q_lens: jax.Array,  # [B + 1] int32
    num_seqs: jax.Array,  # [] int32
) -> QueryRows:
    """Sequence and position of every packed row; entries past `num_seqs` are not believed."""
    batch = kv_lens.shape[0]
    ends = clean_cu(cu_q_lens, num_seqs)[1:]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    live = row < ends[-1]
    sequence = jnp.minimum(sequence, batch - 1)
    position = kv_lens[sequence] - ends[sequence] + row
    return QueryRows(sequence, position, live)


def clean_cu(cu_q_lens: jax.Array, num_seqs: jax.Array) -> jax.Array:
    """cu_q_lens whose entries past `num_seqs` repeat the last valid one."""
    index = jnp.arange(cu_q_lens.shape[0], dtype=jnp.int32)
    return cu_q_lens[jnp.minimum(index, num_seqs)]


def safe_ids(tables: jax.Array, num_pages: int) -> tuple[jax.Array, jax.Array]:
    """Table entries with every id that is no page replaced by 0, and which were pages."""
    ok = (tables >= 0) & (tables < num_pages)
    return jnp.where(ok, tables, 0), ok


def visible(key: jax.Array, query: jax.Array, sliding_window: int | None) -> jax.Array:
    """Whether the key at position `key` is seen from `query`: causal, and within the window."""
    mask = key <= query
    if sliding_window is not None:
        mask &= key > query - sliding_window
    return mask


def softmax(s: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last axis (-inf: absent) with an optional sink; a row of nothing is zeros."""
    any_key = jnp.any(s > -jnp.inf, axis=-1)
    top = jnp.max(s, axis=-1)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(any_key, top, 0.0))
    e = jnp.exp(s - top[..., None])
    total = jnp.sum(e, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    total = jnp.where(any_key, total, 1.0)
    lse = jnp.where(any_key, top + jnp.log(total), -jnp.inf)
    return e / total[..., None], lse
