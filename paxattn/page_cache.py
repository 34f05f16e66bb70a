"""Recently released pages, kept in front of the free list.

Each row (scheduler slot) keeps up to C of the pages that its last requests released, and takes
them first when its next request arrives. Very many short requests then come and go without a
transaction on the free list. The cache is bounded by ``B * C`` pages, and it never makes a
request fail: when the free list is too short for what is asked, all rows' pages go back to it
first. So the ``ok`` masks are those of the plain allocator, and only page numbers differ.

The functions have the signatures of :mod:`paxattn.allocator`; row b of their arguments is row b
of the cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxattn import allocator
from paxattn.allocator import Allocator


class PageCache(NamedTuple):
    """An allocator and the pages in front of it: not on its free list, and without references."""

    base: Allocator
    recent: jax.Array  # [B, C] int32: row b's pages, the last is taken first; 0 after them

    @property
    def free_list(self) -> jax.Array:
        return self.base.free_list

    @property
    def num_free(self) -> jax.Array:
        """Pages on the free list, ``[]`` int32, those in the cache not included."""
        return self.base.num_free

    @property
    def refcount(self) -> jax.Array:
        return self.base.refcount


def init(num_pages: int, max_seqs: int, pages_per_row: int) -> PageCache:
    """An empty cache of up to C = ``pages_per_row`` pages for each row.

    Raises:
      ValueError: if a size is too small.
    """
    if pages_per_row < 1:
        raise ValueError(f"pages_per_row is {pages_per_row}; it must be at least 1")
    return PageCache(allocator.init(num_pages), jnp.zeros((max_seqs, pages_per_row), jnp.int32))


def cached(state: PageCache) -> jax.Array:
    """Pages in each row's cache, ``[B]`` int32."""
    return jnp.sum(state.recent != 0, axis=1, dtype=jnp.int32)


def drain(state: PageCache) -> PageCache:
    """Put every cached page back on the free list."""
    pages = state.recent
    # give() takes back references, so each page gets one for the moment
    at = jnp.where(pages != 0, pages, state.refcount.shape[0])
    base = state.base._replace(refcount=state.refcount.at[at].set(1, mode="drop"))
    base, _ = allocator.give(base, pages, pages != 0)
    return PageCache(base, jnp.zeros_like(pages))


def take(
    state: PageCache, counts: jax.Array, first: jax.Array, width: int
) -> tuple[PageCache, jax.Array, jax.Array]:
    """As :func:`paxattn.allocator.take`: row b's own recent pages first, then the free list."""
    wanted = jnp.where((counts >= 0) & (first >= 0) & (counts <= width - first), counts, 0)
    own = jnp.minimum(wanted, cached(state))
    # in doubt (an upper bound of what the free list must give), the rows pool their pages
    beyond = jnp.sum((wanted - own).astype(jnp.float32))
    state = jax.lax.cond(
        beyond > state.num_free.astype(jnp.float32), drain, lambda same: same, state
    )

    have = cached(state)
    own = jnp.minimum(wanted, have)
    from_list = counts - own
    base, pages, ok = jax.lax.cond(
        jnp.any(from_list != 0),
        lambda base: allocator.take(base, from_list, first + own, width),
        lambda base: (base, jnp.zeros((counts.shape[0], width), jnp.int32), from_list == 0),
        state.base,
    )
    own = jnp.where(ok, own, 0)

    slot = jnp.arange(state.recent.shape[1], dtype=jnp.int32)[None, :]  # [1, C]
    leaving = (slot >= (have - own)[:, None]) & (slot < have[:, None])  # the last `own` pages
    at = jnp.where(leaving, state.recent, base.refcount.shape[0])
    base = base._replace(refcount=base.refcount.at[at].set(1, mode="drop"))
    nth = jnp.arange(width, dtype=jnp.int32)[None, :] - first[:, None]  # [B, width]
    mine = (nth >= 0) & (nth < own[:, None])
    place = jnp.where(mine, have[:, None] - 1 - nth, 0)
    pages = jnp.where(mine, jnp.take_along_axis(state.recent, place, axis=1), pages)
    return PageCache(base, jnp.where(leaving, 0, state.recent)), pages, ok


def share(state: PageCache, pages: jax.Array, mask: jax.Array) -> tuple[PageCache, jax.Array]:
    """As :func:`paxattn.allocator.share`."""
    base, ok = allocator.share(state.base, pages, mask)
    return state._replace(base=base), ok


def give(state: PageCache, pages: jax.Array, mask: jax.Array) -> tuple[PageCache, jax.Array]:
    """As :func:`paxattn.allocator.give`, for ``[B, M]`` pages.

    Row b keeps the first pages that nobody else holds, as many as it has room for; the others go
    to the free list.
    """
    num_pages = state.refcount.shape[0]
    depth = state.recent.shape[1]
    have = cached(state)
    in_pool = (pages > 0) & (pages < num_pages)
    alone = mask & in_pool & (state.refcount[jnp.where(in_pool, pages, 0)] == 1)
    nth = jnp.cumsum(alone, axis=1, dtype=jnp.int32) - 1
    slot = jnp.where(alone, have[:, None] + nth, depth)  # [B, M]: where the page is to stand

    rows = jnp.arange(pages.shape[0], dtype=jnp.int32)[:, None]
    new = jnp.zeros_like(state.recent).at[rows, slot].set(pages, mode="drop")
    # A page named twice would stand in two places. As in the allocator, each page carries the
    # number of its last place for a moment; the other places lose it, and report it below.
    number = jnp.arange(2, new.size + 2, dtype=jnp.int32).reshape(new.shape)
    at = jnp.where(new != 0, new, num_pages)
    refcount = state.refcount.at[at].max(number, mode="drop")
    won = (new != 0) & (refcount[new] == number)
    refcount = refcount.at[jnp.where(won, new, num_pages)].set(0, mode="drop")
    base = state.base._replace(refcount=refcount)

    kept = (slot < depth) & jnp.take_along_axis(won, jnp.minimum(slot, depth - 1), axis=1)
    rest = mask & ~kept
    base, ok = jax.lax.cond(
        jnp.any(rest),
        lambda base: allocator.give(base, pages, rest),
        lambda base: (base, jnp.ones(pages.shape, bool)),
        base,
    )
    recent = jnp.where(won, new, state.recent)
    lost = jnp.any((new != 0) & ~won)  # only after a double free: close the gap that it leaves
    return PageCache(base, jax.lax.cond(lost, _close_gaps, lambda same: same, recent)), ok


def _close_gaps(recent: jax.Array) -> jax.Array:
    order = jnp.argsort(recent == 0, axis=1, stable=True)
    return jnp.take_along_axis(recent, order, axis=1)
