"""Defects reported against other paged caches, each as a test here or the name of one elsewhere."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, ragged_paged_attention
from paxattn import accounting, memory, prefix_cache
from paxattn.invariants import broken, check

# Reported there, and where the whole engine or a kernel is tested for it here.
ELSEWHERE = {
    "vLLM 936, pytorch/xla 9219: NaN from V outside the context": [
        "test_conformance.py::test_a_wrong_kernel_fails",  # its mutant unmasked_v
        "test_engine_bits.py::test_stale_pages_cannot_be_seen",
    ],
    "vLLM 25780: recomputation after preemption counted as hits": [
        "test_engine_prefix.py::test_the_tokens_of_an_evicting_pool_are_the_same",
    ],
    "vLLM, predictable hashes: one user's prompt collides with another's": [
        "test_prefix_cache.py::test_a_hash_collision_serves_nobody_elses_page",
        "test_prefix_cache.py::test_tenants_with_different_salts_share_nothing_and_with_equal_ones_everything",
    ],
    "marin 1899, levanter 1186: 'out of free pages' kills the batch": [
        "test_engine.py::test_preempted_requests_give_the_same_tokens",
        "test_engine.py::test_a_prompt_that_can_never_fit_does_not_stop_the_others",
    ],
    "xllm 828: utilisation of 135%": [
        "test_prefix_cache.py::test_adopted_pages_are_not_counted_as_free_too",
    ],
    "sglang-jax 204, 235: one token repeats, for KV was not carried to the next step": [
        "test_engine.py::test_greedy_tokens_are_those_of_dense_attention",
    ],
    "jax 23819, 27224: wrong or NaN unless the length is a multiple of the tile": [
        "test_attention.py::test_decode",
        "test_attention.py::test_ragged",
        "test_conformance.py::test_ours_passes_everything",
    ],
    "marin 2923: a traced sm_scale fails": [
        "test_conformance.py::test_ours_passes_everything",  # its case "sm_scale, traced"
    ],
}


@pytest.mark.parametrize("defect", ELSEWHERE)
def test_the_named_tests_exist(defect):
    for name in ELSEWHERE[defect]:
        file, test = name.split("::")
        text = (Path(__file__).parent / file).read_text()
        assert re.search(rf"^def {test}\(", text, re.MULTILINE), name


def ints(*values):
    return jnp.array(values, jnp.int32)


def bools(*values):
    return jnp.array(values, bool)


release, reserve, fork = map(jax.jit, (memory.release, memory.reserve, memory.fork))
release_before = jax.jit(memory.release_before)
append = jax.jit(memory.append)
checked = jax.jit(check)


@pytest.mark.parametrize("recent", [0, 2])
def test_a_page_released_on_two_paths_is_free_once(recent):
    """vLLM 42571, sglang-jax 70, 982, 994: the same block enters the free queue twice."""
    state, _ = reserve(memory.init(10, 3, 3, 4, recent), ints(10, 0, 0))
    state, _, _ = fork(state, ints(-1, 0, -1))
    everyone = bools(1, 1, 1)
    paths = {
        "finished, and finished again": lambda s: release(release(s, everyone), everyone),
        "left the window, then finished": lambda s: release(
            release_before(s, ints(8, 8, 0)), everyone
        ),
        "left the window twice": lambda s: release(
            release_before(release_before(s, ints(4, 8, 0)), ints(8, 8, 0)), everyone
        ),
        "one parent, then both": lambda s: release(release(s, bools(1, 0, 0)), everyone),
    }
    for name, path in paths.items():
        end = path(state)
        assert int(memory.free_pages(end)) == 9, name
        assert broken(checked(end)) == {}, name
        full, ok = reserve(end, ints(12, 12, 12))  # each page is handed out once
        assert bool(ok.all()), name
        assert len(set(full.block_tables.ravel().tolist())) == 9, name


def test_nothing_is_written_to_a_page_that_left_the_window():
    """vLLM 42273: a stale table entry after an eviction corrupts a recycled page."""
    state, _ = reserve(memory.init(7, 2, 5, 4), ints(10, 0))
    state = release_before(state, ints(8, 0))  # pages 1 and 2 go
    state, ok = reserve(state, ints(10, 8))  # and are row 1's
    assert bool(ok.all())
    recycled = set(state.block_tables[1].tolist()) - {0}
    assert recycled == {1, 2}
    positions = jnp.arange(20, dtype=jnp.int32)
    slots = memory.slot_mapping(state, jnp.zeros(20, jnp.int32), positions)
    assert not recycled & set((slots // 4).tolist())
    assert not slots[:8].any()  # written to the null page, if at all
    for _ in range(6):  # a new page on the way
        state, slots, _ = append(state, bools(1, 0))
        assert int(slots[0]) // 4 not in recycled


def test_utilisation_counts_tokens_and_not_pages():
    """vLLM PR 57336: 67% was shown while 37% of the slots held tokens."""
    # 9 pages of 16: six rows of one page each hold 6/9 of the pages and 53/144 of the slots.
    state, ok = reserve(memory.init(10, 6, 2, 16), ints(9, 9, 9, 9, 9, 8))
    assert bool(ok.all())
    waste = accounting.of_paged(state)
    assert int(waste.capacity) == 144
    assert round(100 * int(waste.held) / int(waste.capacity)) == 67
    assert round(100 * int(waste.used) / int(waste.capacity)) == 37


def admit(state, row, prompt, salt=None):
    tokens = np.zeros((4, 4), np.int32)
    tokens.ravel()[: len(prompt)] = prompt
    m, c, found = _admit(
        *state, np.int32(row), tokens, np.int32(len(prompt)), prefix_cache.salt_of(salt)
    )
    assert broken(_checked(m, c)) == {}
    return (m, c), found


_admit = jax.jit(prefix_cache.admit)
_release = jax.jit(prefix_cache.release)
_checked = jax.jit(lambda m, c: check(m, prefix_cache.pins(c)))


def test_a_prefix_shorter_than_a_page_counts_neither_as_hit_nor_as_miss():
    """vLLM 54607: a rate of 0% hits where the shared prefix is shorter than a block."""
    state = memory.init(20, 4, 4, 4), prefix_cache.init(20, 4)
    state, _ = admit(state, 0, [7, 7, 7])
    state, found = admit(state, 1, [7, 7, 7, 1])  # a full page, and nothing could be adopted
    assert (int(found.hits), int(found.misses)) == (0, 0)
    state, found = admit(state, 2, [7, 7, 7, 1, 2])  # it shares a whole page, and is a hit
    assert (int(found.hits), int(found.misses), int(found.cached_tokens)) == (1, 0, 4)


def test_a_shared_page_is_used_once_however_many_hold_it():
    """xllm 828: utilisation of 135%, for a shared page was promised twice."""
    state = memory.init(9, 4, 4, 4), prefix_cache.init(9, 4)
    prompt = list(range(1, 16))  # three full pages and a partial one
    oks = []
    for row in range(4):
        state, found = admit(state, row, prompt)
        oks.append(bool(found.ok))
        waste = accounting.of_paged(state[0])
        assert int(waste.held) + int(waste.free) == 32
        assert 0 <= int(waste.used) <= 32
    assert oks == [True] * 4  # 4 pages, and one more for each of the others: 7 of 8
    assert int(state[0].allocator.num_free) == 1
    state, found = admit((_release(*state, bools(1, 1, 1, 1))), 0, [9] * 16)
    assert bool(found.ok)
    assert int(found.evicted) == 0  # 3 idle pages, 5 free: the fourth page fits without
    state, found = admit(state, 1, prompt)  # three adopted, one new: exactly full
    assert (bool(found.ok), int(found.hits)) == (True, 3)
    state, found = admit(state, 2, [8])
    assert not bool(found.ok)
    assert int(accounting.of_paged(state[0]).held) == 32


def test_a_refused_row_is_told_so_and_the_others_go_on():
    """marin 1899, levanter 1186: 'out of free pages' kills the batch."""
    state, _ = reserve(memory.init(4, 3, 3, 4), ints(4, 3, 4))  # every page is taken
    after, slots, ok = append(state, bools(1, 1, 1))
    assert ok.tolist() == [False, True, False]
    assert slots.tolist() == [0, 2 * 4 + 3, 0]
    assert after.lengths.tolist() == [4, 4, 4]
    after, slots, ok = append(release(after, bools(0, 0, 1)), bools(1, 1, 0))
    assert ok.tolist() == [True, False, True]


# --- compile time -------------------------------------------------------------------------------


def size_of(f, *args):
    """Lines of the program that is handed to the compiler."""
    return jax.jit(f).lower(*args).as_text().count("\n")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_program_does_not_grow_with_the_number_of_sequences(implementation):
    """pytorch/xla 8731: compile time explodes with the number of sequences."""

    def size(rows):
        q = jnp.zeros((rows, 4, 8))
        pages = (jnp.zeros((9, 4, 2, 8)),) * 2
        tables, lengths = jnp.zeros((rows, 3), jnp.int32), jnp.zeros(rows, jnp.int32)
        starts, count = jnp.zeros(rows + 1, jnp.int32), jnp.zeros(1, jnp.int32)
        options = dict(kv_layout="NPKD", implementation=implementation)
        decode = lambda *x: paged_attention(*x, **options)  # noqa: E731
        ragged = lambda *x: ragged_paged_attention(*x, **options)  # noqa: E731
        return (
            size_of(decode, q, *pages, tables, lengths),
            size_of(ragged, q, pages, lengths, tables, starts, count),
        )

    assert size(16) == size(256)


def test_the_memorys_programs_do_not_grow_with_rows_or_pages():
    """The same for allocation."""

    def size(rows, pages):
        state = memory.init(pages, rows, 4, 4)
        lengths = state.lengths
        return [
            size_of(memory.reserve, state, lengths),
            size_of(memory.append, state, lengths > 0),
            size_of(memory.fork, state, lengths),
            size_of(memory.release, state, lengths > 0),
        ]

    assert size(16, 1000) == size(16, 10)
    # the saturating sum over rows is a tree: each doubling adds one level and no more
    small, middle, large = (np.array(size(rows, 10)) for rows in (64, 128, 256))
    assert (large - middle == middle - small).all()
    assert (large < 2 * small).all()
