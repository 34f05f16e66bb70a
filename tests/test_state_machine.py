"""Every operation of the memory, in random order, against plain lists and dicts.

Reservations, appends, forks, releases, windows, a prefix cache with salts, preemption, swapping out
and in, draining, saving and rewinding: after each operation the tables, counts, free list and
cached pages equal the oracle's, what every token holds is read back through the tables, and
`invariants.check` finds nothing.

PAXATTN_MACHINE_OPS (200,000) and PAXATTN_MACHINE_SEED (0) are the run's length and seed.
"""

import os
import random
import zlib
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import state_machine as machine
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule
from machine_oracle import World
from state_machine import KINDS, PLACES, B, M, N, P

from paxattn import allocator, kv_pool, memory, prefix_cache, swap, time_travel

CHUNK = 500
SALTS = [prefix_cache.salt_of(name) for name in (None, "alice", "bob")]


class Run:
    """Operations on the oracle, noted down for the compiled machine, with what must come out."""

    def __init__(self, size):
        self.world = World(N, B, M, P, PLACES)
        self.saved = self.world.save()
        self.ops = machine.Op(
            kind=np.zeros(size, np.int32),
            rows=np.zeros((size, B), np.int32),
            number=np.zeros(size, np.int32),
            length=np.zeros(size, np.int32),
            spare=np.zeros(size, np.int32),
            salt=np.zeros((size, 4), np.uint32),
            tokens=np.zeros((size, M * P), np.int32),
            content=np.zeros((size, M * P), np.int32),
            stamp=np.zeros(size, np.int32),
        )
        self.seen = {
            "ok": np.ones((size, B), bool),
            "first": np.zeros((size, B), np.int32),
            "second": np.zeros((size, B), np.int32),
            "tables": np.zeros((size, B, M), np.int32),
            "lengths": np.zeros((size, B), np.int32),
            "refcount": np.zeros((size, N), np.int32),
            "free": np.zeros((size, N), np.int32),
            "cached": np.zeros((size, N), bool),
            "content": np.zeros((size, B, M * P), np.int32),
        }
        self.done = 0
        self.count = 0
        self.outcomes = Counter()

    def reset(self):
        self.count = 0

    def do(self, kind, rows=(0,) * B, number=0, prompt=(), salt=0, spare=0, name=None):
        """Runs one operation on the oracle and notes it."""
        i, world, ops = self.count, self.world, self.ops
        stamp = self.done % machine.STAMPS
        value = lambda b, at: stamp * (B * M * P) + b * (M * P) + at  # noqa: E731
        ok, first, second = True, 0, 0
        if kind == "reserve":
            wanted = [len(r.content) + more for r, more in zip(world.rows, rows, strict=True)]
            ok = world.reserve(wanted, value)
        elif kind == "append":
            first, ok = world.append([r > 0 for r in rows], value)
        elif kind == "fork":
            first, second, ok = world.fork(rows)
        elif kind == "release":
            world.release([r > 0 for r in rows])
        elif kind == "release_before":
            # a window gives pages back for good: rows whose pages are cached have none
            rows = [0 if world.holds_cached(b) else r for b, r in enumerate(rows)]
            world.release_before(rows)
        elif kind == "admit":
            content = contents_of(prompt, salt)
            ok, *first = world.admit(number, prompt, salt, spare, content)
            first = first + [0] * (B - 3)
            ops.length[i], ops.salt[i], ops.spare[i] = len(prompt), SALTS[salt], spare
            ops.tokens[i, : len(prompt)] = prompt[: M * P]
            ops.content[i, : len(prompt)] = content[: M * P]
        elif kind == "evict":
            first = world.evict(number)
        elif kind == "clear":
            world.clear()
        elif kind == "swap_out":
            first = world.swap_out([r > 0 for r in rows], number)
        elif kind == "swap_in":
            held = [p for row in world.outside[number] or [] if row for p in row.pages if p]
            ok = world.swap_in(number, rows)
            name = name or (kind if len(held) == len(set(held)) else "swap_in of shared pages")
        elif kind == "drain":
            world.drain()
        elif kind == "save":
            self.saved = world.save()
        elif kind == "rewind":
            world.rewind(self.saved)
        ops.kind[i], ops.rows[i], ops.number[i], ops.stamp[i] = (
            KINDS.index(kind),
            rows,
            number,
            stamp,
        )
        self._note(i, ok, first, second)
        self.outcomes[name or kind, "done" if np.all(ok) else "refused"] += 1
        self.done += 1
        self.count += 1
        return ok

    def _note(self, i, ok, first, second):
        world, seen = self.world, self.seen
        seen["ok"][i], seen["first"][i], seen["second"][i] = ok, first, second
        seen["lengths"][i] = [len(row.content) for row in world.rows]
        seen["refcount"][i] = world.count
        seen["free"][i] = world.free + [-1] * (N - len(world.free))
        seen["tables"][i] = [row.pages + [0] * (M - len(row.pages)) for row in world.rows]
        pad = [0] * (M * P)
        seen["content"][i] = [row.content + pad[len(row.content) :] for row in world.rows]
        seen["cached"][i] = False
        seen["cached"][i, list(world.cached)] = True

    def compare(self, got, said=""):
        """All that was noted since `reset` against what the machine saw."""
        got = {name: np.asarray(x) for name, x in got._asdict().items()}
        n = self.count
        wrong = {name: None for name in got}
        for name, want in self.seen.items():
            if name != "content":
                wrong[name] = (got[name][:n] != want[:n]).reshape(n, -1).any(1)
        wrong["broken"] = got["broken"][:n].any(1)
        # tokens of pages that left the window cannot be read
        held = np.repeat(self.seen["tables"][:n] != 0, P, axis=2)
        for name, sign in [("keys", 1), ("values", -1)]:
            differs = (sign * got[name][:n] != self.seen["content"][:n]) & held
            past = np.arange(M * P)[None, None, :] >= self.seen["lengths"][:n, :, None]
            wrong[name] = (differs & ~past).any((1, 2))
        bad = np.any(list(wrong.values()), axis=0)
        if bad.any():
            i = int(bad.argmax())
            names = [name for name, w in wrong.items() if w[i]]
            op = jax.tree.map(lambda x: x[i].tolist(), self.ops)
            details = {
                name: (got[name][i].tolist(), self.seen.get(name, self.seen["content"])[i].tolist())
                for name in names
                if name != "broken"
            }
            raise AssertionError(
                f"{said} operation {self.done - n + i}, {KINDS[op.kind]} {op}: {names} differ from "
                f"the oracle's; (got, wanted): {details}; rules: {got['broken'][i].tolist()}"
            )


