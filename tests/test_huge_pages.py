"""Weights and pools in huge pages: the same values, XLA's in-place updates, and nothing leaked."""

import gc
import mmap
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

from paxattn import LLM, SamplingParams, huge_pages

PARAMS = {
    "embedding": np.arange(35, dtype=np.float32).reshape(7, 5),
    "kernel": (np.full((1, 3), 0.1, np.float32), jnp.ones((2, 3))),
    "none": np.zeros((0, 4), np.float32),
    "norm": jnp.asarray(0.3),
}


def asks_for_huge_pages(address: int) -> bool:
    """Whether it was asked; how many the system then has depends on its other users."""
    inside = False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
            elif inside and line.startswith("VmFlags:"):
                return "hg" in line.split()
    return False


def share_in_memory(x: jax.Array) -> float:
    """The share of an array's own pages, the parts of pages at its ends left out, that are there.

    Not the resident size of the mapping, which may hold a neighbour's memory too.
    """
    first = -(-x.unsafe_buffer_pointer() // mmap.PAGESIZE)
    last = (x.unsafe_buffer_pointer() + x.nbytes) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first)), np.uint64)
    assert entries.size == last - first
    return (entries >> np.uint64(63)).mean()


needs_huge_pages = pytest.mark.skipif(
    not pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(),
    reason="this system has no huge pages",
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("system", ["with", "without"])
def test_copies_have_the_same_values(monkeypatch, dtype, system):
    if system == "without":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    copies = huge_pages.copied(PARAMS, dtype)
    assert jax.tree.structure(copies) == jax.tree.structure(PARAMS)
    for x, y in zip(jax.tree.leaves(PARAMS), jax.tree.leaves(copies), strict=True):
        assert isinstance(y, jax.Array)
        assert (y.dtype, y.shape) == (dtype, x.shape)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(x).astype(dtype))


def test_copies_do_not_follow_their_originals():
    original = np.ones((300, 300), np.float32)
    copy = huge_pages.copied([original], np.float32)[0]
    original[...] = 2
    assert copy.max() == 1


@needs_huge_pages
def test_weights_lie_in_huge_pages_until_the_last_is_gone():
    kernels = [np.ones((1024, 1024), ml_dtypes.bfloat16) for _ in range(8)]  # 2 MiB each
    copies = huge_pages.copied(kernels, jnp.bfloat16)
    addresses = [x.unsafe_buffer_pointer() for x in copies]
    assert {address % 64 for address in addresses} == {0}
    assert all(map(asks_for_huge_pages, addresses))
    last = copies.pop()
    del copies
    gc.collect()
    assert all(map(asks_for_huge_pages, addresses))
    assert last.astype(jnp.float32).mean() == 1  # the memory is still there
    del last
    gc.collect()
    assert not any(map(asks_for_huge_pages, addresses))


@needs_huge_pages
def test_pools_are_zeros_without_memory_until_written_in_place():
    zeros = (jnp.zeros((5000, 1024)), jnp.zeros((3, 3)), jnp.zeros((0,)))
    assert huge_pages.backed(zeros) is zeros
    pool = zeros[0]
    address = pool.unsafe_buffer_pointer()
    assert asks_for_huge_pages(address + pool.nbytes // 2)
    assert share_in_memory(pool) == 0
    assert all(not x.any() for x in zeros)
    del zeros
    fill = jax.jit(lambda x, y: x + y, donate_argnums=0)
    for _ in range(2):
        pool = fill(pool, 1.0)
        assert pool.unsafe_buffer_pointer() == address
    assert share_in_memory(pool) == 1
    assert (pool == 2).all()


def test_a_pool_of_another_backend_is_left_alone(monkeypatch):
    pool = jnp.ones((1000, 1000))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert huge_pages.backed(pool) is pool
    assert (pool == 1).all()


def test_the_engine_gives_the_same_tokens_without(monkeypatch):
    def tokens():
        llm = LLM(tiny.model(), max_num_seqs=4, max_model_len=64)
        [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12))
        return output.outputs[0].token_ids

    expected = tokens()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert tokens() == expected
