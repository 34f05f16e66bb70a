"""Compiler options are known to the compiler, and only a CPU gets any."""

import jax
import jax.numpy as jnp
import pytest

from paxattn import compiler


@pytest.mark.parametrize("faster", [True, False])
def test_options_compile(monkeypatch, faster):
    monkeypatch.setattr(compiler, "_library_is_faster", lambda: faster)
    x = jnp.ones((16, 16), jnp.bfloat16)
    for many in (False, True):
        for dtype in (jnp.float32, jnp.bfloat16):
            options = compiler.options(many, dtype)
            assert (len(options) == 2) == (many and dtype == jnp.bfloat16 and faster)
            jax.jit(lambda x: x @ x, compiler_options=options)(x)


def test_a_gpu_gets_none(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiler.options(True, jnp.bfloat16) == {}


def test_the_measurement_ends_in_a_choice():
    assert compiler._library_is_faster() in (True, False)