def contents_of(prompt, salt):
    """What a prompt's tokens hold: a number that depends on the salt and all tokens up to there."""
    numbers, seed = [], salt + 1
    for token in prompt:
        seed = zlib.crc32(bytes([token]), seed)
        numbers.append(2**23 + seed % 2**23)
    return numbers


WEIGHTS = {
    "reserve": 12,
    "append": 34,
    "fork": 9,
    "release": 12,
    "preempt": 4,
    "release_before": 5,
    "admit": 14,
    "evict": 4,
    "clear": 0.3,
    "swap_out": 5,
    "swap_in": 9,
    "drain": 0.2,
    "save": 1,
    "rewind": 1,
}


class Draw:
    """Random operations, many of them impossible."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.bases = [[self.rng.randrange(9) for _ in range(M * P)] for _ in range(3)]
        self.preempted, self.prompts = [], {}

    def each(self, chance, draw, otherwise):
        rng = self.rng
        return [draw() if rng.random() < chance else otherwise for _ in range(B)]

    def prompt(self):
        rng = self.rng
        if self.preempted and rng.random() < 0.5:
            return self.preempted.pop()
        length = rng.randrange(1, M * P + 1) if rng.random() < 0.98 else 0
        known = rng.randrange(length + 1)
        tail = [rng.randrange(2) for _ in range(length - known)]
        return (*self.bases[rng.randrange(3)][:known], *tail), rng.randrange(3)

    def run(self, run):
        rng = self.rng
        kind = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
        some = lambda chance: self.each(chance, lambda: 1, 0)  # noqa: E731
        if kind == "reserve":
            run.do(kind, self.each(0.3, lambda: rng.randrange(-2, 12), 0))
        elif kind == "append":
            run.do(kind, some(0.7))
        elif kind == "fork":
            full = [b for b in range(B) if run.world.rows[b].content]
            if full and rng.random() < 0.7:
                chosen = lambda b: -1 if b in full or rng.random() < 0.5 else rng.choice(full)  # noqa: E731
                run.do(kind, [chosen(b) for b in range(B)])
            else:
                run.do(kind, self.each(0.4, lambda: rng.randrange(-2, B + 1), -1))
        elif kind == "release":
            run.do(kind, some(rng.choice((0.3, 0.3, 0.8))))
        elif kind == "preempt":
            rows = [b for b in self.prompts if run.world.rows[b].content]
            if not rows:
                return
            row = rng.choice(rows)  # it goes, and its prompt comes again later
            self.preempted.append(self.prompts.pop(row))
            run.do("release", [int(b == row) for b in range(B)], name=kind)
        elif kind == "release_before":
            run.do(kind, self.each(0.4, lambda: rng.randrange(-1, M * P + 2), 0))
        elif kind == "admit":
            empty = [b for b in range(B) if not run.world.rows[b].content]
            row = rng.choice(empty) if empty and rng.random() < 0.9 else rng.randrange(B)
            prompt, salt = self.prompt()
            spare = rng.choice((0, 0, 0, 1, 4, 9))
            if run.do(kind, number=row, prompt=prompt, salt=salt, spare=spare):
                self.prompts[row] = prompt, salt
        elif kind == "evict":
            run.do(kind, number=rng.randrange(-1, 6))
        elif kind == "swap_out":
            rows, place = some(rng.choice((0.3, 0.6))), rng.randrange(PLACES)
            family = [b for b in range(B) if run.world.relatives(b)]
            empty = [i for i in range(PLACES) if not run.world.outside[i]]
            if family and empty and rng.random() < 0.7:  # rows that share pages go together
                related, place = run.world.relatives(rng.choice(family)), rng.choice(empty)
                rows = [int(b in related) for b in range(B)]
            run.do(kind, rows, number=place)
        elif kind == "swap_in":
            full = [i for i in range(PLACES) if run.world.outside[i]]
            place = rng.choice(full) if full and rng.random() < 0.9 else rng.randrange(PLACES)
            group = run.world.outside[place] or [None] * B
            size = sum(row is not None for row in group)
            if size and rng.random() < 0.5 and run.count < CHUNK - 2:
                going = rng.sample(range(B), size)  # make room
                run.do("release", [int(b in going) for b in range(B)])
                run.do("evict", number=M * B)
            empty = [b for b in range(B) if not run.world.rows[b].content]
            if len(empty) >= size and rng.random() < 0.8:
                rng.shuffle(empty)
                rows = [-1 if row is None else empty.pop() for row in group]
            else:
                rows = [rng.randrange(-1, B + 1) for _ in range(B)]
            run.do(kind, rows, number=place)
        else:
            run.do(kind)


def run_random(count, seed, chunk=CHUNK):
    """So many operations, in compiled chunks; between chunks states are saved and gone back to."""
    # a new function each time: JAX would remember the trace of `step` when a mutant is put in
    scan = jax.jit(lambda carry, ops: jax.lax.scan(lambda c, o: machine.step(c, o), carry, ops))
    rewind = jax.jit(time_travel.rewind, donate_argnums=0)
    carry, run, draw = machine.begin(), Run(chunk), Draw(seed)
    kept = None
    for at in range(0, count, chunk):
        run.reset()
        while run.count < chunk:
            draw.run(run)
        ops = run.ops._replace(tokens=run.ops.tokens.reshape(-1, M, P))
        carry, seen = scan(carry, ops)
        run.compare(seen, f"PAXATTN_MACHINE_SEED={seed}:")
        if kept and draw.rng.random() < 0.5:
            saved, gone, world = kept
            assert time_travel.diff(saved, carry.state) or world == run.world.save()
            carry = carry._replace(state=rewind(carry.state, saved), gone=jnp.array(gone))
            run.world.rewind(world)
            assert not time_travel.diff(saved, carry.state)
            kept = None
        elif at % 5 == 0:
            kept = time_travel.save(carry.state), np.array(carry.gone), run.world.save()
    return run


def test_random_operations_equal_the_oracle():
    run = run_random(5000, seed=int(os.environ.get("PAXATTN_MACHINE_SEED", "0")))
    happened = run.outcomes
    for kind in [*KINDS, "preempt", "swap_in of shared pages"]:
        assert happened[kind, "done"] > 0, kind
    for kind in ["reserve", "append", "fork", "admit", "swap_in"]:
        assert happened[kind, "refused"] > 20, kind


@pytest.mark.slow
def test_200_000_random_operations_equal_the_oracle():
    count = int(os.environ.get("PAXATTN_MACHINE_OPS", "200000"))
    run_random(count, seed=int(os.environ.get("PAXATTN_MACHINE_SEED", "0")))


# --- machines that are wrong --------------------------------------------------------------------


def keep_a_page(state, mask, release=memory.release):
    """A row that leaves, for the host or for good, forgets its claim to its second page."""
    pages = state.allocator
    held = mask & (state.block_tables[:, 1] != 0)
    again, _ = allocator.share(pages, state.block_tables[:, 1], held)
    return release(replace(state, allocator=again), mask)


def free_twice(state, pages, mask):
    """A page whose count falls to 0 is pushed for every entry that named it."""
    num_pages = state.refcount.shape[0]
    refcount = state.refcount.at[jnp.where(mask, pages, num_pages)].add(-1, mode="drop")
    gone = mask & (refcount[pages] <= 0)
    nth = (jnp.cumsum(gone.ravel(), dtype=jnp.int32) - 1).reshape(pages.shape)
    push = jnp.where(gone, state.num_free + nth, num_pages)
    free_list = state.free_list.at[push].set(pages, mode="drop")
    count = state.num_free + jnp.sum(gone, dtype=jnp.int32)
    return allocator.Allocator(free_list, count, jnp.maximum(refcount, 0)), mask


def one_salt(m, c, row, tokens, length, salt, spare=0, admit=prefix_cache.admit):
    """Everybody's pages are found by everybody."""
    return admit(m, c, row, tokens, length, jnp.zeros_like(salt), spare)


