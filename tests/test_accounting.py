"""Token slots by what they are for, worked out by hand; they sum to the capacity."""

import jax
import jax.numpy as jnp
import numpy as np

from paxattn import accounting, contiguous, memory


def ints(*values):
    return jnp.array(values, jnp.int32)


def values(waste):
    assert int(waste.capacity) == sum(int(part) for part in waste)
    return {name: int(part) for name, part in waste._asdict().items()}


def test_a_paged_memory_wastes_the_rest_of_last_pages():
    state, _ = memory.reserve(memory.init(11, 3, 4, 4), ints(5, 4, 0))
    # 10 pages of 4: rows hold 2 and 1
    assert values(accounting.of_paged(state)) == {
        "used": 9, "reserved": 0, "internal": 3, "external": 0, "free": 28,
    }  # fmt: skip


def test_shared_tokens_are_counted_once():
    state, _ = memory.reserve(memory.init(11, 3, 4, 4), ints(6, 0, 0))
    state, _, _ = memory.fork(state, ints(-1, 0, 0))
    # pages: one shared and full, three tails with 2 of 4 tokens
    assert values(accounting.of_paged(state)) == {
        "used": 10, "reserved": 0, "internal": 6, "external": 0, "free": 24,
    }  # fmt: skip


def test_pages_in_the_page_cache_are_free():
    state = memory.init(11, 3, 4, 4, recent_pages=2)
    state, _ = memory.reserve(state, ints(5, 4, 0))
    state = memory.release(state, jnp.array([True, False, False]))
    assert values(accounting.of_paged(state)) == {
        "used": 4, "reserved": 0, "internal": 0, "external": 0, "free": 36,
    }  # fmt: skip


def test_reserve_max():
    # 12 pages of 4 beside the null page, 3 rows of 3 pages: 3 pages can be no row's
    state, _ = contiguous.reserve(contiguous.init(13, 3, 3, 4), ints(5, 1, 0))
    assert values(accounting.of_reserve_max(state, 13)) == {
        "used": 6, "reserved": 18, "internal": 0, "external": 12, "free": 12,
    }  # fmt: skip
    assert values(accounting.of_reserve_max(state, 13, ints(8, 2, 7))) == {
        "used": 6, "reserved": 4, "internal": 14, "external": 12, "free": 12,
    }  # fmt: skip


def test_the_request_that_needs_10_slots_of_2048():
    waste = accounting.split(ints(10), ints(10), ints(2048), jnp.int32(2048))
    assert values(waste)["internal"] == 2038
    state, _ = memory.reserve(memory.init(200, 1, 128, 16), ints(10))
    assert values(accounting.of_paged(state))["internal"] == 6


def test_the_parts_sum_to_the_capacity_at_every_step():
    def step(state, active):
        state, _, _ = memory.append(state, active)
        waste = accounting.of_paged(state)
        return state, (waste, state.lengths)

    active = np.random.default_rng(0).random((60, 5)) < 0.5
    start = memory.init(40, 5, 10, 4)
    _, (waste, lengths) = jax.jit(lambda s: jax.lax.scan(step, s, active))(start)
    np.testing.assert_array_equal(waste.used, lengths.sum(1))
    np.testing.assert_array_equal(waste.internal, (-lengths % 4).sum(1))
    np.testing.assert_array_equal(waste.capacity, 39 * 4)
