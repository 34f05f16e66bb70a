"""Paged memory against plain Python lists, operation by operation.

The random run takes 20,000 operations; PAXATTN_MEMORY_OPS=1000000 makes it a million.
"""

import dataclasses
import os

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from memory_oracle import Oracle

from paxattn import allocator, block_tables, invariants, memory

SIZES = {"num_pages": 20, "max_seqs": 6, "pages_per_seq": 5, "page_size": 4}
B = SIZES["max_seqs"]

check = jax.jit(invariants.check)
reserve, append, fork, release, slot_mapping = map(
    jax.jit,
    (memory.reserve, memory.append, memory.fork, memory.release, memory.slot_mapping),
)


def ints(*values):
    return jnp.array(values, jnp.int32)


def bools(*values):
    return jnp.array(values, bool)


# --- by hand ----------------------------------------------------------------------------------


def test_reserve_takes_the_pages_that_the_lengths_need():
    state = memory.init(10, 4, 3, 4)
    state, ok = reserve(state, ints(5, 4, 13, 0))  # 2 pages, 1, too long (12 is most), none
    assert ok.tolist() == [True, True, False, True]
    assert state.block_tables.tolist() == [[1, 2, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert state.lengths.tolist() == [5, 4, 0, 0]
    assert int(memory.free_pages(state)) == 6
    assert memory.held_pages(state).tolist() == [2, 1, 0, 0]


def test_reserve_grows_keeps_and_refuses_to_shrink():
    state, _ = reserve(memory.init(10, 3, 3, 4), ints(5, 5, 5))
    state, ok = reserve(state, ints(9, 5, 4))
    assert ok.tolist() == [True, True, False]
    assert state.lengths.tolist() == [9, 5, 5]
    assert state.block_tables.tolist() == [[1, 2, 7], [3, 4, 0], [5, 6, 0]]


@pytest.mark.parametrize("length", [-1, -(2**31), 2**31 - 1])
def test_reserve_refuses_absurd_lengths(length):
    state = memory.init(10, 2, 3, 4)
    after, ok = reserve(state, ints(length, 4))
    assert ok.tolist() == [False, True]
    assert after.lengths.tolist() == [0, 4]


def test_append_takes_a_page_only_at_a_page_boundary():
    state, _ = reserve(memory.init(10, 3, 3, 4), ints(3, 4, 2))
    state, slots, ok = append(state, bools(1, 1, 0))
    assert slots.tolist() == [1 * 4 + 3, 4 * 4 + 0, 0]  # pages 1, 2, 3 are taken: the next is 4
    assert ok.tolist() == [True] * 3
    assert state.lengths.tolist() == [4, 5, 2]
    assert state.block_tables.tolist() == [[1, 0, 0], [2, 4, 0], [3, 0, 0]]


def test_append_refuses_a_full_row_and_an_empty_pool_and_changes_nothing():
    state, _ = reserve(memory.init(4, 2, 2, 4), ints(8, 4))
    after, slots, ok = append(state, bools(1, 1))  # row 0 is full, no page for row 1
    assert ok.tolist() == [False, False]
    assert slots.tolist() == [0, 0]
    assert jax.tree.all(jax.tree.map(np.array_equal, state, after))


def test_fork_shares_full_pages_and_copies_the_partial_one():
    state, _ = reserve(memory.init(10, 4, 3, 4), ints(6, 4, 0, 0))
    state, (source, target), ok = fork(state, ints(-1, -1, 0, 1))
    assert ok.tolist() == [True] * 4
    assert state.block_tables.tolist() == [[1, 2, 0], [3, 0, 0], [1, 4, 0], [3, 0, 0]]
    assert (source.tolist(), target.tolist()) == ([0, 0, 2, 0], [0, 0, 4, 0])
    assert state.lengths.tolist() == [6, 4, 6, 4]
    assert state.allocator.refcount.tolist() == [0, 2, 1, 2, 1, 0, 0, 0, 0, 0]
    # both go on writing, each into a page of its own
    state, slots, _ = append(state, bools(1, 0, 1, 0))
    assert slots.tolist() == [2 * 4 + 2, 0, 4 * 4 + 2, 0]


def test_fork_refuses_rows_in_use_unknown_parents_and_lack_of_pages():
    state, _ = reserve(memory.init(4, 5, 3, 4), ints(6, 2, 0, 0, 0))  # no page left
    after, (source, target), ok = fork(state, ints(1, -1, 0, 5, -2))
    assert ok.tolist() == [False, True, False, False, False]
    assert source.tolist() == target.tolist() == [0] * 5
    assert jax.tree.all(jax.tree.map(np.array_equal, state, after))


def test_a_page_with_two_holders_is_free_when_both_have_gone():
    state, _ = reserve(memory.init(6, 3, 2, 4), ints(4, 0, 0))
    state, _, _ = fork(state, ints(-1, 0, 0))
    state = release(state, bools(1, 0, 0))
    assert int(memory.free_pages(state)) == 4
    state = release(state, bools(1, 1, 1))  # row 0 is empty already
    assert int(memory.free_pages(state)) == 5
    assert invariants.broken(check(state)) == {}


def test_a_shared_page_is_never_written():
    state, _ = reserve(memory.init(6, 2, 2, 4), ints(2, 3))
    shared, _ = allocator.share(state.allocator, ints(1), bools(1))  # someone pins a partial page
    state = dataclasses.replace(state, allocator=shared)
    _, slots, ok = append(state, bools(1, 1))
    assert (slots.tolist(), ok.tolist()) == ([0, 2 * 4 + 3], [False, True])
    _, ok = reserve(state, ints(3, 4))
    assert ok.tolist() == [False, True]


def test_slot_mapping():
    state, _ = reserve(memory.init(10, 2, 3, 4), ints(5, 9))  # pages 1 2 and 3 4 5
    rows = ints(0, 0, 0, 1, 1, -1, 2, 0, 0, 1, 0)
    at = ints(0, 3, 4, 8, 11, 0, 0, 8, 12, -1, 2**31 - 1)
    expected = [4, 7, 8, 20, 23, 0, 0, 0, 0, 0, 0]
    assert slot_mapping(state, rows, at).tolist() == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 1, 1, 1), "num_pages is 1"),
        ((4, 0, 1, 1), "max_seqs is 0"),
        ((4, 1, 0, 1), "pages_per_seq is 0"),
        ((4, 1, 1, -3), "page_size is -3"),
        ((2**28, 1, 1, 16), "32 bits"),
    ],
)
def test_impossible_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        memory.init(*sizes)


