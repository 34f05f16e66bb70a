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
from typing import Any

from movie_changes import EFFECTS, EMPTY, Changes, Key, View, changes, effects, view
from movie_words import caption


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
            followed = self.computed, self.parked, self.content
            self.frames.append(frame_of(kind, text, now, got, self.page_size, *followed))
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


def frame_of(
    kind: str,
    text: str,
    now: View,
    got: Changes,
    size: int,
    computed: dict[Key, int],
    parked: dict[int, dict[str, Any]],
    content: dict[int, Key],
) -> dict[str, Any]:
    """One frame as plain data; see `Recorder` for the last three."""
    fill: dict[int, int] = {}
    entries = 0
    for key, table in now.tables.items():
        for column, page in enumerate(table):
            if page:
                here = min(max(computed[key] - column * size, 0), size)
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
            [*key, now.lengths[key], computed[key], list(table)]
            for key, table in now.tables.items()
        ],
        "fill": [[p, n] for p, n in sorted(fill.items())],
        "refcount": list(now.refcount),
        "cached": sorted(now.cached),
        "idle": [[p, *content.get(p, (-1, 0))] for p in idle],
        "waiting": [[r, parked.get(r)] for r in now.waiting],
        "taken": _places(got.taken),
        "joined": _places(got.shared) + _places(got.adopted),
        "copied": [[*key, *pair] for key, pairs in got.copied.items() for pair in pairs],
        "evicted": list(got.evicted),
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
