"""The prefix cache against a dictionary: the same hits, and invariants after each operation."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxattn import memory, prefix_cache
from paxattn.invariants import broken, check

P, N, ROWS, WIDTH = 4, 20, 4, 8
PLAIN = prefix_cache.salt_of(None)
admit = jax.jit(prefix_cache.admit)
release = jax.jit(prefix_cache.release)
evict = jax.jit(prefix_cache.evict)
checked = jax.jit(lambda m, c: check(m, prefix_cache.pins(c)))
idle_pages = jax.jit(prefix_cache.idle_pages)


def start():
    return memory.init(N, ROWS, WIDTH, P), prefix_cache.init(N, P)


def enter(state, row, prompt, salt=PLAIN, spare=0):
    tokens = np.zeros(WIDTH * P, np.int32)
    tokens[: len(prompt)] = prompt
    m, c, found = admit(
        *state,
        np.int32(row),
        tokens.reshape(WIDTH, P),
        np.int32(len(prompt)),
        salt,
        np.int32(spare),
    )
    assert not broken(checked(m, c))
    return (m, c), found


def leave(state, *rows):
    state = release(*state, np.isin(np.arange(ROWS), rows))
    assert not broken(checked(*state))
    return state


def table(state, row):
    entries = np.asarray(state[0].block_tables[row])
    return entries[entries != 0].tolist()


def test_known_pages_are_adopted_and_the_last_token_is_always_left():
    prompt = list(range(1, 13))  # three full pages
    state, first = enter(start(), 0, prompt)
    assert (int(first.cached_tokens), int(first.hits), int(first.misses)) == (0, 0, 2)
    state, second = enter(state, 1, prompt)  # all of it is known: the last page is computed again
    assert (int(second.cached_tokens), int(second.hits), int(second.misses)) == (8, 2, 0)
    a, b = table(state, 0), table(state, 1)
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    state, third = enter(state, 2, [*prompt, 99])  # and one token more: three pages are known
    assert int(third.cached_tokens) == 12
    assert table(state, 2)[:3] == a


def test_a_prefix_shorter_than_a_page_is_neither_hit_nor_miss():
    state, _ = enter(start(), 0, [1, 2, 3])
    _, found = enter(state, 1, [1, 2, 3])
    assert (int(found.hits), int(found.misses), int(found.cached_tokens)) == (0, 0, 0)


def test_tenants_with_different_salts_share_nothing_and_with_equal_ones_everything():
    prompt = list(range(1, 14))
    alice, bob = prefix_cache.salt_of("alice"), prefix_cache.salt_of("bob")
    state, _ = enter(start(), 0, prompt, alice)
    state, found = enter(state, 1, prompt, bob)
    assert int(found.hits) == 0
    assert not set(table(state, 0)) & set(table(state, 1))
    state, found = enter(state, 2, prompt, alice)
    assert int(found.hits) == 3
    assert table(state, 2)[:3] == table(state, 0)[:3]


def test_a_hash_collision_serves_nobody_elses_page(monkeypatch):
    same = lambda tokens, salt: jnp.zeros(tokens.shape[0], jnp.uint32)  # noqa: E731
    monkeypatch.setattr(prefix_cache, "prefix_hashes", same)
    monkeypatch.setitem(globals(), "admit", jax.jit(partial(prefix_cache.admit)))
    state, _ = enter(start(), 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    for prompt, salt in [
        ([1, 2, 3, 9, 5, 6, 7, 8, 9], PLAIN),  # another first page
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], prefix_cache.salt_of("other")),
    ]:
        state, found = enter(state, 1, prompt, salt)
        assert bool(found.ok)
        assert int(found.hits) == 0
        state = leave(state, 1)
    state, found = enter(state, 1, [1, 2, 3, 4, 5, 6, 7, 0, 9])  # a second page unlike the first's
    assert int(found.hits) == 1


def test_pages_wait_without_users_and_leave_oldest_first_tails_before_heads():
    state, _ = enter(start(), 0, list(range(1, 14)))  # three full pages and a tail
    state, _ = enter(state, 1, list(range(101, 110)))  # two
    old, young = table(state, 0)[:3], table(state, 1)[:2]
    state = leave(leave(state, 0), 1)
    assert int(state[0].allocator.num_free) == N - 1 - 5
    assert int(idle_pages(*state)) == 5
    for page in [*old[::-1], *young[::-1]]:
        m, c, count = evict(*state, np.int32(1))
        state = m, c
        assert int(count) == 1
        assert int(c.place[page]) == -1
        assert not broken(checked(*state))
    assert int(state[0].allocator.num_free) == N - 1
    assert int(evict(*state, np.int32(5))[2]) == 0


def test_adopted_pages_are_not_counted_as_free_too():
    """The free check must come after the references, or a pool is promised twice."""
    long = list(range(1, 29))  # seven pages, six of which can be adopted
    state = start()
    state, _ = enter(state, 0, long)
    state = leave(state, 0)
    state, _ = enter(state, 1, list(range(201, 229)))
    state, _ = enter(state, 2, list(range(301, 317)))
    # 19 pages: 7 and 4 are in use, 7 idle, 1 free. The prompt adopts six: two are left.
    assert int(state[0].allocator.num_free) == 1
    before = jax.tree.map(np.asarray, state)
    state, found = enter(state, 3, long, spare=2)
    assert not bool(found.ok)
    for a, b in zip(jax.tree.leaves(before[0]), jax.tree.leaves(state[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    state, found = enter(state, 3, long, spare=1)
    assert (bool(found.ok), int(found.hits), int(found.evicted)) == (True, 6, 0)


def test_rows_in_use_and_prompts_of_no_or_too_many_tokens_are_refused():
    state, _ = enter(start(), 0, [1, 2, 3])
    assert not enter(state, 0, [1, 2, 3])[1].ok
    m, c, found = admit(*state, np.int32(1), np.zeros((8, P), np.int32), np.int32(0), PLAIN, 0)
    assert not found.ok
    m, c, found = admit(*state, np.int32(1), np.zeros((8, P), np.int32), np.int32(33), PLAIN, 0)
    assert not found.ok
    assert not broken(checked(m, c))


def test_clear_forgets_everything_and_keeps_what_sequences_hold():
    state, _ = enter(start(), 0, list(range(1, 14)))
    state, _ = enter(state, 1, list(range(1, 6)))
    state = leave(state, 0)
    state = jax.jit(prefix_cache.clear)(*state)
    assert not broken(checked(*state))
    assert int(state[0].allocator.num_free) == N - 1 - 2
    assert int(enter(state, 2, list(range(1, 14)))[1].hits) == 0


def test_hashes_chain_in_closed_form():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, (6, P)).astype(np.int32)
    got = np.asarray(prefix_cache.prefix_hashes(tokens, PLAIN))

    def mix(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    h = sum(mix(i) for i in range(1, 5)) % 2**32
    for j, page in enumerate(tokens):
        own = sum(mix(int(t) ^ ((i + 1) * 0x85EBCA77 % 2**32)) for i, t in enumerate(page))
        h = (h * (0x9E3779B1 if j else 1) + mix(own % 2**32)) % 2**32
        assert int(got[j]) == mix(h)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_operations_against_a_dictionary(seed):
    """Prefixes known to a dictionary of tuples are exactly those that are adopted."""
    rng = np.random.default_rng(seed)
    state, known, rows = start(), {}, {}
    salts = [PLAIN, prefix_cache.salt_of("x")]
    bases = rng.integers(1, 100, (3, 28))
    seen = Counter()
    for _ in range(200):
        kind = rng.random()
        if kind < 0.65 and len(rows) < ROWS:
            row = next(r for r in range(ROWS) if r not in rows)
            salt = int(rng.integers(2))
            base, tail = bases[rng.integers(3)], rng.integers(1, 3, 28)
            prompt = tuple([*base[: rng.integers(29)], *tail][: rng.integers(1, 29)])
            prompt = tuple(int(t) for t in prompt)
            free, idle = int(state[0].allocator.num_free), int(idle_pages(*state))
            spare = int(rng.integers(8))
            state, found = enter(state, row, prompt, salts[salt], spare)
            most = (len(prompt) - 1) // P
            hits = 0
            while hits < most and (salt, prompt[: (hits + 1) * P]) in known:
                hits += 1
            keys = [(salt, prompt[: (j + 1) * P]) for j in range(hits)]
            live = {p for held in rows.values() for p in held}
            adopted_idle = sum(known[k] not in live for k in keys)
            need = -(-len(prompt) // P) - hits
            assert bool(found.ok) == (need + spare <= free + idle - adopted_idle)
            seen["ok" if found.ok else "refused"] += 1
            if not found.ok:
                continue
            assert int(found.hits) == hits
            assert int(found.evicted) == max(0, need - free)
            seen["hits"] += hits
            seen["evicted"] += int(found.evicted)
            pages = table(state, row)
            assert pages[:hits] == [known[k] for k in keys]
            rows[row] = pages
            place = np.asarray(state[1].place)
            known = {k: p for k, p in known.items() if place[p] >= 0 and p not in pages[hits:]}
            for j in range(hits, len(prompt) // P):
                known.setdefault((salt, prompt[: (j + 1) * P]), pages[j])
        elif rows:
            gone = rng.choice(list(rows), rng.integers(1, len(rows) + 1), replace=False)
            state = leave(state, *gone)
            for row in gone:
                del rows[row]
        if kind > 0.95:
            m, c, _ = evict(*state, np.int32(rng.integers(1, 6)))
            state = m, c
            place = np.asarray(c.place)
            known = {k: p for k, p in known.items() if place[p] >= 0}
        # A prefix that is cached has all of its beginnings cached: tails went before heads.
        for salt, prefix in known:
            assert len(prefix) == P or (salt, prefix[:-P]) in known
    assert min(seen["ok"], seen["refused"], seen["hits"], seen["evicted"]) > 5
