"""Paged memory as a value: an allocator and the block tables of B sequences.

    memory = init(num_pages=1024, max_seqs=8, pages_per_seq=64, page_size=16)
    memory, ok = reserve(memory, prompt_lengths)         # pages for a batch of prompts
    memory, slots, ok = append(memory, active)           # one more token for each active row
    memory, (source, target), ok = fork(memory, parents) # children share their parents' pages
    memory = release(memory, finished)

Every function is pure and vectorised over the batch, and can be called under ``jit``, ``vmap``,
``scan``, ``cond`` and ``while_loop``. ``ok`` is False only where something was asked that could
not be had; such a row changes nothing, and the others are served in the order of the rows (a row
behind one that did not fit waits too). The cost is O(B) for an append and O(B*M) for the others,
whatever the number of pages.
"""

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp

from paxattn import allocator as _allocator
from paxattn import block_tables as _tables
from paxattn import page_cache as _page_cache
from paxattn.allocator import Allocator
from paxattn.page_cache import PageCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedMemory:
    """Which pages each sequence holds, and how many tokens are in them.

    A row's table entries ``[:ceil(lengths / page_size)]`` are its pages, the others are 0 (and the
    first ones, after ``release_before``). A page
    that is not full belongs to one row alone, so a token can always be written to it.
    """

    allocator: Allocator | PageCache
    block_tables: jax.Array  # [B, M] int32
    lengths: jax.Array  # [B] int32
    page_size: int = dataclasses.field(metadata={"static": True})


def init(
    num_pages: int, max_seqs: int, pages_per_seq: int, page_size: int, recent_pages: int = 0
) -> PagedMemory:
    """Empty memory.

    Args:
      num_pages: N, pages in the pool, the null page included.
      max_seqs: B, sequences that can be held at once.
      pages_per_seq: M, the most pages of one sequence.
      page_size: P, tokens in a page.
      recent_pages: released pages that each row keeps for its next sequence, see
        :mod:`paxattn.page_cache`; 0 for none.

    Raises:
      ValueError: if a size is not positive or a slot number would not fit in 32 bits.
    """
    check_sizes(num_pages, max_seqs, pages_per_seq, page_size)
    allocator: Allocator | PageCache
    if recent_pages:
        allocator = _page_cache.init(num_pages, max_seqs, recent_pages)
    else:
        allocator = _allocator.init(num_pages)
    return PagedMemory(
        allocator=allocator,
        block_tables=jnp.zeros((max_seqs, pages_per_seq), jnp.int32),
        lengths=jnp.zeros(max_seqs, jnp.int32),
        page_size=page_size,
    )


def reserve(
    memory: PagedMemory, new_lengths: jax.Array, max_new_pages: int | None = None
) -> tuple[PagedMemory, jax.Array]:
    """Let each row grow until it holds ``new_lengths[b]`` tokens.

    Args:
      memory: the memory.
      new_lengths: ``[B]`` int32; the present length leaves a row as it is.
      max_new_pages: the most pages that any row gains in this call, for a cost of
        O(B * max_new_pages) instead of O(B * M). A row that needs more is refused.

    Returns:
      The next memory, whose ``lengths`` are the new ones where granted, and ``ok`` ``[B]`` bool:
      False where pages ran short, where the table is too narrow, or where the row would shrink.
    """
    tables, lengths, size = memory.block_tables, memory.lengths, memory.page_size
    width = tables.shape[1]
    most = width if max_new_pages is None else min(max_new_pages, width)
    have = _tables.pages_for(lengths, size)
    need = _tables.pages_for(jnp.maximum(new_lengths, 0), size)
    possible = (new_lengths >= lengths) & (need <= width) & (need - have <= most)
    # Growth inside a page writes to that page: it must not be shared.
    possible &= (new_lengths == lengths) | _tail_is_exclusive(memory)
    counts = jnp.where(possible, need - have, 0)
    if most == width:
        allocator, pages, granted = _pages(memory).take(memory.allocator, counts, have, width)
        tables = jnp.where(pages != 0, pages, tables)
    else:
        start = jnp.zeros_like(have)
        allocator, pages, granted = _pages(memory).take(memory.allocator, counts, start, most)
        row = jnp.arange(tables.shape[0], dtype=jnp.int32)[:, None]
        column = have[:, None] + jnp.arange(most, dtype=jnp.int32)[None, :]
        at = jnp.where(pages != 0, column, width)
        tables = tables.at[row, at].set(pages, mode="drop")
    ok = possible & granted
    return (
        dataclasses.replace(
            memory,
            allocator=allocator,
            block_tables=tables,
            lengths=jnp.where(ok, new_lengths, lengths),
        ),
        ok,
    )


