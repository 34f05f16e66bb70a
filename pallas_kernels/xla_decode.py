"""Decode attention in plain XLA: a loop over chunks of tokens with an online softmax.

The trip count is the longest sequence's, found at run time, so a table's width costs nothing. A
sequence's result does not depend on its neighbours: chunks begin at fixed positions, and a chunk of
which it sees nothing changes no bit of its state.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import layouts
from pallas_kernels.options import AttentionOptions
from pallas_kernels.reference import safe_ids, visible

# Tokens a chunk, by measurement on CPUs: longer ones spill out of the cache, shorter ones pay the
# loop's overhead.
CHUNK_TOKENS = 128
LOW = -0.7 * float(jnp.finfo(jnp.float32).max)  # the running maximum before any key is seen


class Softmax(NamedTuple):
    """The state of an online softmax over keys seen so far (any leading axes)."""

    out: jax.Array  # [..., D] float32, not yet divided by total
    top: jax.Array  # [...] float32, the greatest logit
    total: jax.Array  # [...] float32, sum of exp(logit - top)


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
    kv_heads, groups = geo.num_kv_heads, heads // geo.num_kv_heads
    pages = max(1, CHUNK_TOKENS // geo.page_size)
    tables = pad_tables(block_tables, pages)
    q_heads = q.astype(jnp.float32).reshape(batch, kv_heads, groups, head_dim)
    first, last = chunk_range(lengths - 1, lengths, pages * geo.page_size, tables, pages, options)

    def step(i: jax.Array, state: Softmax) -> Softmax:
        ids = jax.lax.dynamic_slice_in_dim(tables, i * pages, pages, axis=1)
        ids, page_ok = safe_ids(ids, geo.num_pages)
        position = i * pages * geo.page_size + jnp.arange(pages * geo.page_size, dtype=jnp.int32)
        mask = visible(position[None, :], lengths[:, None] - 1, options.sliding_window)
        mask &= jnp.repeat(page_ok, geo.page_size, axis=1)  # [B, C]
        k, v = gather_chunk(k_pages, v_pages, ids, mask, options)
        s = jnp.einsum("bkgd,bkcd->bkgc", q_heads, k)
        distance = position[None, :] - (lengths[:, None] - 1)
        s = bend(s, distance[:, None, None, :], ids, options, (1, kv_heads, groups, 1))
        weights = weigh(state, s, mask[:, None, None, :], ids, options)
        return add(state, weights, jnp.einsum("bkgc,bkcd->bkgd", weights.p, v))

    state = jax.lax.fori_loop(first, last, step, empty((batch, kv_heads, groups), head_dim))
    sinks = None if options.sinks is None else options.sinks.reshape(1, kv_heads, groups)
    out, lse = finish(state, sinks)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, heads)


def pad_tables(tables: jax.Array, pages: int) -> jax.Array:
    """[B, M] -> [B, M rounded up to whole chunks], padded with the null page."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages)))


