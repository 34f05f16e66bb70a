"""What must hold in a paged memory after every operation, checked as data.

``check`` counts the offences against each rule; it is pure and can be jitted. It reads the whole
pool, so it belongs in tests and debugging, not in a decode step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxattn import block_tables as _tables
from paxattn.memory import PagedMemory
from paxattn.page_cache import PageCache


class Report(NamedTuple):
    """How many pages, entries or rows break each rule; all ``[]`` int32, 0 when all is well."""

    null_page_used: jax.Array  # references to page 0, and places on the free list that hold it
    free_count_wrong: jax.Array  # |num_free - free pages|: free + cached + used + null == N
    not_on_free_list: jax.Array  # pages with refcount 0, not cached, that it does not hold
    free_twice: jax.Array  # places of the free list whose page stands there already
    free_but_held: jax.Array  # places of the free list whose page has references, or is none
    refcount_wrong: jax.Array  # pages whose refcount is not table entries + pins
    entry_out_of_range: jax.Array  # table entries that are no page
    length_out_of_range: jax.Array  # rows with a negative length, or one past the table's end
    pages_missing: jax.Array  # entries below ceil(length / page_size) that are 0
    pages_past_length: jax.Array  # entries above it, or released, that are not 0
    page_twice_in_row: jax.Array  # rows that name one page twice
    cached_wrong: jax.Array  # pages in the page cache twice, or while referenced
    tail_shared: jax.Array  # rows whose partial last page, which will be written, is shared


def check(
    memory: PagedMemory,
    pins: jax.Array | None = None,
    released_before: jax.Array | None = None,
) -> Report:
    """Count what is broken.

    Args:
      memory: the memory.
      pins: ``[N]`` int32, references to each page from outside the block tables (a prefix cache,
        ...); None for none. Pages of a :mod:`paxattn.page_cache` need no pins.
      released_before: ``[B]`` int32, positions up to which ``memory.release_before`` was called;
        None for never.

    Returns:
      The report; ``broken(report)`` names what is wrong.
    """
    state = memory.allocator
    free_list, num_free, refcount = state.free_list, state.num_free, state.refcount
    tables, lengths = memory.block_tables, memory.lengths
    num_pages = refcount.shape[0]
    width = tables.shape[1]
    if pins is None:
        pins = jnp.zeros(num_pages, jnp.int32)

    on_stack = jnp.arange(num_pages, dtype=jnp.int32) < num_free  # [N]
    listed = _count(free_list, on_stack, num_pages)
    is_page = (free_list > 0) & (free_list < num_pages)
    cached = jnp.zeros(num_pages, jnp.int32)  # [N]: how often a page stands in the page cache
    if isinstance(state, PageCache):
        cached = _count(state.recent, state.recent != 0, num_pages)
    free = jnp.zeros(num_pages, bool).at[1:].set((refcount[1:] == 0) & (cached[1:] == 0))
    entries = (tables > 0) & (tables < num_pages)
    named = _count(tables, entries, num_pages)

    # worked out otherwise than by the code under test: ceil(n / P) == -floor(-n / P)
    needed = -(-jnp.maximum(lengths, 0) // memory.page_size)
    inside = jnp.arange(width, dtype=jnp.int32)[None, :] < needed[:, None]  # [B, M]
    gone = jnp.zeros_like(inside)
    if released_before is not None:
        first = jnp.clip(released_before, 0, jnp.maximum(lengths, 0)) // memory.page_size
        gone = jnp.arange(width, dtype=jnp.int32)[None, :] < first[:, None]
    ordered = jnp.sort(jnp.where(entries, tables, 0), axis=1)
    repeated = jnp.any((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != 0), axis=1)
    tail = _tables.entry_at(tables, lengths // memory.page_size)
    partial = lengths % memory.page_size != 0
    shared = refcount[jnp.clip(tail, 0, num_pages - 1)] != 1

    return Report(
        null_page_used=jnp.abs(refcount[0]) + listed[0],
        free_count_wrong=jnp.abs(num_free - _sum(free)),
        not_on_free_list=_sum(free & (listed == 0)),
        free_twice=jnp.sum(jnp.maximum(listed - 1, 0), dtype=jnp.int32),
        free_but_held=_sum(on_stack & ~(is_page & free[jnp.where(is_page, free_list, 0)])),
        refcount_wrong=_sum(refcount != named + pins),
        entry_out_of_range=_sum((tables < 0) | (tables >= num_pages)),
        length_out_of_range=_sum((lengths < 0) | (needed > width)),
        pages_missing=_sum(inside & ~gone & (tables == 0)),
        pages_past_length=_sum((~inside | gone) & (tables != 0)),
        page_twice_in_row=_sum(repeated),
        cached_wrong=_sum((cached > 1) | ((cached > 0) & (refcount != 0))),
        tail_shared=_sum(partial & (tail != 0) & shared),
    )


def broken(report: Report) -> dict[str, int]:
    """The rules that do not hold, with the number of offences; empty when all is well."""
    return {name: int(count) for name, count in report._asdict().items() if int(count)}


def _count(pages: jax.Array, mask: jax.Array, num_pages: int) -> jax.Array:
    """How often each page is named, ``[N]`` int32."""
    at = jnp.where(mask & (pages >= 0), pages, num_pages)
    return jnp.zeros(num_pages, jnp.int32).at[at].add(1, mode="drop")


def _sum(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.int32)
