"""A buddy allocator over one arena: the one under the Orca baselines of the PagedAttention paper.

A block has ``2**order`` units and starts at a multiple of its size. A request gets the smallest
block that holds it; larger blocks are halved on the way, and a block that is freed joins its
buddy whenever that is free too (Knowlton, 1965). Units are usually the KV bytes of one token. An
arena that is no power of two is cut into the largest blocks that fit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Buddy(NamedTuple):
    """Free blocks by address, and each row's block."""

    free_order: jax.Array  # [A] int32: the order of the free block that starts here, or -1
    start: jax.Array  # [B] int32: where each row's block starts
    order: jax.Array  # [B] int32: its order, -1 for a row without a block
    size: jax.Array  # [B] int32: the units that were asked for, at most 2**order


def init(capacity: int, max_seqs: int) -> Buddy:
    """An arena of A = ``capacity`` units, all free.

    Raises:
      ValueError: if a size is not positive, or the arena is too large to search (use a larger
        unit).
    """
    if not 0 < capacity < 2**24 or max_seqs < 1:
        raise ValueError(
            f"a buddy arena of {capacity} units for {max_seqs} sequences; both must be at least "
            "1, and the capacity less than 2**24 (count in larger units otherwise)"
        )
    free = np.full(capacity, -1, np.int32)
    at = 0
    for order in reversed(range(capacity.bit_length())):
        while at + 2**order <= capacity and at % 2**order == 0:
            free[at] = order
            at += 2**order
    return Buddy(
        jnp.asarray(free),
        jnp.zeros(max_seqs, jnp.int32),
        jnp.full(max_seqs, -1, jnp.int32),
        jnp.zeros(max_seqs, jnp.int32),
    )


def order_for(size: jax.Array) -> jax.Array:
    """The smallest order whose block holds ``size`` units (at least 1); int32 in and out."""
    return 32 - jax.lax.clz(jnp.maximum(size, 1) - 1)


def place(buddy: Buddy, row: jax.Array, size: jax.Array) -> tuple[Buddy, jax.Array]:
    """Give a row the smallest free block that holds ``size`` units, at the lowest address.

    Returns:
      The next state and ``ok`` ``[]`` bool: False, and nothing changed, where no block is large
      enough, the row has a block already, or the size is not positive.
    """
    units = buddy.free_order.shape[0]
    wanted = order_for(size)
    index = jnp.arange(units, dtype=jnp.int32)
    # one minimum over (order, address)
    none = jnp.int32(2**31 - 1)
    keys = buddy.free_order * 2**24 + index
    key = jnp.min(jnp.where(buddy.free_order >= wanted, keys, none))
    found, at = key // 2**24, key % 2**24
    ok = (key != none) & (size > 0) & (buddy.order[row] < 0)

    # halving a block of order `found` leaves one free block of each order from `wanted` up
    orders = jnp.arange(units.bit_length(), dtype=jnp.int32)
    left = ok & (orders >= wanted) & (orders < found)
    halves = jnp.where(left, at + 2**orders, units)
    free = buddy.free_order.at[jnp.where(ok, at, units)].set(-1, mode="drop")
    free = free.at[halves].set(orders, mode="drop")
    return (
        Buddy(
            free,
            buddy.start.at[row].set(jnp.where(ok, at, buddy.start[row])),
            buddy.order.at[row].set(jnp.where(ok, wanted, buddy.order[row])),
            buddy.size.at[row].set(jnp.where(ok, size, buddy.size[row])),
        ),
        ok,
    )


def free(buddy: Buddy, row: jax.Array) -> Buddy:
    """Take back one row's block (``row`` ``[]`` int32) and join it with its free buddies."""
    units = buddy.free_order.shape[0]

    def partner(at: jax.Array, order: jax.Array) -> jax.Array:
        return at ^ (jnp.int32(1) << order)

    def joins(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        free_order, at, order = carry
        other = partner(at, order)
        # `other` may lie behind the arena's end, where nothing is free
        return (order >= 0) & (other < units) & (free_order[other % units] == order)

    def join(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        free_order, at, order = carry
        other = partner(at, order)
        return free_order.at[other].set(-1), jnp.minimum(at, other), order + 1

    at, order = buddy.start[row], buddy.order[row]
    free_order, at, order = jax.lax.while_loop(joins, join, (buddy.free_order, at, order))
    held = order >= 0
    free_order = free_order.at[jnp.where(held, at, units)].set(order, mode="drop")
    return Buddy(free_order, buddy.start, buddy.order.at[row].set(-1), buddy.size.at[row].set(0))


def total_free(buddy: Buddy) -> jax.Array:
    """Units in no block, ``[]`` int32."""
    return jnp.sum(_free_sizes(buddy), dtype=jnp.int32)


def largest_hole(buddy: Buddy) -> jax.Array:
    """Units of the largest free block, ``[]`` int32: no larger request can be placed."""
    return jnp.max(_free_sizes(buddy))


def _free_sizes(buddy: Buddy) -> jax.Array:
    order = buddy.free_order
    return jnp.where(order >= 0, jnp.int32(1) << jnp.maximum(order, 0), 0)
