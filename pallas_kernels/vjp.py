"""The gradient of attention over pages, into the queries, the pages and the real-valued options.

The backward pass walks the same blocks of query rows and chunks of keys as `xla_ragged`, recomputes
the weights from the saved log-sum-exp, and adds each chunk's gradient to the pages it came from, so
that a page which several sequences share receives the sum. With p the weights, do the cotangent of
the output, and delta = sum_d do * out:

    dv = p^T do        ds = p * (do v^T - delta + dlse)        dq = ds k        dk = ds^T q

Reference: Dao, "FlashAttention-2", 2023, algorithm 2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import layouts
from pallas_kernels.options import AttentionOptions
from pallas_kernels.reference import safe_ids, visible
from pallas_kernels.xla_decode import chunk_range, pad_tables
from pallas_kernels.xla_ragged import BLOCK_ROWS, CHUNK_TOKENS, Block, plan_blocks, take_blocks

Result = tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ragged(
    run: Callable[..., Result],
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    options: AttentionOptions,
) -> Result:
    """Ragged attention by the backend `run`, with a gradient."""
    return run(q, k_pages, v_pages, kv_lens, page_indices, cu_q_lens, num_seqs, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def decode(
    run: Callable[..., Result],
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
) -> Result:
    """Decode by the backend `run`; the gradient is ragged attention's, one query a sequence."""
    return run(q, k_pages, v_pages, block_tables, lengths, options)


class Sums(NamedTuple):
    """Gradients while they are summed, in float32; pages in [N, P, K, D]."""

    q: jax.Array  # [margin + T + margin, H, D]
    k_pages: jax.Array
    v_pages: jax.Array
    sm_scale: jax.Array  # []
    alibi_slopes: jax.Array  # [H]


class Rows(NamedTuple):
    """What the backward pass reads of each query row, with a margin of BLOCK_ROWS at both ends."""

    q: jax.Array  # [.., H, D]
    d_out: jax.Array  # [.., H, D]
    lse: jax.Array  # [.., H]
    slope: jax.Array  # [.., H]: delta - dlse


def _ragged_forward(run: Callable[..., Result], *arguments: Any) -> tuple[Result, Any]:
    out, lse = run(*arguments)
    return (out, lse), (*arguments, out, lse)


def _ragged_backward(run: Any, saved: Any, cotangents: Result) -> tuple[Any, ...]:
    del run  # the gradient needs its results only
    return _backward(saved, cotangents)


def _decode_forward(run: Callable[..., Result], *arguments: Any) -> tuple[Result, Any]:
    out, lse = run(*arguments)
    return (out, lse), (*arguments, out, lse)


def _decode_backward(run: Any, saved: Any, cotangents: Result) -> tuple[Any, ...]:
    del run
    q, k_pages, v_pages, tables, lengths, options, out, lse = saved
    batch = q.shape[0]
    cu, count = jnp.arange(batch + 1, dtype=jnp.int32), jnp.int32(batch)
    packed = (q, k_pages, v_pages, lengths, tables, cu, count, options, out, lse)
    d_q, d_k, d_v, *_, d_options = _backward(packed, cotangents)
    return d_q, d_k, d_v, None, None, d_options


