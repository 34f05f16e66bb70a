"""The direction of imports: `pallas_kernels` can be copied into any model."""

import subprocess
import sys

import pytest

LIST_MODULES = """
import sys
import {module}
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


def loaded_by(module):
    code = LIST_MODULES.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_pallas_kernels_loads_jax_and_numpy_only():
    loaded = loaded_by("pallas_kernels")
    assert {"jax", "numpy"} <= loaded
    assert not loaded & {"flax", "transformers", "paxattn", "convert", "orbax", "torch"}


@pytest.mark.parametrize("module", ["pallas_kernels.conformance"])
def test_the_conformance_suite_needs_nothing_else(module):
    assert not loaded_by(module) & {"flax", "transformers", "paxattn", "convert", "pytest"}
