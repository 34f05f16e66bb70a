"""Static faults of a call, found before anything is computed: each message has the values and the remedy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layouts
from pallas_kernels.layouts import Geometry
from pallas_kernels.options import AttentionOptions

IMPLEMENTATIONS = ("auto", "pallas", "xla", "reference", "interpret")
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
QUANTISED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless `condition`."""
    if not condition:
        raise ValueError(message)


def indices(name: str, value: Any) -> jax.Array:
    """An index array as a jax.Array, where no value would change on the way.

    JAX keeps the low 32 bits of the 64 that NumPy and lists have.
    """
    if any(isinstance(x, jax.Array) for x in jax.tree.leaves(value)):
        return jnp.asarray(value)
    array = np.asarray(value)
    integers = array.dtype.kind in "iu" or all(isinstance(x, int) for x in array.flat)
    for extreme in (array.min(), array.max()) if integers and array.size else ():
        require(
            -(2**31) <= int(extreme) < 2**31,
            f"{name} holds {extreme}, which int32 cannot: {name} must be int32.",
        )
    return jnp.asarray(array)


def check_pages(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    kv_layout: str,
    kv_dtype: Any,
) -> tuple[Geometry, str | None]:
    """Checks the pages and returns their sizes and the normalised kv_dtype."""
    require(
        kv_layout in layouts.LAYOUTS,
        f"kv_layout must be one of {', '.join(layouts.LAYOUTS)}; got {kv_layout!r}.",
    )
    axes = "N,P,2K,D" if kv_layout == "NP2KD" else ",".join(kv_layout)
    require(
        k_pages.ndim == 4,
        f'k_pages must have the 4 axes [{axes}] of kv_layout="{kv_layout}"; got shape '
        f"{k_pages.shape}.",
    )
    if kv_layout == "NP2KD":
        require(
            v_pages is None,
            'kv_layout="NP2KD" interleaves K and V in one array: pass that array alone, or name '
            "the layout of two arrays (KNPD, NPKD, NKPD, NKDP).",
        )
        require(
            k_pages.shape[2] % 2 == 0,
            "Axis 2 of interleaved pages [N,P,2K,D] holds K0,V0,K1,V1,.. and must be even; got "
            f"shape {k_pages.shape}. For separate K and V arrays name their kv_layout.",
        )
    geo = layouts.geometry(k_pages.shape, kv_layout)
    require(
        min(geo) > 0,
        f"Every axis of the pages must have at least one element; got {k_pages.shape}.",
    )
    if kv_layout != "NP2KD":
        require(
            v_pages is not None,
            f'kv_layout="{kv_layout}" needs k_pages and v_pages; got k_pages alone.',
        )
        assert v_pages is not None
        expected = layouts.v_shape(geo, kv_layout)
        require(
            v_pages.shape == expected,
            f"v_pages must have shape {expected} beside k_pages {k_pages.shape} in "
            f'kv_layout="{kv_layout}"; got {v_pages.shape}.',
        )
        require(
            v_pages.dtype == k_pages.dtype,
            f"k_pages and v_pages must have one dtype; got {k_pages.dtype} and {v_pages.dtype}.",
        )
    return geo, _check_kv_dtype(k_pages.dtype, kv_dtype)


def _check_kv_dtype(stored: Any, kv_dtype: Any) -> str | None:
    name = None if kv_dtype is None else jnp.dtype(kv_dtype).name
    if stored == jnp.uint16:
        require(
            name == "bfloat16",
            'Pages of dtype uint16 hold the bits of bfloat16 numbers: pass kv_dtype="bfloat16" '
            f"(got kv_dtype={kv_dtype!r}), or store the pages as floating point.",
        )
        return name
    require(
        stored.name in FLOAT_DTYPES + QUANTISED_DTYPES,
        f"Pages must be one of {', '.join(FLOAT_DTYPES + QUANTISED_DTYPES)}, or uint16 with "
        f'kv_dtype="bfloat16"; got {stored.name}.',
    )
    require(
        name is None or name == stored.name,
        f"kv_dtype={name!r} says how to read uint16 pages; these are {stored.name}: leave it out.",
    )
    return None