def _backward(saved: Any, cotangents: Result) -> tuple[Any, ...]:
    q, k_pages, v_pages, kv_lens, tables, cu_q_lens, num_seqs, options, out, lse = saved
    if options.k_scale is not None or options.v_scale is not None:
        raise NotImplementedError(
            'The gradient through quantised pages needs implementation="reference".'
        )
    geo = layouts.geometry(k_pages.shape, options.kv_layout)
    plan = plan_blocks(kv_lens, cu_q_lens, num_seqs)
    pages = max(1, CHUNK_TOKENS // geo.page_size)
    tables = pad_tables(tables, pages)
    d_out, d_lse = (x.astype(jnp.float32) for x in cotangents)
    seen = lse > -jnp.inf
    slope = jnp.sum(d_out * out.astype(jnp.float32), axis=-1) - jnp.where(seen, d_lse, 0.0)
    safe_lse = jnp.where(seen, lse, 0.0)
    rows = Rows(*(_with_margins(x.astype(jnp.float32)) for x in (q, d_out, safe_lse, slope)))

    def body(i: jax.Array, sums: Sums) -> Sums:
        block = take_blocks(plan, i[None])
        return _block_backward(block, rows, sums, k_pages, v_pages, tables, pages, geo, options)

    pool = jnp.zeros((geo.num_pages, geo.page_size, geo.num_kv_heads, geo.head_dim), jnp.float32)
    zeros = Sums(jnp.zeros_like(rows.q), pool, pool, jnp.float32(0), jnp.zeros(q.shape[1]))
    sums = jax.lax.fori_loop(0, plan.ends[-1], body, zeros)

    d_q = sums.q[BLOCK_ROWS : BLOCK_ROWS + q.shape[0]].astype(q.dtype)
    d_k, d_v = _to_layout(sums.k_pages, sums.v_pages, k_pages.dtype, options.kv_layout)
    if options.sinks is None:
        d_sinks = None
    else:  # a sink is a logit with a value of zero
        weight = jnp.where(seen, jnp.exp(options.sinks[None, :] - safe_lse), 0.0)
        d_sinks = -jnp.sum(weight * slope, axis=0)
    d_options = dataclasses.replace(
        options,
        sm_scale=sums.sm_scale,
        alibi_slopes=None if options.alibi_slopes is None else sums.alibi_slopes,
        sinks=d_sinks,
    )
    return d_q, d_k, d_v, None, None, None, None, d_options


def _block_backward(
    block: Block,
    rows: Rows,
    sums: Sums,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    tables: jax.Array,
    pages: int,
    geo: layouts.Geometry,
    options: AttentionOptions,
) -> Sums:
    """Adds the gradient of one block of query rows."""
    kv_heads, chunk = geo.num_kv_heads, pages * geo.page_size
    groups = rows.q.shape[1] // kv_heads
    at = block.row[0] + BLOCK_ROWS
    position, live = block.position[0], block.live[0]  # [R]

    def heads_first(x: jax.Array) -> jax.Array:  # [.., H, ..] -> [K, G, R, ..]
        x = jax.lax.dynamic_slice_in_dim(x, at, BLOCK_ROWS)
        x = x.reshape(BLOCK_ROWS, kv_heads, groups, *x.shape[2:])
        return jnp.moveaxis(x, 0, 2)

    q, d_out, lse, slope = (heads_first(x) for x in rows)
    newest = jnp.max(jnp.where(live, position + 1, 0))
    oldest = jnp.min(jnp.where(live, position, jnp.iinfo(jnp.int32).max))
    first, last = chunk_range(oldest[None], newest[None], chunk, tables, pages, options)
    table = tables[block.sequence[0]]

    def step(i: jax.Array, carry: tuple[jax.Array, Sums]) -> tuple[jax.Array, Sums]:
        d_q, sums = carry
        ids = jax.lax.dynamic_slice_in_dim(table, i * pages, pages)
        ids, page_ok = safe_ids(ids, geo.num_pages)
        key = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        usable = jnp.repeat(page_ok, geo.page_size) & (key < newest)
        mask = visible(key[None, :], position[:, None], options.sliding_window)
        mask = (mask & usable[None, :] & live[:, None])[None, None]  # [1, 1, R, C]
        k, v = layouts.gather_heads(k_pages, v_pages, ids, options.kv_layout, options.kv_dtype)
        k, v = (jnp.where(usable[None, :, None], x.astype(jnp.float32), 0.0) for x in (k, v))
        dots = jnp.einsum("kgrd,kcd->kgrc", q, k)
        s = dots * options.sm_scale
        bent = jnp.ones_like(s)  # the soft cap's derivative
        if options.soft_cap is not None:
            tanh = jnp.tanh(s / options.soft_cap)
            s, bent = options.soft_cap * tanh, 1.0 - tanh * tanh
        distance = (key[None, :] - position[:, None]).astype(jnp.float32)[None, None]
        if options.alibi_slopes is not None:
            s = s + options.alibi_slopes.reshape(kv_heads, groups, 1, 1) * distance
        p = jnp.where(mask, jnp.exp(jnp.where(mask, s, 0.0) - lse[..., None]), 0.0)
        d_p = jnp.einsum("kgrd,kcd->kgrc", d_out, v)
        d_s = p * (d_p - slope[..., None])
        d_dots = d_s * bent * options.sm_scale
        d_k = jnp.einsum("kgrc,kgrd->ckd", d_dots, q).reshape(-1, geo.page_size, *k.shape[::2])
        d_v = jnp.einsum("kgrc,kgrd->ckd", p, d_out).reshape(d_k.shape)
        sums = sums._replace(
            k_pages=sums.k_pages.at[ids].add(d_k),
            v_pages=sums.v_pages.at[ids].add(d_v),
            sm_scale=sums.sm_scale + jnp.sum(d_s * bent * dots),
            alibi_slopes=sums.alibi_slopes + jnp.sum(d_s * distance, axis=(2, 3)).reshape(-1),
        )
        return d_q + jnp.einsum("kgrc,kcd->kgrd", d_dots, k), sums

    d_q, sums = jax.lax.fori_loop(first, last, step, (jnp.zeros_like(q), sums))
    d_q = jnp.moveaxis(d_q, 2, 0).reshape(BLOCK_ROWS, *rows.q.shape[1:])
    # Rows outside the sequence have d_q = 0, so neighbours are left as they are.
    old = jax.lax.dynamic_slice_in_dim(sums.q, at, BLOCK_ROWS)
    return sums._replace(q=jax.lax.dynamic_update_slice_in_dim(sums.q, old + d_q, at, axis=0))


def _with_margins(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((BLOCK_ROWS, BLOCK_ROWS), *((0, 0),) * (x.ndim - 1)))


def _to_layout(
    d_k: jax.Array,  # [N, P, K, D] float32
    d_v: jax.Array,
    dtype: Any,
    kv_layout: str,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Gradients as the pages are laid out; None where the pages are not real numbers."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return None, None
    d_k, d_v = d_k.astype(dtype), d_v.astype(dtype)
    if kv_layout == "NP2KD":
        n, p, k, d = d_k.shape
        return jnp.stack([d_k, d_v], axis=3).reshape(n, p, 2 * k, d), None
    v_layout = "NKPD" if kv_layout == "NKDP" else kv_layout
    return _permute(d_k, kv_layout), _permute(d_v, v_layout)


def _permute(x: jax.Array, kv_layout: str) -> jax.Array:
    return x.transpose(*("NPKD".index(axis) for axis in kv_layout))


ragged.defvjp(_ragged_forward, _ragged_backward)
decode.defvjp(_decode_forward, _decode_backward)
