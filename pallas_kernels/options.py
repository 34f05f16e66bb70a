"""What an attention call asks for beside its arrays: one value, checked once, read by every backend."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

KVLayout = Literal["KNPD", "NPKD", "NKPD", "NP2KD", "NKDP"]


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The options of one attention call, normalised by `pallas_kernels.api`.

    The logit of a query at position i and a key at position j <= i is, in this order,
    `s = sm_scale * k_scale * (q . k)`; `s = soft_cap * tanh(s / soft_cap)`;
    `s += alibi_slope[h] * (j - i)`; and it exists only where `j > i - sliding_window`.
    A sink is one more logit of its head with a value of zero: it takes part in the softmax's
    denominator and in the log-sum-exp. A query that sees no key gives zeros and a log-sum-exp of
    -inf, with or without a sink.

    A pytree: the first five fields are data and may be traced, the others are static.
    """

    sm_scale: float | jax.Array = 1.0  # float, or [] float32
    sinks: jax.Array | None = None  # [H] float32
    alibi_slopes: jax.Array | None = None  # [H] float32, positive: logits fall with distance
    k_scale: jax.Array | None = None  # [] or [K] float32, or the pages' axes without D, any float
    v_scale: jax.Array | None = None  # as k_scale; for "NP2KD" each is [N, P, K]
    soft_cap: float | None = _static(None)
    mask_value: float | None = _static(None)  # accepted for JAX's callers; masks here are exact
    sliding_window: int | None = _static(None)  # in tokens, the query's own included
    kv_layout: KVLayout = _static("KNPD")  # noqa: RUF009
    kv_dtype: str | None = _static(None)  # "bfloat16" where the pages are uint16 bits, else None
    return_lse: bool = _static(False)
    narrow_products: bool = _static(False)  # see `api.ragged_paged_attention`
