"""The baselines against plain Python: reserve-max, arenas of regions, buddy blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory_oracle import Blocks, Intervals

from paxattn import arena, buddy, contiguous


def ints(*values):
    return jnp.array(values, jnp.int32)


# --- reserve-max ------------------------------------------------------------------------------


def test_each_row_owns_consecutive_pages_for_ever():
    state = contiguous.init(8, 2, 3, 4)
    tables = [[1, 2, 3], [4, 5, 6]]
    assert state.block_tables.tolist() == tables
    state, ok = contiguous.reserve(state, ints(5, 13))  # a row has room for 12
    assert (ok.tolist(), state.lengths.tolist()) == ([True, False], [5, 0])
    state, slots, ok = contiguous.append(state, jnp.array([True, True]))
    assert slots.tolist() == [2 * 4 + 1, 4 * 4]
    assert ok.tolist() == [True, True]
    assert contiguous.slot_mapping(state, ints(0, 1, 1, -1), ints(0, 0, 11, 3)).tolist() == [
        *(4, 16, 27, 0)
    ]
    assert contiguous.held_pages(state).tolist() == [3, 3]
    state = contiguous.release(state, jnp.array([True, False]))
    assert state.lengths.tolist() == [0, 1]
    assert state.block_tables.tolist() == tables
    assert int(contiguous.free_pages(state)) == 3


def test_a_full_row_takes_no_more():
    state, _ = contiguous.reserve(contiguous.init(8, 2, 3, 4), ints(12, 3))
    state, slots, ok = contiguous.append(state, jnp.array([True, False]))
    assert (slots.tolist(), ok.tolist()) == ([0, 0], [False, True])
    assert state.lengths.tolist() == [12, 3]
    _, ok = contiguous.reserve(state, ints(12, 2))  # a row does not shrink
    assert ok.tolist() == [True, False]


def test_a_pool_too_small_for_the_rows_is_refused_with_what_fits():
    with pytest.raises(ValueError, match=r"max_seqs is 3, but 7 pages reserve 3 pages.*for 2 seq"):
        contiguous.init(7, 3, 3, 4)
    assert contiguous.rows_that_fit(7, 3) == 2


# --- arenas, against a list of intervals ------------------------------------------------------


@pytest.mark.parametrize("fit", ["first", "best"])
def test_random_regions_equal_a_list_of_intervals(fit):
    rows, capacity, rng = 6, 64, np.random.default_rng(1)
    state, plain = arena.init(capacity, rows), Intervals(capacity)
    place = jax.jit(lambda s, r, n: arena.place(s, r, n, fit))
    move = jax.jit(lambda s, r, n: arena.move(s, r, n, fit))
    grow, free = jax.jit(arena.grow), jax.jit(arena.free)
    measure = jax.jit(lambda s: (arena.largest_hole(s), arena.total_free(s)))
    for _ in range(1500):
        row, size = int(rng.integers(rows)), int(rng.integers(0, 30))
        which = rng.integers(4)
        if which == 0:
            state, ok = place(state, row, size)
            assert bool(ok) == plain.place(row, size, fit)
        elif which == 1:
            state, ok = grow(state, row, size)
            assert bool(ok) == plain.grow(row, size)
        elif which == 2:
            state, ok = move(state, row, size)
            assert bool(ok) == plain.move(row, size, fit)
        else:
            state = free(state, jnp.arange(rows) == row)
            plain.regions.pop(row, None)
        start, held = np.asarray(state.start), np.asarray(state.size)
        assert {r: (start[r], held[r]) for r in range(rows) if held[r]} == plain.regions
        sizes = [size for _, size in plain.holes()]
        assert tuple(map(int, measure(state))) == (max(sizes, default=0), sum(sizes))


def test_free_memory_in_pieces_cannot_hold_a_request():
    # four regions of 25 in 100 units; the first and the third go: 50 are free, 25 in one piece
    state = arena.init(100, 5)
    for row in range(4):
        state, ok = arena.place(state, row, 25)
        assert bool(ok)
    state = arena.free(state, jnp.array([True, False, True, False, False]))
    assert (int(arena.total_free(state)), int(arena.largest_hole(state))) == (50, 25)
    assert float(arena.external_fragmentation(state)) == 0.5
    after, ok = arena.place(state, 4, 26)
    assert not bool(ok)
    assert jax.tree.all(jax.tree.map(np.array_equal, state, after))


def test_growing_by_copying_needs_both_regions_at_once():
    state, _ = arena.place(arena.init(10, 1), 0, 4)
    state, ok = arena.move(state, 0, 6)  # 4..9 is free
    assert (bool(ok), state.start.tolist(), state.size.tolist()) == (True, [4], [6])
    _, ok = arena.move(state, 0, 7)  # 4 of the 7 units are its own, and it cannot use them
    assert not bool(ok)


def test_arena_arguments():
    with pytest.raises(ValueError, match="an arena of 0 units"):
        arena.init(0, 4)
    with pytest.raises(ValueError, match="larger units"):
        arena.init(2**31, 4)
    with pytest.raises(ValueError, match="fit is 'worst'"):
        arena.place(arena.init(4, 1), 0, 1, "worst")


# --- buddy, against sets of free blocks -------------------------------------------------------


@pytest.mark.parametrize("capacity", [64, 100, 1, 127])
def test_random_blocks_equal_sets_of_blocks(capacity):
    rows, rng = 8, np.random.default_rng(capacity)
    state, plain = buddy.init(capacity, rows), Blocks(capacity)
    place, free = jax.jit(buddy.place), jax.jit(buddy.free)
    measure = jax.jit(lambda s: (buddy.largest_hole(s), buddy.total_free(s)))
    for _ in range(600):
        row, size = int(rng.integers(rows)), int(rng.integers(0, 40))
        if rng.random() < 0.6:
            state, ok = place(state, row, size)
            assert bool(ok) == plain.place(row, size)
        else:
            state = free(state, row)
            plain.free_row(row)
        at = np.flatnonzero(np.asarray(state.free_order) >= 0)
        assert {(int(state.free_order[i]), int(i)) for i in at} == plain.free
        start, order, size = (np.asarray(x) for x in (state.start, state.order, state.size))
        held = {r: (start[r], order[r], size[r]) for r in range(rows) if order[r] >= 0}
        assert held == plain.rows
        sizes = [2**order for order, _ in plain.free]
        assert tuple(map(int, measure(state))) == (max(sizes, default=0), sum(sizes))


def test_orders():
    sizes = ints(1, 2, 3, 4, 5, 1024, 1025, 2048)
    assert buddy.order_for(sizes).tolist() == [0, 1, 2, 2, 3, 10, 11, 11]


def test_the_papers_arena_holds_seven_longest_requests():
    # 12 GiB of OPT-13B's KV cache are 15,728 token slots
    state, place = buddy.init(15_728, 8), jax.jit(buddy.place)
    for row in range(8):
        state, ok = place(state, row, 2048)
        assert bool(ok) == (row < 7)
    assert (int(buddy.total_free(state)), int(buddy.largest_hole(state))) == (1392, 1024)


def test_buddy_arguments():
    with pytest.raises(ValueError, match="a buddy arena of 0 units"):
        buddy.init(0, 4)
    with pytest.raises(ValueError, match="larger units"):
        buddy.init(2**24, 4)
