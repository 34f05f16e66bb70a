"""A frame of the memory movie in plain words."""

from __future__ import annotations

from collections.abc import Iterable

from movie_changes import Changes, Key


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
        said.append(f"{_upper(_pages(got.dropped))} left the sliding window and went back.")
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
    many = len(twins) > 1
    text = f"{_upper(listed([name(k) for k in twins]))} began as {'twins' if many else 'a twin'}"
    if shared:
        text += f": {_pages(shared)} shared with {'their' if many else 'its'} parent"
    copies = [pair for k in twins for pair in got.copied.get(k, [])]
    if copies:
        pairs = listed([f"{s} to {t}" for s, t in copies])
        text += f"; the last page will be written, so it was copied ({pairs})"
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