def check_query(q: jax.Array, geo: Geometry, axes: str) -> None:
    """Checks q [B, H, D] or [T, H, D] against the pool's sizes."""
    require(q.ndim == 3, f"q must be {axes}; got shape {q.shape}.")
    require(
        q.dtype.name in FLOAT_DTYPES,
        f"q must be one of {', '.join(FLOAT_DTYPES)}; got {q.dtype.name}.",
    )
    rows, heads, head_dim = q.shape
    require(rows > 0, f"q has no rows (shape {q.shape}): leave the call out of an empty batch.")
    require(
        head_dim == geo.head_dim,
        f"q has head dim {head_dim}, the pages have {geo.head_dim} (read as {geo}); check "
        "kv_layout.",
    )
    require(
        heads > 0 and heads % geo.num_kv_heads == 0,
        f"The {heads} query heads must be a multiple of the {geo.num_kv_heads} KV heads (pages "
        f"read as {geo}); check kv_layout.",
    )


def check_int32(name: str, value: jax.Array, shape: tuple[int, ...]) -> None:
    """Checks one of the small index arrays."""
    require(value.shape == shape, f"{name} must have shape {shape}; got {value.shape}.")
    require(
        value.dtype == jnp.int32,
        f"{name} must be int32; got {value.dtype}: use {name}.astype(jnp.int32).",
    )


def check_not_swapped(tables: jax.Array, lengths: jax.Array | None, batch: int) -> None:
    """Catches the argument order of JAX's TPU decode in a call with that of its GPU decode."""
    looks_swapped = tables.ndim == 1 and (lengths is not None and lengths.ndim == 2)
    require(
        not looks_swapped,
        f"block_tables has shape {tables.shape} and lengths has shape "
        f"{None if lengths is None else lengths.shape}: they are swapped. JAX's TPU "
        "paged_attention takes (lengths, page_indices); this one, like JAX's GPU one, takes "
        "(block_tables [B, M], lengths [B]).",
    )
    require(
        tables.ndim == 2 and tables.shape[0] == batch and tables.shape[1] > 0,
        f"block_tables must be [B, M] with B = {batch} (the rows of q) and M > 0; got shape "
        f"{tables.shape}.",
    )


def make_options(
    geo: Geometry,
    num_heads: int,
    *,
    sm_scale: Any,
    soft_cap: Any,
    mask_value: Any,
    sliding_window: Any,
    sinks: Any,
    alibi_slopes: Any,
    k_scale: Any,
    v_scale: Any,
    kv_layout: Any,
    kv_dtype: str | None,
    return_lse: bool,
    narrow_products: bool = False,
) -> AttentionOptions:
    """Normalises the options of a call."""
    return AttentionOptions(
        sm_scale=_sm_scale(sm_scale),
        sinks=_per_head("sinks", sinks, num_heads),
        alibi_slopes=_per_head("alibi_slopes", alibi_slopes, num_heads),
        k_scale=_kv_scale("k_scale", k_scale, geo, kv_layout),
        v_scale=_kv_scale("v_scale", v_scale, geo, kv_layout),
        soft_cap=_static_number("soft_cap", soft_cap),
        mask_value=None if mask_value is None else float(_static("mask_value", mask_value)),
        sliding_window=_window(sliding_window),
        kv_layout=kv_layout,
        kv_dtype=kv_dtype,
        return_lse=bool(return_lse),
        narrow_products=bool(narrow_products),
    )


def _sm_scale(value: Any) -> float | jax.Array:
    require(
        value is not None,
        "sm_scale must be a number; None is not a default here. Pass 1.0 (q is scaled already) "
        "or head_dim ** -0.5.",
    )
    if isinstance(value, jax.Array | np.ndarray | np.generic) and not isinstance(value, np.float64):
        require(
            jnp.size(value) == 1 and jnp.issubdtype(value.dtype, jnp.floating),
            f"sm_scale must be a float or a floating-point scalar array; got {value!r}.",
        )
        return jnp.asarray(value).reshape(()).astype(jnp.float32)
    require(
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST,
        f"sm_scale must be a finite number that float32 holds, or a scalar array; got {value!r}.",
    )
    return float(value)


