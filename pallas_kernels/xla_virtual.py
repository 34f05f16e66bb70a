"""Decode attention for the CPU's page layout "NKDP": neither products nor gathered keys.

Scores are written as an array over ALL pages, F[b, n, k, g, p] = sum_d q[b, k, g, d] * K[n, k, d, p],
the sum spelled out term by term, and the block table then gathers from F. XLA fuses the expression
into the gather: F never exists, only the table's pages are computed, each read once from the pool
where it lies, in vectors over p. Weights times V likewise, in vectors over d.

A sequence is cut into a few spans of chunks, whose softmax states are joined at the end. Spans are
taken longest first in small groups, each group with its own number of chunks: work grows with the
tokens present, not with the batch times its longest sequence, and a lone long sequence is a group of
its own. Where a sequence is cut depends on its length alone, so a row's arithmetic is the same in
every batch.

On 2 cores (3 KV heads of 64, 3 queries each, P = 16, float32 and bfloat16 alike) this takes half the
time of the chunk loop in `xla_decode`. It rests on XLA's fusion, so a test watches the size of the
compiled program's temporaries.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import layouts
from pallas_kernels.options import AttentionOptions
from pallas_kernels.reference import safe_ids, visible
from pallas_kernels.xla_decode import (
    LOW,
    Softmax,
    bend,
    empty,
    finish,
    over_keys,
    pad_tables,
)

# By measurement, with pages in huge pages of memory: 32 rows of 50-350 tokens take 1.1 times as long in
# chunks of 64; groups of 32 spans are 1.1 times as fast where all are as long, and as much slower
# where they are not; with 8 rows of which few are alive, groups of 8 take 1.5 times as long as groups
# of 4. Cut into spans, one row of 1,000 tokens takes 0.6 of the time that it takes whole, 30 rows of
# exponentially distributed lengths (mean 400) 0.7, and 32 rows of 1,024 each 1.06.
CHUNK_TOKENS = 128
SPANS, SPAN_TOKENS = 4, 384  # at most so many spans a sequence, of so many tokens or more
GROUP = 16  # spans
FEW_ROWS, GROUP_OF_FEW = 8, 4
# D terms are spelled out, and P for each page that is summed in place; past this D + P the program
# takes too long to compile.
MAX_TERMS = 256
# Up to so many pages of a chunk are gathered and summed in one kernel; with more, each page's product
# is stored and then summed: 1.1 times as long, but quick to compile.
MAX_GATHERS = 8


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
    q_rows = q.astype(jnp.float32).reshape(batch, geo.num_kv_heads, -1, head_dim)
    pages = max(1, CHUNK_TOKENS // geo.page_size)
    tables = pad_tables(block_tables, pages)
    group = GROUP if batch > FEW_ROWS else GROUP_OF_FEW
    plan = _plan(lengths, tables.shape[1] // pages, pages * geo.page_size, group, options)

    def body(i: jax.Array, state: Softmax) -> Softmax:
        at = i * group
        row, first, count = (
            jax.lax.dynamic_slice_in_dim(x, at, group) for x in (plan.row, plan.first, plan.chunks)
        )
        new = _group(
            q_rows.at[row].get(mode="promise_in_bounds"),
            *(k_pages, v_pages, tables, row, lengths[row], first, count, pages, geo, options),
        )
        return Softmax(
            *(
                jax.lax.dynamic_update_slice_in_dim(x, y, at, axis=0)
                for x, y in zip(state, new, strict=True)
            )
        )

    groups = -(-jnp.sum(plan.chunks > 0, dtype=jnp.int32) // group)
    state = empty((plan.row.shape[0], *q_rows.shape[1:3]), head_dim)
    state = jax.lax.fori_loop(0, groups, body, state)
    sinks = None if options.sinks is None else options.sinks.reshape(1, *q_rows.shape[1:3])
    out, lse = finish(_joined(state, plan), sinks)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(batch, heads)


class _Plan(NamedTuple):
    """The spans that the sequences are cut into, the longest first; S of them, or unused."""

    row: jax.Array  # [S] int32, whose it is
    first: jax.Array  # [S] int32, its first chunk
    chunks: jax.Array  # [S] int32, how many; 0 if unused
    place: jax.Array  # [B, spans of a row] int32, where they stand
    used: jax.Array  # [B, spans of a row] bool


def _plan(
    lengths: jax.Array, most: int, chunk: int, group: int, options: AttentionOptions
) -> _Plan:
    """Cuts sequences of at most `most` chunks into spans, by their lengths alone."""
    end = jnp.minimum(-(-lengths // chunk), most)
    start = jnp.zeros_like(end)
    if options.sliding_window is not None:
        start = jnp.minimum(jnp.maximum(lengths - options.sliding_window, 0) // chunk, end)
    fewest = max(1, SPAN_TOKENS // chunk)
    spans = min(SPANS, -(-most // fewest))
    span = jnp.maximum(-(-(end - start) // spans), fewest)[:, None]  # chunks
    first = start[:, None] + jnp.arange(spans, dtype=jnp.int32)[None, :] * span
    count = jnp.clip(end[:, None] - first, 0, span)  # [B, spans]
    order = jnp.argsort(-count.reshape(-1)).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    # Of a single group XLA makes another program: 8 rows of 256 took 24 ms in it, 9 in two groups.
    padding = max(-order.size % group, 2 * group - order.size)
    row = jnp.arange(order.size, dtype=jnp.int32) // spans
    row, firsts, counts = (jnp.pad(x.reshape(-1)[order], (0, padding)) for x in (row, first, count))
    return _Plan(row, firsts, counts, place.reshape(count.shape), count > 0)


def _joined(parts: Softmax, plan: _Plan) -> Softmax:
    """The softmax states of the rows from those of their spans: [S, ...] to [B, ...]."""
    top = jnp.where(plan.used[..., None, None], parts.top[plan.place], LOW)  # [B, spans, K, G]
    best = jnp.max(top, axis=1)
    weight = jnp.where(plan.used[..., None, None], _exp(top - best[:, None]), 0.0)
    out: jax.Array | float = 0.0
    total: jax.Array | float = 0.0
    for i in range(plan.place.shape[1]):  # in this order whatever the batch
        part = Softmax(*(x.at[plan.place[:, i]].get(mode="promise_in_bounds") for x in parts))
        out = out + weight[:, i, ..., None] * part.out
        total = total + weight[:, i] * part.total
    return Softmax(jnp.asarray(out), best, jnp.asarray(total))


def _group(
    q: jax.Array,  # [W, K, G, D] float32
    k_pages: jax.Array,
    v_pages: jax.Array,
    tables: jax.Array,  # [B, M] int32, M whole chunks
    rows: jax.Array,  # [W] int32, whose table
    lengths: jax.Array,  # [W] int32
    first: jax.Array,  # [W] int32, a span's first chunk
    count: jax.Array,  # [W] int32, its chunks
    pages: int,
    geo: layouts.Geometry,
    options: AttentionOptions,
) -> Softmax:
    """The softmax state of a few rows after all their chunks.

    Keys keep their page axis, which comes first, [C, W, K, G, P]: moved to one axis of C*P keys,
    every kernel that reads the scores would gather them element by element, and behind W each
    page's weights would be copied before they are used.
    """
    width, kv_heads, groups, head_dim = q.shape
    size = geo.page_size
    q_heads = q[:, None]
    steps = jnp.max(count)
    row = jnp.arange(width, dtype=jnp.uint32)
    column = jnp.arange(pages, dtype=jnp.int32)[:, None]
    offset = jnp.arange(size, dtype=jnp.int32)[None, None, :]

    def weigh(
        s: jax.Array, top: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top = jnp.maximum(top, jnp.max(jnp.max(s, axis=0), axis=-1))
        # A row that has seen no key yet must not read exp(LOW - LOW) = 1 as a weight.
        base = jnp.where(top > LOW, top, 0.0)
        return top, _exp(s - base[None, ..., None]), jnp.where(mask, jnp.int32(-1), jnp.int32(0))

    def step(i: jax.Array, state: Softmax) -> Softmax:
        # Without the barrier XLA moves the widening of bfloat16 out of the loop, and widens the
        # whole pool.
        k_all, v_all, i = jax.lax.optimization_barrier((k_pages, v_pages, i))
        chunk = jnp.minimum(first + i, tables.shape[1] // pages - 1)
        page = chunk[None, :] * pages + column  # [C, W]
        ids = tables.at[rows[None, :], page].get(mode="promise_in_bounds")
        alive = i < count[None, :]
        # Behind a span's end stands the null page, so that no memory of another span is read.
        ids, page_ok = safe_ids(jnp.where(alive, ids, 0), geo.num_pages)
        page_ok &= alive
        at = ids.astype(jnp.uint32)
        # By page, so that a kernel finds the visible slots of one with a comparison of two numbers.
        start = lengths[None, :] - 1 - page * size  # [C, W]: the query's place in it
        mask = visible(offset, start[..., None], options.sliding_window)
        mask &= page_ok[..., None]  # [C, W, P]

        scores = _sum(
            q_heads[..., d, None] * _widen(k_all[:, :, d, :])[None, :, :, None, :]
            for d in range(head_dim)
        )  # [W, N, K, G, P], virtual
        s = scores.at[row, at].get(mode="promise_in_bounds")  # [C, W, K, G, P]
        distance = (offset - start[..., None])[:, :, None, None, :]
        s = bend(s, distance, ids[..., None], options, (1, 1, kv_heads, groups, 1))
        s = jnp.where(mask[:, :, None, None, :], s, LOW)  # a masked logit may be NaN
        # A branch that is always taken: XLA fuses nothing across it. Otherwise every kernel that
        # reads the weights computes the exponentials again, and attention takes 1.25 times as long.
        top, p, keep = jax.lax.cond(
            i < steps,
            weigh,
            lambda s, top, mask: (top, s, jnp.zeros(mask.shape, jnp.int32)),
            *(s, state.top, mask),
        )
        shrink = _exp(state.top - top)
        total = state.total * shrink[..., None] + functools.reduce(jnp.add, p)
        scale = layouts.gather_scales(options.v_scale, ids[..., None], options.kv_layout)
        if scale is not None:
            # A dead slot has a weight of 0 but may have a scale of NaN.
            p = jnp.where(mask[:, :, None, None, :], p * over_keys(scale, p.ndim), 0.0)

        if pages <= MAX_GATHERS:
            product = _sum(_weighted_values(p, keep, v_all, c, (row, at[c])) for c in range(pages))
        else:
            every = slice(None)
            products = _weighted_values(p, keep, v_all, every, (column.astype(jnp.uint32), row, at))
            product = _sum(products[c] for c in range(pages))
        return Softmax(state.out * shrink[..., None] + product, top, total)

    state = empty((width, kv_heads, groups), head_dim)
    # By slot, so that a chunk is added in vectors.
    state = state._replace(total=jnp.zeros((*state.total.shape, size), jnp.float32))
    state = jax.lax.fori_loop(0, steps, step, state)
    # Term by term: XLA sums an axis in an order that depends on the batch.
    return state._replace(total=_sum(state.total[..., j] for j in range(size)))


def _weighted_values(
    p: jax.Array,  # [C, W, K, G, P] float32
    keep: jax.Array,  # [C, W, P] int32: all bits where the slot is alive, none where it is dead
    v_pages: jax.Array,  # [N, K, P, D]
    chosen: int | slice,  # which of the C pages
    at: tuple[jax.Array, ...],  # indices of the axes before K: the page's, uint32, comes last
) -> jax.Array:  # [..., K, G, D] float32
    """The weights of one page, or of several, times its values."""
    ones = (1,) * (len(at) - 1)
    products = _sum(
        p[chosen, ..., j][..., None, :, :, None]
        * _kept(
            v_pages[:, :, j].reshape(ones + v_pages[:, :, j].shape),
            keep[chosen, ..., j][..., None, None, None],
        )[..., None, :]
        for j in range(p.shape[-1])
    )  # [..., N, K, G, D], virtual
    return products.at[at].get(mode="promise_in_bounds")


def _exp(x: jax.Array) -> jax.Array:
    """exp(x) for x <= 0 in float32, to a relative 2e-7; 0 below -87.

    Spelled out, because XLA's own is not vectorised in a loop of one page's 16 slots: 2^n times a
    polynomial of the rest, the coefficients those of Cephes' expf (Moshier).
    """
    n = jnp.floor(x * 1.44269504 + 0.5)
    r = x - n * 0.693359375 + n * 2.12194440e-4  # ln 2 in two parts
    y = jnp.full_like(r, 1.98756915e-4)
    for c in (1.39819995e-3, 8.33345191e-3, 4.16657959e-2, 1.66666655e-1, 0.5):
        y = y * r + c
    y = y * (r * r) + r + 1.0
    power = jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(x < -87.0, 0.0, y * power)


def _widen(pages: jax.Array) -> jax.Array:
    """Float32 numbers of pages that hold float32 or the bits of bfloat16."""
    if pages.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(pages, jnp.bfloat16).astype(jnp.float32)
    return pages


def _kept(pages: jax.Array, keep: jax.Array) -> jax.Array:
    """Float32 numbers of pages, 0 where `keep` (int32) has no bits.

    Dead slots may hold NaN, so the number itself must go, not only its weight; and by its bits,
    because LLVM makes a branch of each selection (in cache, 1.2 to 1.4 times as long).
    """
    if pages.dtype == jnp.uint16:
        bits = pages.astype(jnp.int32) << 16
    else:
        bits = jax.lax.bitcast_convert_type(pages, jnp.int32)
    return jax.lax.bitcast_convert_type(bits & keep, jnp.float32)


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