def share_the_tail(state, parents, fork=memory.fork):
    """A child's partial page is its parent's, and not a copy."""
    new, (source, target), ok = fork(state, parents)
    swapped = (new.block_tables[:, :, None] == target[None, None, :]) & (target != 0)[None, None]
    at = jnp.argmax(swapped, axis=2)
    tables = jnp.where(swapped.any(2), source[at], new.block_tables)
    pages, _ = allocator.give(new.allocator, target, target != 0)
    pages, _ = allocator.share(pages, source, source != 0)
    none = jnp.zeros_like(source)
    return replace(new, block_tables=tables, allocator=pages), (none, none), ok


def copy_nothing(pool, sources, destinations):
    """A child has a page of its own, but nobody copies what is in it."""
    return pool


def stale_entries(state, positions, release_before=memory.release_before):
    """Pages leave the window, and the tables go on naming them."""
    return replace(release_before(state, positions), block_tables=state.block_tables)


def evict_heads_first(m, c, count, evict=prefix_cache._evict):
    """Of one chain the head goes first, and its tail can never be found again."""
    m, other, count = evict(m, c._replace(depth=-c.depth), count)
    return m, other._replace(depth=c.depth), count


def count_once(m, rows, entries, lengths, count, restore=swap.restore):
    """What comes back shared is counted as held by one row."""
    new, pages, ok = restore(m, rows, entries, lengths, count)
    at = jnp.where(pages != 0, pages, N)
    refcount = new.allocator.refcount.at[at].set(1, mode="drop")
    return replace(new, allocator=new.allocator._replace(refcount=refcount)), pages, ok


