"""The device's state as the host works on it: which sequences hold pages, and since when.

The state itself is a value and every operation on it a compiled pure function (`decode.Programs`).
This is the shell around them: it owns the one current state, because each program consumes the one
before, and speaks of sequences where the programs speak of rows.
"""

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxattn import contiguous, huge_pages, kv_pool, prefix_cache, time_travel
from paxattn import memory as paged
from paxattn.capacity import Capacity
from paxattn.decode import MAX_STEPS, Programs, State
from paxattn.llama import Llama
from paxattn.llama_config import LlamaConfig
from paxattn.request import Sequence, Swapped
from paxattn.scheduler import Scheduler


class Event(NamedTuple):
    """What an observer is told after each program that changed the memory."""

    kind: str  # admit, prefill, fork, decode, preempt, swap_out, swap_in, release, evict, window,
    # rewind
    rows: dict[int, tuple[int, int]]  # memory row -> (request, sample) of every running sequence
    waiting: list[int]  # requests that wait, the next one first


class Snapshot(NamedTuple):
    """An engine between two steps: what `LLM.save` gives and `LLM.rewind` takes, any number of times.

    `time_travel.diff(a.state, b.state)` says how two of them differ.
    """

    state: time_travel.Saved  # the pages in use, the tables, the prefix cache
    scheduler: Scheduler  # the sequences, and who waits
    swap_used: int
    requests: int = 0  # how many there have been

    @property
    def nbytes(self) -> int:
        return self.state.nbytes


