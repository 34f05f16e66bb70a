"""The XLA backend: which of its forms does a call."""

from __future__ import annotations

import jax

from pallas_kernels import xla_decode, xla_virtual
from pallas_kernels.options import AttentionOptions
from pallas_kernels.xla_ragged import ragged

__all__ = ["decode", "ragged"]


def decode(
    q: jax.Array,  # [B, H, D]
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_tables: jax.Array,  # [B, M] int32
    lengths: jax.Array,  # [B] int32
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:  # [B, H, D] like q, [B, H] float32
    """One query token a sequence: the last of `lengths` tokens."""
    form = xla_virtual if xla_virtual.applies(q, k_pages, options) else xla_decode
    return form.decode(q, k_pages, v_pages, block_tables, lengths, options)
