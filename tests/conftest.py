"""Strict numerics for every test, and the reasons for which a test is skipped."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; jax sees only " + jax.default_backend())
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