def append(memory: PagedMemory, active: jax.Array) -> tuple[PagedMemory, jax.Array, jax.Array]:
    """Make place for one more token in each active row; a page is taken only at a page's end.

    Args:
      memory: the memory.
      active: ``[B]`` bool.

    Returns:
      The next memory; ``slots`` ``[B]`` int32, where to write the token, 0 (the null page) for
      a row that is inactive or was refused; ``ok`` ``[B]`` bool, True for inactive rows.
    """
    tables, lengths, size = memory.block_tables, memory.lengths, memory.page_size
    rows, width = tables.shape
    column = lengths // size  # [B]: the page of the next token
    needs_page = lengths % size == 0
    possible = active & (column < width) & _tail_is_exclusive(memory)
    counts = (possible & needs_page).astype(jnp.int32)
    allocator, pages, granted = _pages(memory).take(
        memory.allocator, counts, jnp.zeros_like(counts), 1
    )
    new = pages[:, 0]  # [B]
    done = possible & granted
    # scattered, not selected: an append touches B entries of the table, not B*M
    at = jnp.where(new != 0, column, width)
    tables = tables.at[jnp.arange(rows, dtype=jnp.int32), at].set(new, mode="drop")
    page = jnp.where(needs_page, new, _tables.entry_at(tables, column))
    return (
        dataclasses.replace(
            memory,
            allocator=allocator,
            block_tables=tables,
            lengths=lengths + done.astype(jnp.int32),
        ),
        jnp.where(done, page * size + lengths % size, 0),
        done | ~active,
    )


def fork(
    memory: PagedMemory, parents: jax.Array
) -> tuple[PagedMemory, tuple[jax.Array, jax.Array], jax.Array]:
    """Make each empty row b a copy of row ``parents[b]``: copy-on-write.

    Full pages are shared. A partial last page will be written by both, so the child gets a page
    of its own and the caller copies the content, in every layer, before the next write.

    Args:
      memory: the memory; parents are read as they stand before this call.
      parents: ``[B]`` int32, -1 for rows that are to stay as they are.

    Returns:
      The next memory; ``(source, target)``, each ``[B]`` int32, the pages to copy, 0 and 0 where
      there is nothing to copy; ``ok`` ``[B]`` bool: False where pages ran short, where row b
      holds something already, or where there is no such parent.
    """
    tables, lengths, size = memory.block_tables, memory.lengths, memory.page_size
    rows, width = tables.shape
    asked = parents != -1
    possible = asked & (parents >= 0) & (parents < rows) & (lengths == 0)
    parent = jnp.where(possible, parents, 0)
    length = jnp.where(possible, lengths[parent], 0)
    full = length // size
    counts = (possible & (length % size > 0)).astype(jnp.int32)
    allocator, pages, granted = _pages(memory).take(memory.allocator, counts, full, width)
    done = possible & granted

    inherited = tables[parent]  # [B, M]
    shared = done[:, None] & (jnp.arange(width, dtype=jnp.int32)[None, :] < full[:, None])
    shared &= inherited != 0
    allocator, _ = _pages(memory).share(allocator, inherited, shared)
    child = jnp.where(shared, inherited, pages)
    copied = done & (counts > 0)
    source = jnp.where(copied, _tables.entry_at(inherited, full), 0)
    target = jnp.where(copied, _tables.entry_at(pages, full), 0)
    return (
        dataclasses.replace(
            memory,
            allocator=allocator,
            block_tables=jnp.where(done[:, None], child, tables),
            lengths=jnp.where(done, length, lengths),
        ),
        (source, target),
        done | ~asked,
    )


def release(memory: PagedMemory, mask: jax.Array) -> PagedMemory:
    """Empty the rows that ``mask`` ``[B]`` bool selects; releasing an empty row does nothing.

    A page goes back to the free list when its last holder has gone.
    """
    tables = memory.block_tables
    allocator, _ = _pages(memory).give(memory.allocator, tables, mask[:, None] & (tables != 0))
    return dataclasses.replace(
        memory,
        allocator=allocator,
        block_tables=jnp.where(mask[:, None], 0, tables),
        lengths=jnp.where(mask, 0, memory.lengths),
    )


