"""What changed in a paged memory between two moments, told by sequence and page.

`paxattn.time_travel.diff` compares the rows of two states; here it is requests and their samples
that come, grow, share and go, whatever row each one has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Key = tuple[int, int]  # request, sample

EFFECTS = {
    "take": "pages are taken from the free list",
    "share": "samples of one request share pages",
    "copy": "copy-on-write: a shared page that will be written is copied",
    "adopt": "pages are adopted from the prefix cache",
    "evict": "the prefix cache gives idle pages up",
    "preempt": "a running request loses its pages and is replayed later",
    "swap_out": "a running request's pages are moved to host memory",
    "swap_in": "they come back",
    "window": "pages that left the sliding window go back",
    "finish": "a finished request releases its pages",
}


class View(NamedTuple):
    """One moment of the memory, copied to the host."""

    tables: dict[Key, tuple[int, ...]]  # pages in order; 0 where one left the sliding window
    lengths: dict[Key, int]  # tokens that the pages are reserved for
    refcount: tuple[int, ...]
    cached: dict[int, int]  # page in the prefix cache -> hash of the prefix that ends with it
    waiting: tuple[int, ...]


class Changes(NamedTuple):
    """What is different between two views; pages by the sequence that got them."""

    taken: dict[Key, list[int]]
    shared: dict[Key, list[int]]  # held by another sample of the request too
    adopted: dict[Key, list[int]]  # known to the prefix cache, or held by another request
    copied: dict[Key, list[tuple[int, int]]]  # (source, target)
    freed: list[int]
    evicted: list[int]
    dropped: list[int]  # given back by sequences that go on: they left the window
    grown: dict[Key, int]  # tokens more
    arrived: list[Key]
    left: dict[Key, list[int]]  # with the pages that each one held
    kept: list[int]  # pages of those that left which only the prefix cache holds now


EMPTY = View({}, {}, (), {}, ())


def view(event: Any, state: Any) -> View:
    """Copies what a frame needs: the state's arrays are donated to the next program.

    Raises:
      ValueError: the memory has no pages to show.
    """
    memory, prefix = state.memory, state.prefix
    if not hasattr(memory, "allocator"):
        raise ValueError("only paged memory has a movie; make the LLM with cache='paged'")
    lengths, entries = np.asarray(memory.lengths), np.asarray(memory.block_tables)
    held = {
        tuple(key): -(-int(lengths[row]) // memory.page_size)
        for row, key in sorted(event.rows.items(), key=lambda item: item[1])
        if lengths[row] > 0
    }
    row_of = {tuple(key): row for row, key in event.rows.items()}
    cached = {}
    if prefix is not None:
        hashes = np.asarray(prefix.hashes)
        cached = {int(p): int(hashes[p]) for p in np.flatnonzero(np.asarray(prefix.place) >= 0)}
    return View(
        tables={k: tuple(entries[row_of[k], :n].tolist()) for k, n in held.items()},
        lengths={k: int(lengths[row_of[k]]) for k in held},
        refcount=tuple(np.asarray(memory.allocator.refcount).tolist()),
        cached=cached,
        waiting=tuple(event.waiting),
    )


def changes(before: View, after: View) -> Changes:
    """What happened between two views."""
    got = Changes({}, {}, {}, {}, [], [], [], {}, [], {}, [])
    held: dict[int, set[int]] = {}  # the requests that hold each page
    for (request, _), table in before.tables.items():
        for page in filter(None, table):
            held.setdefault(page, set()).add(request)
    for key, table in after.tables.items():
        old = before.tables.get(key, ())
        if key not in before.tables:
            got.arrived.append(key)
        elif after.lengths[key] > before.lengths[key]:
            got.grown[key] = after.lengths[key] - before.lengths[key]
        for column, page in enumerate(table):
            was = old[column] if column < len(old) else 0
            if page == was:
                continue
            if page == 0:
                got.dropped.append(was)
                continue
            holders = held.setdefault(page, set())
            known = page in before.cached and before.cached[page] == after.cached.get(page)
            if key[0] in holders:
                got.shared.setdefault(key, []).append(page)
            elif holders or known:
                got.adopted.setdefault(key, []).append(page)
            elif source := _copied_from(before, after, key, column):
                got.copied.setdefault(key, []).append((source, page))
            else:
                got.taken.setdefault(key, []).append(page)
            holders.add(key[0])
    for key, table in before.tables.items():
        if key not in after.tables:
            got.left[key] = [p for p in table if p]
    still = {p for table in after.tables.values() for p in table}
    leaving = {p for pages in got.left.values() for p in pages}
    got.kept.extend(sorted(p for p in leaving if p not in still and p in after.cached))
    pages = range(1, len(after.refcount))
    if before.refcount:
        got.freed.extend(p for p in pages if before.refcount[p] and not after.refcount[p])
    got.evicted.extend(sorted(p for p, h in before.cached.items() if after.cached.get(p) != h))
    return got


def _copied_from(before: View, after: View, key: Key, column: int) -> int:
    """The shared page that a sequence's new page is a copy of; 0 where there is none.

    Its own page at that place until now, or, for a new sample, the partial last page of a twin.
    """
    table, old = after.tables[key], before.tables.get(key, ())
    if column < len(old) and old[:column] == table[:column]:
        return old[column]
    if key in before.tables or column + 1 < len(table):
        return 0
    for twin, pages in before.tables.items():
        alike = twin[0] == key[0] and before.lengths[twin] == after.lengths[key]
        if alike and pages[:column] == table[:column]:
            return pages[column]
    return 0


def effects(kind: str, got: Changes) -> list[str]:
    """Which words of EFFECTS a frame shows."""
    gone = kind if kind in ("preempt", "swap_out") else "finish"
    found = {
        "take": got.taken,
        "share": got.shared,
        "copy": got.copied,
        "adopt": got.adopted,
        "evict": got.evicted,
        "swap_in": kind == "swap_in" and got.arrived,
        "window": got.dropped,
        gone: got.left,
    }
    return [effect for effect in EFFECTS if found.get(effect)]
