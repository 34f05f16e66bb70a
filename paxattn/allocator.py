"""Which page is free: a stack of free pages and reference counts, as one value.

The only owner of that question. Each function takes the state and returns the next one; nothing
here is jitted, so that a caller composes it under its own ``jit``, ``vmap``, ``scan`` or
``while_loop``. Every function is one vectorised pass whose cost grows with the number of pages
asked for, never with the size of the pool, and each writes its arrays in place when the caller
donates the state.

Page 0 is the null page: it is never allocated, never free, and its reference count stays 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Allocator(NamedTuple):
    """The free list and the reference counts of N pages."""

    free_list: jax.Array  # [N] int32: entries [:num_free] are the free pages, the last is the top
    num_free: jax.Array  # [] int32
    refcount: jax.Array  # [N] int32: table entries and cache pins that hold each page


def init(num_pages: int) -> Allocator:
    """All pages free but the null page; page 1 is handed out first.

    Args:
      num_pages: N, the null page included; at least 2.

    Raises:
      ValueError: if no page is left beside the null page.
    """
    if num_pages < 2:
        raise ValueError(
            f"num_pages is {num_pages}: page 0 is the null page, so a pool needs at least 2 pages"
        )
    return Allocator(
        # N-1, ..., 2, 1 and one entry that no push can ever need.
        free_list=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.int32(num_pages - 1),
        refcount=jnp.zeros(num_pages, jnp.int32),
    )


def take(
    state: Allocator, counts: jax.Array, first: jax.Array, width: int
) -> tuple[Allocator, jax.Array, jax.Array]:
    """Take ``counts[b]`` pages for each row b, all of them or none.

    First come, first served, in the order of the rows: once a row does not fit, every later row
    that needs a page is refused too, so that a small request never overtakes a large one.

    Args:
      state: the allocator.
      counts: ``[B]`` int32, pages wanted by each row; 0 asks for nothing and is always granted.
      first: ``[B]`` int32, the column at which a row's first page is to stand.
      width: columns of the result; ``first + counts`` must not exceed it.

    Returns:
      The next state; ``[B, width]`` int32, row b's new pages in columns ``first[b]`` to
      ``first[b] + counts[b] - 1`` and 0 elsewhere; ``ok`` ``[B]`` bool. A refused row's pages
      are all 0 and take nothing.
    """
    num_pages = state.free_list.shape[0]
    column = jnp.arange(width, dtype=jnp.int32)[None, :]  # [1, width]
    possible = (counts >= 0) & (first >= 0) & (counts <= width - first)
    needed = jnp.where(possible, counts, 0)
    # Saturating sum: B rows of up to N pages may exceed int32, and must not come back as "fits".
    ends = _saturating_cumsum(needed, num_pages)  # [B]
    ok = possible & ((needed == 0) | (ends <= state.num_free))

    nth = column - first[:, None]  # [B, width]: which of its row's pages an entry is
    wanted = ok[:, None] & (nth >= 0) & (nth < needed[:, None])
    top = state.num_free - 1 - (ends - needed)[:, None] - nth
    # unused entries read position 0 and are masked: a gather is always in range
    pages = jnp.where(wanted, state.free_list[jnp.where(wanted, top, 0)], 0)
    held = jnp.where(wanted, pages, num_pages)
    return (
        state._replace(
            num_free=state.num_free - jnp.sum(jnp.where(ok, needed, 0), dtype=jnp.int32),
            refcount=state.refcount.at[held].set(1, mode="drop"),
        ),
        pages,
        ok,
    )


def share(state: Allocator, pages: jax.Array, mask: jax.Array) -> tuple[Allocator, jax.Array]:
    """Add one reference to each page that the mask selects.

    Args:
      state: the allocator.
      pages: any shape, int32; a page named twice gains two references.
      mask: bool of the same shape.

    Returns:
      The next state and ``ok``, bool of that shape: False where a selected entry is no page in
      use (free, null, or outside the pool). Such an entry changes nothing.
    """
    num_pages = state.refcount.shape[0]
    in_pool = (pages > 0) & (pages < num_pages)
    held = in_pool & (state.refcount[jnp.where(in_pool, pages, 0)] > 0)
    at = jnp.where(mask & held, pages, num_pages)
    return state._replace(refcount=state.refcount.at[at].add(1, mode="drop")), held | ~mask


def give(state: Allocator, pages: jax.Array, mask: jax.Array) -> tuple[Allocator, jax.Array]:
    """Drop one reference to each selected page; a page without references becomes free.

    Pages that become free go on the stack in the order in which their last reference stands in
    ``pages``, so the last one is the first to be taken again.

    Args:
      state: the allocator.
      pages: ``[..., M]`` int32; a page may be named as often as it has references.
      mask: bool of the same shape.

    Returns:
      The next state and ``ok``, bool of that shape: False where a selected entry is no page in
      use, or where a page is named more often than it has references (a double free). Such an
      entry changes nothing, so no page can stand on the free list twice.
    """
    num_pages = state.refcount.shape[0]
    in_pool = (pages > 0) & (pages < num_pages)
    before = state.refcount[jnp.where(in_pool, pages, 0)]
    held = mask & in_pool & (before > 0)
    safe = jnp.where(held, pages, 0)

    refcount = state.refcount.at[_only(held, pages, num_pages)].add(-1, mode="drop")
    left = refcount[safe]
    too_often = held & (left < 0)
    freed = held & (left == 0)

    # A page released by several rows at once stands here several times, and must be pushed once.
    # Its count is 0 now, so it can carry the number of its last entry for a moment: no array of
    # N marks is needed, and the cost stays that of the request. A page named too often has a
    # negative count, and the same write gives it its old one again.
    number = jnp.arange(1, pages.size + 1, dtype=jnp.int32).reshape(pages.shape)
    marked = _only(freed | too_often, pages, num_pages)
    refcount = refcount.at[marked].max(jnp.where(freed, number, before), mode="drop")
    last = freed & (refcount[safe] == number)
    refcount = refcount.at[_only(last, pages, num_pages)].set(0, mode="drop")

    push = _only(last, state.num_free + _order(last), num_pages)
    return (
        Allocator(
            free_list=state.free_list.at[push].set(pages, mode="drop"),
            num_free=state.num_free + jnp.sum(last, dtype=jnp.int32),
            refcount=refcount,
        ),
        (held & ~too_often) | ~mask,
    )


def _only(mask: jax.Array, pages: jax.Array, num_pages: int) -> jax.Array:
    """Indices for a write that drops the entries outside ``mask``."""
    return jnp.where(mask, pages, num_pages)


def _saturating_cumsum(counts: jax.Array, limit: int) -> jax.Array:
    """Running sum of ``[B]`` counts >= 0 that stops growing just above ``limit``."""
    top = jnp.int32(limit + 1)
    return jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, top), jnp.minimum(counts, top))


def _order(mask: jax.Array) -> jax.Array:
    """Number the True entries 0, 1, ... in row-major order; ``[..., M]`` bool to int32."""
    # Row by row, then across rows: a flat running sum over B*M entries is several times slower.
    ones = mask.astype(jnp.int32)
    if mask.ndim < 2:
        return jnp.cumsum(ones, dtype=jnp.int32) - 1
    rows = ones.reshape(-1, mask.shape[-1])
    before = jnp.cumsum(rows.sum(-1, dtype=jnp.int32), dtype=jnp.int32)
    start = before - rows.sum(-1, dtype=jnp.int32)
    return (start[:, None] + jnp.cumsum(rows, axis=-1, dtype=jnp.int32) - 1).reshape(mask.shape)