@pytest.mark.parametrize("most", [1, 2])
def test_a_bound_on_new_pages_changes_the_cost_and_not_the_result(most):
    state, _ = reserve(memory.init(10, 3, 4, 4), ints(3, 4, 0))
    wanted = state.lengths + ints(most * 4, 0, most * 4)
    bounded = jax.jit(memory.reserve, static_argnums=2)
    assert jax.tree.all(
        jax.tree.map(np.array_equal, bounded(state, wanted, most), reserve(state, wanted))
    )
    after, ok = bounded(state, wanted + ints(0, 0, 1), most)  # one page more than the bound
    assert ok.tolist() == [True, True, False]
    assert after.lengths.tolist() == [3 + most * 4, 4, 0]


@pytest.mark.parametrize("recent", [0, 2])
def test_operations_on_some_rows_are_those_on_all_with_the_others_idle(recent):
    state, _ = reserve(memory.init(12, 4, 3, 4, recent), ints(5, 6, 0, 4))
    rows = ints(3, 1, 4)  # 4 is padding

    def some(state):
        part = memory.select(state, rows)
        part = memory.release(part, bools(0, 1, 0))
        part, ok = memory.reserve(part, ints(9, 2, 0))
        return memory.update(state, rows, part), ok

    def every(state):
        state = memory.release(state, bools(0, 1, 0, 0))
        state, _ = memory.reserve(state, ints(5, 0, 0, 9))  # row 3 is the first that asks
        state, ok = memory.reserve(state, ints(5, 2, 0, 9))
        return state, ok[rows[:2]]

    (one, ok_one), (two, ok_two) = jax.jit(some)(state), jax.jit(every)(state)
    assert jax.tree.all(jax.tree.map(np.array_equal, one, two))
    assert ok_one.tolist() == [*ok_two.tolist(), True]
    assert invariants.broken(check(one)) == {}


# --- random operations against the oracle -----------------------------------------------------


def step(state, operation):
    """One of the four operations: ``(kind, argument [B])``; results padded to one shape."""
    kind, argument = operation
    nothing = jnp.zeros(B, jnp.int32)

    def reserve(state):
        state, ok = memory.reserve(state, state.lengths + argument)
        return state, (ok, nothing, nothing)

    def append(state):
        state, slots, ok = memory.append(state, argument > 0)
        return state, (ok, slots, nothing)

    def fork(state):
        state, (source, target), ok = memory.fork(state, argument)
        return state, (ok, source, target)

    def release(state):
        return memory.release(state, argument > 0), (jnp.ones(B, bool), nothing, nothing)

    state, result = jax.lax.switch(kind, [reserve, append, fork, release], state)
    return state, (state, result, invariants.check(state))


