"""Attention over pages in float64 numpy, one query token and one head at a time.

Written from the definition and from nothing else in this package, so that both can be wrong only
separately: for each query token, for each key position that it may see, the physical page is
`table[position // P]`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Features(NamedTuple):
    """What a case asks of the attention beside its arrays."""

    sm_scale: float = 1.0
    soft_cap: float | None = None
    sliding_window: int | None = None
    sinks: np.ndarray | None = None  # [H]
    alibi_slopes: np.ndarray | None = None  # [H]
    k_scale: np.ndarray | None = None  # [], [K] or [N, P, K]
    v_scale: np.ndarray | None = None


def attend_token(
    q: np.ndarray,  # [H, D] float64
    k_pages: np.ndarray,  # [N, P, K, D] float64, as stored
    v_pages: np.ndarray,  # [N, P, K, D] float64, as stored
    table: np.ndarray,  # [M] int
    length: int,  # the query is token number length - 1
    features: Features,
) -> tuple[np.ndarray, np.ndarray]:  # [H, D], [H]
    """Attention of the last of `length` tokens."""
    heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    out, lse = np.zeros((heads, head_dim)), np.full(heads, -np.inf)
    if length <= 0:
        return out, lse
    first = 0
    if features.sliding_window is not None:
        first = max(0, length - features.sliding_window)
    positions = np.arange(first, length)
    page = np.array([table[p // page_size] for p in positions])
    offset = positions % page_size
    for h in range(heads):
        kv_head = h // (heads // kv_heads)
        keys = k_pages[page, offset, kv_head] * scale_of(features.k_scale, page, offset, kv_head)
        values = v_pages[page, offset, kv_head] * scale_of(features.v_scale, page, offset, kv_head)
        logits = keys @ q[h] * features.sm_scale
        if features.soft_cap is not None:
            logits = features.soft_cap * np.tanh(logits / features.soft_cap)
        if features.alibi_slopes is not None:
            logits = logits + float(features.alibi_slopes[h]) * (positions - (length - 1))
        extra = [] if features.sinks is None else [float(features.sinks[h])]
        top = max([logits.max(), *extra])
        weights = np.exp(logits - top)
        total = weights.sum() + sum(np.exp(s - top) for s in extra)
        out[h] = weights @ values / total
        lse[h] = top + np.log(total)
    return out, lse


def scale_of(
    scale: np.ndarray | None, page: np.ndarray, offset: np.ndarray, kv_head: int
) -> np.ndarray | float:
    """The scales of some slots: [tokens, 1], or one number."""
    if scale is None:
        return 1.0
    scale = np.asarray(scale, np.float64)
    if scale.ndim == 0:
        return float(scale)
    if scale.ndim == 1:
        return float(scale[kv_head])
    return scale[page, offset, kv_head][:, None]


def attend_ragged(
    q: np.ndarray,  # [T, H, D] float64
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    tables: np.ndarray,  # [B, M] int
    kv_lens: np.ndarray,  # [B] int
    q_lens: np.ndarray,  # [sequences present] int
    features: Features,
) -> tuple[np.ndarray, np.ndarray]:  # [T, H, D], [T, H]
    """Packed sequences, each query row by itself; rows past the last sequence are zeros."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    row = 0
    for b, q_len in enumerate(q_lens):
        for i in range(q_len):
            length = int(kv_lens[b]) - int(q_len) + i + 1
            out[row], lse[row] = attend_token(q[row], k_pages, v_pages, tables[b], length, features)
            row += 1
    return out, lse
