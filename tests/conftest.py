"""Strict numerics for every test, and the reasons for which a test is skipped."""

import atexit
import collections
import os
import shutil
import tempfile

import jax
import pytest

# Threads of torch, the reference, in several test processes at once wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Engines of one test run have many programs in common: whichever process needs one first compiles
# it. A cache of limited size is one that jax locks; the first process, whose children the others
# are, removes it.
if "PAXATTN_TEST_PROGRAMS" not in os.environ:
    os.environ["PAXATTN_TEST_PROGRAMS"] = tempfile.mkdtemp(prefix="paxattn-tests-")
    atexit.register(shutil.rmtree, os.environ["PAXATTN_TEST_PROGRAMS"], ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", os.environ["PAXATTN_TEST_PROGRAMS"])
jax.config.update("jax_compilation_cache_max_size", 2**33)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(autouse=True, scope="module")
def _optimisation(request):
    """LLVM's optimisations only where a module asks: compiling is most of the suite's time.

    XLA's own (what is fused, what is updated in place) are the same in both. All of them everywhere
    with PAXATTN_TEST_OPTIMIZED=1.
    """
    every = os.environ.get("PAXATTN_TEST_OPTIMIZED") == "1"
    without = not every and request.node.get_closest_marker("optimized") is None
    if jax.config.values["jax_disable_most_optimizations"] != without:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", without)


@pytest.fixture(scope="module")
def loaded():
    """A small random model."""
    import tiny

    return tiny.model()


@pytest.fixture(scope="module")
def prompts():
    """Eight prompts for it."""
    import tiny

    return tiny.prompts()


def pytest_configure(config):
    # pytest-xdist would hand out the files with most tests first, and the slow ones have few.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    # Files with slow tests first, so that no worker is alone with one in the end.
    slow = collections.Counter(item.path for item in items if "slow" in item.keywords)
    items.sort(key=lambda item: -slow[item.path])
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; jax sees only " + jax.default_backend())
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
