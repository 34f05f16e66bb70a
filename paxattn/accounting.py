"""Where the KV memory goes, counted in token slots and never in blocks.

Every slot of the memory is one of

* used: it holds the keys and values of a token;
* reserved: the sequence that owns it will use it later;
* internal: a sequence owns it and will never use it (or, paged: the rest of its last page);
* external: no sequence owns it, and none can, because of the way memory is cut up;
* free: no sequence owns it, and one could.

The five sum to the capacity, always. Figure 2 of the PagedAttention paper shows the first four.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxattn.contiguous import ReserveMax
from paxattn.memory import PagedMemory, free_pages


class Waste(NamedTuple):
    """Token slots by what they are for; all ``[]`` int32 (or one array shape)."""

    used: jax.Array
    reserved: jax.Array
    internal: jax.Array
    external: jax.Array
    free: jax.Array

    @property
    def held(self) -> jax.Array:
        """Slots that sequences own."""
        return self.used + self.reserved + self.internal

    @property
    def capacity(self) -> jax.Array:
        """All slots."""
        return self.held + self.external + self.free


def of_paged(memory: PagedMemory) -> Waste:
    """Waste of a paged memory.

    A page that several sequences share is counted once, as are its tokens. Pages that only a
    prefix cache holds count as used: they are full of tokens.
    """
    size = memory.page_size
    pages = memory.allocator.refcount.shape[0] - 1  # the null page is nobody's
    free = free_pages(memory)
    held = pages - free
    # only full pages are shared, so what is missing is the rest of each row's last page
    rest = jnp.sum(-memory.lengths % size, dtype=jnp.int32)
    zero = jnp.zeros_like(held)
    return Waste(held * size - rest, zero, rest, zero, free * size)


def of_reserve_max(
    memory: ReserveMax, num_pages: int, final_lengths: jax.Array | None = None
) -> Waste:
    """Waste of the cache that keeps room for the longest sequence in each row.

    Args:
      memory: the cache.
      num_pages: pages in its pool, the null page included.
      final_lengths: ``[B]`` int32, tokens that each sequence will have in the end; None while
        nobody knows, and then all that is not used counts as reserved.
    """
    rows, width = memory.block_tables.shape
    row_slots = width * memory.page_size
    active = memory.lengths > 0
    if final_lengths is None:
        final_lengths = jnp.full(rows, row_slots, jnp.int32)
    owned = jnp.where(active, row_slots, 0)
    final = jnp.where(active, jnp.clip(final_lengths, memory.lengths, row_slots), 0)
    return split(
        memory.lengths,
        final,
        owned,
        jnp.int32((num_pages - 1) * memory.page_size),
        free=jnp.sum(~active, dtype=jnp.int32) * row_slots,
    )


def split(
    lengths: jax.Array,
    final_lengths: jax.Array,
    owned: jax.Array,
    capacity: jax.Array,
    free: jax.Array | None = None,
) -> Waste:
    """Waste of sequences with a region each.

    Args:
      lengths: ``[B]`` int32, tokens held now.
      final_lengths: ``[B]`` int32, tokens held in the end.
      owned: ``[B]`` int32, slots of each region, at least ``final_lengths``.
      capacity: ``[]`` int32, slots of the arena.
      free: ``[]`` int32, slots outside the regions that a request could get; None for none, the
        case when a request waits and finds no place.
    """
    if free is None:
        free = jnp.int32(0)
    total = jnp.sum(owned, dtype=jnp.int32)
    return Waste(
        used=jnp.sum(lengths, dtype=jnp.int32),
        reserved=jnp.sum(final_lengths - lengths, dtype=jnp.int32),
        internal=jnp.sum(owned - final_lengths, dtype=jnp.int32),
        external=capacity - total - free,
        free=free,
    )