def release_before(memory: PagedMemory, positions: jax.Array) -> PagedMemory:
    """Give back each row's pages whose tokens all stand before ``positions`` ``[B]`` int32.

    For a sliding window: tokens that left it are never read again. The entries become 0, so no
    stale one can name a page that another row gets; the lengths and the other pages stay. 0 or
    less keeps a row as it is.
    """
    tables = memory.block_tables
    first = jnp.clip(positions, 0, memory.lengths) // memory.page_size
    gone = jnp.arange(tables.shape[1], dtype=jnp.int32)[None, :] < first[:, None]
    gone &= tables != 0
    allocator, _ = _pages(memory).give(memory.allocator, tables, gone)
    return dataclasses.replace(memory, allocator=allocator, block_tables=jnp.where(gone, 0, tables))


def select(memory: PagedMemory, rows: jax.Array) -> PagedMemory:
    """The memory as R of its rows see it, so that an operation costs O(R*M) instead of O(B*M).

    Args:
      memory: the memory.
      rows: ``[R]`` int32, distinct rows; B for padding, which is an empty row.

    Returns:
      A memory of R rows. After operations on it, ``update`` puts it back; the original must not
      be used in between, for both own the same pages. (With a page cache, what the other rows
      keep stays theirs: it does not go back to the free list when that runs dry.)
    """
    state = memory.allocator
    if isinstance(state, PageCache):
        recent = state.recent.at[rows].get(mode="fill", fill_value=0)
        state = state._replace(recent=recent)
    return dataclasses.replace(
        memory,
        allocator=state,
        block_tables=memory.block_tables.at[rows].get(mode="fill", fill_value=0),
        lengths=memory.lengths.at[rows].get(mode="fill", fill_value=0),
    )


def update(memory: PagedMemory, rows: jax.Array, part: PagedMemory) -> PagedMemory:
    """Put back what ``select(memory, rows)`` gave; padding rows must have stayed empty."""
    state = part.allocator
    if isinstance(state, PageCache) and isinstance(memory.allocator, PageCache):
        recent = memory.allocator.recent.at[rows].set(state.recent, mode="drop")
        state = state._replace(recent=recent)
    return dataclasses.replace(
        memory,
        allocator=state,
        block_tables=memory.block_tables.at[rows].set(part.block_tables, mode="drop"),
        lengths=memory.lengths.at[rows].set(part.lengths, mode="drop"),
    )


def slot_mapping(memory: PagedMemory, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Slots of tokens: ``[T]`` rows (negative: padding) and positions to ``[T]`` int32.

    0, a slot of the null page, for padding and for places that the row does not hold.
    """
    return _tables.slots(memory.block_tables, rows, positions, memory.page_size)


def free_pages(memory: PagedMemory) -> jax.Array:
    """Pages that can be taken, ``[]`` int32."""
    state = memory.allocator
    if isinstance(state, PageCache):
        return state.num_free + jnp.sum(_page_cache.cached(state), dtype=jnp.int32)
    return state.num_free


def held_pages(memory: PagedMemory) -> jax.Array:
    """Table entries held by each row, ``[B]`` int32; a shared page counts for each holder."""
    return _tables.held_pages(memory.block_tables)


def check_sizes(num_pages: int, max_seqs: int, pages_per_seq: int, page_size: int) -> None:
    """Raise ValueError for sizes that no memory, paged or contiguous, can have."""
    sizes = {"max_seqs": max_seqs, "pages_per_seq": pages_per_seq, "page_size": page_size}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if num_pages < 2:
        raise ValueError(
            f"num_pages is {num_pages}: page 0 is the null page, so a pool needs at least 2 pages"
        )
    if num_pages * page_size >= 2**31 or pages_per_seq * page_size >= 2**31:
        raise ValueError(
            f"{num_pages} pages ({pages_per_seq} a sequence) of {page_size} tokens: slots are "
            f"32 bits wide, so a pool and a sequence hold less than {2**31} tokens each; "
            "take fewer pages"
        )


def _pages(memory: PagedMemory) -> ModuleType:
    """The functions that go with the memory's allocator."""
    return _page_cache if isinstance(memory.allocator, PageCache) else _allocator


def _tail_is_exclusive(memory: PagedMemory) -> jax.Array:
    """``[B]`` bool: the row's last page is full, absent, or held by this row alone."""
    partial = memory.lengths % memory.page_size != 0
    tail = _tables.entry_at(memory.block_tables, memory.lengths // memory.page_size)
    # A single read would become a slice, which XLA on CPUs repeats after the counts are written,
    # for the price of a copy of all of them; two reads stay a gather.
    count = memory.allocator.refcount[jnp.concatenate([tail, tail[:1]])][:-1]
    return ~partial | (count == 1)
