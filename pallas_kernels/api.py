"""The two public attention calls, in the ecosystem's dialects, and the choice of a backend.

`paged_attention` has the arguments of `jax.experimental.pallas.ops.gpu.paged_attention`,
`ragged_paged_attention` those of JAX's TPU `ragged_paged_attention`: a model that calls one of them
switches by changing its import line. Everything they lack is a keyword.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import faults, reference, validate, vjp, xla
from pallas_kernels.options import AttentionOptions, KVLayout
from pallas_kernels.validate import require

Result = jax.Array | tuple[jax.Array, jax.Array]


def chosen_implementation(implementation: str = "auto") -> str:
    """Which backend a call with this `implementation` runs on here.

    "pallas": the GPU kernels. "xla": plain XLA, fast on CPUs. "reference": the readable
    specification. "interpret": the GPU kernels, interpreted on any machine (slow, for tests).
    "auto" is "pallas" where JAX's default backend is a GPU and "xla" elsewhere.

    Raises:
      ValueError: `implementation` is none of these.
      NotImplementedError: "pallas" without a GPU.
    """
    require(
        implementation in validate.IMPLEMENTATIONS,
        f"implementation must be one of {', '.join(validate.IMPLEMENTATIONS)}; got "
        f"{implementation!r}.",
    )
    platform = jax.default_backend()
    if implementation == "auto":
        return "pallas" if platform == "gpu" else "xla"
    if implementation == "pallas" and platform != "gpu":
        raise NotImplementedError(
            f'implementation="pallas" needs an NVIDIA GPU and JAX\'s default backend is {platform}: '
            'use "xla" (or "interpret" to try the kernels themselves, slowly).'
        )
    return implementation


def paged_attention(
    q: jax.Array,  # [B, H, D]
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_tables: jax.Array,  # [B, M] int32
    lengths: jax.Array | None,  # [B] int32
    k_scales_pages: jax.Array | None = None,
    v_scales_pages: jax.Array | None = None,
    *,
    kv_layout: KVLayout = "KNPD",
    kv_dtype: Any = None,
    sm_scale: float | jax.Array = 1.0,
    attn_logits_soft_cap: float | None = None,
    mask_value: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,  # [H]
    alibi_slopes: jax.Array | None = None,  # [H]
    return_lse: bool = False,
    implementation: str = "auto",
    block_h: int | None = None,
    pages_per_compute_block: int | None = None,
    k_splits: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    interpret: bool = False,
    debug: bool = False,
) -> Result:
    """Attention of one query token a sequence over the pages of its block table (decode).

    The query is the last of its sequence's `lengths[b]` tokens, whose own key and value are in the
    pages already. `out[b, h] = softmax_j(s[b, h, j]) @ v[b, j]`, with the logits `s` described at
    `AttentionOptions`.

    Args:
      q: [B, H, D] float32, bfloat16 or float16; H a multiple of K.
      k_pages: The pool's keys: [K, N, P, D], or as `kv_layout` says. Float32, bfloat16, float16,
        int8, float8_e4m3fn, float8_e5m2, or uint16 (see `kv_dtype`).
      v_pages: The pool's values, likewise; None for kv_layout "NP2KD".
      block_tables: [B, M] int32, the physical pages of each sequence in order. Entries past the
        length are never read.
      lengths: [B] int32, tokens of each sequence, 0 .. M*P; None: all M*P. 0 gives zeros (and a
        log-sum-exp of -inf).
      k_scales_pages: Scale of quantised keys (key = stored * scale): scalar, [K], or the pages'
        axes without D ([K, N, P] in the default layout).
      v_scales_pages: The same for values.
      kv_layout: See `pallas_kernels.layouts`. No layout is copied into another.
      kv_dtype: "bfloat16" where the pages are uint16 and hold its bits.
      sm_scale: Factor of q . k; static or traced. Note the default, JAX's, of 1.0.
      attn_logits_soft_cap: c in c * tanh(s / c).
      mask_value: Accepted for JAX's callers and unused: masks are exact.
      sliding_window: Tokens that a query sees, itself included.
      sinks: [H], a logit that takes part in the softmax and has no value.
      alibi_slopes: [H], ALiBi's positive slopes.
      return_lse: Also return the log-sum-exp of the logits, [B, H] float32.
      implementation: "auto", "pallas", "xla", "reference" or "interpret"; see
        `chosen_implementation`.
      block_h, pages_per_compute_block, k_splits, num_warps, num_stages: Tiles of the Pallas kernel;
        the other backends ignore them.
      interpret: JAX's spelling of implementation="interpret".
      debug: Accepted for JAX's callers; ignored.

    Returns:
      [B, H, D] in q's dtype; with `return_lse` also [B, H] float32 (natural logarithm).

    Raises:
      ValueError: arguments that do not fit together, by name and value; outside `jax.jit` also page
        ids and lengths out of range.
      NotImplementedError: the chosen backend cannot do this; the message names one that can.

    References:
      Kwon et al., "Efficient Memory Management for Large Language Model Serving with
      PagedAttention", 2023, equation 4.

    >>> q = jnp.ones((1, 2, 4)); pages = jnp.ones((1, 3, 2, 4))  # K=1, N=3, P=2
    >>> table, lengths = jnp.array([[2, 1]]), jnp.array([3])
    >>> paged_attention(q, pages, pages, table, lengths).shape
    (1, 2, 4)
    """
    del debug
    q, k_pages = jnp.asarray(q), jnp.asarray(k_pages)
    block_tables = validate.indices("block_tables", block_tables)
    v_pages = None if v_pages is None else jnp.asarray(v_pages)
    lengths = None if lengths is None else validate.indices("lengths", lengths)
    geo, kv_dtype = validate.check_pages(k_pages, v_pages, kv_layout, kv_dtype)
    validate.check_query(q, geo, "[B, H, D], one token a sequence")
    validate.check_not_swapped(block_tables, lengths, q.shape[0])
    validate.check_int32("block_tables", block_tables, block_tables.shape)
    if lengths is None:
        full = block_tables.shape[1] * geo.page_size
        lengths = jnp.full((q.shape[0],), full, jnp.int32)
    validate.check_int32("lengths", lengths, (q.shape[0],))
    options = validate.make_options(
        geo,
        q.shape[1],
        sm_scale=sm_scale,
        soft_cap=attn_logits_soft_cap,
        mask_value=mask_value,
        sliding_window=sliding_window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_scale=k_scales_pages,
        v_scale=v_scales_pages,
        kv_layout=kv_layout,
        kv_dtype=kv_dtype,
        return_lse=return_lse,
    )
    faults.check_option_values(options)
    if faults.known(block_tables, lengths):
        faults.check_table_values("block_tables", block_tables, "lengths", lengths, geo)
    chosen = chosen_implementation("interpret" if interpret else implementation)
    arrays = (q, k_pages, v_pages, block_tables, lengths)
    if chosen == "reference":
        out, lse = _reference_decode(*arrays, options)
    else:
        run = _backend(
            "decode",
            chosen,
            options,
            block_h=block_h,
            pages_per_compute_block=pages_per_compute_block,
            k_splits=k_splits,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        out, lse = _decode(run, *arrays, options)
    return (out, lse) if return_lse else out


def ragged_paged_attention(
    q: jax.Array,  # [T, H, D]
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,  # [B] int32
    page_indices: jax.Array,  # [B, M] int32
    cu_q_lens: jax.Array,  # [B + 1] int32
    num_seqs: jax.Array,  # [1] int32
    *,
    sm_scale: float | jax.Array = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    kv_layout: KVLayout = "NP2KD",
    kv_dtype: Any = None,
    sinks: jax.Array | None = None,  # [H]
    alibi_slopes: jax.Array | None = None,  # [H]
    return_lse: bool = False,
    narrow_products: bool = False,
    implementation: str = "auto",
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Result:
    """Causal attention of packed sequences over their pages: prefill chunks and decodes, mixed.

    Sequence b (of `num_seqs`) owns rows cu_q_lens[b] .. cu_q_lens[b + 1] of q. They are the last of
    its kv_lens[b] tokens, whose keys and values are all in the pages already. Differentiable by
    `jax.grad` into q, the pages, sm_scale, sinks and alibi_slopes, on every backend; a page that
    several sequences share receives the sum of their gradients.

    Args:
      q: [T, H, D] float32, bfloat16 or float16; rows past the last sequence are padding.
      kv_pages: [N, P, 2K, D] with K0, V0, K1, V1, ..; for the other layouts (k_pages, v_pages).
      kv_lens: [B] int32; entries past num_seqs are ignored, here and below.
      page_indices: [B, M] int32, the block tables. Entries past the length are never read.
      cu_q_lens: [B + 1] int32, running sum of query lengths from 0; a length may be 0.
      num_seqs: [1] int32 (or a scalar), sequences present, 0 .. B.
      sm_scale, sliding_window, soft_cap, mask_value: As `paged_attention`.
      k_scale, v_scale: As `paged_attention`'s scales; per token and head [N, P, K] for "NP2KD".
      num_kv_pages_per_block, num_queries_per_block, num_warps, num_stages: Tiles of the Pallas
        kernel; the other backends ignore them.
      vmem_limit_bytes: Accepted for JAX's callers; ignored.
      kv_layout, kv_dtype, sinks, alibi_slopes, return_lse, implementation: As `paged_attention`.
      narrow_products: With bfloat16 pages, whether "xla" may multiply in bfloat16, as the kernels
        for GPUs do: queries and softmax weights are rounded to it, sums stay float32. Faster on
        CPUs with matrix units, slower on others. Gradients are computed without this rounding.

    Returns:
      [T, H, D] in q's dtype, zeros past the last sequence; with `return_lse` also [T, H] float32.

    Raises:
      ValueError: arguments that do not fit together, by name and value; outside `jax.jit` also
        values out of range.
      NotImplementedError: the chosen backend cannot do this; the message names one that can.
    """
    del vmem_limit_bytes
    k_pages, v_pages = _split_pages(kv_pages, kv_layout)
    q, kv_lens = jnp.asarray(q), validate.indices("kv_lens", kv_lens)
    page_indices = validate.indices("page_indices", page_indices)
    cu_q_lens = validate.indices("cu_q_lens", cu_q_lens)
    num_seqs = validate.indices("num_seqs", num_seqs)
    geo, kv_dtype = validate.check_pages(k_pages, v_pages, kv_layout, kv_dtype)
    validate.check_query(q, geo, "[T, H, D], the packed tokens")
    validate.check_ragged(kv_lens, page_indices, cu_q_lens, num_seqs)
    num_seqs = num_seqs.reshape(())
    options = validate.make_options(
        geo,
        q.shape[1],
        sm_scale=sm_scale,
        soft_cap=soft_cap,
        mask_value=mask_value,
        sliding_window=sliding_window,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_layout=kv_layout,
        kv_dtype=kv_dtype,
        return_lse=return_lse,
        narrow_products=narrow_products,
    )
    faults.check_option_values(options)
    if faults.known(kv_lens, page_indices, cu_q_lens, num_seqs):
        count = faults.check_ragged_values(
            q.shape[0], kv_lens, cu_q_lens, num_seqs, kv_lens.shape[0]
        )
        faults.check_table_values(
            "page_indices", page_indices[:count], "kv_lens", kv_lens[:count], geo
        )
    chosen = chosen_implementation(implementation)
    arrays = (q, k_pages, v_pages, kv_lens, page_indices, cu_q_lens, num_seqs)
    if chosen == "reference":
        out, lse = _reference_ragged(*arrays, options)
    else:
        run = _backend(
            "ragged",
            chosen,
            options,
            num_kv_pages_per_block=num_kv_pages_per_block,
            num_queries_per_block=num_queries_per_block,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        out, lse = _ragged(run, *arrays, options)
    return (out, lse) if return_lse else out


def _split_pages(pages: Any, kv_layout: str) -> tuple[jax.Array, jax.Array | None]:
    if isinstance(pages, tuple | list):
        require(
            kv_layout != "NP2KD" and len(pages) == 2,
            f"kv_pages is a tuple of {len(pages)} arrays and kv_layout={kv_layout!r}: pass one "
            'interleaved array for "NP2KD", or (k_pages, v_pages) and the name of their layout.',
        )
        return jnp.asarray(pages[0]), jnp.asarray(pages[1])
    require(
        kv_layout == "NP2KD",
        f"kv_layout={kv_layout!r} needs kv_pages = (k_pages, v_pages); got one array.",
    )
    return jnp.asarray(pages), None


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A launch of a Pallas kernel: hashable, so that it can be static under `jax.jit`."""

    name: str  # "decode" or "ragged"
    interpret: bool
    tiles: tuple[tuple[str, int], ...]
    sm_scale: float | None  # a number that the kernel can fold in; None: read it from the options

    def __call__(self, *arguments: Any) -> tuple[jax.Array, jax.Array]:
        *arrays, options = arguments
        if self.sm_scale is not None:
            options = dataclasses.replace(options, sm_scale=self.sm_scale)
        launch = _launcher(self.name)
        return launch(*arrays, options, interpret=self.interpret, **dict(self.tiles))


def _backend(name: str, chosen: str, options: AttentionOptions, **tiles: int | None) -> Any:
    """The function of a chosen implementation that computes "decode" or "ragged"."""
    if chosen == "xla":
        return getattr(xla, name)
    given = tuple((tile, value) for tile, value in tiles.items() if value is not None)
    static = options.sm_scale if isinstance(options.sm_scale, float) else None
    return _Kernel(name, chosen == "interpret", given, static)


def _launcher(name: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The Pallas launcher, imported when it is first needed."""
    try:
        module = importlib.import_module(f"pallas_kernels.gpu_{name}")
    except ImportError as error:
        raise NotImplementedError(
            f'The Pallas {name} kernel is not available here ({error}): use implementation="xla".'
        ) from error
    return getattr(module, name)


# Jitted so that an eager call compiles once; inside a caller's jit they are inlined.
_decode = jax.jit(vjp.decode, static_argnums=0)
_ragged = jax.jit(vjp.ragged, static_argnums=0)
_reference_decode = jax.jit(reference.decode)
_reference_ragged = jax.jit(reference.ragged)
