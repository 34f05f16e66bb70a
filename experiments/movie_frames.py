"""Frames of a memory movie: what pages, tables and queues look like after each program of an engine.

    recorder = Recorder(page_size=8)
    llm.observer = recorder          # called with (event, state) after each program
    ...
    recorder.frames                  # plain data, ready for JSON

What a frame says (pages taken, shared, copied, adopted, evicted, freed) is worked out from the
difference of two states; the event's kind only says why. So hand-driven calls of `paxattn.memory`
can be recorded just as well.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
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


# --- words ------------------------------------------------------------------------------------


def caption(kind: str, got: Changes, written, waiting, again, name) -> str:
    """What happened, in plain words.

    Args:
      kind: the event's.
      got: what is different.
      written: sequences whose prompts were computed.
      waiting: requests that have joined the queue.
      again: requests that had to give way before.
      name: from (request, sample) to what it is called.
    """
    said = []
    if kind == "prefill":
        said.append(_prompts(written))
    if got.left:
        said.append(_leaving(kind, got, name))
    if got.evicted:
        said.append(
            f"The free list ran short: the prefix cache gave up {_pages(got.evicted)}, "
            "the least recently used."
        )
    twins = [k for k in got.arrived if k in got.shared or k in got.copied]
    if kind == "swap_in":
        for request in sorted({r for r, _ in got.arrived}):
            said.append(_arrival([k for k in got.arrived if k[0] == request], kind, again, got))
    else:
        said += [_arrival([k], kind, again, got) for k in got.arrived if k not in twins]
        if twins:
            said.append(_split(twins, got, name))
    if got.grown:
        said.append(_growth(got, name))
    if got.dropped:
        said.append(f"{_pages(got.dropped)} left the sliding window and went back.")
    if queue := _requests(waiting):
        said.append(f"In the queue: {queue}.")
    return " ".join(said) or "Nothing changed."


def _prompts(written: Iterable[Key]) -> str:
    requests = [r for r, _ in written]
    many = len(requests) > 1
    return (
        f"The prompt{'s' * many} of {_requests(requests)} {'are' if many else 'is'} computed: keys "
        f"and values fill {'their' if many else 'its'} pages."
    )


def _arrival(keys: list[Key], kind: str, again, got: Changes) -> str:
    taken = sorted({p for k in keys for p in got.taken.get(k, [])})
    adopted = sorted({p for k in keys for p in got.adopted.get(k, [])})
    parts = []
    if taken:
        parts.append(f"{_pages(taken)} taken from the free list")
    if adopted:
        parts.append(f"{_pages(adopted)} adopted from the prefix cache")
    request = keys[0][0]
    verb = "was admitted again" if request in again else "was admitted"
    verb = "came back from host memory" if kind == "swap_in" else verb
    return f"Request {request} {verb}: {', '.join(parts) or 'no new page'}."


def _split(twins: list[Key], got: Changes, name) -> str:
    shared = sorted({p for k in twins for p in got.shared.get(k, [])})
    text = f"{_upper(listed([name(k) for k in twins]))} began as twins"
    if shared:
        text += f": {_pages(shared)} shared with their parent"
    copies = [pair for k in twins for pair in got.copied.get(k, [])]
    if copies:
        pairs = listed([f"{s} to {t}" for s, t in copies])
        text += f"; each will write to the last page, so it was copied ({pairs})"
    return text + "."


def _growth(got: Changes, name) -> str:
    steps = set(got.grown.values())
    total, many = sum(got.grown.values()), len(got.grown) > 1
    who = f"{len(got.grown)} sequences" if many else _upper(name(next(iter(got.grown))))
    count = total if len(steps) > 1 else steps.pop()
    text = f"{who} wrote {count} token{'s' * (count != 1)}"
    if many:
        text += " each" if count * len(got.grown) == total else " together"
    new = [
        f"{name(k)} took {_pages(pages)}" for k, pages in got.taken.items() if k not in got.arrived
    ]
    for key, pairs in got.copied.items():
        if key not in got.arrived:
            new += [f"the page that {name(key)} shares was copied ({s} to {t})" for s, t in pairs]
    return f"{text}{': ' if new else ''}{listed(new)}."


def _leaving(kind: str, got: Changes, name) -> str:
    ends = []
    if got.freed:
        ends.append(f"{_pages(got.freed)} freed")
    if got.kept:
        ends.append(f"{_pages(got.kept)} kept by the prefix cache")
    held = {p for pages in got.left.values() for p in pages}
    if others := held - set(got.freed) - set(got.kept):
        ends.append(f"{_pages(sorted(others))} still held by others")
    after = f": {', '.join(ends)}." if ends else "."
    requests = _requests({r for r, _ in got.left})
    if kind == "preempt":
        return f"Pages ran out: {requests} gave way and will be computed again later{after}"
    if kind == "swap_out":
        return f"Pages ran out: {requests} moved to host memory{after}"
    return f"{_upper(listed([name(k) for k in got.left]))} finished{after}"


def listed(words: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _requests(requests: Iterable[int]) -> str:
    """ "request 3", "requests 3, 4 and 7", "requests 3 to 9"; "" for none"""
    found = sorted(set(requests))
    if len(found) < 2:
        return "".join(f"request {r}" for r in found)
    if len(found) > 3 and found[-1] - found[0] == len(found) - 1:
        return f"requests {found[0]} to {found[-1]}"
    return f"requests {listed([str(r) for r in found])}"


def _pages(pages: list[int]) -> str:
    """ "page 7", "pages 7, 8 and 12", "9 pages" """
    pages = sorted(set(pages))
    if len(pages) > 6:
        return f"{len(pages)} pages"
    return f"page{'s' * (len(pages) > 1)} {listed([str(p) for p in pages])}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- recording --------------------------------------------------------------------------------


@dataclasses.dataclass
class Recorder:
    """Collects frames; an instance is an engine's observer.

    Args:
      page_size: tokens in a page.
      samples: how many sequences each request has, for their names; one unless said otherwise.
      prefill_tokens: the most prompt tokens that one prefill computes.
    """

    page_size: int
    samples: dict[int, int] = dataclasses.field(default_factory=dict)
    prefill_tokens: int = 512
    frames: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    counts: Counter = dataclasses.field(default_factory=Counter)  # of events by kind
    last: View = EMPTY
    told: bool = False  # of the prefill whose event is still to come
    computed: dict[Key, int] = dataclasses.field(default_factory=dict)  # tokens in the pages
    parked: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    content: dict[int, Key] = dataclasses.field(default_factory=dict)  # page -> request, column

    def __call__(self, event: Any, state: Any) -> None:
        now = view(event, state)
        self.counts[event.kind] += 1
        if event.kind == "prefill" and self.told:
            self.told = False
            return
        if event.kind == "fork" and self._prompts():  # told of before the prefill that led to it
            self.told = True
            self._add("prefill", self.last)
        self._add(event.kind, now)

    def _add(self, kind: str, now: View) -> None:
        got = changes(self.last, now)
        written = self._fill(kind, now, got)
        again = list(self.parked)
        self._park(kind, now, got)
        late = [r for r in now.waiting if r not in self.last.waiting and r not in self.parked]
        if written or late or any(got):
            text = caption(kind, got, written, late, again, self.name)
            self.frames.append(self._frame(kind, text, now, got))
        self.last = now

    def _prompts(self) -> list[Key]:
        """Sequences whose prompts are not computed as a whole."""
        return [k for k, n in self.last.lengths.items() if self.computed[k] < n]

    def name(self, key: Key) -> str:
        request, sample = key
        if self.samples.get(request, 1) == 1:
            return f"request {request}"
        return f"sequence {request}.{sample}"

    def _fill(self, kind: str, now: View, got: Changes) -> list[Key]:
        """Follows which tokens are in the pages; returns the sequences of a prefill."""
        written = []
        for key in got.left:
            self.computed.pop(key, None)
        for key in got.arrived:
            adopted = len(got.adopted.get(key, [])) * self.page_size
            whole = kind == "swap_in" or key in got.shared or key in got.copied
            self.computed[key] = now.lengths[key] if whole else adopted
        if kind == "prefill":
            room = self.prefill_tokens
            for key, done in self.computed.items():
                step = min(room, now.lengths[key] - done)
                if step > 0:
                    written.append(key)
                self.computed[key] += step
                room -= step
        for key in got.grown:
            self.computed[key] = now.lengths[key]
        return written

    def _park(self, kind: str, now: View, got: Changes) -> None:
        """Follows why requests wait, and which tokens each page holds."""
        for request, _ in got.left:
            if kind in ("preempt", "swap_out"):
                pages = {p for k, ps in got.left.items() if k[0] == request for p in ps}
                self.parked[request] = {"why": kind, "pages": len(pages)}
        for request, _ in got.arrived:
            self.parked.pop(request, None)
        for (request, _), table in now.tables.items():
            for column, page in enumerate(table):
                if page:
                    self.content[page] = (request, column)

    def _frame(self, kind: str, text: str, now: View, got: Changes) -> dict[str, Any]:
        size = self.page_size
        fill: dict[int, int] = {}
        entries = 0
        for key, table in now.tables.items():
            for column, page in enumerate(table):
                if page:
                    here = min(max(self.computed[key] - column * size, 0), size)
                    fill[page] = min(fill.get(page, size), here)
                    entries += 1
        holders = Counter(p for table in now.tables.values() for p in table if p)
        idle = sorted(set(now.cached) - set(holders))
        pages = len(now.refcount) - 1
        return {
            "kind": kind,
            "effects": effects(kind, got),
            "caption": text,
            "tables": [
                [*key, now.lengths[key], self.computed[key], list(table)]
                for key, table in now.tables.items()
            ],
            "fill": [[p, n] for p, n in sorted(fill.items())],
            "cached": sorted(now.cached),
            "idle": [[p, *self.content.get(p, (-1, 0))] for p in idle],
            "waiting": [[r, self.parked.get(r)] for r in now.waiting],
            "taken": _places(got.taken),
            "joined": _places(got.shared) + _places(got.adopted),
            "copied": [[*key, *pair] for key, pairs in got.copied.items() for pair in pairs],
            "freed": sorted({*got.freed, *got.evicted} - set(holders)),
            "counters": {
                "free": pages - len(holders) - len(idle),
                "used": len(holders),
                "cached": len(idle),
                "shared": sum(n > 1 for n in holders.values()),
                "utilisation": sum(fill.values()) / (len(holders) * size) if holders else None,
                "saved": 1 - len(holders) / entries if entries else None,
            },
        }


def _places(pages: dict[Key, list[int]]) -> list[list[int]]:
    """[request, sample, page] of each."""
    return [[*key, page] for key, found in pages.items() for page in found]


def seen(frames: list[dict[str, Any]]) -> dict[str, int]:
    """Frames that show each of EFFECTS."""
    count = Counter(effect for frame in frames for effect in frame["effects"])
    return {effect: count[effect] for effect in EFFECTS}
