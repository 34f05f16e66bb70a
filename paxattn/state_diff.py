"""What changed between two states, worked out on the host for people to read."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np


class Row(NamedTuple):
    """What one sequence holds."""

    length: int  # tokens
    pages: tuple[int, ...]  # in order; 0 where the page left a sliding window

    def __str__(self) -> str:
        if not self.length:
            return "empty"
        return f"{self.length} tokens in pages {_list(self.pages)}"


class Cached(NamedTuple):
    """A page of the prefix cache: what it is found by."""

    tokens: tuple[int, ...]
    salt: tuple[int, ...]
    parent: int


class View(NamedTuple):
    """A state on the host. Pages that nobody holds are left out."""

    page_size: int
    rows: list[Row]
    refcounts: dict[int, int]
    free: list[int]  # in the order of the stack
    cached: dict[int, Cached]
    contents: dict[int, np.ndarray] | None  # [P, bytes] uint8 of each page
    other: dict[str, Any]  # further arrays by name


@dataclass(frozen=True)
class Diff:
    """Changes from one state to another; falsy when there are none. `str` lists them."""

    rows: tuple[tuple[int, Row, Row], ...] = ()  # row, before, after
    allocated: tuple[int, ...] = ()  # pages that nobody held before
    freed: tuple[int, ...] = ()  # pages that nobody holds now
    shared: tuple[int, ...] = ()  # pages with several references that had at most one
    copied: tuple[tuple[int, int], ...] = ()  # source, target: a new row's copy of a partial page
    refcounts: tuple[tuple[int, int, int], ...] = ()  # page, before, after
    cached: tuple[int, ...] = ()  # pages that entered the prefix cache
    evicted: tuple[int, ...] = ()  # pages that left it
    contents: tuple[int, ...] = ()  # pages held before and after whose bits differ
    other: tuple[str, ...] = ()  # whatever else differs, by name

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))

    def __str__(self) -> str:
        lines = [f"row {row}: {before} -> {after}" for row, before, after in self.rows]
        # from nothing to one reference and back is what "allocated" and "freed" say already
        counts = [f"page {p}: {a} -> {b}" for p, a, b in self.refcounts if max(a, b) > 1]
        for title, what in [
            ("allocated", _list(self.allocated)),
            ("freed", _list(self.freed)),
            ("shared now", _list(self.shared)),
            ("copied", ", ".join(f"{a} -> {b}" for a, b in self.copied)),
            ("references", ", ".join(counts)),
            ("entered the prefix cache", _list(self.cached)),
            ("left the prefix cache", _list(self.evicted)),
            ("content differs", _list(self.contents)),
            ("also differs", ", ".join(self.other)),
        ]:
            if what:
                lines.append(f"{title}: {what}")
        return "\n".join(lines) or "no difference"


def compare(a: View, b: View) -> Diff:
    """The changes from `a` to `b`, states of one geometry."""
    pages = sorted(a.refcounts.keys() | b.refcounts.keys())
    counts = [(p, a.refcounts.get(p, 0), b.refcounts.get(p, 0)) for p in pages]
    both = sorted(a.cached.keys() & b.cached.keys())
    renewed = {p for p in both if a.cached[p] != b.cached[p]}
    other = [name for name, x in a.other.items() if not _equal(x, b.other[name])]
    entered = tuple(sorted((b.cached.keys() - a.cached.keys()) | renewed))
    left = tuple(sorted((a.cached.keys() - b.cached.keys()) | renewed))
    if entered or left:  # its arrays change with its pages; when a page was used is further news
        news = ("prefix.used", "prefix.clock")
        other = [name for name in other if name in news or not name.startswith("prefix.")]
    if sorted(a.free) == sorted(b.free) and a.free != b.free:
        other.insert(0, "order of the free list")
    contents = []
    if a.contents is not None and b.contents is not None:
        held = sorted(a.contents.keys() & b.contents.keys())
        contents = [p for p in held if not np.array_equal(a.contents[p], b.contents[p])]
    return Diff(
        rows=tuple(
            (row, x, y) for row, (x, y) in enumerate(zip(a.rows, b.rows, strict=True)) if x != y
        ),
        allocated=tuple(p for p, x, y in counts if not x),
        freed=tuple(p for p, x, y in counts if not y),
        shared=tuple(p for p, x, y in counts if x < 2 <= y),
        copied=tuple(_copies(a, b)),
        refcounts=tuple(c for c in counts if c[1] != c[2]),
        cached=entered,
        evicted=left,
        contents=tuple(contents),
        other=tuple(other),
    )


def _copies(a: View, b: View):
    """Partial pages of `a` that stand copied in a row which `b` has and `a` had not.

    A fork leaves no note, but its traces are plain: the full pages before are the parent's own,
    and the new page starts with the bits of the parent's last one.
    """
    for before, after in zip(a.rows, b.rows, strict=True):
        if before.length or not after.length:
            continue
        for parent in a.rows:
            full, rest = divmod(parent.length, a.page_size)
            if not rest or after.length < parent.length:
                continue
            source, target = parent.pages[full], after.pages[full]
            kin = any(parent.pages[:full])
            copied = parent.pages[:full] == after.pages[:full]
            copied = copied and target != 0 and target not in a.refcounts
            if a.contents is not None and b.contents is not None and copied:
                x, y = a.contents[source][:rest], b.contents[target][:rest]
                copied, kin = np.array_equal(x, y), kin or bool(x.any())
            if copied and kin:
                yield source, target
                break


def _equal(x: Any, y: Any) -> bool:
    return np.array_equal(np.asarray(x), np.asarray(y))


def _list(pages: tuple[int, ...]) -> str:
    return " ".join(map(str, pages))