def _static(name: str, value: Any) -> Any:
    require(
        not isinstance(value, jax.core.Tracer),
        f"{name} must be a Python number known at trace time; got the traced value {value}. Mark "
        "it static in jax.jit.",
    )
    return value


def _static_number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(_static(name, value), jax.Array | np.ndarray) and value.size == 1:
        value = value.item()
    require(
        isinstance(value, int | float | np.integer | np.floating)
        and not isinstance(value, bool)
        and bool(_LEAST <= value <= _MOST),
        f"{name} must be a positive number that float32 holds, or None for no {name}; got "
        f"{value!r}.",
    )
    return float(value)


def _window(value: Any) -> int | None:
    if value is None:
        return None
    _static("sliding_window", value)
    require(
        isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1,
        "sliding_window is how many tokens a query sees, itself included: an integer >= 1, or "
        f"None for all; got {value!r}.",
    )
    # Beyond int32, in which positions are counted, it is as wide as none.
    return int(value) if int(value) < 2**31 else None


def _per_head(name: str, value: Any, num_heads: int) -> jax.Array | None:
    if value is None:
        return None
    array = jnp.asarray(value)
    require(
        array.shape == (num_heads,) and jnp.issubdtype(array.dtype, jnp.floating),
        f"{name} must be [H] = [{num_heads}] floating point, one a query head; got "
        f"{array.dtype}{list(array.shape)}.",
    )
    return array.astype(jnp.float32)


def _kv_scale(name: str, value: Any, geo: Geometry, kv_layout: str) -> jax.Array | None:
    if value is None:
        return None
    array = jnp.asarray(value)
    per_token = layouts.scale_shape(geo, kv_layout)
    require(
        jnp.issubdtype(array.dtype, jnp.floating),
        f"{name} must be floating point; got {array.dtype}.",
    )
    require(
        array.shape in ((), (geo.num_kv_heads,), per_token),
        f"{name} must be a scalar, [K] = [{geo.num_kv_heads}], or one a token and head "
        f'{list(per_token)} (the pages\' axes without D in kv_layout="{kv_layout}"); got '
        f"{list(array.shape)}.",
    )
    return array.astype(jnp.float32) if array.ndim < 2 else array


def check_append(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    kv_layout: str,
    kv_dtype: str | None,
) -> Geometry:
    """Checks the arguments of `append_kv`."""
    geo, _ = check_pages(k_pages, v_pages, kv_layout, kv_dtype)
    expected = (slots.shape[0] if slots.ndim == 1 else -1, geo.num_kv_heads, geo.head_dim)
    require(
        slots.ndim == 1 and slots.dtype == jnp.int32,
        f"slots must be [T] int32; got {slots.dtype}{list(slots.shape)}.",
    )
    for name, value in (("k", k), ("v", v)):
        require(
            value.shape == expected,
            f"{name} must be [T, K, D] = {list(expected)} for these slots and pages; got "
            f"{list(value.shape)}.",
        )
        require(
            value.dtype.name in FLOAT_DTYPES or value.dtype == k_pages.dtype,
            f"{name} must be floating point or the pages' own dtype; got {value.dtype}.",
        )
        require(
            k_pages.dtype.name not in QUANTISED_DTYPES or value.dtype == k_pages.dtype,
            f"The pages hold quantised {k_pages.dtype} numbers: quantise {name} (now "
            f"{value.dtype}) by its scale before it is written.",
        )
    return geo


def check_ragged(
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
) -> None:
    """Checks the index arrays of a ragged batch."""
    require(
        page_indices.ndim == 2 and min(page_indices.shape) > 0,
        f"page_indices must be [B, M] with B, M > 0; got shape {page_indices.shape}. The order is "
        "(q, kv_pages, kv_lens [B], page_indices [B, M], cu_q_lens [B + 1], num_seqs [1]).",
    )
    batch = page_indices.shape[0]
    check_int32("page_indices", page_indices, page_indices.shape)
    check_int32("kv_lens", kv_lens, (batch,))
    check_int32("cu_q_lens", cu_q_lens, (batch + 1,))
    require(
        num_seqs.shape in ((), (1,)) and num_seqs.dtype == jnp.int32,
        f"num_seqs must be [1] int32; got {num_seqs.dtype}{list(num_seqs.shape)}.",
    )