class DeviceState:
    """The pool, the memory and the prefix cache of one engine, and the programs that change them.

    Args:
      config, dtype: of the model, whose programs these are.
      capacity: pages and rows.
      reserved: the traditional cache instead of the paged one.
      prefix_caching: keep full prompt pages.
      swap_bytes: host memory that sequences may be swapped out to.
    """

    def __init__(
        self,
        config: LlamaConfig,
        dtype: Any,
        capacity: Capacity,
        reserved: bool,
        prefix_caching: bool,
        swap_bytes: int,
    ):
        self.config, self.dtype, self.capacity = config, dtype, capacity
        self.reserved, self.prefix_caching = reserved, prefix_caching
        self.programs = Programs(Llama(config, dtype))
        self.scheduler: Scheduler
        self.state: State
        self.observer: Callable[[Event, State], None] | None = None
        self.counts = dict.fromkeys(
            ("hits", "misses", "evictions", "saved_tokens", "swapped_out", "swapped_in"), 0
        )
        self.swap_bytes, self.swap_used = swap_bytes, 0
        self.swap_seconds_per_page: float | None = None  # there and back, as measured
        windows = [config.layer_window(i) for i in range(config.num_layers)]
        self._window = None if None in windows else max(w for w in windows if w is not None)
        self.reset()

    def reset(self) -> None:
        """An empty pool, an empty memory and nobody in it."""
        c, plan = self.config, self.capacity
        ops = contiguous if self.reserved else paged
        pool = kv_pool.init(
            c.num_layers, plan.num_pages, plan.page_size, c.num_kv_heads, c.head_dim, self.dtype
        )
        self.state = State(
            huge_pages.backed(pool),
            ops.init(plan.num_pages, plan.max_rows, plan.pages_per_seq, plan.page_size),
            prefix_cache.init(plan.num_pages, plan.page_size) if self.prefix_caching else None,
        )
        self.scheduler = Scheduler(plan.max_rows, plan.page_size, self.reserved)
        self.swap_used = 0

    def notify(self, kind: str) -> None:
        """Tells the observer, if there is one, that the memory has changed."""
        if self.observer is None:
            return
        rows = {s.row: (s.index, s.sample) for s in self.scheduler.running}
        waiting = [group[0].index for group in self.scheduler.waiting]
        self.observer(Event(kind, rows, waiting), self.state)

    # ------------------------------------------------------------------ coming

    def free_pages(self) -> int:
        """Pages that a sequence could have: free, or idle in the prefix cache."""
        if self.reserved:
            return 0
        if self.state.prefix is not None:
            return int(self.programs.available(self.state.memory, self.state.prefix))
        return int(self.state.memory.allocator.num_free)

    def admit(self) -> None:
        """Lets those who wait come in, in their order, while there is room."""
        scheduler = self.scheduler
        while (group := scheduler.next_group()) is not None:
            if group[0].swapped is not None:
                if not self._swap_in(group, group[0].swapped):
                    return
            elif self.state.prefix is not None:
                if not self._admit_cached(group):
                    return
            else:
                admitted = scheduler.admit(self.free_pages())
                if not admitted:
                    return
                self._reserve(admitted)

    def _reserve(self, sequences: list[Sequence]) -> None:
        lengths = np.asarray(self.state.memory.lengths).copy()
        for s in sequences:
            lengths[s.row] = len(s.prompt_ids)
        memory, ok = self.programs.reserve(self.state.memory, lengths)
        self.state = self.state._replace(memory=memory)
        _granted(ok)
        self.notify("admit")

    def _admit_cached(self, group: list[Sequence]) -> bool:
        """Admits one prompt: what it finds in the prefix cache depends on those before it."""
        scheduler, first = self.scheduler, group[0]
        length = len(first.prompt_ids)
        width = self._table_width(scheduler.pages(length))
        tokens = np.zeros((width, self.capacity.page_size), np.int32)
        tokens.reshape(-1)[:length] = first.prompt_ids
        memory, prefix, found = self.programs.admit(
            self.state.memory,
            self.state.prefix,
            np.int32(scheduler.free_rows[-1]),
            tokens,
            np.int32(length),
            prefix_cache.salt_of(first.cache_salt),
            np.int32(scheduler.beyond_prompt(group)),
        )
        self._keep(memory, prefix)
        found = jax.tree.map(int, jax.device_get(found))
        if not found.ok:
            return False
        scheduler.place()
        first.stored = found.cached_tokens
        self.counts["evictions"] += found.evicted
        if not first.preemptions:  # a prompt that comes back finds its own pages
            self.counts["hits"] += found.hits
            self.counts["misses"] += found.misses
            self.counts["saved_tokens"] += found.cached_tokens
        self.notify("admit")
        return True

    def _table_width(self, pages: int) -> int:
        """Pages padded to 8, 32, 128, ...: few programs."""
        width = 8
        while width < pages:
            width *= 4
        return min(width, self.capacity.pages_per_seq)

    def fork(self, sequences: list[Sequence]) -> None:
        """Each sequence takes the pages of its parent, and a copy of a partial last one."""
        if not sequences:
            return
        self._evict(len(sequences))  # each may copy a page, and pages come from the free list only
        parents = np.full(self.capacity.max_rows, -1, np.int32)
        for s in sequences:
            assert s.parent is not None
            parents[s.row] = s.parent.row
        self.state, ok = self.programs.fork(self.state, parents)
        _granted(ok)
        for s in sequences:
            assert s.parent is not None
            s.stored, s.dropped, s.parent = s.parent.stored, s.parent.dropped, None
        self.notify("fork")

    # ------------------------------------------------------------------ staying

    def make_room(self, sequences: list[Sequence], steps: int = MAX_STEPS) -> None:
        """Evicts as many idle pages as `steps` decode steps may want beyond the free list."""
        if self.state.prefix is None:
            return
        pages = self.scheduler.pages
        want = 0
        for s in sequences:
            most = min(steps, max(1, s.limit - s.in_play))
            want += pages(s.stored + most) - pages(s.stored)
        self._evict(want)

    def _evict(self, want: int) -> None:
        """Puts idle pages on the free list until it holds `want`, if there are so many."""
        want -= int(self.state.memory.allocator.num_free)
        if self.state.prefix is None or want <= 0:
            return
        memory, prefix, count = self.programs.evict(
            self.state.memory, self.state.prefix, np.int32(want)
        )
        self._keep(memory, prefix)
        self.counts["evictions"] += int(count)
        if int(count):
            self.notify("evict")

    def leave_window(self, sequences: list[Sequence]) -> None:
        """Gives back pages that no layer's sliding window reaches any more.

        Not with a prefix cache, where whoever holds a page holds all those before it.
        """
        if self._window is None or self.prefix_caching or self.reserved:
            return
        positions = np.zeros(self.capacity.max_rows, np.int32)
        before = {s: s.dropped for s in sequences}
        for s in sequences:
            positions[s.row] = max(0, s.stored + 1 - self._window)  # seen by the next token
            s.dropped = int(positions[s.row]) // self.capacity.page_size
        if any(s.dropped > count for s, count in before.items()):
            memory = self.programs.release_before(self.state.memory, positions)
            self.state = self.state._replace(memory=memory)
            self.notify("window")

    # ------------------------------------------------------------------ going

    def release(self, rows: list[int], kind: str = "release") -> None:
        """Empties rows; what only they held is free."""
        mask = self._mask(rows)
        if self.state.prefix is not None:
            self._keep(*self.programs.release_cached(self.state.memory, self.state.prefix, mask))
        else:
            memory = self.programs.release(self.state.memory, mask)
            self.state = self.state._replace(memory=memory)
        self.notify(kind)

    def leave(self, sequences: list[Sequence]) -> None:
        """Lets the finished ones among some sequences go."""
        rows = []
        for s in sequences:
            if s.finish_reason:
                rows.append(s.row)
                self.scheduler.finish(s)
        if rows:
            self.release(rows)

    def preempt(self) -> None:
        """The youngest group gives its pages back; it computes them again when it returns."""
        unfinished = not all(s.prefilled for s in self.scheduler.running[-1].group)
        self.release(self.scheduler.preempt(), "preempt")
        if unfinished and self.state.prefix is not None:
            # Its prompt's pages were entered before they were computed: nobody may find them.
            self._keep(*self.programs.clear(self.state.memory, self.state.prefix))

    def can_swap(self) -> bool:
        """Whether the youngest group has anything that is worth keeping: a computed prompt."""
        group = self.scheduler.running[-1].group
        return not self.reserved and all(s.prefilled and s.parent is None for s in group)

    def swap_out(self) -> bool:
        """The youngest group's pages go to host memory; they come back bit-identical.

        False, and nothing happens, where they would exceed its budget.
        """
        group = list(self.scheduler.running[-1].group)
        rows = [s.row for s in group]
        started, compiled = time.perf_counter(), self.compiled()
        pages, entries, count = jax.device_get(
            self.programs.pages_of(self.state.memory, self._mask(rows))
        )
        padded = _padded(pages[: int(count)])
        if self.swap_used + len(padded) * self.capacity.bytes_per_page > self.swap_bytes:
            return False
        contents = jax.device_get(self.programs.take_pages(self.state.pool, padded))
        lengths = np.asarray(self.state.memory.lengths)[rows]
        group[0].swapped = Swapped(entries[rows], lengths, int(count), contents)
        self._measure_swap(int(count), time.perf_counter() - started, compiled)
        self.swap_used += group[0].swapped.nbytes
        self.counts["swapped_out"] += int(count)
        self.scheduler.preempt(keep=True)
        self.release(rows, "swap_out")
        return True

    def _swap_in(self, group: list[Sequence], swapped: Swapped) -> bool:
        scheduler = self.scheduler
        if swapped.num_pages + scheduler.next_tokens(group) > self.free_pages():
            return False
        self._evict(swapped.num_pages)
        started, compiled = time.perf_counter(), self.compiled()
        scheduler.place()
        plan = self.capacity
        rows = np.full(plan.max_rows, -1, np.int32)
        entries = np.zeros((plan.max_rows, plan.pages_per_seq), np.int32)
        lengths = np.zeros(plan.max_rows, np.int32)
        here = slice(0, len(group))
        rows[here] = [s.row for s in group]
        entries[here], lengths[here] = swapped.entries, swapped.lengths
        self.state, ok = self.programs.swap_in(
            self.state, rows, entries, lengths, np.int32(swapped.num_pages), swapped.contents
        )
        _granted(ok)
        self._measure_swap(swapped.num_pages, time.perf_counter() - started, compiled)
        self.swap_used -= swapped.nbytes
        self.counts["swapped_in"] += swapped.num_pages
        group[0].swapped = None
        self.notify("swap_in")
        return True

    def _measure_swap(self, pages: int, seconds: float, compiled: int) -> None:
        if pages and compiled == self.compiled():  # a compilation is no cost of swapping
            both_ways = 2 * seconds / pages
            old = self.swap_seconds_per_page
            self.swap_seconds_per_page = both_ways if old is None else (old + both_ways) / 2

    def abandon(self, closed: bool = False) -> None:
        """Empties everything after a failed call, or one that its caller `closed` between two steps.

        The observer is not told. Every row is released, whoever the scheduler thinks holds one: an
        interrupt may come between its books and the device's. Cached pages are forgotten where some
        may never have been computed.
        """
        plan = self.capacity
        computed = closed and all(s.prefilled for s in self.scheduler.running)
        self.scheduler = Scheduler(plan.max_rows, plan.page_size, self.reserved)
        self.swap_used = 0
        if _deleted(self.state):  # a program failed after it had taken the donated state
            self.reset()
            return
        everyone = np.ones(plan.max_rows, bool)
        if self.state.prefix is None:
            memory = self.programs.release(self.state.memory, everyone)
            self.state = self.state._replace(memory=memory)
            return
        self._keep(*self.programs.release_cached(self.state.memory, self.state.prefix, everyone))
        if not computed:
            self._keep(*self.programs.clear(self.state.memory, self.state.prefix))

    # ------------------------------------------------------------------ time

    def save(self) -> Snapshot:
        """Everything as it stands; costs the pages in use."""
        return Snapshot(
            time_travel.save(self.state), _copy_scheduler(self.scheduler), self.swap_used
        )

    def rewind(self, saved: Snapshot) -> None:
        """Everything as it stood."""
        time_travel.check_same_geometry(self.state, saved.state)  # here, not from inside a program
        self.state = self.programs.rewind(self.state, saved.state)
        self.scheduler = _copy_scheduler(saved.scheduler)
        self.swap_used = saved.swap_used
        self.notify("rewind")

    # ------------------------------------------------------------------ small parts

    def compiled(self) -> int:
        """Programs compiled so far."""
        return sum(self.programs.compiled.values())

    def sharing(self) -> tuple[int, int]:
        """Table entries of all sequences, and how many pages stand in several of them."""
        memory = self.state.memory
        if self.reserved:
            return int(contiguous.held_pages(memory).sum()), 0
        entries = np.asarray(memory.block_tables)
        entries = entries[entries != 0]
        _, holders = np.unique(entries, return_counts=True)
        return entries.size, int((holders > 1).sum())

    def dropped_tokens(self) -> int:
        """Tokens of running sequences whose pages have left the window and been given back."""
        return sum(s.dropped for s in self.scheduler.running) * self.capacity.page_size

    def page_counts(self) -> tuple[int, int, int]:
        """Pages that are free, held by sequences, and only in the prefix cache."""
        ops = contiguous if self.reserved else paged
        free = int(ops.free_pages(self.state.memory))
        cached = 0 if self.state.prefix is None else self.free_pages() - free
        return free, self.capacity.num_pages - 1 - free - cached, cached

    def tokens(self) -> int:
        """Tokens of all sequences, those that left the window included."""
        return int(jnp.sum(self.state.memory.lengths))

    def _keep(self, memory: Any, prefix: Any) -> None:
        self.state = self.state._replace(memory=memory, prefix=prefix)

    def _mask(self, rows: list[int]) -> np.ndarray:
        mask = np.zeros(self.capacity.max_rows, bool)
        mask[rows] = True
        return mask


def _copy_scheduler(scheduler: Scheduler) -> Scheduler:
    """Its sequences and queues; what never changes (parameters, swapped pages) is shared."""
    groups = [*scheduler.waiting, *(s.group for s in scheduler.running)]
    fixed = [x for group in groups for s in group for x in (s.params, s.prompt_ids, s.swapped)]
    return copy.deepcopy(scheduler, {id(x): x for x in fixed if x is not None})


def _granted(ok: Any) -> None:
    if not np.asarray(ok).all():
        raise RuntimeError("the allocator refused pages that the scheduler had counted as free")


def _padded(pages: np.ndarray) -> np.ndarray:
    """Pages padded to 8, 16, 32, ...: few programs; the padding is the null page."""
    size = max(8, 1 << (len(pages) - 1).bit_length())
    return np.pad(pages, (0, size - len(pages))).astype(np.int32)


def _deleted(state: State) -> bool:
    return any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
