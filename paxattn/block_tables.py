"""From a sequence's token positions to physical places: block tables and slots.

A block table is ``[B, M]`` int32: row b lists the physical pages of sequence b in order, and
unused entries are 0, the null page. The slot of a token is ``page * page_size + offset``.
"""

import jax
import jax.numpy as jnp


def pages_for(lengths: jax.Array, page_size: int) -> jax.Array:
    """Pages that hold so many tokens, rounded up; int32 in and out, and no overflow near 2**31."""
    return lengths // page_size + (lengths % page_size > 0).astype(jnp.int32)


def held_pages(tables: jax.Array) -> jax.Array:
    """Pages held by each row, ``[B, M]`` to ``[B]`` int32: its entries other than 0."""
    return jnp.sum(tables != 0, axis=-1, dtype=jnp.int32)


def slots(tables: jax.Array, rows: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """The physical place of each token.

    Args:
      tables: ``[B, M]`` int32.
      rows: ``[T]`` int32, the sequence of each token; negative for padding.
      positions: ``[T]`` int32, the token's position in its sequence.
      page_size: P.

    Returns:
      ``[T]`` int32: ``page * P + position % P``, and 0 (the null page) for padding, for a row or
      a position outside the table and for a position whose page the row does not hold.
    """
    num_rows, width = tables.shape
    column = positions // page_size
    valid = (rows >= 0) & (rows < num_rows) & (positions >= 0) & (column < width)
    page = tables[jnp.where(valid, rows, 0), jnp.where(valid, column, 0)]
    return jnp.where(valid & (page != 0), page * page_size + positions % page_size, 0)


def entry_at(tables: jax.Array, column: jax.Array) -> jax.Array:
    """Each row's entry at its own column, ``[B]`` int32; 0 where the column is outside."""
    inside = (column >= 0) & (column < tables.shape[1])
    entry = jnp.take_along_axis(tables, jnp.where(inside, column, 0)[:, None], axis=1)[:, 0]
    return jnp.where(inside, entry, 0)
