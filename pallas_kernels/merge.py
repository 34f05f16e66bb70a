"""Merging attention over two disjoint sets of keys through their log-sum-exps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.validate import require


def merge_attention(
    out_a: jax.Array,  # [..., H, D]
    lse_a: jax.Array,  # [..., H] float32
    out_b: jax.Array,  # [..., H, D]
    lse_b: jax.Array,  # [..., H] float32
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    With weights w_x = exp(lse_x): out = (w_a out_a + w_b out_b) / (w_a + w_b) and
    lse = log(w_a + w_b). A side with a log-sum-exp of -inf saw no key and adds nothing; where both
    are -inf the result is zeros and -inf. A sink must be given to one side only.

    Args:
      out_a, out_b: [..., H, D], of one dtype.
      lse_a, lse_b: [..., H] float32, natural logarithm.

    Returns:
      (out, lse), like the arguments.

    Raises:
      ValueError: shapes that do not match.
    """
    require(
        out_a.shape == out_b.shape and out_a.dtype == out_b.dtype,
        "out_a and out_b must match; got "
        f"{out_a.dtype}{list(out_a.shape)} and {out_b.dtype}{list(out_b.shape)}.",
    )
    require(
        lse_a.shape == lse_b.shape == out_a.shape[:-1],
        f"lse_a and lse_b must be {list(out_a.shape[:-1])}; got {list(lse_a.shape)} and "
        f"{list(lse_b.shape)}.",
    )
    top = jnp.maximum(lse_a, lse_b)
    seen = top > -jnp.inf
    top = jnp.where(seen, top, 0.0)
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = jnp.where(seen, weight_a + weight_b, 1.0)
    mixed = (
        out_a.astype(jnp.float32) * (weight_a / total)[..., None]
        + out_b.astype(jnp.float32) * (weight_b / total)[..., None]
    )
    return mixed.astype(out_a.dtype), jnp.where(seen, top + jnp.log(total), -jnp.inf)
