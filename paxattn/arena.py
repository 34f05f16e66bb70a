"""One contiguous region for each sequence, cut from one arena: first fit and best fit.

What caches do that hold a sequence's keys and values in one piece. Sizes and addresses are in
units, usually the KV bytes of one token. The state is a value and the functions are pure, as in
:mod:`paxattn.memory`; each costs O(B**2) for B rows.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Fit = Literal["first", "best"]


class Arena(NamedTuple):
    """Where each row's region lies; a row without one has size 0."""

    capacity: jax.Array  # [] int32, units
    start: jax.Array  # [B] int32
    size: jax.Array  # [B] int32


def init(capacity: int, max_seqs: int) -> Arena:
    """An empty arena.

    Raises:
      ValueError: if a size is not positive, or the capacity does not fit in 31 bits (then use a
        larger unit).
    """
    if not 0 < capacity < 2**31 or max_seqs < 1:
        raise ValueError(
            f"an arena of {capacity} units for {max_seqs} sequences; both must be at least 1, and "
            "the capacity less than 2**31 (count in larger units otherwise)"
        )
    return Arena(
        jnp.int32(capacity), jnp.zeros(max_seqs, jnp.int32), jnp.zeros(max_seqs, jnp.int32)
    )


def holes(arena: Arena) -> tuple[jax.Array, jax.Array]:
    """The free pieces: ``(start, size)``, each ``[B + 1]`` int32, size 0 where there is none."""
    held = arena.size > 0
    # a hole begins at 0 or at the end of a region, and reaches to the next region
    begin = jnp.concatenate([jnp.zeros(1, jnp.int32), arena.start + arena.size])
    exists = jnp.concatenate([jnp.ones(1, bool), held])
    later = held[None, :] & (arena.start[None, :] >= begin[:, None])  # [B + 1, B]
    end = jnp.min(jnp.where(later, arena.start[None, :], arena.capacity), axis=1)
    return begin, jnp.where(exists, end - begin, 0)


def place(
    arena: Arena, row: jax.Array, size: jax.Array, fit: Fit = "first"
) -> tuple[Arena, jax.Array]:
    """Give a row a region of ``size`` units.

    Args:
      arena: the arena.
      row: ``[]`` int32, a row without a region.
      size: ``[]`` int32, at least 1.
      fit: "first", the lowest hole that is large enough, or "best", the smallest.

    Returns:
      The next arena and ``ok`` ``[]`` bool: False, and nothing changed, where no hole is large
      enough, the row has a region already, or the size is not positive.
    """
    begin, room = holes(arena)
    at = _choose(begin, room, size, fit)
    ok = (at >= 0) & (size > 0) & (arena.size[row] == 0)
    return _set(arena, row, at, size, ok), ok


def grow(arena: Arena, row: jax.Array, size: jax.Array) -> tuple[Arena, jax.Array]:
    """Enlarge a row's region where it stands; ``ok`` is False where the next region is too near."""
    _, room = holes(arena)
    ok = (arena.size[row] > 0) & (size >= arena.size[row])
    ok &= size - arena.size[row] <= room[row + 1]  # the hole behind row b is the (b + 1)th
    return _set(arena, row, arena.start[row], size, ok), ok


def move(
    arena: Arena, row: jax.Array, size: jax.Array, fit: Fit = "first"
) -> tuple[Arena, jax.Array]:
    """Grow by copying, as ``jnp.concatenate`` does: the old and the new region exist at once.

    Returns:
      The next arena and ``ok``: False where no hole holds the whole new region.
    """
    begin, room = holes(arena)
    at = _choose(begin, room, size, fit)
    ok = (at >= 0) & (arena.size[row] > 0) & (size >= arena.size[row])
    return _set(arena, row, at, size, ok), ok


def free(arena: Arena, mask: jax.Array) -> Arena:
    """Take back the regions of the rows that ``mask`` ``[B]`` bool selects."""
    return arena._replace(size=jnp.where(mask, 0, arena.size))


def total_free(arena: Arena) -> jax.Array:
    """Units in no region, ``[]`` int32."""
    return arena.capacity - jnp.sum(arena.size, dtype=jnp.int32)


def largest_hole(arena: Arena) -> jax.Array:
    """Units of the largest free piece, ``[]`` int32: no larger request can be placed."""
    return jnp.max(holes(arena)[1])


def external_fragmentation(arena: Arena) -> jax.Array:
    """``1 - largest hole / free``, ``[]`` float32: 0 when all free memory is in one piece."""
    free_units = total_free(arena)
    share = largest_hole(arena) / jnp.maximum(free_units, 1)
    return jnp.where(free_units > 0, 1 - share, jnp.float32(0))


def _choose(begin: jax.Array, room: jax.Array, size: jax.Array, fit: Fit) -> jax.Array:
    """Address of the hole to use, -1 if none is large enough."""
    if fit not in ("first", "best"):
        raise ValueError(f"fit is {fit!r}; it must be 'first' or 'best'")
    none = jnp.int32(2**31 - 1)
    fits = room >= size
    if fit == "best":
        fits &= room == jnp.min(jnp.where(fits, room, none))
    at = jnp.min(jnp.where(fits, begin, none))
    return jnp.where(at == none, -1, at)


def _set(arena: Arena, row: jax.Array, at: jax.Array, size: jax.Array, ok: jax.Array) -> Arena:
    return arena._replace(
        start=arena.start.at[row].set(jnp.where(ok, at, arena.start[row])),
        size=arena.size.at[row].set(jnp.where(ok, size, arena.size[row])),
    )