def draw(rng, count):
    """Random operations, many of them impossible: shrinking, too long, forks into rows in use."""
    kinds = rng.choice(4, count, p=[0.25, 0.45, 0.15, 0.15]).astype(np.int32)
    arguments = np.empty((count, B), np.int32)
    growth = rng.integers(-2, 12, (count, B)) * (rng.random((count, B)) < 0.3)
    arguments[:] = growth
    active = rng.random((count, B)) < 0.7
    parents = np.where(rng.random((count, B)) < 0.4, rng.integers(-2, B + 1, (count, B)), -1)
    gone = rng.random((count, B)) < 0.25
    arguments[kinds == 1] = active[kinds == 1]
    arguments[kinds == 2] = parents[kinds == 2]
    arguments[kinds == 3] = gone[kinds == 3]
    return kinds, arguments


def compare(oracle, kind, argument, state, result):
    ok, first, second = (part.tolist() for part in result)
    if kind == 0:
        grown = [length + more for length, more in zip(oracle.lengths, argument, strict=True)]
        assert ok == oracle.reserve(grown)
    elif kind == 1:
        assert (first, ok) == oracle.append([a > 0 for a in argument])
    elif kind == 2:
        assert (first, second, ok) == oracle.fork(argument)
    else:
        oracle.release([a > 0 for a in argument])
    (free_list, num_free, refcount), tables, lengths = state
    assert free_list[:num_free].tolist() == oracle.free
    np.testing.assert_array_equal(refcount, oracle.counts())
    np.testing.assert_array_equal(tables, oracle.tables())
    assert lengths.tolist() == oracle.lengths


def run_random(count, seed, chunk=1000):
    """Run so many operations compiled, and compare every state on the way with the oracle."""
    # a new function each time: JAX would remember the trace of `step` when a mutant is put in
    run = jax.jit(lambda state, ops: jax.lax.scan(lambda s, o: step(s, o), state, ops))
    state, oracle, rng = memory.init(**SIZES), Oracle(**SIZES), np.random.default_rng(seed)
    for _ in range(count // chunk):
        kinds, arguments = draw(rng, chunk)
        state, seen = run(state, (kinds, arguments))
        states, results, reports = jax.tree.map(np.asarray, seen)
        wrong = {name: int(c.sum()) for name, c in reports._asdict().items() if c.any()}
        assert not wrong, f"invariants broken: {wrong}"
        for i in range(chunk):
            at = jax.tree.map(lambda x, i=i: x[i], (states, results))
            flat = (at[0].allocator, at[0].block_tables, at[0].lengths)
            compare(oracle, kinds[i], arguments[i].tolist(), flat, at[1])
    return state


def test_random_operations_equal_the_oracle():
    run_random(int(os.environ.get("PAXATTN_MEMORY_OPS", "20000")), seed=0)


def free_without_looking(state, pages, mask):
    """Mutant: every entry whose page has no reference left is pushed, twice if it stands twice."""
    num_pages = state.refcount.shape[0]
    refcount = state.refcount.at[jnp.where(mask, pages, num_pages)].add(-1, mode="drop")
    gone = mask & (refcount[pages] <= 0)
    nth = (jnp.cumsum(gone.ravel(), dtype=jnp.int32) - 1).reshape(pages.shape)
    push = jnp.where(gone, state.num_free + nth, num_pages)
    free_list = state.free_list.at[push].set(pages, mode="drop")
    num_free = state.num_free + jnp.sum(gone, dtype=jnp.int32)
    return allocator.Allocator(free_list, num_free, jnp.maximum(refcount, 0)), mask


def forget_a_page(state, counts, first, width, take=allocator.take):
    """Mutant: one page more than was handed out leaves the stack."""
    state, pages, ok = take(state, counts, first, width)
    lost = jnp.any(counts > 1).astype(jnp.int32)
    return state._replace(num_free=jnp.maximum(state.num_free - lost, 0)), pages, ok


def share_the_tail(lengths, size):
    """Mutant of pages_for, used where fork and reserve round: always a page more."""
    return lengths // size + 1


def no_reference(state, pages, mask):
    """Mutant: fork lists the parent's pages without counting itself."""
    return state, mask


MUTANTS = {
    "double free": (allocator, "give", free_without_looking),
    "lost page": (allocator, "take", forget_a_page),
    "off-by-one page count": (block_tables, "pages_for", share_the_tail),
    "uncounted sharing": (allocator, "share", no_reference),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_allocator_is_caught(name, monkeypatch):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError):
        run_random(1000, seed=0)


class Machine(RuleBasedStateMachine):
    """The same comparison, with sequences that hypothesis shrinks when one fails."""

    run = staticmethod(jax.jit(step))

    def __init__(self):
        super().__init__()
        self.state, self.oracle = memory.init(**SIZES), Oracle(**SIZES)
        self.report = invariants.check(self.state)

    def _do(self, kind, argument):
        self.state, (state, result, self.report) = self.run(
            self.state, (jnp.int32(kind), ints(*argument))
        )
        state = jax.tree.map(np.asarray, state)
        result = jax.tree.map(np.asarray, result)
        flat = (state.allocator, state.block_tables, state.lengths)
        compare(self.oracle, kind, list(argument), flat, result)

    def _each(values):
        return st.lists(values, min_size=B, max_size=B)

    @rule(growth=_each(st.integers(-3, 21)))
    def reserve(self, growth):
        self._do(0, growth)

    @rule(active=_each(st.integers(0, 1)), times=st.integers(1, 5))
    def append(self, active, times):
        for _ in range(times):
            self._do(1, active)

    @rule(parents=_each(st.integers(-2, B)))
    def fork(self, parents):
        self._do(2, parents)

    @rule(gone=_each(st.integers(0, 1)))
    def release(self, gone):
        self._do(3, gone)

    @invariant()
    def nothing_is_broken(self):
        assert invariants.broken(self.report) == {}


Machine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, derandomize=True, database=None
)
TestMachine = Machine.TestCase


