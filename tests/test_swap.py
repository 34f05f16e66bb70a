"""Rows leave the pool and come back: the same bits, the same sharing, or nothing at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxattn import kv_pool, memory, prefix_cache, swap
from paxattn.invariants import broken, check

P = 4
LAYOUTS = ["KNPD", "NPKD", "NKPD", "NKDP"]
pages_of, restore = jax.jit(swap.pages_of), jax.jit(swap.restore)
take_pages = jax.jit(swap.take_pages)
put_pages = jax.jit(swap.put_pages, donate_argnums=0)
checked = jax.jit(check)
admit, release_cached = jax.jit(prefix_cache.admit), jax.jit(prefix_cache.release)
reserve, release = jax.jit(memory.reserve), jax.jit(memory.release)
fork, append = jax.jit(memory.fork), jax.jit(memory.append)
checked_cache = jax.jit(lambda m, c: check(m, prefix_cache.pins(c)))
checked_window = jax.jit(lambda m, p: check(m, None, p))
idle_pages = jax.jit(prefix_cache.idle_pages)


def ints(*values):
    return jnp.array(values, jnp.int32)


def bools(*values):
    return jnp.array(values, bool)


def same(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def forked():
    """Row 0: 6 tokens in pages 1 2; row 2 its fork in 1 4; row 1: 4 tokens in page 3."""
    state, _ = reserve(memory.init(10, 4, 3, P), ints(6, 4, 0, 0))
    state, _, ok = fork(state, ints(-1, -1, 0, -1))
    assert ok.all()
    return state


def random_bits(pool, seed):
    """Every bit pattern, so NaN payloads too."""
    rng = np.random.default_rng(seed)
    unsigned = {2: np.uint16, 4: np.uint32}

    def fill(x):
        bits = rng.integers(0, 256, x.nbytes, np.uint8).view(unsigned[x.dtype.itemsize])
        return jnp.asarray(bits.reshape(x.shape).view(x.dtype))

    return jax.tree.map(fill, pool)


def bits(tree):
    return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(tree)]


# --- by hand ----------------------------------------------------------------------------------


def test_a_shared_page_stands_once_in_order_of_appearance():
    group = pages_of(forked(), bools(1, 0, 1, 1))
    assert int(group.count) == 3
    assert group.pages.tolist() == [1, 2, 4] + [0] * 9
    assert group.entries.tolist() == [[1, 2, 0], [0, 0, 0], [1, 3, 0], [0, 0, 0]]


def test_no_rows_hold_no_pages():
    group = pages_of(forked(), bools(0, 0, 0, 1))
    assert (int(group.count), group.pages.any(), group.entries.any()) == (0, False, False)


def test_forked_rows_come_back_shared_as_they_were():
    state = forked()
    leaving = bools(1, 0, 1, 0)
    group = pages_of(state, leaving)
    gone = release(state, leaving)
    assert int(memory.free_pages(gone)) == 8  # page 3 is row 1's
    gone, ok = reserve(gone, ints(0, 4, 0, 3))  # somebody else comes in between
    assert gone.block_tables[3].tolist() == [4, 0, 0]  # the page that was freed last
    back, pages, ok = restore(gone, ints(0, -1, 2, -1), group.entries, state.lengths, group.count)
    assert bool(ok)
    # freed in order of their last entry: 2, then 1 (row 2's), then 4, which row 3 took
    assert pages.tolist() == [1, 2, 5] + [0] * 9
    assert back.block_tables.tolist() == [[1, 2, 0], [3, 0, 0], [1, 5, 0], [4, 0, 0]]
    assert back.allocator.refcount.tolist() == [0, 2, 1, 1, 1, 1, 0, 0, 0, 0]
    assert back.lengths.tolist() == [6, 4, 6, 3]
    assert broken(checked(back)) == {}


def test_a_group_comes_back_to_other_rows():
    state = forked()
    group = pages_of(state, bools(1, 0, 1, 0))
    part = [0, 2]  # only the group's rows: what a caller with many rows keeps
    back, _, ok = restore(
        memory.init(10, 4, 3, P), ints(3, 1), group.entries[part, :], state.lengths[part,], 3
    )
    assert bool(ok)
    assert back.lengths.tolist() == [0, 6, 0, 6]
    assert back.block_tables.tolist() == [[0, 0, 0], [1, 3, 0], [0, 0, 0], [1, 2, 0]]
    assert broken(checked(back)) == {}


def test_pages_that_left_a_window_stay_away():
    state, _ = reserve(memory.init(10, 2, 5, P), ints(18, 3))
    positions = ints(9, 0)
    state = jax.jit(memory.release_before)(state, positions)
    group = pages_of(state, bools(1, 0))
    assert int(group.count) == 3
    gone = release(state, bools(1, 0))
    back, pages, ok = restore(gone, ints(0, -1), group.entries, state.lengths, group.count)
    assert bool(ok)
    assert (back.block_tables[0, :2] == 0).all()
    assert back.block_tables[0, 2:].tolist() == pages[:3].tolist()
    assert broken(checked_window(back, positions)) == {}
    assert int(memory.free_pages(back)) == int(memory.free_pages(state))


def test_an_empty_row_of_the_group_is_no_fault():
    state = forked()
    group = pages_of(state, bools(0, 0, 0, 1))
    back, _, ok = restore(state, ints(-1, -1, -1, 3), group.entries, state.lengths, group.count)
    assert bool(ok)
    assert same(back, state)


# --- all or nothing ---------------------------------------------------------------------------

REFUSED = {
    "a row in use": dict(rows=(1, -1, 2, -1)),
    "a row twice": dict(rows=(0, -1, 0, -1)),
    "no such row": dict(rows=(0, -1, 4, -1)),
    "a page that no row names": dict(rows=(0, -1, -1, -1)),
    "more pages than are named": dict(count=4),
    "fewer pages than are named": dict(count=2),
    "a negative count": dict(count=-1),
    "a negative length": dict(lengths=(-1, 0, 6, 0)),
    "a length past the table": dict(lengths=(13, 0, 6, 0)),
    "an entry past the length": dict(lengths=(4, 0, 6, 0)),
    "a negative entry": dict(entries=((1, 2, 0), (0, 0, 0), (1, -3, 0), (0, 0, 0))),
    "a partial page in two rows": dict(entries=((1, 2, 0), (0, 0, 0), (3, 2, 0), (0, 0, 0))),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_no_group_or_has_no_place_changes_nothing(fault):
    state = forked()
    group = pages_of(state, bools(1, 0, 1, 0))
    gone = release(state, bools(1, 0, 1, 0))
    good = dict(
        rows=(0, -1, 2, -1), entries=group.entries, lengths=state.lengths, count=group.count
    )
    assert bool(restore(gone, *(jnp.asarray(x, jnp.int32) for x in good.values()))[2])
    asked = {**good, **REFUSED[fault]}
    after, pages, ok = restore(gone, *(jnp.asarray(x, jnp.int32) for x in asked.values()))
    assert not bool(ok)
    assert not pages.any()
    assert same(after, gone)


@pytest.mark.parametrize("recent", [0, 2])
def test_too_few_pages_change_nothing_and_just_enough_will_do(recent):
    state, _ = reserve(memory.init(6, 4, 3, P, recent), ints(6, 4, 0, 0))
    state, _, _ = fork(state, ints(-1, -1, 0, -1))  # pages 1 2, 3, 1 4: one is left
    leaving = bools(1, 0, 1, 0)
    group = pages_of(state, leaving)
    gone = release(state, leaving)
    short, _ = reserve(gone, ints(0, 12, 0, 0))
    args = (ints(0, -1, 2, -1), group.entries, state.lengths, group.count)
    after, pages, ok = restore(short, *args)
    assert (bool(ok), pages.any()) == (False, False)
    assert same(after, short)
    enough, _ = reserve(gone, ints(0, 8, 0, 0))
    after, _, ok = restore(enough, *args)
    assert bool(ok)
    assert int(memory.free_pages(after)) == 0
    assert broken(checked(after)) == {}


def test_shapes_that_do_not_belong_together_are_named():
    state = forked()
    with pytest.raises(ValueError, match=r"rows \(4,\), entries \(4, 2\)"):
        swap.restore(state, ints(0, 1, 2, 3), jnp.zeros((4, 2), jnp.int32), state.lengths, 0)


# --- contents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_contents_come_back_to_the_last_bit(layout, dtype):
    pool = random_bits(kv_pool.init(2, 10, P, 2, 3, dtype, layout), seed=1)
    before = bits(pool)
    state = forked()
    leaving = bools(1, 0, 1, 0)
    group = pages_of(state, leaving)
    contents = jax.device_get(take_pages(pool, group.pages))
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(contents))
    kept = [[bits(kv_pool.gather(pool, i, t)) for t in state.block_tables] for i in range(2)]

    gone = release(state, leaving)
    pool = kv_pool.fill_pages(pool, ints(1, 2, 4, 5), float("nan"))  # whoever comes in between
    gone, _ = reserve(gone, ints(0, 4, 0, 3))
    back, pages, ok = restore(gone, ints(0, -1, 2, -1), group.entries, state.lengths, group.count)
    assert bool(ok)
    untouched = np.setdiff1d(np.arange(10), [0, 1, 2, 4, 5])  # put: 1 2 5; page 4 is row 3's
    pool = put_pages(pool, pages, contents)

    for i in range(2):
        for row, tokens in [(0, 6), (1, 4), (2, 6)]:
            got = bits(kv_pool.gather(pool, i, back.block_tables[row]))
            for a, b in zip(got, kept[i][row], strict=True):
                np.testing.assert_array_equal(a[:tokens], b[:tokens])
    axis = layout.index("N")
    for a, b in zip(bits(pool), before, strict=True):
        for page in [0, *untouched]:  # the null page is padding's, and is not written either
            np.testing.assert_array_equal(a.take(page, axis), b.take(page, axis))


def test_some_of_the_width_is_enough():
    pool = random_bits(kv_pool.init(1, 10, P, 2, 3), seed=2)
    group = pages_of(forked(), bools(1, 0, 1, 0))
    contents = take_pages(pool, group.pages[:4])
    assert contents.num_pages == 4
    fresh = put_pages(kv_pool.init(1, 10, P, 2, 3), ints(7, 8, 9, 0), contents)
    want, got = (take_pages(x, p) for x, p in [(pool, ints(1, 2, 4)), (fresh, ints(7, 8, 9))])
    assert all(np.array_equal(a, b) for a, b in zip(bits(want), bits(got), strict=True))
    assert not any(x.any() for x in bits(take_pages(fresh, jnp.arange(7, dtype=jnp.int32))))


@pytest.mark.parametrize(
    "other",
    [
        dict(layout="KNPD"),
        dict(dtype=jnp.bfloat16),
        dict(page_size=8),
        dict(num_layers=2),
    ],
    ids=str,
)
def test_contents_of_another_pool_are_refused_by_name(other):
    sizes = dict(num_layers=1, num_pages=4, page_size=4, num_kv_heads=2, head_dim=3, layout="NPKD")
    contents = swap.take_pages(kv_pool.init(**{**sizes, **other}), ints(1, 2))
    with pytest.raises(ValueError, match=r"contents of .* cannot stand in "):
        swap.put_pages(kv_pool.init(**sizes), ints(1, 2), contents)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_put_is_in_place(layout, dtype):
    pool = jax.eval_shape(lambda: kv_pool.init(2, 512, 16, 2, 8, jnp.dtype(dtype), layout))
    pages = jax.ShapeDtypeStruct((4,), jnp.int32)
    contents = jax.eval_shape(swap.take_pages, pool, pages)
    analysis = put_pages.lower(pool, pages, contents).compile().memory_analysis()
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
    assert analysis.alias_size_in_bytes == total
    assert analysis.temp_size_in_bytes < total // 8


def test_the_pool_size_costs_nothing():
    def compiled(num_pages):
        state = jax.eval_shape(lambda: memory.init(num_pages, 4, 16, 16))
        f = jax.jit(
            lambda s, m: swap.restore(
                s, jnp.where(m, 1, -1), swap.pages_of(s, m).entries, s.lengths, s.lengths[0]
            ),
            donate_argnums=0,
        )
        return f.lower(state, jax.ShapeDtypeStruct((4,), bool)).compile()

    small, large = (compiled(n).memory_analysis() for n in (1_000, 1_000_000))
    assert small.temp_size_in_bytes == large.temp_size_in_bytes
    assert large.alias_size_in_bytes >= 8 * 1_000_000


# --- with a prefix cache ----------------------------------------------------------------------


def test_cached_pages_stay_and_the_row_comes_back_in_pages_of_its_own():
    state, cache = memory.init(12, 3, 5, P), prefix_cache.init(12, P)
    tokens = np.arange(5 * P, dtype=np.int32).reshape(5, P)
    salt = prefix_cache.salt_of(None)
    state, cache, first = admit(state, cache, np.int32(0), tokens, np.int32(14), salt)
    state, cache, second = admit(state, cache, np.int32(1), tokens, np.int32(13), salt)
    assert (bool(first.ok), int(second.hits)) == (True, 3)
    both = bools(1, 1, 0)
    group = pages_of(state, both)
    assert int(group.count) == 5  # three shared, a partial page each
    gone, cache = release_cached(state, cache, both)
    assert int(idle_pages(gone, cache)) == 3
    assert broken(checked_cache(gone, cache)) == {}
    back, pages, ok = restore(gone, ints(2, 0, -1), group.entries, state.lengths, group.count)
    assert bool(ok)
    assert int(idle_pages(back, cache)) == 3  # the row's pages are private
    assert not set(pages[:5].tolist()) & set(np.flatnonzero(prefix_cache.pins(cache)).tolist())
    assert back.lengths.tolist() == [13, 0, 14]
    assert broken(checked_cache(back, cache)) == {}
    back, cache, third = admit(back, cache, np.int32(1), tokens, np.int32(14), salt)
    assert (bool(third.ok), int(third.hits)) == (True, 3)
    assert broken(checked_cache(back, cache)) == {}


def test_a_pinned_page_is_not_taken_from_the_cache_to_bring_a_row_back():
    state, cache = memory.init(5, 2, 3, P), prefix_cache.init(5, P)
    tokens = np.arange(3 * P, dtype=np.int32).reshape(3, P)
    salt = prefix_cache.salt_of(None)
    state, cache, _ = admit(state, cache, np.int32(0), tokens, np.int32(12), salt)
    group = pages_of(state, bools(1, 0))
    gone, cache = release_cached(state, cache, bools(1, 0))
    args = (ints(1, -1), group.entries, state.lengths, group.count)
    after, _, ok = restore(gone, *args)  # one page is free, three are idle: the caller evicts
    assert not bool(ok)
    assert same(after, gone)
    gone, cache, _ = jax.jit(prefix_cache.evict)(gone, cache, group.count - gone.allocator.num_free)
    after, _, ok = restore(gone, *args)
    assert bool(ok)
    assert broken(checked_cache(after, cache)) == {}


def test_restored_rows_go_on():
    """Grow, fork and release after coming back: nothing is lost."""
    state = forked()
    group = pages_of(state, bools(1, 0, 1, 0))
    back, _, ok = restore(
        release(state, bools(1, 0, 1, 0)),
        ints(0, -1, 2, -1),
        group.entries,
        state.lengths,
        group.count,
    )
    back, slots, ok = append(back, bools(1, 1, 1, 0))
    assert bool(ok.all())
    assert len(set(slots[:3].tolist())) == 3
    back, _, ok = fork(back, ints(-1, -1, -1, 2))
    assert bool(ok.all())
    assert broken(checked(back)) == {}
    back = release(back, bools(1, 1, 1, 1))
    assert int(memory.free_pages(back)) == 9
    assert broken(checked(back)) == {}


def test_a_memory_of_some_rows_gives_the_same_group():
    state = forked()
    whole = pages_of(state, bools(1, 0, 1, 0))
    part = pages_of(memory.select(state, ints(0, 2)), bools(1, 1))
    assert part.pages[:3].tolist() == whole.pages[:3].tolist()
    assert part.entries.tolist() == whole.entries[ints(0, 2)].tolist()
