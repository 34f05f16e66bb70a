"""Sequences leave the pool for host memory and come back, to any pages and any rows.

    group = pages_of(memory, mask)                          # which pages the rows hold, each once
    lengths = memory.lengths
    contents = jax.device_get(take_pages(pool, group.pages))
    memory = release(memory, mask)                          # memory.release or prefix_cache.release
    ...
    memory, pages, ok = restore(memory, rows, group.entries, lengths, group.count)
    pool = put_pages(pool, pages, contents)                 # where ok

Rows may share pages (forks): a page that several rows of the group hold leaves once, and comes
back once with as many references. Pages that a sliding window dropped (`memory.release_before`)
stay dropped. What comes back is equal to the last bit, NaN payloads included, for the pool's bytes
are moved as they are.

`pages` has room for every table entry, and only its first `count` places are pages. Whoever moves
pages between devices takes the first few: `take_pages(pool, group.pages[:width])` with a static
`width >= count`, and the same width at `put_pages`.

All functions are pure, can be compiled, and cost O(B*M), not O(N). For R rows of many,
`pages_of(memory.select(memory, rows), ...)` costs O(R*M), and `restore` does by itself.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxattn import allocator as _allocator
from paxattn import block_tables as _tables
from paxattn import memory as paged
from paxattn import page_cache as _page_cache
from paxattn.kv_pool import put_pages, take_pages
from paxattn.memory import PagedMemory
from paxattn.page_cache import PageCache

__all__ = ["Group", "pages_of", "put_pages", "restore", "take_pages"]


class Group(NamedTuple):
    """Which pages some rows hold, and how they share them; with M entries a row, C = B*M."""

    pages: jax.Array  # [C] int32: distinct pages in order of appearance, row by row; 0 after them
    entries: jax.Array  # [B, M] int32: 1 + place in `pages` of each table entry; 0 for none
    count: jax.Array  # type: ignore[assignment]  # [] int32: pages (a field, not tuple's method)


def pages_of(memory: PagedMemory, mask: jax.Array) -> Group:
    """The pages of the rows that `mask` ([B] bool) selects, each once however many rows hold it."""
    flat = jnp.where(mask[:, None], memory.block_tables, 0).ravel()  # [C]
    place = jnp.arange(flat.shape[0], dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    page = flat[order]  # equal pages stand together, the first to appear in front
    leads = (page != 0) & jnp.concatenate([jnp.ones(1, bool), page[1:] != page[:-1]])
    first = order[jax.lax.cummax(jnp.where(leads, place, 0))]  # [C]: where the page appears first
    is_first = jnp.zeros_like(leads).at[order].set(leads)
    number = jnp.cumsum(is_first, dtype=jnp.int32)  # 1, 2, ... in order of appearance
    entries = jnp.zeros_like(flat).at[order].set(jnp.where(page != 0, number[first], 0))
    at = jnp.where(is_first, number - 1, flat.shape[0])
    return Group(
        pages=jnp.zeros_like(flat).at[at].set(flat, mode="drop"),
        entries=entries.reshape(memory.block_tables.shape),
        count=jnp.sum(is_first, dtype=jnp.int32),
    )


def restore(
    memory: PagedMemory,
    rows: jax.Array,
    entries: jax.Array,
    lengths: jax.Array,
    count: jax.Array,
) -> tuple[PagedMemory, jax.Array, jax.Array]:
    """Give empty rows `count` new pages, shared among them as they were: all or nothing.

    Args:
      memory: the memory.
      rows: ``[R]`` int32, the empty row of the memory that each sequence gets; distinct, negative
        where there is none (its entries and length are ignored).
      entries: ``[R, M]`` int32, `Group.entries` as `pages_of` gave it, or rows of it.
      lengths: ``[R]`` int32, tokens of each sequence.
      count: ``[]`` int32, `Group.count`.

    Returns:
      The next memory; ``pages`` ``[R*M]`` int32, where the contents of `Group.pages` are to be
      put, 0 after `count` pages; ``ok`` ``[]`` bool. Not ok, and nothing changed (pages all 0):
      pages run short, a row is in use, named twice or no row of the memory, or the entries are
      not those of a group: some page of it named by none of the rows, an entry past its row's
      length, a partial last page in two rows.

    Raises:
      ValueError: if the shapes do not belong together.
    """
    width, size = memory.block_tables.shape[1], memory.page_size
    if entries.shape != (rows.shape[0], width) or lengths.shape != rows.shape:
        raise ValueError(
            f"rows {rows.shape}, entries {entries.shape} and lengths {lengths.shape}: expected "
            f"[R], [R, {width}] and [R], for the memory's tables are {width} pages wide"
        )
    real = rows >= 0
    lengths = jnp.where(real, lengths, 0)
    entries = jnp.where(real[:, None], entries, 0)
    names = jnp.zeros(entries.size, jnp.int32)
    names = names.at[jnp.where(entries > 0, entries - 1, entries.size)].add(1, mode="drop")
    ok = _rows_are_free(memory, rows) & _is_group(entries, names, lengths, count, size)

    state = memory.allocator
    if isinstance(state, PageCache):
        fits = ok & (count <= paged.free_pages(memory)) & (count > state.num_free)
        state = jax.lax.cond(fits, _page_cache.drain, lambda same: same, state)
        base = state.base
    else:
        base = state
    wanted, start = jnp.where(ok, count, 0)[None], jnp.zeros(1, jnp.int32)
    base, taken, granted = _allocator.take(base, wanted, start, entries.size)
    pages, ok = taken[0], ok & granted[0]
    held = jnp.where(pages != 0, pages, base.refcount.shape[0])
    base = base._replace(refcount=base.refcount.at[held].set(names, mode="drop"))

    tables = jnp.where(entries > 0, pages[jnp.maximum(entries - 1, 0)], 0)
    at = jnp.where(ok & real, rows, memory.lengths.shape[0])
    return (
        dataclasses.replace(
            memory,
            allocator=state._replace(base=base) if isinstance(state, PageCache) else base,
            block_tables=memory.block_tables.at[at].set(tables, mode="drop"),
            lengths=memory.lengths.at[at].set(lengths, mode="drop"),
        ),
        pages,
        ok,
    )


def _rows_are_free(memory: PagedMemory, rows: jax.Array) -> jax.Array:
    """Whether every row that is not padding is a row of the memory, empty, and named once."""
    number = memory.lengths.shape[0]
    at = jnp.where(rows >= 0, rows, number)
    named = jnp.zeros(number, jnp.int32).at[at].add(1, mode="drop")
    used = (memory.lengths != 0) | jnp.any(memory.block_tables != 0, axis=1)
    return jnp.all(rows < number) & ~jnp.any((named > 1) | ((named > 0) & used))


def _is_group(
    entries: jax.Array, names: jax.Array, lengths: jax.Array, count: jax.Array, size: int
) -> jax.Array:
    """Whether tables made of these entries keep the memory's invariants."""
    width = entries.shape[1]
    need = _tables.pages_for(jnp.maximum(lengths, 0), size)
    inside = jnp.arange(width, dtype=jnp.int32)[None, :] < need[:, None]
    numbered = jnp.all((entries >= 0) & (entries <= count) & (inside | (entries == 0)))
    # each of 1..count is named: a page that nobody names would be lost
    numbered &= (count >= 0) & (jnp.sum(names > 0, dtype=jnp.int32) == count)
    tail = _tables.entry_at(entries, lengths // size)
    alone = (tail > 0) & (names[jnp.maximum(tail - 1, 0)] == 1)
    return numbered & jnp.all((lengths >= 0) & (need <= width) & ((lengths % size == 0) | alone))