# --- where it runs ----------------------------------------------------------------------------


def test_decode_until_the_pages_run_out_is_one_compiled_loop():
    # 9 pages, two rows of at most 5 pages of 4: the tenth page is the first that is refused
    def more(carry):
        state, _, steps = carry
        state, _, now = memory.append(state, bools(1, 1))
        return state, now.all(), steps + 1

    start = (memory.init(10, 2, 5, 4), jnp.array(True), jnp.int32(0))
    state, ok, steps = jax.jit(lambda c: jax.lax.while_loop(lambda c: c[1], more, c))(start)
    assert not bool(ok)
    assert (int(steps), state.lengths.tolist()) == (17, [17, 16])
    assert invariants.broken(check(state)) == {}


def test_many_memories_under_vmap_equal_each_alone():
    states = jax.vmap(lambda _: memory.init(**SIZES))(jnp.arange(4))
    operations = [draw(np.random.default_rng(seed), 50) for seed in range(4)]
    kinds, arguments = (np.stack(part) for part in zip(*operations, strict=True))
    scan = jax.jit(lambda state, ops: jax.lax.scan(step, state, ops))
    together, _ = jax.jit(jax.vmap(lambda s, o: jax.lax.scan(step, s, o)))(
        states, (kinds, arguments)
    )
    for i in range(4):
        alone, _ = scan(memory.init(**SIZES), (kinds[i], arguments[i]))
        same = jax.tree.map(lambda a, b, i=i: np.array_equal(a[i], b), together, alone)
        assert jax.tree.all(same)


OPERATIONS = {
    "reserve": lambda state: memory.reserve(state, state.lengths + 20)[0],
    "append": lambda state: memory.append(state, state.lengths >= 0)[0],
    "fork": lambda state: memory.fork(state, state.lengths - 1),
    "release": lambda state: memory.release(state, state.lengths >= 0),
}


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_pool_size_costs_nothing(name, rows):
    def compiled(num_pages):
        state = jax.eval_shape(lambda: memory.init(num_pages, rows, 16, 16))
        return jax.jit(OPERATIONS[name], donate_argnums=0).lower(state).compile()

    small, large = compiled(1_000), compiled(1_000_000)
    assert large.memory_analysis().temp_size_in_bytes == small.memory_analysis().temp_size_in_bytes
    assert large.memory_analysis().alias_size_in_bytes >= 8 * 1_000_000  # in place
    wide = [line for line in large.as_text().splitlines() if "[1000000]" in line]
    assert not [line for line in wide if " copy(" in line]


def test_an_append_touches_the_batch_and_not_the_tables():
    state = jax.eval_shape(lambda: memory.init(1000, 64, 512, 16))
    step = jax.jit(lambda s: memory.append(s, s.lengths >= 0), donate_argnums=0)
    temporary = step.lower(state).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 64 * 512 * 4 // 4