def half_restored(m, rows, entries, lengths, count, restore=swap.restore):
    """A row that does not fit comes back with a length and no pages."""
    new, pages, ok = restore(m, rows, entries, lengths, count)
    to = jnp.where((rows >= 0) & ~ok, rows, B)
    return replace(new, lengths=new.lengths.at[to].set(lengths, mode="drop")), pages, ok


def other_order(m, mask, pages_of=swap.pages_of):
    """Contents leave in an order that is not the one by which they come back."""
    group = pages_of(m, mask)
    place = jnp.arange(group.pages.shape[0], dtype=jnp.int32)
    turned = group.pages[jnp.where(place < group.count, group.count - 1 - place, place)]
    return group._replace(pages=turned)


def keys_only(pool, pages, contents, put_pages=swap.put_pages):
    """Keys come back from the host; values do not."""
    return replace(put_pages(pool, pages, contents), v=pool.v)


def tables_only(now, saved, rewind=time_travel.rewind):
    """Going back brings back the tables, and leaves what the pages hold now."""
    return rewind(now, saved)._replace(pool=now.pool)


MUTANTS = {
    "a page kept by a row that left": (memory, "release", keep_a_page),
    "double free": (allocator, "give", free_twice),
    "another salt's page": (prefix_cache, "admit", one_salt),
    "partial page shared": (memory, "fork", share_the_tail),
    "partial page not copied": (kv_pool, "copy_pages", copy_nothing),
    "stale window entries": (memory, "release_before", stale_entries),
    "heads evicted first": (prefix_cache, "_evict", evict_heads_first),
    "shared page counted once": (swap, "restore", count_once),
    "half restored": (swap, "restore", half_restored),
    "swapped in another order": (swap, "pages_of", other_order),
    "values left outside": (swap, "put_pages", keys_only),
    "rewound without contents": (time_travel, "rewind", tables_only),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_machine_is_caught(name, monkeypatch):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError, match="PAXATTN_MACHINE_SEED=0: operation"):
        run_random(2000, seed=0)


