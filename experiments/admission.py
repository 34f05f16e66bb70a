"""How a request gets KV memory: the policies that simulator.py runs.

Each calls the library's own allocators: :mod:`paxattn.memory`, as the engine does, for pages on
demand, and :mod:`paxattn.buddy` or :mod:`paxattn.arena` for the contiguous baselines.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxattn import arena, buddy, memory


class Policy(NamedTuple):
    """How requests get memory; every function is pure and works on one row."""

    name: str
    init: Callable[[], Any]
    # (store, row, length, final) -> (store, owned slots, ok)
    admit: Callable[..., tuple[Any, jax.Array, jax.Array]]
    leave: Callable[[Any, jax.Array], Any]  # (store, row)
    # (store, length) -> bool: False where admit would surely refuse, to save the attempt
    may_fit: Callable[[Any, jax.Array], jax.Array]
    capacity: int  # token slots
    rows: int  # most requests at once
    page_size: int  # 0: a region for each request, which never grows


def paged(num_pages: int, rows: int, longest: int, page_size: int, watermark: int = 0) -> Policy:
    """Pages on demand.

    Args:
      num_pages: pages in the pool, the null page included.
      rows: most requests at once.
      longest: tokens of the longest request.
      page_size: P.
      watermark: pages that admission leaves free, so that the running requests can grow.
    """

    def may_fit(store, length):
        left = memory.free_pages(store) - (length + page_size - 1) // page_size
        alone = jnp.all(store.lengths == 0)
        return (left >= watermark) | (alone & (left >= 0))

    def admit(store, row, length, final):
        del final
        part = memory.select(store, row[None])
        part, ok = memory.reserve(part, length[None])
        return memory.update(store, row[None], part), jnp.int32(0), ok[0]

    def leave(store, row):
        part = memory.release(memory.select(store, row[None]), jnp.ones(1, bool))
        return memory.update(store, row[None], part)

    pages_per_seq = -(-longest // page_size)
    return Policy(
        "paged",
        lambda: memory.init(num_pages, rows, pages_per_seq, page_size),
        *(admit, leave, may_fit),
        *((num_pages - 1) * page_size, rows, page_size),
    )


def reserved(
    name: str,
    region: Callable[[jax.Array, jax.Array], jax.Array],
    capacity: int,
    rows: int,
    kind: str = "buddy",
) -> Policy:
    """A region for each request, of the size that ``region(prompt, final)`` says.

    Args:
      name: of the policy.
      region: from the tokens of prompt and of the finished request to slots, at least ``final``.
      capacity: slots in the arena.
      rows: most requests at once.
      kind: "buddy", "first" (fit) or "best" (fit).
    """
    # a buddy arena is searched unit by unit: at most 64k of them
    unit = 2 ** max(0, (capacity // 2**16).bit_length()) if kind == "buddy" else 1

    def admit(store, row, length, final):
        size = region(length, final)
        if kind == "buddy":
            store, ok = buddy.place(store, row, (size + unit - 1) // unit)
        else:
            store, ok = arena.place(store, row, size, kind)
        return store, jnp.where(ok, size, 0), ok

    def leave(store, row):
        if kind == "buddy":
            return buddy.free(store, row)
        return arena.free(store, jnp.arange(rows, dtype=jnp.int32) == row)

    start = buddy.init if kind == "buddy" else arena.init
    return Policy(
        name,
        lambda: start(capacity // unit, rows),
        *(admit, leave, lambda store, length: jnp.array(True)),
        *(capacity // unit * unit, rows, 0),
    )


def power_of_two(tokens: jax.Array) -> jax.Array:
    """The next power of two, ``[]`` int32, for at least 1 token."""
    return jnp.int32(1) << buddy.order_for(tokens)


def orca(capacity: int, rows: int, longest: int, kind: str = "buddy") -> dict[str, Policy]:
    """The three baselines of the PagedAttention paper (Section 6.1), by their JSON names."""

    def pow2(prompt, final):
        return jnp.minimum(prompt + power_of_two(jnp.maximum(final - prompt, 1)), longest)

    regions = {
        "orca_max": lambda prompt, final: jnp.int32(longest),
        "orca_pow2": pow2,
        "orca_oracle": lambda prompt, final: final,
    }
    return {name: reserved(name, r, capacity, rows, kind) for name, r in regions.items()}
