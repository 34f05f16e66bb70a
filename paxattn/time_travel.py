"""States are values: keep one, go back to it, compare two, try several futures.

    saved = save(state)                       # the pages in use, not the pool
    state = go_on(state)                      # may donate: `saved` owns its arrays
    print(diff(saved, state))                 # which rows, pages, counts and contents changed
    state = rewind(state, saved)              # as it was, to the last bit
    state, ends = fork_and_compare(state, greedy, sampled)

A state is a `PagedMemory` or a NamedTuple that has one as its `memory`, with or without a KV pool
as its `pool` (`decode.State`; the prefix cache travels with it). A saved value may be rewound to
any number of times, and is a pytree: `jax.device_get` moves it to the host.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxattn import block_tables as _tables
from paxattn import kv_pool
from paxattn.contiguous import ReserveMax
from paxattn.kv_pool import KVPool
from paxattn.memory import PagedMemory
from paxattn.state_diff import Cached, Diff, Row, View, compare

__all__ = [
    "Diff",
    "End",
    "Saved",
    "check_same_geometry",
    "diff",
    "fork_and_compare",
    "rewind",
    "save",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved:
    """A state without its pool, and the contents of the pages that were in use."""

    rest: Any  # the state; its `pool`, if it has one, is None
    pages: jax.Array  # [C] int32: the pages in use in ascending order, and 0 after them
    contents: KVPool | None  # of those pages

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self))


class End(NamedTuple):
    """Where one future led."""

    state: Saved
    change: Diff  # since the start


def save(state: Any) -> Saved:
    """Copy what is needed to come back to `state`: counters, tables, and the pages in use.

    Reads from the device how many pages are in use, so it cannot be compiled. Room is made for
    up to a quarter more, so that states of many sizes share a few compiled programs.
    """
    memory = _memory_of(state)
    used = np.flatnonzero(_in_use(memory)).astype(np.int32)
    pages = np.zeros(_room(len(used)), np.int32)
    pages[: len(used)] = used
    pool = getattr(state, "pool", None)
    rest = state if pool is None else state._replace(pool=None)
    return Saved(
        rest=_copy(rest),
        pages=jnp.asarray(pages),
        contents=None if pool is None else _take(pool, jnp.asarray(pages)),
    )


def rewind(now: Any, saved: Saved) -> Any:
    """The state as it was: tables, counters and caches whole, and the contents of its pages.

    Pure; under `jax.jit(rewind, donate_argnums=0)` the pages are written into the pool of `now`
    in place. Pages that were free then keep what they hold now: nobody reads them.

    Args:
      now: a state of the same geometry, given up.
      saved: what `save` returned; it stays good.

    Raises:
      ValueError: `now` is a state of another geometry.
    """
    check_same_geometry(now, saved)
    rest = _copy(saved.rest)
    if saved.contents is None:
        return rest
    return rest._replace(pool=kv_pool.put_pages(now.pool, saved.pages, saved.contents))


def check_same_geometry(now: Any, saved: Saved) -> None:
    """Raises ValueError, which names both geometries, where `rewind(now, saved)` would."""
    _agree(_geometry(now), _geometry(saved), "this state cannot become the saved one")


def diff(before: Any, after: Any) -> Diff:
    """What changed from one state to the other; live or saved ones, falsy if nothing did.

    Prints as a list of rows and pages. Contents are compared, bit by bit, for pages that are in
    use in both states and where both states have a pool.

    Raises:
      ValueError: the states are of different geometries.

    >>> from paxattn.memory import fork, init, reserve
    >>> before, _ = reserve(init(10, 2, 3, 4), jnp.array([6, 0], jnp.int32))
    >>> after, _, _ = fork(before, jnp.array([-1, 0], jnp.int32))
    >>> print(diff(before, after))
    row 1: empty -> 6 tokens in pages 1 3
    allocated: 3
    shared now: 1
    copied: 2 -> 3
    references: page 1: 1 -> 2
    """
    _agree(_geometry(before), _geometry(after), "these states cannot be compared")
    return compare(_view(before), _view(after))


def fork_and_compare(state: Any, *futures: Callable[[Any], Any]) -> tuple[Any, list[End]]:
    """Try each future (a function from state to state) on the same start.

    One pool serves all of them: each future goes on in the pages of the last, rewound in place.

    Args:
      state: the start, given up, as to a step that donates it.
      futures: functions of a state; they may donate it.

    Returns:
      The start again, and for each future where it led, saved, and the `Diff` since the start.
    """
    start = save(state)
    ends = []
    for future in futures:
        state = future(state)
        end = save(state)
        ends.append(End(end, diff(start, end)))
        state = _rewind_in_place(state, start)
    return state, ends


_take = jax.jit(kv_pool.take_pages)
_rewind_in_place = jax.jit(rewind, donate_argnums=0)
# A copy is a new buffer even where a compiled program would hand its argument through.
_copy = partial(jax.tree.map, lambda x: jnp.array(x, copy=True))


def _room(count: int) -> int:
    """At least `count` and 8, with three bits that count: 8, 10, 12, 14, 16, 20, ..."""
    step = max(1, (1 << max(count - 1, 0).bit_length()) // 8)
    return max(8, -(-count // step) * step)


def _memory_of(state: Any) -> PagedMemory | ReserveMax:
    memory = (
        state if isinstance(state, PagedMemory | ReserveMax) else getattr(state, "memory", None)
    )
    if not isinstance(memory, PagedMemory | ReserveMax):
        raise ValueError(
            f"a {type(state).__name__} is no state: pass a PagedMemory, or a NamedTuple with a "
            "`memory` as decode.State"
        )
    return memory


def _in_use(memory: PagedMemory | ReserveMax) -> np.ndarray:
    """Which pages somebody holds, [N] bool."""
    if isinstance(memory, PagedMemory):
        return np.asarray(memory.allocator.refcount) > 0
    held = np.asarray(_tables.pages_for(jnp.asarray(memory.lengths), memory.page_size))
    tables = np.asarray(memory.block_tables)
    used = np.zeros(tables.max() + 1, bool)
    used[tables[np.arange(tables.shape[1])[None, :] < held[:, None]]] = True
    return used


def _geometry(state: Any) -> dict[str, Any]:
    """Everything in which two states must agree, by name."""
    if isinstance(state, Saved):
        rest, pool = state.rest, state.contents
    else:
        rest, pool = state, getattr(state, "pool", None)
        rest = rest if pool is None else rest._replace(pool=None)
    memory = _memory_of(rest)
    shape = memory.block_tables.shape
    found = {
        "kind": type(rest).__name__,
        "rows": shape[0],
        "pages_per_seq": shape[1],
        "page_size": memory.page_size,
    }
    if isinstance(memory, PagedMemory):
        found["num_pages"] = memory.allocator.refcount.shape[0]
    if pool is not None:
        found["pool"] = f"{pool.num_layers} layers of {pool.dtype} in {pool.layout}"
        one = jax.eval_shape(kv_pool.take_pages, pool, jax.ShapeDtypeStruct((1,), jnp.int32))
        found["page"] = one.k[0].shape
    found["parts"] = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(rest)
    ]
    found["shapes"] = [x.shape for x in jax.tree.leaves(rest)]
    return found


def _agree(a: dict[str, Any], b: dict[str, Any], what: str) -> None:
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    if names:
        # the first names are the telling ones: different parts have different shapes
        one, other = ({name: x.get(name) for name in names[:3]} for x in (a, b))
        raise ValueError(f"{what}: they are of different geometries, {one} and {other}")


def _view(state: Any) -> View:
    saved = jax.device_get(state if isinstance(state, Saved) else save(state))
    memory = _memory_of(saved.rest)
    lengths = memory.lengths.tolist()
    needed = [-(-length // memory.page_size) for length in lengths]
    rows = [
        Row(length, tuple(table[:need].tolist()))
        for length, need, table in zip(lengths, needed, memory.block_tables, strict=True)
    ]
    used = [page for page in saved.pages.tolist() if page]
    counts, free, other = dict.fromkeys(used, 1), [], {}
    if isinstance(memory, PagedMemory):
        counts = {page: int(memory.allocator.refcount[page]) for page in used}
        free = memory.allocator.free_list[: int(memory.allocator.num_free)].tolist()
    cached = {}
    prefix = getattr(saved.rest, "prefix", None)
    in_cache = np.zeros(0, bool) if prefix is None else prefix.place >= 0
    if prefix is not None:
        for page in np.flatnonzero(in_cache).tolist():
            tokens, salt = (tuple(x[page].tolist()) for x in (prefix.tokens, prefix.salts))
            cached[page] = Cached(tokens, salt, int(prefix.parents[page]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(saved.rest):
        name = jax.tree_util.keystr(path).lstrip(".")
        last = name.rsplit(".", 1)[-1]
        if last in ("block_tables", "lengths", "refcount", "num_free", "free_list"):
            continue  # described above
        if name.startswith("prefix.") and leaf.shape[:1] == in_cache.shape:
            leaf = leaf[in_cache]  # what is known of other pages is left over
        other[name] = leaf
    contents = None
    if saved.contents is not None:
        by_place = kv_pool.page_bytes(saved.contents)
        contents = {page: by_place[i] for i, page in enumerate(used)}
    return View(memory.page_size, rows, counts, free, cached, contents, other)
