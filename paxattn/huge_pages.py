"""Weights and KV pools in huge pages of a CPU's memory, where the system has them.

A decode step reads all weights and much of the pool once. In the usual pages of 4 KiB the CPU waits
every 4 KiB for an address translation, and its prefetcher stops there; in pages of 2 MiB neither
happens. `experiments/profile_step.py` times a step in both. Donated arrays must lie in memory of XLA's
own (`backed`), because the first donation copies others; weights are not donated (`copied`).

Elsewhere (GPUs, systems other than Linux, huge pages switched off) everything here is a plain copy
or nothing.
"""

import contextlib
import ctypes
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# XLA's CPU backend uses memory in place, without a copy, if it begins at a multiple of this.
_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


def copied(params: Any, dtype: Any) -> Any:
    """The parameters (JAX or NumPy arrays) as JAX arrays of `dtype` on the default device."""
    if not _has_huge_pages():
        return jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    leaves, tree = jax.tree.flatten(params)
    itemsize = jnp.dtype(dtype).itemsize
    sizes = [-(-x.size * itemsize // _ALIGNMENT) * _ALIGNMENT for x in leaves]
    memory = _allocated(sum(sizes))
    placed, start = [], 0
    for x, size in zip(leaves, sizes, strict=True):
        view = memory[start : start + x.size * itemsize].view(dtype).reshape(x.shape)
        view[...] = np.asarray(x)
        placed.append(jax.device_put(view, may_alias=True))
        start += size
    return jax.tree.unflatten(tree, placed)


def backed(zeros: Any) -> Any:
    """JAX arrays of zeros, the same ones, whose memory comes in huge pages as it is first written.

    Their memory goes back to the system, so that they hold zeros afterwards whatever they held
    before.
    """
    if not _has_huge_pages():
        return zeros
    for x in jax.tree.leaves(zeros):
        start = x.block_until_ready().unsafe_buffer_pointer()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (start + x.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size < _HUGE_PAGE:
            continue
        with contextlib.suppress(OSError, AttributeError):  # where there is no such call
            advise = ctypes.CDLL(None).madvise
            advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            if advise(first, size, mmap.MADV_HUGEPAGE) == 0:
                advise(first, size, mmap.MADV_DONTNEED)
    return zeros


def _has_huge_pages() -> bool:
    return jax.default_backend() == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")


def _allocated(size: int) -> np.ndarray:
    """So many bytes from the start of a huge page on.

    They go back to the system when the last array that lies in them is gone.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages
    memory = mmap.mmap(-1, size + 2 * _HUGE_PAGE, flags=private)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    first = -everything.ctypes.data % _HUGE_PAGE
    return everything[first : first + size]