def chunk_range(
    query: jax.Array,  # [B] int32, the position of a query
    lengths: jax.Array,  # [B] int32, 0 where there is none
    chunk: int,
    tables: jax.Array,
    pages: int,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """The chunks that any query sees: from the window's start to the longest length."""
    last = jnp.minimum(-(-jnp.max(lengths) // chunk), tables.shape[1] // pages)
    if options.sliding_window is None:
        return jnp.zeros_like(last), last
    start = jnp.where(lengths > 0, query - options.sliding_window + 1, jnp.iinfo(jnp.int32).max)
    return jnp.minimum(jnp.maximum(jnp.min(start), 0) // chunk, last), last


def gather_chunk(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    ids: jax.Array,  # [..., C/P] int32
    mask: jax.Array,  # [..., C] bool
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """K and V of a chunk's tokens, [..., K, C, D]; V is zero where the mask is False.

    Float32, unless the options ask for narrow products and the pages hold bfloat16.
    """
    k, v = layouts.gather_heads(k_pages, v_pages, ids, options.kv_layout, options.kv_dtype)
    if not (options.narrow_products and k.dtype == v.dtype == jnp.bfloat16):
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    # A dead slot may hold NaN, and 0 * NaN is NaN: V must go, not only its weight. (A NaN logit is
    # replaced, so K may stay.)
    return k, jnp.where(mask[..., None, :, None], v, jnp.zeros((), v.dtype))


def bend(
    s: jax.Array,  # [..., C] float32, q . k
    distance: jax.Array,  # key position - query position, broadcasts against s
    ids: jax.Array,  # [..., C/P]
    options: AttentionOptions,
    head_axes: tuple[int, ...],  # the shape in which [H] broadcasts against s
) -> jax.Array:
    """Applies the scales, soft cap and ALiBi to a chunk's logits."""
    s = s * options.sm_scale
    scale = layouts.gather_scales(options.k_scale, ids, options.kv_layout)  # [..., C or 1, K]
    if scale is not None:
        s = s * over_keys(scale, s.ndim)
    if options.soft_cap is not None:
        s = options.soft_cap * jnp.tanh(s / options.soft_cap)
    if options.alibi_slopes is not None:
        s = s + options.alibi_slopes.reshape(head_axes) * distance.astype(jnp.float32)
    return s


class Weights(NamedTuple):
    """One step of the online softmax, its product with V still to be added."""

    p: jax.Array  # [..., C] float32, exp(logit - top), v_scale included
    shrink: jax.Array  # [...] float32, factor of what was summed before
    top: jax.Array  # [...] float32
    total: jax.Array  # [...] float32


def weigh(
    state: Softmax,
    s: jax.Array,  # [..., C] float32
    mask: jax.Array,  # broadcasts against s
    ids: jax.Array,  # [..., C/P]
    options: AttentionOptions,
) -> Weights:
    """The weights of a chunk of keys, relative to the new greatest logit."""
    s = jnp.where(mask, s, LOW)  # before anything else: a masked logit may be NaN
    top = jnp.maximum(state.top, jnp.max(s, axis=-1))
    # A row that has seen no key yet must not read exp(LOW - LOW) = 1 as a weight. (Masking the
    # weights instead takes XLA's CPU backend 2.5 times as long.)
    base = jnp.where(top > LOW, top, 0.0)
    # The barrier keeps XLA from computing the exponentials twice, for the sum and the product.
    p = jax.lax.optimization_barrier(jnp.exp(s - base[..., None]))
    shrink = jnp.exp(state.top - top)
    total = state.total * shrink + jnp.sum(p, axis=-1)
    scale = layouts.gather_scales(options.v_scale, ids, options.kv_layout)
    if scale is not None:
        # A dead slot has a weight of 0 but may have a scale of NaN.
        p = jnp.where(mask, p * over_keys(scale, s.ndim), 0.0)
    return Weights(p, shrink, top, total)


def add(state: Softmax, w: Weights, product: jax.Array) -> Softmax:
    """Adds a chunk's weighted values to the state."""
    return Softmax(state.out * w.shrink[..., None] + product, w.top, w.total)


def over_keys(scale: jax.Array, ndim: int) -> jax.Array:
    """[.., C or 1, K] -> [.., K, 1 .., C or 1], to broadcast against logits of `ndim` axes."""
    flipped = jnp.swapaxes(scale, -1, -2)
    return jnp.expand_dims(flipped, tuple(range(flipped.ndim - 1, ndim - 1)))


def empty(rows: tuple[int, ...], head_dim: int) -> Softmax:
    """The state before any key."""
    return Softmax(
        out=jnp.zeros((*rows, head_dim), jnp.float32),
        top=jnp.full(rows, LOW, jnp.float32),
        total=jnp.zeros(rows, jnp.float32),
    )


def finish(state: Softmax, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp; a row that saw no key is zeros and -inf."""
    seen = state.total > 0
    top, total, out = state.top, state.total, state.out
    if sinks is not None:
        top = jnp.maximum(state.top, sinks)
        shrink = jnp.exp(state.top - top)
        total, out = total * shrink + jnp.exp(sinks - top), out * shrink[..., None]
    total = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, top + jnp.log(total), -jnp.inf)
    return jnp.where(seen[..., None], out / total[..., None], 0.0), lse
