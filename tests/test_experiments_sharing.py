"""The counting models of experiments/sharing.py and prefix_cache.py against the real memory."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from paxattn import memory, prefix_cache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))


@pytest.fixture(scope="module")
def scripts():
    import importlib

    return importlib.import_module("sharing"), importlib.import_module("prefix_cache")


def test_replayed_blocks_are_those_that_the_real_cache_adopts(scripts):
    """A block of 512 tokens is a page of one token here: its id."""
    rng = np.random.default_rng(0)
    capacity, block = 24, 512
    heads = [rng.integers(1, 1000, 12).tolist() for _ in range(4)]
    blocks, lengths = [], []
    for _ in range(60):
        ids = [*heads[rng.integers(4)][: rng.integers(1, 13)], *rng.integers(1000, 2000, 4)]
        ids = [int(i) for i in ids[: rng.integers(1, 14)]]
        blocks.append(tuple(ids))
        lengths.append(len(ids) * block)  # every block is full
    # The model's ids name a block and all before it; the cache is given each block's own.
    named = [tuple(hash(ids[: j + 1]) for j in range(len(ids))) for ids in blocks]
    got = scripts[1].replay(named, lengths, block, capacity)

    admit, release = jax.jit(prefix_cache.admit), jax.jit(prefix_cache.release)
    state = memory.init(capacity + 1, 1, 16, 1), prefix_cache.init(capacity + 1, 1)
    hits = misses = evictions = 0
    for ids in blocks:
        tokens = np.zeros((16, 1), np.int32)
        tokens[: len(ids), 0] = ids
        m, c, found = admit(
            *state, np.int32(0), tokens, np.int32(len(ids)), prefix_cache.salt_of(None)
        )
        assert found.ok
        hits += int(found.hits)
        misses += int(found.misses)
        evictions += int(found.evicted)
        state = release(m, c, np.ones(1, bool))
    assert (got["hits"], got["misses"], got["evictions"]) == (hits, misses, evictions)
    assert hits > 50
    assert evictions > 50
    assert got["saved_tokens"] == hits * block


def test_parallel_samples_are_counted_as_the_memory_shares_them(scripts):
    # by hand: 17 to 24 tokens are three pages of 8 each, of which two are shared by all three
    assert scripts[0].parallel(16, 8, 3, 8) == (72, 40)
    prompt, output, samples, page = 21, 13, 3, 8
    state = memory.init(32, samples, 8, page)
    state, _ = memory.reserve(state, jnp.asarray([prompt, 0, 0], jnp.int32))
    state, _, ok = memory.fork(state, jnp.asarray([-1, 0, 0], jnp.int32))
    assert bool(jnp.all(ok))
    append, entries, pages = jax.jit(memory.append), 0, 0
    for _ in range(output):
        state, _, _ = append(state, jnp.ones(samples, bool))
        entries += int(jnp.sum(memory.held_pages(state)))
        pages += 31 - int(memory.free_pages(state))
    assert scripts[0].parallel(prompt, output, samples, page) == (entries, pages)


def test_one_beam_shares_nothing_and_equal_beams_almost_everything(scripts):
    beam = scripts[0].beam
    rng = np.random.default_rng(0)
    entries, pages = beam(20, 30, 1, 8, 2.0, rng)
    assert entries == pages == sum(-(-n // 8) for n in range(21, 51))
    entries, pages = beam(20, 60, 4, 8, 4.0, rng)
    assert 0.5 < 1 - pages / entries < 0.75  # three of four entries could go at the most


def test_the_engines_beams_save_at_least_their_prompt(scripts):
    sharing = scripts[0]
    found = sharing.engine_beams(tiny.model(), "float32", 8, 6, 0)["saved_percent"]
    assert list(found) == list(sharing.SIZES)
    for n, percent in found.items():
        # Prompts of 20 tokens have two full pages, which all beams share in every step.
        entries, pages = sharing.parallel(20, 5, n, 8)
        assert 100 * (1 - pages / entries) - 1e-6 <= percent < 100 * (1 - 1 / n)
