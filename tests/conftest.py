"""Strict numerics for every test, and the reasons for which a test is skipped."""

import atexit
import shutil
import tempfile

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Engines of one test run have many programs in common: each process compiles them once.
_programs = tempfile.mkdtemp(prefix="paxattn-tests-")
atexit.register(shutil.rmtree, _programs, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _programs)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; jax sees only " + jax.default_backend())
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
