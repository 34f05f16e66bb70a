"""Where a token's key and value stand in the pages: five layouts, one geometry, no copy of a pool.

| kv_layout | k_pages | v_pages | spoken by |
|---|---|---|---|
| "KNPD" | [K, N, P, D] | the same | JAX's decode kernels |
| "NPKD" | [N, P, K, D] | the same | vLLM and FlashInfer (NHD), the pool on GPUs |
| "NKPD" | [N, K, P, D] | the same | FlashInfer (HND) |
| "NP2KD" | [N, P, 2K, D]: K0, V0, K1, V1, .. | (in k_pages) | JAX's ragged TPU kernel |
| "NKDP" | [N, K, D, P] | [N, K, P, D] | the pool on CPUs |

Letters: N pages, P page size, K KV heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

LAYOUTS = ("KNPD", "NPKD", "NKPD", "NP2KD", "NKDP")
_PAGE_AXIS = {"KNPD": 1, "NPKD": 0, "NKPD": 0, "NP2KD": 0, "NKDP": 0}


class Geometry(NamedTuple):
    """The sizes of a pool of pages."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


def geometry(shape: tuple[int, ...], kv_layout: str) -> Geometry:
    """Reads the sizes from the shape of `k_pages` (4 axes) in `kv_layout`."""
    sizes = dict(zip("NPKD" if kv_layout == "NP2KD" else kv_layout, shape, strict=True))
    if kv_layout == "NP2KD":
        sizes["K"] //= 2
    return Geometry(sizes["N"], sizes["P"], sizes["K"], sizes["D"])


def k_shape(geo: Geometry, kv_layout: str) -> tuple[int, ...]:
    """Shape of `k_pages` (both halves for "NP2KD")."""
    sizes = dict(zip("NPKD", geo, strict=True))
    if kv_layout == "NP2KD":
        return (sizes["N"], sizes["P"], 2 * sizes["K"], sizes["D"])
    return tuple(sizes[axis] for axis in kv_layout)


def v_shape(geo: Geometry, kv_layout: str) -> tuple[int, ...] | None:
    """Shape of `v_pages`; None for "NP2KD"."""
    if kv_layout == "NP2KD":
        return None
    return k_shape(geo, "NKPD" if kv_layout == "NKDP" else kv_layout)


def scale_shape(geo: Geometry, kv_layout: str) -> tuple[int, ...]:
    """Shape of scales per token and head: the pages' axes without D."""
    sizes = dict(zip("NPKD", geo, strict=True))
    axes = kv_layout.replace("2", "").replace("D", "")
    return tuple(sizes[axis] for axis in axes)


def widen(pages: jax.Array, kv_dtype: str | None) -> jax.Array:
    """Reads uint16 bits as the bfloat16 numbers they are; other dtypes pass through."""
    if kv_dtype is None:
        return pages
    return jax.lax.bitcast_convert_type(pages, jnp.dtype(kv_dtype))


def take_pages(pages: jax.Array, ids: jax.Array, axis: int) -> jax.Array:
    """`pages` at `ids` along `axis`, without the negative-index and bounds handling.

    The caller promises 0 <= ids < N: the check costs as much as the gather on CPUs.
    """
    where = (slice(None),) * axis + (ids.astype(jnp.uint32),)
    return pages.at[where].get(mode="promise_in_bounds")


def gather_kv(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    ids: jax.Array,  # [..., C] int32, in range
    kv_layout: str,
    kv_dtype: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers pages into token order: ([..., C*P, K, D], [..., C*P, K, D]), dtype as stored."""
    taken_k = widen(take_pages(k_pages, ids, _PAGE_AXIS[kv_layout]), kv_dtype)
    if kv_layout == "NP2KD":
        heads = taken_k.shape[-2] // 2
        pairs = taken_k.reshape(*taken_k.shape[:-2], heads, 2, taken_k.shape[-1])
        return _flat(pairs[..., 0, :]), _flat(pairs[..., 1, :])
    assert v_pages is not None
    taken_v = widen(take_pages(v_pages, ids, _PAGE_AXIS[kv_layout]), kv_dtype)
    if kv_layout == "NKDP":
        return _flat(jnp.moveaxis(taken_k, -1, -3)), _flat(jnp.moveaxis(taken_v, -2, -3))
    return _flat(_to_pkd(taken_k, kv_layout)), _flat(_to_pkd(taken_v, kv_layout))


def gather_heads(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    ids: jax.Array,  # [..., C] int32, in range
    kv_layout: str,
    kv_dtype: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers pages head by head: ([..., K, C*P, D], [..., K, C*P, D]), dtype as stored.

    The order in which a batched product reads them. Where a head's part of a page is one piece of
    memory, rows of [N*K, ..] are gathered straight into that order.
    """
    if kv_layout in ("NKPD", "NKDP"):
        assert v_pages is not None
        k = widen(_gather_rows(k_pages, ids), kv_dtype)
        v = widen(_gather_rows(v_pages, ids), kv_dtype)
        if kv_layout == "NKDP":
            k = jnp.swapaxes(k, -1, -2)
        *lead, c, p, d = v.shape
        return k.reshape(*lead, c * p, d), v.reshape(*lead, c * p, d)
    k, v = gather_kv(k_pages, v_pages, ids, kv_layout, kv_dtype)
    return jnp.swapaxes(k, -2, -3), jnp.swapaxes(v, -2, -3)


def _gather_rows(pages: jax.Array, ids: jax.Array) -> jax.Array:
    """Pages [N, K, X, Y] at ids [..., C] as [..., K, C, X, Y], through rows of [N*K, X, Y]."""
    heads = pages.shape[1]
    rows = pages.reshape(-1, *pages.shape[2:])
    head = jnp.arange(heads, dtype=ids.dtype).reshape(heads, 1)
    row_ids = ids[..., None, :] * heads + head.reshape((1,) * (ids.ndim - 1) + (heads, 1))
    return take_pages(rows, row_ids, 0)


def gather_scales(
    scale: jax.Array | None,
    ids: jax.Array,  # [..., C] int32, in range
    kv_layout: str,
) -> jax.Array | None:
    """Scales as float32 that broadcasts against [..., C*P, K]; None stays None."""
    if scale is None:
        return None
    scale = jnp.asarray(scale)
    if scale.ndim < 3:  # per tensor or per head
        return scale.astype(jnp.float32).reshape((1,) * ids.ndim + (-1,))
    taken = take_pages(scale, ids, _PAGE_AXIS[kv_layout]).astype(jnp.float32)
    if kv_layout == "KNPD":
        taken = jnp.moveaxis(taken, 0, -1)
    elif kv_layout in ("NKPD", "NKDP"):
        taken = jnp.swapaxes(taken, -1, -2)
    return taken.reshape(*ids.shape[:-1], -1, taken.shape[-1])


def _to_pkd(taken: jax.Array, kv_layout: str) -> jax.Array:
    """Moves gathered pages [.., page axes ..] to [..., C, P, K, D]."""
    if kv_layout == "KNPD":  # [K, ..., C, P, D]
        return jnp.moveaxis(taken, 0, -2)
    if kv_layout == "NKPD":  # [..., C, K, P, D]
        return jnp.swapaxes(taken, -2, -3)
    return taken


def _flat(pages: jax.Array) -> jax.Array:
    """[..., C, P, K, D] -> [..., C*P, K, D]."""
    *lead, c, p, k, d = pages.shape
    return pages.reshape(*lead, c * p, k, d)
