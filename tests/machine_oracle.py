"""Everything that memory can do, in plain Python lists and dicts: what the arrays are compared with.

Written from the description of the operations and not from the code: one page, one row and one
step at a time. A row is a list of pages (0: left a window) and a list of what its tokens hold, a
number each, so a page that is shared, copied, cached or swapped wrongly shows in what is read back.
"""

from dataclasses import dataclass, field


@dataclass
class Row:
    pages: list = field(default_factory=list)
    content: list = field(default_factory=list)  # one number a token

    def copy(self):
        return Row(list(self.pages), list(self.content))


class World:
    def __init__(self, num_pages, max_seqs, pages_per_seq, page_size, places):
        self.num_pages, self.width, self.size = num_pages, pages_per_seq, page_size
        self.free = list(range(num_pages - 1, 0, -1))
        self.count = [0] * num_pages
        self.rows = [Row() for _ in range(max_seqs)]
        self.known = {}  # (salt, tokens of the whole prefix) -> page
        self.cached = {}  # page -> that key
        self.used = {}  # page -> when
        self.clock = 0
        self.outside = [None] * places  # swapped groups: a list of rows, None for rows not in it

    # --- pages ---

    def _take(self):
        page = self.free.pop()
        assert self.count[page] == 0
        self.count[page] = 1
        return page

    def _give(self, page):
        assert self.count[page] > 0, f"page {page} is freed twice"
        self.count[page] -= 1
        if self.count[page] == 0:
            self.free.append(page)

    def _pages(self, tokens):
        return -(-tokens // self.size)

    # --- memory ---

    def reserve(self, new_lengths, value):
        ok, blocked, budget = [], False, len(self.free)
        for b, (row, new) in enumerate(zip(self.rows, new_lengths, strict=True)):
            old = len(row.content)
            if new < old or self._pages(new) > self.width:
                ok.append(False)
                continue
            need = self._pages(new) - len(row.pages)
            if need and (blocked or need > budget):
                blocked = True
                ok.append(False)
                continue
            budget -= need
            row.pages += [self._take() for _ in range(need)]
            row.content += [value(b, i) for i in range(old, new)]
            ok.append(True)
        return ok

    def append(self, active, value):
        slots, ok = [], []
        for b, (row, go) in enumerate(zip(self.rows, active, strict=True)):
            at = len(row.content)
            at_end = at == len(row.pages) * self.size
            if not go or (at_end and (len(row.pages) == self.width or not self.free)):
                slots.append(0)
                ok.append(not go)
                continue
            if at_end:
                row.pages.append(self._take())
            row.content.append(value(b, at))
            slots.append(row.pages[at // self.size] * self.size + at % self.size)
            ok.append(True)
        return slots, ok

    def fork(self, parents):
        source, target, ok = [], [], []
        before = [row.copy() for row in self.rows]
        for b, parent in enumerate(parents):
            source.append(0)
            target.append(0)
            if parent == -1:
                ok.append(True)
                continue
            if not 0 <= parent < len(before) or before[b].content:
                ok.append(False)
                continue
            child = before[parent].copy()
            full, rest = divmod(len(child.content), self.size)
            if rest and not self.free:
                ok.append(False)
                continue
            for page in child.pages[:full]:
                if page:
                    self.count[page] += 1
            if rest:
                source[-1], target[-1] = child.pages[full], self._take()
                child.pages[full] = target[-1]
            self.rows[b] = child
            ok.append(True)
        return source, target, ok

    def release(self, mask):
        self.clock += 1
        for b, go in enumerate(mask):
            if go:
                for page in self.rows[b].pages:
                    if page in self.used:
                        self.used[page] = self.clock
                for page in self.rows[b].pages:
                    if page:
                        self._give(page)
                self.rows[b] = Row()

    def relatives(self, b):
        """The rows that share a page with row b, and it; none if it shares none."""
        mine = {page for page in self.rows[b].pages if page}
        kin = [c for c, row in enumerate(self.rows) if mine & set(row.pages)]
        return kin if len(kin) > 1 else []

    def holds_cached(self, b):
        return any(page in self.cached for page in self.rows[b].pages)

    def release_before(self, positions):
        for row, position in zip(self.rows, positions, strict=True):
            first = max(0, min(position, len(row.content))) // self.size
            for i in range(first):
                if row.pages[i]:
                    self._give(row.pages[i])
                    row.pages[i] = 0

    # --- prefix cache ---

    def idle(self):
        return [page for page in self.cached if self.count[page] == 1]

    def _key(self, salt, prompt, pages):
        return salt, tuple(prompt[: pages * self.size])

    def admit(self, b, prompt, salt, spare, content):
        """Returns ok, pages adopted, pages missed, pages evicted."""
        self.clock += 1
        length = len(prompt)
        full, could = length // self.size, max(length - 1, 0) // self.size
        known = 0
        while known < full and self._key(salt, prompt, known + 1) in self.known:
            known += 1
        hits = min(known, could)
        adopted = [self.known[self._key(salt, prompt, j + 1)] for j in range(hits)]
        need = self._pages(length) - hits
        waiting = [page for page in self.idle() if page not in adopted]
        fits = need + spare <= len(self.free) + len(waiting)
        if self.rows[b].content or not 0 < length <= self.width * self.size or not fits:
            return False, 0, 0, 0
        for page in adopted:
            self.count[page] += 1
        evicted = self.evict(need - len(self.free))
        pages = adopted + [self._take() for _ in range(need)]
        self.rows[b] = Row(pages, list(content[:length]))
        for j in range(known, full):
            key = self._key(salt, prompt, j + 1)
            assert key not in self.known, "a tail was cached without its head"
            self.known[key], self.cached[pages[j]] = pages[j], key
            self.count[pages[j]] += 1
            self.used[pages[j]] = self.clock
        for page in adopted:
            self.used[page] = self.clock
        return True, hits, could - hits, evicted

    def _forget(self, page):
        del self.known[self.cached.pop(page)], self.used[page]
        self._give(page)

    def evict(self, count):
        if count <= 0:
            return 0
        going = sorted(self.idle(), key=lambda p: (self.used[p], -len(self.cached[p][1]), p))
        for page in going[:count]:
            self._forget(page)
        return min(count, len(going))

    def clear(self):
        for page in sorted(self.cached):
            self._forget(page)

    # --- leaving and coming back ---

    def swap_out(self, mask, place):
        """Returns the pages that leave; into a place that is taken nobody goes."""
        if self.outside[place] is not None:
            mask = [False] * len(mask)
        else:
            self.outside[place] = [
                row.copy() if go else None for row, go in zip(self.rows, mask, strict=True)
            ]
        held = [p for row, go in zip(self.rows, mask, strict=True) if go for p in row.pages if p]
        self.release(mask)
        return len(set(held))

    def swap_in(self, place, targets):
        group = self.outside[place]
        if group is None:
            return False
        pairs = [(row or Row(), b) for row, b in zip(group, targets, strict=True) if b >= 0]
        chosen = [b for _, b in pairs]
        fits = len(set(chosen)) == len(chosen) and all(b < len(self.rows) for b in chosen)
        if not fits or any(self.rows[b].content for b in chosen):
            return False
        # a page that no row would hold any more must not be lost
        every = dict.fromkeys(p for row in group if row for p in row.pages if p)
        if {p for row, _ in pairs for p in row.pages if p} != set(every):
            return False
        if len(every) > len(self.free):
            return False
        new = {0: 0}
        for page in every:
            new[page] = self._take()
            self.count[new[page]] = 0
        for row, b in pairs:
            for page in row.pages:
                if page:
                    self.count[new[page]] += 1
            self.rows[b] = Row([new[p] for p in row.pages], list(row.content))
        self.outside[place] = None
        return True

    def drain(self):
        """Everything goes; all pages must be free again."""
        self.release([True] * len(self.rows))
        self.clear()
        self.outside = [None] * len(self.outside)
        assert sorted(self.free) == list(range(1, self.num_pages))

    # --- values ---

    def save(self):
        return (
            list(self.free),
            list(self.count),
            [row.copy() for row in self.rows],
            dict(self.known),
            dict(self.cached),
            dict(self.used),
            self.clock,
        )

    def rewind(self, saved):
        self.free, self.count, self.rows, self.known, self.cached, self.used, self.clock = saved
        self.free, self.count, self.rows, self.known, self.cached, self.used, _ = self.save()
