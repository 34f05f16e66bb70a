"""The traditional cache, kept in pages only so that the same attention can read it.

Each of B rows owns room for the longest sequence for ever: M consecutive pages, whether it uses
them or not. The functions have the names and the results of :mod:`paxattn.memory`, so a program
changes from one to the other by changing the module. (Allocators over an arena of bytes, the
other baselines, are in :mod:`paxattn.arena` and :mod:`paxattn.buddy`.)
"""

import dataclasses

import jax
import jax.numpy as jnp

from paxattn import block_tables as _tables
from paxattn.memory import check_sizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReserveMax:
    """Row b owns the consecutive pages ``1 + b*M`` to ``(b + 1)*M``."""

    block_tables: jax.Array  # [B, M] int32; never changes
    lengths: jax.Array  # [B] int32; 0 for a row without a sequence
    page_size: int = dataclasses.field(metadata={"static": True})


def rows_that_fit(num_pages: int, pages_per_seq: int) -> int:
    """Sequences that a pool of ``num_pages`` (the null page included) has room for."""
    return (num_pages - 1) // pages_per_seq


def init(num_pages: int, max_seqs: int, pages_per_seq: int, page_size: int) -> ReserveMax:
    """Room for the longest sequence in each of ``max_seqs`` rows.

    Raises:
      ValueError: if the pool has not room for ``max_seqs`` times ``pages_per_seq`` pages beside
        the null page.
    """
    check_sizes(num_pages, max_seqs, pages_per_seq, page_size)
    fit = rows_that_fit(num_pages, pages_per_seq)
    if max_seqs > fit:
        raise ValueError(
            f"max_seqs is {max_seqs}, but {num_pages} pages reserve {pages_per_seq} pages "
            f"(the longest sequence) for {fit} sequences only; lower max_seqs or the longest "
            "sequence, or enlarge the pool"
        )
    owned = 1 + jnp.arange(max_seqs * pages_per_seq, dtype=jnp.int32)
    return ReserveMax(
        block_tables=owned.reshape(max_seqs, pages_per_seq),
        lengths=jnp.zeros(max_seqs, jnp.int32),
        page_size=page_size,
    )


def reserve(memory: ReserveMax, new_lengths: jax.Array) -> tuple[ReserveMax, jax.Array]:
    """Rows grow to ``new_lengths`` ``[B]``; ``ok`` is False past the maximum and for shrinking."""
    capacity = memory.block_tables.shape[1] * memory.page_size
    ok = (new_lengths >= memory.lengths) & (new_lengths <= capacity)
    lengths = jnp.where(ok, new_lengths, memory.lengths)
    return dataclasses.replace(memory, lengths=lengths), ok


def append(memory: ReserveMax, active: jax.Array) -> tuple[ReserveMax, jax.Array, jax.Array]:
    """One more token for each active row: the next memory, ``slots`` ``[B]`` int32 and ``ok``."""
    capacity = memory.block_tables.shape[1] * memory.page_size
    done = active & (memory.lengths < capacity)
    rows = jnp.arange(memory.lengths.shape[0], dtype=jnp.int32)
    slots = slot_mapping(memory, jnp.where(done, rows, -1), memory.lengths)
    lengths = memory.lengths + done.astype(jnp.int32)
    return dataclasses.replace(memory, lengths=lengths), slots, done | ~active


def release(memory: ReserveMax, mask: jax.Array) -> ReserveMax:
    """Empty the rows that ``mask`` ``[B]`` bool selects; their room stays theirs."""
    return dataclasses.replace(memory, lengths=jnp.where(mask, 0, memory.lengths))


def slot_mapping(memory: ReserveMax, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Slots of tokens: ``[T]`` rows (negative: padding) and positions to ``[T]`` int32."""
    return _tables.slots(memory.block_tables, rows, positions, memory.page_size)


def free_pages(memory: ReserveMax) -> jax.Array:
    """Pages of the rows that hold no sequence, ``[]`` int32."""
    empty = jnp.sum(memory.lengths == 0, dtype=jnp.int32)
    return empty * memory.block_tables.shape[1]


def held_pages(memory: ReserveMax) -> jax.Array:
    """Pages that each row takes from everyone else, ``[B]`` int32: all M, or 0 when empty."""
    width = memory.block_tables.shape[1]
    return jnp.where(memory.lengths > 0, jnp.int32(width), jnp.int32(0))
