"""Memory in plain Python lists, dicts and sets: what the arrays are compared with.

One page, one row and one step at a time, written from the description of the operations and not
from the code: a stack of free pages, a dict of counts, a list of pages for each row.
"""

import numpy as np


class Oracle:
    def __init__(self, num_pages, max_seqs, pages_per_seq, page_size):
        self.num_pages, self.width, self.size = num_pages, pages_per_seq, page_size
        self.free = list(range(num_pages - 1, 0, -1))
        self.count = dict.fromkeys(range(num_pages), 0)
        self.rows = [[] for _ in range(max_seqs)]
        self.lengths = [0] * max_seqs

    def _pages(self, length):
        pages = 0
        while pages * self.size < length:
            pages += 1
        return pages

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

    def reserve(self, new_lengths):
        ok, blocked, budget = [], False, len(self.free)
        for row, new in enumerate(new_lengths):
            if new < self.lengths[row] or self._pages(max(new, 0)) > self.width:
                ok.append(False)
                continue
            need = self._pages(new) - len(self.rows[row])
            if need and (blocked or need > budget):
                blocked = True
                ok.append(False)
                continue
            budget -= need
            self.rows[row] += [self._take() for _ in range(need)]
            self.lengths[row] = new
            ok.append(True)
        return ok

    def append(self, active):
        slots, ok = [], []
        for row, go in enumerate(active):
            at_end = self.lengths[row] == len(self.rows[row]) * self.size
            full = len(self.rows[row]) == self.width
            if not go or (at_end and (full or not self.free)):
                slots.append(0)
                ok.append(not go)
                continue
            if at_end:
                self.rows[row].append(self._take())
            position = self.lengths[row]
            slots.append(self.rows[row][position // self.size] * self.size + position % self.size)
            self.lengths[row] += 1
            ok.append(True)
        return slots, ok

    def fork(self, parents):
        source, target, ok = [], [], []
        rows, lengths = [list(r) for r in self.rows], list(self.lengths)
        for row, parent in enumerate(parents):
            source.append(0)
            target.append(0)
            if parent == -1:
                ok.append(True)
                continue
            if not 0 <= parent < len(rows) or lengths[row]:
                ok.append(False)
                continue
            full, rest = divmod(lengths[parent], self.size)
            if rest and not self.free:
                ok.append(False)
                continue
            for page in rows[parent][:full]:
                self.count[page] += 1
            self.rows[row] = rows[parent][:full]
            if rest:
                source[-1], target[-1] = rows[parent][full], self._take()
                self.rows[row].append(target[-1])
            self.lengths[row] = lengths[parent]
            ok.append(True)
        return source, target, ok

    def release(self, mask):
        for row, go in enumerate(mask):
            if go:
                for page in self.rows[row]:
                    self._give(page)
                self.rows[row], self.lengths[row] = [], 0

    def tables(self):
        table = np.zeros((len(self.rows), self.width), np.int32)
        for row, pages in enumerate(self.rows):
            table[row, : len(pages)] = pages
        return table

    def counts(self):
        return np.array([self.count[page] for page in range(self.num_pages)], np.int32)


class Intervals:
    """An arena as a plain list of (start, size, row), and every address looked at in turn."""

    def __init__(self, capacity):
        self.capacity, self.regions = capacity, {}

    def holes(self):
        taken = np.zeros(self.capacity, bool)
        for start, size in self.regions.values():
            assert not taken[start : start + size].any()
            taken[start : start + size] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[1], taken, [1]]).astype(int)))
        return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def find(self, size, fit):
        fitting = [hole for hole in self.holes() if hole[1] >= size]
        if not fitting:
            return None
        return min(fitting, key=lambda h: h if fit == "first" else (h[1], h[0]))[0]

    def place(self, row, size, fit):
        at = self.find(size, fit)
        if row in self.regions or at is None or size < 1:
            return False
        self.regions[row] = (at, size)
        return True

    def grow(self, row, size):
        if row not in self.regions or size < self.regions[row][1]:
            return False
        start, old = self.regions[row]
        behind = dict(self.holes()).get(start + old, 0)
        if size - old > behind:
            return False
        self.regions[row] = (start, size)
        return True

    def move(self, row, size, fit):
        at = self.find(size, fit)
        if row not in self.regions or at is None or size < self.regions[row][1]:
            return False
        self.regions[row] = (at, size)
        return True


class Blocks:
    """A buddy allocator as a set of free (order, start)."""

    def __init__(self, capacity):
        self.free, self.rows, at = set(), {}, 0
        for order in reversed(range(capacity.bit_length())):
            if capacity - at >= 2**order:
                self.free.add((order, at))
                at += 2**order

    def place(self, row, size):
        order = max(size - 1, 0).bit_length()
        fitting = [block for block in self.free if block[0] >= order]
        if row in self.rows or size < 1 or not fitting:
            return False
        found, at = min(fitting)
        self.free.remove((found, at))
        while found > order:
            found -= 1
            self.free.add((found, at + 2**found))
        self.rows[row] = (at, order, size)
        return True

    def free_row(self, row):
        if row not in self.rows:
            return
        at, order, _ = self.rows.pop(row)
        while (order, at ^ 2**order) in self.free:
            self.free.remove((order, at ^ 2**order))
            at, order = min(at, at ^ 2**order), order + 1
        self.free.add((order, at))