# --- sequences that shrink ----------------------------------------------------------------------


def each(values):
    return st.lists(values, min_size=B, max_size=B)


PROMPTS = st.builds(
    lambda base, known, tail: (*([base] * known), *tail),
    st.integers(0, 2),
    st.integers(0, 12),
    st.lists(st.integers(0, 2), max_size=8),
)


class Machine(RuleBasedStateMachine):
    """The same comparison one operation at a time, in sequences that hypothesis shrinks."""

    run_step = staticmethod(jax.jit(machine.step))

    def __init__(self):
        super().__init__()
        self.run, self.carry = Run(1), machine.begin()

    def _do(self, kind, *args, **kwargs):
        self.run.reset()
        self.run.do(kind, *args, **kwargs)
        ops = self.run.ops._replace(tokens=self.run.ops.tokens.reshape(-1, M, P))
        self.carry, seen = self.run_step(self.carry, jax.tree.map(lambda x: x[0], ops))
        self.run.compare(jax.tree.map(lambda x: np.asarray(x)[None], seen))

    @rule(growth=each(st.integers(-3, 21)))
    def reserve(self, growth):
        self._do("reserve", growth)

    @rule(active=each(st.integers(0, 1)), times=st.integers(1, 5))
    def append(self, active, times):
        for _ in range(times):
            self._do("append", active)

    @rule(parents=each(st.integers(-2, B)))
    def fork(self, parents):
        self._do("fork", parents)

    @rule(gone=each(st.integers(0, 1)))
    def release(self, gone):
        self._do("release", gone)

    @rule(positions=each(st.integers(-1, M * P + 1)))
    def release_before(self, positions):
        self._do("release_before", positions)

    @rule(
        row=st.integers(0, B - 1), prompt=PROMPTS, salt=st.integers(0, 2), spare=st.integers(0, 4)
    )
    def admit(self, row, prompt, salt, spare):
        self._do("admit", number=row, prompt=prompt, salt=salt, spare=spare)

    @rule(row=st.integers(0, B - 1), prompt=PROMPTS, salt=st.integers(0, 2))
    def preempt(self, row, prompt, salt):
        for _ in range(2):
            self._do("admit", number=row, prompt=prompt, salt=salt)
            self._do("release", [int(b == row) for b in range(B)])

    @rule(count=st.integers(-1, N))
    def evict(self, count):
        self._do("evict", number=count)

    @rule(gone=each(st.integers(0, 1)), place=st.integers(0, PLACES - 1))
    def swap_out(self, gone, place):
        self._do("swap_out", gone, number=place)

    @rule(rows=each(st.integers(-1, B)) | st.permutations(range(B)), at=st.integers(0, PLACES - 1))
    def swap_in(self, rows, at):
        self._do("swap_in", rows, number=at)

    @rule(kind=st.sampled_from(["clear", "drain", "save", "rewind"]))
    def whole(self, kind):
        self._do(kind)


Machine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, derandomize=True, database=None
)
TestMachine = Machine.TestCase
