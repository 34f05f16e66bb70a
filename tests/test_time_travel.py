"""Saved states outlive donation and come back to the last bit; differences worked out by hand."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxattn import contiguous, kv_pool, memory, prefix_cache, time_travel
from paxattn.decode import State
from paxattn.state_diff import Diff, Row
from paxattn.time_travel import diff, fork_and_compare, rewind, save

N, B, M, P = 10, 4, 3, 4
NOTHING = Row(0, ())
rewind_in_place = jax.jit(rewind, donate_argnums=0)


def ints(*values):
    return jnp.array(values, jnp.int32)


def bools(*values):
    return jnp.array(values, bool)


def start(dtype="float32", layout="NPKD", cached=False, pages=N, recent=0):
    """A pool in which every place of every page holds other bits, NaNs among them."""
    pool = kv_pool.init(2, pages, P, 2, 3, dtype, layout)
    rng = np.random.default_rng(0)
    unsigned = {2: np.uint16, 4: np.uint32}

    def fill(x):
        bits = rng.integers(0, 256, x.nbytes, np.uint8).view(unsigned[x.dtype.itemsize])
        return jnp.asarray(bits.reshape(x.shape).view(x.dtype))

    return State(
        jax.tree.map(fill, pool),
        memory.init(pages, B, M, P, recent),
        prefix_cache.init(pages, P) if cached else None,
    )


def change(state, pages, value):
    return state._replace(pool=kv_pool.fill_pages(state.pool, pages, value))


@partial(jax.jit, donate_argnums=0)
def reserved(state, lengths):
    grown, _ = memory.reserve(state.memory, lengths)
    return state._replace(memory=grown)


@partial(jax.jit, donate_argnums=0)
def appended(state, active, value):
    grown, slots, _ = memory.append(state.memory, active)
    new = jnp.full((B, 2, 3), value, state.pool.dtype)
    pool = state.pool
    for layer in range(2):
        pool = kv_pool.write(pool, layer, new, new, slots)
    return state._replace(memory=grown, pool=pool)


@partial(jax.jit, donate_argnums=0)
def forked(state, parents):
    grown, copies, _ = memory.fork(state.memory, parents)
    return state._replace(memory=grown, pool=kv_pool.copy_pages(state.pool, *copies))


@partial(jax.jit, donate_argnums=0)
def released(state, mask):
    return state._replace(memory=memory.release(state.memory, mask))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def equal(a, b):
    return bits(a) == bits(b)


def held(state):
    return kv_pool.take_pages(state.pool, jnp.flatnonzero(state.memory.allocator.refcount))


# --- coming back ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["KNPD", "NPKD", "NKPD", "NKDP"])
def test_a_saved_state_survives_donation_and_comes_back_to_the_last_bit(layout, dtype):
    state = reserved(start(dtype, layout), ints(6, 4, 0, 0))
    saved = save(state)
    tables, pages = bits(state.memory), bits(held(state))
    for _ in range(2):  # as often as one likes
        state = appended(forked(state, ints(-1, -1, 0, -1)), bools(1, 1, 1, 0), 7)
        state = released(state, bools(1, 1, 0, 0))
        state = change(reserved(state, ints(0, 0, 6, 12)), ints(1, 2, 3), 5)
        state = rewind_in_place(state, saved)
        assert bits(state.memory) == tables
        assert bits(held(state)) == pages
        assert not diff(saved, state)


@pytest.mark.parametrize("recent", [0, 2])
def test_going_on_after_a_rewind_is_as_never_having_left(recent):
    def on(state):
        for i, active in enumerate([bools(1, 1, 0, 0), bools(1, 0, 0, 0), bools(1, 1, 0, 0)]):
            state = appended(state, active, i + 1)
        return appended(forked(state, ints(-1, -1, 1, 0)), bools(0, 1, 1, 1), 9)

    def away(state):
        return appended(
            reserved(released(state, bools(1, 0, 0, 0)), ints(0, 4, 9, 0)), bools(0, 1, 1, 0), 4
        )

    first = reserved(start(recent=recent), ints(3, 4, 0, 0))
    saved = save(first)
    never_left = on(first)
    want, want_pages = bits(never_left.memory), bits(held(never_left))
    back = on(rewind_in_place(away(rewind_in_place(never_left, saved)), saved))
    assert bits(back.memory) == want
    assert bits(held(back)) == want_pages


def test_a_prefix_cache_travels_along_with_the_pages_that_wait_in_it():
    state = start(cached=True)
    tokens = np.arange(M * P, dtype=np.int32).reshape(M, P)
    salt = prefix_cache.salt_of(None)
    admit = jax.jit(prefix_cache.admit)
    m, c, _ = admit(state.memory, state.prefix, np.int32(0), tokens, np.int32(9), salt)
    m, c = jax.jit(prefix_cache.release)(m, c, bools(1, 0, 0, 0))
    state = state._replace(memory=m, prefix=c)
    saved = save(state)  # nobody's pages 1 and 2, which wait
    pages = bits(held(state))
    m, c = jax.jit(prefix_cache.clear)(m, c)
    state = change(state._replace(memory=m, prefix=c), ints(1, 2), 0)
    change_ = diff(saved, state)
    assert change_.evicted == change_.freed == (1, 2)
    state = rewind_in_place(state, saved)
    assert bits(held(state)) == pages
    _, _, found = admit(state.memory, state.prefix, np.int32(1), tokens, np.int32(9), salt)
    assert int(found.hits) == 2


def test_tables_alone_are_a_state_too():
    state, _ = memory.reserve(memory.init(N, B, M, P), ints(6, 4, 0, 0))
    saved = save(state)
    later = memory.release(state, bools(1, 0, 0, 0))
    assert diff(saved, later).freed == (1, 2)
    assert equal(rewind(later, saved), state)


def test_the_traditional_cache_is_a_state_too():
    pool = start(pages=13).pool
    memory_, _ = contiguous.reserve(contiguous.init(13, B, M, P), ints(6, 0, 0, 0))
    state = State(pool, memory_)
    saved = save(state)
    assert saved.pages.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    kept = bits(kv_pool.take_pages(pool, ints(1, 2)))
    state = change(
        state._replace(memory=contiguous.release(memory_, bools(1, 0, 0, 0))), ints(1), 0
    )
    found = diff(saved, state)
    assert (found.rows, found.freed) == (((0, Row(6, (1, 2)), NOTHING),), (1, 2))
    state = rewind(state, saved)
    got = bits(kv_pool.take_pages(state.pool, ints(1, 2)))
    assert got == kept


def test_a_saved_state_can_wait_on_the_host():
    state = reserved(start(), ints(6, 4, 0, 0))
    saved = jax.device_get(save(state))
    pages = bits(held(state))
    state = rewind_in_place(change(state, ints(1, 2, 3), 0), saved)
    assert bits(held(state)) == pages


# --- size -------------------------------------------------------------------------------------


def test_bytes_follow_the_pages_in_use_and_not_the_pool():
    page = 2 * 2 * P * 2 * 3 * 4  # layers, K and V, positions, heads, head dim, bytes
    wide = lambda pages: start(pages=pages)._replace(memory=memory.init(pages, 1, 600, P))  # noqa: E731
    grown = [save(reserved(wide(1000), ints(count * P))) for count in (8, 16, 512)]
    room = [saved.contents.nbytes // page for saved in grown]
    assert room == [8, 16, 512]
    tables = [saved.nbytes - saved.contents.nbytes - saved.pages.nbytes for saved in grown]
    assert tables == [1000 * 8 + 600 * 4 + 2 * 4] * 3  # free list, counts; table; two numbers
    small, large = (save(reserved(wide(n), ints(8 * P))) for n in (100, 2000))
    assert small.contents.nbytes == large.contents.nbytes == 8 * page


def test_room_is_at_most_a_third_more_and_of_few_sizes():
    rooms = [time_travel._room(n) for n in range(1, 2049)]
    assert all(max(8, n) <= r <= max(8, n * 1.34) for n, r in enumerate(rooms, 1))
    assert len(set(rooms)) <= 40


def test_rewinding_is_in_place():
    state = jax.eval_shape(lambda: start("float32")._replace(pool=kv_pool.init(2, 512, 16, 2, 8)))
    few = jax.eval_shape(lambda: kv_pool.init(2, 8, 16, 2, 8))
    saved = time_travel.Saved(state._replace(pool=None), jax.ShapeDtypeStruct((8,), jnp.int32), few)
    analysis = rewind_in_place.lower(state, saved).compile().memory_analysis()
    pool = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.pool))
    assert analysis.alias_size_in_bytes >= pool
    assert analysis.temp_size_in_bytes < pool // 8


# --- differences, by hand ---------------------------------------------------------------------


def test_equal_states_have_no_difference():
    state = reserved(start(cached=True), ints(6, 4, 0, 0))
    assert not diff(state, state)
    assert not diff(save(state), state)
    assert str(diff(state, save(state))) == "no difference"


def test_a_fork_and_a_token_each():
    state = reserved(start(), ints(6, 4, 0, 0))  # pages 1 2, 3
    first = save(state)
    state = forked(state, ints(-1, -1, 0, 1))  # row 2: 1 and a copy of 2; row 3: 3
    second = save(state)
    state = appended(state, bools(1, 0, 1, 1), 5)  # into 2, 4 and a new page 5
    assert diff(first, second) == Diff(
        rows=((2, NOTHING, Row(6, (1, 4))), (3, NOTHING, Row(4, (3,)))),
        allocated=(4,),
        shared=(1, 3),
        copied=((2, 4),),
        refcounts=((1, 1, 2), (3, 1, 2), (4, 0, 1)),
    )
    assert diff(second, state) == Diff(
        rows=(
            (0, Row(6, (1, 2)), Row(7, (1, 2))),
            (2, Row(6, (1, 4)), Row(7, (1, 4))),
            (3, Row(4, (3,)), Row(5, (3, 5))),
        ),
        allocated=(5,),
        refcounts=((5, 0, 1),),
        contents=(2, 4),
    )
    assert str(diff(first, second)) == (
        "row 2: empty -> 6 tokens in pages 1 4\n"
        "row 3: empty -> 4 tokens in pages 3\n"
        "allocated: 4\n"
        "shared now: 1 3\n"
        "copied: 2 -> 4\n"
        "references: page 1: 1 -> 2, page 3: 1 -> 2"
    )
    back = diff(second, first)
    assert (back.freed, back.allocated, back.copied, back.shared) == ((4,), (), (), ())


def test_a_release_and_a_reuse():
    state = reserved(start(), ints(6, 4, 0, 0))
    before = save(state)
    state = reserved(released(state, bools(1, 0, 0, 0)), ints(0, 4, 2, 0))  # page 2 was freed last
    found = diff(before, change(state, ints(2), 0))
    assert found == Diff(
        rows=((0, Row(6, (1, 2)), NOTHING), (2, NOTHING, Row(2, (2,)))),
        freed=(1,),
        refcounts=((1, 1, 0),),
        contents=(2,),  # held before and after, by others
    )


def test_a_partial_first_page_is_known_as_a_copy_by_its_bits_alone():
    state = reserved(start(), ints(3, 0, 0, 0))
    before = save(state)
    apart = diff(before, reserved(state, ints(3, 3, 0, 0)))
    assert (apart.allocated, apart.copied) == ((2,), ())
    state = rewind_in_place(start(), before)
    assert diff(before, forked(state, ints(-1, 0, -1, -1))).copied == ((1, 2),)


def test_a_new_row_whose_window_moved_past_the_place_is_no_copy():
    state = reserved(start(), ints(3, 0, 0, 0))
    before = save(state)
    state = reserved(state, ints(3, 6, 0, 0))
    state = state._replace(memory=memory.release_before(state.memory, ints(0, 4, 0, 0)))
    found = diff(before, state)
    assert found.rows == ((1, NOTHING, Row(6, (0, 3))),)
    assert (found.allocated, found.copied) == ((3,), ())


def test_the_order_of_free_pages_is_a_difference():
    state = memory.init(N, B, M, P)
    again, _ = memory.reserve(state, ints(12, 0, 0, 0))
    again = memory.release(again, bools(1, 0, 0, 0))
    assert diff(state, again) == Diff(other=("order of the free list",))
    assert str(diff(state, again)) == "also differs: order of the free list"


def test_pages_enter_and_leave_the_prefix_cache():
    state = start(cached=True)
    tokens = np.arange(M * P, dtype=np.int32).reshape(M, P)
    salt = prefix_cache.salt_of("alice")
    m, c, _ = jax.jit(prefix_cache.admit)(
        state.memory, state.prefix, np.int32(1), tokens, np.int32(9), salt
    )
    later = state._replace(memory=m, prefix=c)
    found = diff(state, later)
    assert found.cached == found.shared == (1, 2)  # the row's, and the cache's own reference
    assert (found.allocated, found.evicted) == ((1, 2, 3), ())
    assert found.rows == ((1, NOTHING, Row(9, (1, 2, 3))),)
    assert "entered the prefix cache: 1 2" in str(found)
    assert found.other == ("prefix.used", "prefix.clock")


# --- futures ----------------------------------------------------------------------------------


def test_futures_of_one_start_do_not_see_each_other():
    state = reserved(start(), ints(6, 4, 0, 0))
    before, pages = bits(state.memory), bits(held(state))
    one = lambda s: appended(s, bools(1, 0, 0, 0), 1)  # noqa: E731
    two = lambda s: appended(released(s, bools(1, 0, 0, 0)), bools(0, 1, 0, 0), 2)  # noqa: E731
    state, (a, b, c) = fork_and_compare(state, one, two, one)
    assert bits(state.memory) == before
    assert bits(held(state)) == pages
    assert (a.change.contents, a.change.rows) == ((2,), ((0, Row(6, (1, 2)), Row(7, (1, 2))),))
    assert (b.change.freed, b.change.allocated) == ((1,), ())  # 2 is used again, by row 1
    assert b.change.rows[1] == (1, Row(4, (3,)), Row(5, (3, 2)))
    assert not diff(a.state, c.state)
    assert diff(a.state, b.state)
    state = rewind_in_place(state, b.state)  # and go on from there
    assert state.memory.lengths.tolist() == [0, 5, 0, 0]


# --- errors -----------------------------------------------------------------------------------

OTHERS = {
    "pages": (lambda: start(pages=12), r"'num_pages': 12.*'num_pages': 10"),
    "layout": (lambda: start(layout="KNPD"), r"in KNPD.*in NPKD"),
    "dtype": (lambda: start("bfloat16"), r"of bfloat16.*of float32"),
    "prefix cache": (lambda: start(cached=True), r"prefix.*parts"),
    "page cache": (lambda: start(recent=2), r"parts.*parts"),
    "no pool": (lambda: start().memory, r"PagedMemory.*State"),
    "rows": (
        lambda: start()._replace(memory=memory.init(N, 5, M, P)),
        r"'rows': 5.*'rows': 4",
    ),
    "page size": (
        lambda: start()._replace(memory=replace(memory.init(N, B, M, P), page_size=8)),
        r"'page_size': 8.*'page_size': 4",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_states_of_another_geometry_are_refused_by_name(name):
    make, message = OTHERS[name]
    other, saved = make(), save(start())
    with pytest.raises(ValueError, match=message):
        rewind(other, saved)
    with pytest.raises(ValueError, match="cannot be compared"):
        diff(other, saved)


def test_what_is_no_state_is_refused():
    with pytest.raises(ValueError, match="a list is no state"):
        save([1])
