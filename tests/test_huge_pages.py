"""Weights and pools in huge pages: the same values, XLA's in-place updates, and nothing leaked."""

import mmap
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


def huge_kib(array) -> int | None:
    """KiB of the memory around an array that are in huge pages; None where nobody tells."""
    start = array.unsafe_buffer_pointer() + array.nbytes // 2
    inside = False
    try:
        with open("/proc/self/smaps", encoding="utf-8") as lines:
            for line in lines:
                if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                    inside = int(bounds[1], 16) <= start < int(bounds[2], 16)
                elif inside and line.startswith("AnonHugePages:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return None


def needs_huge_pages():
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="utf-8") as setting:
            if "[never]" not in setting.read():
                return
    except OSError:
        pass
    pytest.skip("this system gives no huge pages")


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


def test_weights_lie_in_huge_pages_until_the_last_is_gone():
    needs_huge_pages()
    kernels = [np.ones((1024, 1024), ml_dtypes.bfloat16) for _ in range(8)]  # 2 MiB each
    copies = huge_pages.copied(kernels, jnp.bfloat16)
    assert {x.unsafe_buffer_pointer() % 64 for x in copies} == {0}
    if (before := huge_kib(copies[3])) is None:
        pytest.skip("this system does not tell which pages are huge")
    assert before >= 8 * 2048
    total = jax.jit(lambda *kernels: sum(k.astype(jnp.float32).sum() for k in kernels))(*copies)
    assert total == 8 * 1024**2
    last = copies.pop()
    del copies
    assert last.astype(jnp.float32).mean() == 1  # the memory is still there


def test_pools_are_zeros_in_huge_pages_and_updated_in_place():
    needs_huge_pages()
    zeros = huge_pages.backed((jnp.zeros((5000, 1024)), jnp.zeros((3, 3)), jnp.zeros((0,))))
    assert all(not x.any() for x in zeros)
    pool = zeros[0]
    address = pool.unsafe_buffer_pointer()
    fill = jax.jit(lambda x, y: x + y, donate_argnums=0)
    for _ in range(2):
        pool = fill(pool, 1.0)
        assert pool.unsafe_buffer_pointer() == address
    assert (pool == 2).all()
    if (kib := huge_kib(pool)) is None:
        pytest.skip("this system does not tell which pages are huge")
    assert kib >= 0.8 * pool.nbytes / 1024


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
