"""Each rule, broken by hand once, is named by the check."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from paxattn import invariants, memory

check = jax.jit(invariants.check)


@pytest.fixture(scope="module")
def healthy():
    """Rows of 6, 4 and 0 tokens in pages of 4: pages 1 2, 3; free 9..4, the top is 4."""
    state = memory.init(10, 3, 3, 4)
    return memory.reserve(state, jnp.array([6, 4, 0], jnp.int32))[0]


def test_nothing_is_broken_in_a_healthy_memory(healthy):
    assert invariants.broken(check(healthy)) == {}
    assert invariants.broken(check(memory.init(10, 3, 3, 4))) == {}


def change(state, **arrays):
    inside = {k: v for k, v in arrays.items() if k in state.allocator._fields}
    outside = {k: v for k, v in arrays.items() if k not in inside}
    return dataclasses.replace(state, allocator=state.allocator._replace(**inside), **outside)


BREAKS = {
    "null page handed out": (
        lambda s: {"free_list": s.allocator.free_list.at[5].set(0)},
        {"null_page_used": 1, "not_on_free_list": 1, "free_but_held": 1},
    ),
    "null page referenced": (
        lambda s: {"refcount": s.allocator.refcount.at[0].set(1)},
        {"null_page_used": 1, "refcount_wrong": 1},
    ),
    "page leaked": (
        lambda s: {"num_free": s.allocator.num_free - 1},
        {"free_count_wrong": 1, "not_on_free_list": 1},
    ),
    "freed twice": (
        lambda s: {
            "free_list": s.allocator.free_list.at[6].set(4),
            "num_free": s.allocator.num_free + 1,
        },
        {"free_count_wrong": 1, "free_twice": 1},
    ),
    "freed while held": (
        lambda s: {
            "free_list": s.allocator.free_list.at[6].set(3),
            "num_free": s.allocator.num_free + 1,
        },
        {"free_count_wrong": 1, "free_but_held": 1},
    ),
    "reference forgotten": (
        lambda s: {"refcount": s.allocator.refcount.at[1].set(2)},
        {"refcount_wrong": 1},
    ),
    "entry outside the pool": (
        lambda s: {"block_tables": s.block_tables.at[1, 0].set(77)},
        {"refcount_wrong": 1, "entry_out_of_range": 1},
    ),
    "negative entry": (
        lambda s: {"block_tables": s.block_tables.at[2, 0].set(-1)},
        {"entry_out_of_range": 1, "pages_past_length": 1},
    ),
    "too long": (
        lambda s: {"lengths": s.lengths.at[2].set(13)},
        {"length_out_of_range": 1, "pages_missing": 3},
    ),
    "a page short": (
        lambda s: {"lengths": s.lengths.at[1].set(5)},
        {"pages_missing": 1},
    ),
    "a page too many": (
        lambda s: {"lengths": s.lengths.at[0].set(4)},
        {"pages_past_length": 1},
    ),
    "one page in two rows": (
        lambda s: {"block_tables": s.block_tables.at[1, 0].set(2)},
        {"refcount_wrong": 2},
    ),
    "one page twice in a row": (
        lambda s: {"block_tables": s.block_tables.at[0, 1].set(1)},
        {"refcount_wrong": 2, "page_twice_in_row": 1},
    ),
    "shared tail": (
        lambda s: {
            "block_tables": s.block_tables.at[2].set(s.block_tables[0]),
            "lengths": s.lengths.at[2].set(6),
            "refcount": s.allocator.refcount.at[1:3].set(2),
        },
        {"tail_shared": 2},
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_rule_is_named_when_it_is_broken(name, healthy):
    damage, expected = BREAKS[name]
    found = invariants.broken(check(change(healthy, **damage(healthy))))
    assert expected.items() <= found.items()
    # what the damage implies besides is reported too, but nothing else is
    assert set(found) - set(expected) <= {"tail_shared", "refcount_wrong"}


def test_pins_are_references(healthy):
    pins = jnp.zeros(10, jnp.int32).at[3].set(1)
    assert invariants.broken(check(healthy, pins)) == {"refcount_wrong": 1}
    pinned = change(healthy, refcount=healthy.allocator.refcount.at[3].add(1))
    assert invariants.broken(check(pinned, pins)) == {}


def test_the_check_runs_inside_a_compiled_loop(healthy):
    def step(state, _):
        state, _, _ = memory.append(state, state.lengths > 0)
        return state, invariants.check(state)

    _, reports = jax.jit(lambda s: jax.lax.scan(step, s, None, length=12))(healthy)
    assert not any(counts.any() for counts in reports)
