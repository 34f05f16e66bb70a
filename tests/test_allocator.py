"""The allocator's stack and counts, by hand, and its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxattn import allocator


def ints(*values):
    return jnp.array(values, jnp.int32)


def take(state, *counts, width=4):
    counts = ints(*counts)
    return allocator.take(state, counts, jnp.zeros_like(counts), width)


def give(state, *pages):
    return allocator.give(state, ints(*pages), jnp.ones(len(pages), bool))


def free_pages(state):
    return np.asarray(state.free_list)[: int(state.num_free)].tolist()


def test_a_new_pool_hands_out_page_1_first_and_never_page_0():
    state = allocator.init(4)
    assert free_pages(state) == [3, 2, 1]
    state, pages, ok = take(state, 3)
    assert pages.tolist() == [[1, 2, 3, 0]]
    assert ok.tolist() == [True]
    assert state.refcount.tolist() == [0, 1, 1, 1]


def test_pages_stand_where_the_row_wants_them():
    state, pages, ok = allocator.take(allocator.init(9), ints(2, 0, 3), ints(1, 0, 0), 4)
    assert pages.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [3, 4, 5, 0]]
    assert ok.tolist() == [True] * 3
    assert int(state.num_free) == 3


def test_rows_are_served_in_order_and_none_overtakes():
    state, pages, ok = take(allocator.init(6), 2, 4, 1, 0)
    assert ok.tolist() == [True, False, False, True]
    assert pages.tolist() == [[1, 2, 0, 0], [0] * 4, [0] * 4, [0] * 4]
    assert int(state.num_free) == 3
    assert state.refcount.tolist() == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("count", [-1, 5, 2**31 - 1])
def test_an_impossible_count_is_refused_and_holds_nobody_up(count):
    state, pages, ok = take(allocator.init(6), count, 2)
    assert ok.tolist() == [False, True]
    assert pages.tolist() == [[0] * 4, [1, 2, 0, 0]]
    assert int(state.num_free) == 3


def test_sums_of_counts_beyond_32_bits_are_refused():
    # 3 rows of 2**30 pages sum to less than 0 in int32
    _, _, ok = jax.eval_shape(
        lambda s: allocator.take(s, jnp.full(3, 2**30, jnp.int32), jnp.zeros(3, jnp.int32), 2**30),
        allocator.init(4),
    )
    assert ok.shape == (3,)  # traces; the sum itself is checked without 12 GB of table
    sums = allocator._saturating_cumsum(jnp.full(3, 2**30, jnp.int32), 10)
    assert sums.tolist() == [11, 11, 11]


def test_freed_pages_are_taken_again_last_first():
    state, _, _ = take(allocator.init(6), 4)
    state, ok = give(state, 2, 4)
    assert ok.tolist() == [True, True]
    assert free_pages(state) == [5, 2, 4]
    _, pages, _ = take(state, 2)
    assert pages.tolist() == [[4, 2, 0, 0]]


def test_a_shared_page_is_free_when_its_last_holder_has_gone():
    state, _, _ = take(allocator.init(4), 1)
    state, ok = allocator.share(state, ints(1, 1), jnp.ones(2, bool))
    assert ok.tolist() == [True, True]
    assert state.refcount.tolist() == [0, 3, 0, 0]
    state, _ = give(state, 1)
    assert free_pages(state) == [3, 2]
    state, ok = give(state, 1, 1)  # both holders at once: pushed once
    assert ok.tolist() == [True, True]
    assert free_pages(state) == [3, 2, 1]


@pytest.mark.parametrize("page", [0, -1, 3, 4, 2**31 - 1], ids=str)
def test_what_is_no_page_in_use_cannot_be_given_or_shared(page):
    state, _, _ = take(allocator.init(4), 2)  # pages 1 and 2; 3 is free
    for operation in (allocator.give, allocator.share):
        after, ok = operation(state, ints(page), jnp.ones(1, bool))
        assert ok.tolist() == [False]
        assert jax.tree.all(jax.tree.map(np.array_equal, state, after))


def test_a_double_free_changes_nothing_and_says_so():
    state, _, _ = take(allocator.init(5), 3)
    once, _ = give(state, 1)
    after, ok = give(once, 1)
    assert ok.tolist() == [False]
    assert jax.tree.all(jax.tree.map(np.array_equal, once, after))
    # twice in one batch, beside an honest one: only the honest one is done
    after, ok = give(state, 1, 2, 1)
    assert ok.tolist() == [False, True, False]
    assert after.refcount.tolist() == [0, 1, 0, 1, 0]
    assert free_pages(after) == [4, 2]


def test_entries_outside_the_mask_are_left_alone():
    state, _, _ = take(allocator.init(5), 3)
    after, ok = allocator.give(state, ints(1, 0, 2), jnp.array([False, False, True]))
    assert ok.tolist() == [True, True, True]
    assert after.refcount.tolist() == [0, 1, 0, 1, 0]


def test_a_pool_needs_a_page_beside_the_null_page():
    with pytest.raises(ValueError, match="num_pages is 1"):
        allocator.init(1)


def test_a_batch_under_vmap_equals_each_alone():
    states = jax.vmap(lambda _: allocator.init(6))(jnp.arange(3))
    counts = jnp.array([[1, 2], [4, 4], [0, 5]], jnp.int32)
    both = jax.vmap(lambda s, c: allocator.take(s, c, jnp.zeros_like(c), 5))(states, counts)
    for i in range(3):
        alone = allocator.take(allocator.init(6), counts[i], jnp.zeros(2, jnp.int32), 5)
        assert jax.tree.all(jax.tree.map(lambda a, b, i=i: np.array_equal(a[i], b), both, alone))
    state, pages, _ = both
    given = jax.vmap(allocator.give)(state, pages, pages != 0)[0]
    assert given.num_free.tolist() == [5, 5, 5]


# Cost: what a compiled call reads and writes must grow with the request, not with the pool.


def compiled(operation, num_pages):
    state = jax.eval_shape(lambda: allocator.init(num_pages))
    return jax.jit(operation, donate_argnums=0).lower(state).compile()


def take_64(state):
    return allocator.take(state, jnp.full(64, 2, jnp.int32), jnp.zeros(64, jnp.int32), 4)


def share_64(state):
    pages = jnp.arange(64, dtype=jnp.int32)
    return allocator.share(state, pages, pages > 0)


def give_64(state):
    pages = jnp.arange(64, dtype=jnp.int32).reshape(8, 8)
    return allocator.give(state, pages, pages > 0)


@pytest.mark.parametrize("operation", [take_64, share_64, give_64])
def test_a_pool_of_a_million_pages_is_updated_in_place_at_the_cost_of_a_small_one(operation):
    small, large = compiled(operation, 1_000), compiled(operation, 1_000_000)
    # no temporary is as large as the pool, and every array of the pool reuses its argument's
    assert large.memory_analysis().temp_size_in_bytes == small.memory_analysis().temp_size_in_bytes
    assert large.memory_analysis().alias_size_in_bytes >= 8 * 1_000_000
    copies = [line for line in large.as_text().splitlines() if " copy(" in line]
    assert not [line for line in copies if "[1000000]" in line]
    # and the program is the same one but for the sizes
    assert large.as_text().count("\n") == small.as_text().count("\n")
