"""Writing new keys and values into the pages: a pure function that donation turns into a write in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.options import KVLayout
from pallas_kernels.validate import check_append, indices


def append_kv(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k: jax.Array,  # [T, K, D]
    v: jax.Array,  # [T, K, D]
    slots: jax.Array,  # [T] int32
    *,
    kv_layout: KVLayout = "NPKD",
    kv_dtype: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Writes T tokens' keys and values at `slots` (slot = page * P + offset).

    Tokens to be ignored (padding, inactive rows) carry a slot of the null page, 0 .. P-1, whose
    content nobody reads. Slots below 0 or past the pool are dropped. Slots past the null page must
    be distinct. Under `jax.jit` with both pools donated the pools are updated in place.

    Args:
      k_pages: Pages in `kv_layout`; for "NP2KD" the one interleaved array.
      v_pages: Pages in `kv_layout`; None for "NP2KD".
      k: New keys [T, K, D]; converted to the pages' dtype (rounded, where that is narrower).
      v: New values [T, K, D].
      slots: [T] int32.
      kv_layout: See `pallas_kernels.layouts`.
      kv_dtype: "bfloat16" where the pages are uint16 bits.

    Returns:
      The new (k_pages, v_pages); v_pages is None for "NP2KD".

    Raises:
      ValueError: shapes or dtypes that do not fit together, by name; quantised pages, which need
        their scales: quantise before.

    >>> import jax.numpy as jnp
    >>> pages = jnp.zeros((3, 2, 1, 4))  # [N, P, K, D]
    >>> k, _ = append_kv(pages, pages, jnp.ones((1, 1, 4)), jnp.ones((1, 1, 4)), jnp.array([5]))
    >>> float(k[2, 1].sum()), float(k[1:].sum())
    (4.0, 4.0)
    """
    k_pages, k, v = (jnp.asarray(x) for x in (k_pages, k, v))
    slots = indices("slots", slots)
    v_pages = None if v_pages is None else jnp.asarray(v_pages)
    geo = check_append(k_pages, v_pages, k, v, slots, kv_layout, kv_dtype)
    if slots.shape[0] == 1:
        # XLA's CPU backend turns a scatter of one row into select + update-slice of the whole
        # pool; a second row into the null page keeps it a scatter.
        k, v = (jnp.concatenate([x, x]) for x in (k, v))
        slots = jnp.concatenate([slots, jnp.zeros_like(slots)])
    in_pool = (slots >= 0) & (slots < geo.num_pages * geo.page_size)
    page = jnp.where(in_pool, slots // geo.page_size, geo.num_pages)  # past the end: dropped
    offset = slots % geo.page_size
    new_k, new_v = (_narrow(x, k_pages.dtype, kv_dtype) for x in (k, v))
    if kv_layout == "NP2KD":
        pairs = jnp.stack([new_k, new_v], axis=2).reshape(k.shape[0], -1, k.shape[2])
        return k_pages.at[page, offset].set(pairs, mode="drop"), None
    assert v_pages is not None
    if kv_layout == "KNPD":
        k_at, v_at = (p.at[:, page, offset] for p in (k_pages, v_pages))
        new_k, new_v = (jnp.swapaxes(x, 0, 1) for x in (new_k, new_v))
    elif kv_layout == "NPKD":
        k_at, v_at = (p.at[page, offset] for p in (k_pages, v_pages))
    else:  # "NKPD", "NKDP"
        v_at = v_pages.at[page, :, offset]
        k_at = (
            k_pages.at[page, :, :, offset] if kv_layout == "NKDP" else k_pages.at[page, :, offset]
        )
    return k_at.set(new_k, mode="drop"), v_at.set(new_v, mode="drop")


def _narrow(x: jax.Array, dtype: jnp.dtype, kv_dtype: str | None) -> jax.Array:
    """Rounds to the pages' number format, as the bits that they store."""
    if kv_dtype is None:
        return x.astype(dtype)
    return jax.lax.bitcast_convert_type(x.astype(kv_dtype), dtype)
