"""Compiler options are known to the compiler, and only a CPU gets any."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxattn import compiler
from paxattn.batch import row_bucket, row_bucket_below
from paxattn.llama import linear


@pytest.mark.parametrize("faster", [True, False])
def test_options_compile(monkeypatch, faster):
    monkeypatch.setattr(compiler, "_library_is_faster", lambda rows: faster)
    x = jnp.ones((16, 16), jnp.bfloat16)
    for many in (False, True):
        for dtype in (jnp.float32, jnp.bfloat16):
            options = compiler.options(many, dtype)
            assert (len(options) == 2) == (dtype == jnp.bfloat16 and faster)
            jax.jit(lambda x: x @ x, compiler_options=options)(x)


def test_a_gpu_gets_none(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiler.options(True, jnp.bfloat16) == {}


@pytest.mark.parametrize(("seconds", "faster"), [(1.0, True), (1.95, False), (3.0, False)])
def test_the_library_must_be_clearly_faster(monkeypatch, seconds, faster):
    """By a clock on which a plain product takes two seconds."""
    now, ticks = 0.0, itertools.cycle((0.0, 2.0, 0.0, seconds))  # start, end; plain, library

    def clock():
        nonlocal now
        now += next(ticks)
        return now

    monkeypatch.setattr(compiler, "time", SimpleNamespace(perf_counter=clock))
    assert compiler._library_is_faster.__wrapped__(32) == faster


@pytest.mark.parametrize("faster", [True, False])
def test_bits_do_not_depend_on_the_batch(monkeypatch, faster):
    """Shapes for which the library keeps or drops the rounding of x, by the number of rows."""
    monkeypatch.setattr(compiler, "_library_is_faster", lambda rows: faster)
    rng = np.random.default_rng(0)
    for dtype in (jnp.float32, jnp.bfloat16):
        program = jax.jit(linear, compiler_options=compiler.options(False, dtype))
        for out, inside in ((32, 64), (320, 160), (1000, 288)):
            kernel = jnp.asarray(rng.standard_normal((out, inside)), dtype)
            x = jnp.asarray(rng.standard_normal((64, inside)), jnp.float32)
            expected = np.asarray(program(x, kernel))
            for rows in (8, 16, 24, 32, 48):
                np.testing.assert_array_equal(program(x[:rows], kernel), expected[:rows])


def test_the_bucket_below_is_the_next_smaller_one():
    buckets = sorted({row_bucket(n) for n in range(1, 2049)})
    assert buckets[:7] == [8, 16, 24, 32, 48, 64, 96]
    assert all(row_bucket(n) >= n for n in range(1, 2049))
    assert [row_bucket_below(b) for b in buckets] == [0, *buckets[:-1]]
