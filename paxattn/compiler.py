"""Measured facts of XLA's CPU backend, in one place: what it is told beside the program.

A GPU's programs are compiled as they are.
"""

import contextlib
import ctypes
import time
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Decode steps are 2-5% faster in vectors of 512 bits than in the 256 that LLVM prefers; where there
# are none, LLVM takes what there is.
_VECTORS: dict[str, Any] = {"xla_cpu_prefer_vector_width": 512}
# Products with the conversions around them as calls of XLA's library of micro-kernels. The option
# replaces the default list, so sums are named as well: without them attention takes 2.7x as long.
_LIBRARY: dict[str, Any] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_DOT"
}


def options(many_rows: bool, dtype: Any) -> dict[str, Any]:
    """Compiler options of a program on this backend.

    Args:
      many_rows: its products have hundreds of rows (a prefill), not some tens (a decode step). All
        decode steps get the same options, so that a row's bits do not depend on its batch.
      dtype: of its products.
    """
    if jax.default_backend() != "cpu":
        return {}
    rows = 256 if many_rows else 32
    if jnp.dtype(dtype) == jnp.bfloat16 and _library_is_faster(rows):
        return _VECTORS | _LIBRARY
    return _VECTORS


def return_freed_memory() -> None:
    """Gives the system back what compiling or loading has freed, where glibc would keep it.

    Measured with SmolLM2-135M in bfloat16: 150 MB after loading, 70 MB after the programs.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):  # where there is no glibc
        ctypes.CDLL(None).malloc_trim(0)


def tied_to_step(params: Any, step: jax.Array) -> Any:
    """The parameters, in a loop over decode steps.

    Otherwise XLA's CPU backend converts all narrow weights to float32 before the loop: 120 ms a
    call, twice the memory, and twice the bytes to read in each step.
    """
    if jax.default_backend() != "cpu":
        return params
    return jax.lax.optimization_barrier((params, step))[0]


# Pairs of runs measured, each beside the other: fewer leave a gain of 1.2 to the machine's noise.
_PAIRS = 41


@cache
def _library_is_faster(rows: int) -> bool:
    """Whether XLA's optional library fusions multiply bfloat16 faster here: it depends on the CPU.

    Measured, because no table is right for every CPU: without matrix units 1.4 times as fast with
    256 rows, 1.3 with 32, but 0.8 with 8.
    """
    x = jnp.ones((rows, 1024), jnp.bfloat16)
    w = jnp.ones((1024, 1024), jnp.bfloat16)

    def product(x, w):
        contract = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, w, contract, preferred_element_type=jnp.float32)

    lowered = jax.jit(product).lower(x, w)
    try:
        programs = [lowered.compile(), lowered.compile(compiler_options=_LIBRARY)]
    except Exception:  # a compiler that does not know the option
        return False
    ratios = []
    for i in range(_PAIRS + 2):
        seconds = []
        for program in programs:
            start = time.perf_counter()
            jax.block_until_ready(program(x, w))
            seconds.append(time.perf_counter() - start)
        if i > 1:
            ratios.append(seconds[0] / seconds[1])
    return float(np.median(ratios)) > 1.05
