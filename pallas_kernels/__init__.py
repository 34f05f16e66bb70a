"""Attention over the pages of a KV pool, for any JAX model: imports jax and numpy only.

>>> from pallas_kernels import paged_attention, ragged_paged_attention, append_kv
"""

from pallas_kernels.api import chosen_implementation, paged_attention, ragged_paged_attention
from pallas_kernels.append import append_kv
from pallas_kernels.merge import merge_attention
from pallas_kernels.options import AttentionOptions

__all__ = [
    "AttentionOptions",
    "append_kv",
    "chosen_implementation",
    "merge_attention",
    "paged_attention",
    "ragged_paged_attention",
]
