"""Logits to tokens: greedy or sampled, a key a request, no sort of the vocabulary.

A request's draw at output position i comes from (its seed, i) alone, so that neither the batch nor
a preemption changes it. Filters apply in vLLM's order: temperature, min_p, top_k, top_p.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_ONE = int(np.float32(1.0).view(np.int32))  # the bits of 1.0
_BLOCK = 128
_MASK = 2**64 - 1


def sample_seed(seed: int, sample: int) -> int:
    """Seed of completion number `sample` of a request; completion 0 has the request's own.

    A request of its own with this seed gives the same tokens. Both are taken modulo 2**64; the
    mixing is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), so that neighbouring
    seeds give unrelated streams.
    """
    if sample == 0:
        return seed & _MASK
    x = (seed + sample * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


HostArray = Any  # NumPy, filled in on the host; a jax.Array inside the programs


class SamplingArrays(NamedTuple):
    """The sampling of a batch, a row a request."""

    temperature: HostArray  # [B] float32; 0 is greedy
    top_k: HostArray  # [B] int32; 0 keeps all
    top_p: HostArray  # [B] float32
    min_p: HostArray  # [B] float32
    seed: HostArray  # [B, 2] uint32
    min_tokens: HostArray  # [B] int32
    stop_ids: HostArray  # [B, S] int32; -1 where there is none


def sample(
    logits: jax.Array,  # [B, V] float32
    sampling: SamplingArrays,
    generated: jax.Array,  # [B] int32
    *,
    greedy: bool,
    columns: bool = False,
) -> jax.Array:
    """Chooses each row's next token, [B] int32.

    generated: how many tokens each request has so far; the draw's position.
    greedy: static; True when the caller knows that every row's temperature is 0.
    columns: static; True where the logits are the transpose of what was computed, so that XLA need
      not lay them out anew to find the likeliest tokens (1 ms for 32 rows of 49,152).
    """
    early = jnp.any(generated < sampling.min_tokens)

    def masked(logits):
        return _without_early_stop(logits, sampling, generated)

    if greedy:  # tokens, not logits, come out of the branches: logits would be copied
        rows = lambda x: x.T if columns else x  # noqa: E731
        axis = 0 if columns else 1
        return jax.lax.cond(
            early,
            lambda x: _greedy(masked(rows(x)), 1),
            lambda x: _greedy(x, axis),
            rows(logits),
        )
    logits = jax.lax.cond(early, masked, lambda x: x, logits)
    best = _greedy(logits, 1)
    hot = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scaled = logits / hot[:, None]
    # Unnormalised probabilities in [0, 1]: their bits sort as integers.
    p = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
    p = jnp.where(p >= sampling.min_p[:, None], p, 0.0)
    p = jax.lax.cond(jnp.any(sampling.top_k > 0), _keep_top_k, lambda p, _: p, p, sampling)
    p = jax.lax.cond(jnp.any(sampling.top_p < 1), _keep_top_p, lambda p, _: p, p, sampling)
    keys = jax.vmap(lambda s, i: jax.random.fold_in(jax.random.wrap_key_data(s), i))(
        sampling.seed, generated
    )
    drawn = _draw(p, jax.vmap(jax.random.uniform)(keys))
    return jnp.where(sampling.temperature > 0, drawn, best)


def _greedy(logits: jax.Array, axis: int) -> jax.Array:
    """The first of the likeliest tokens, [B] int32; some token in a row with a NaN.

    One pass for the maximum of each block, which vectorises, then `argmax` of the blocks and inside
    one of them: XLA's CPU backend takes several times as long for an `argmax` of the whole row.

    Args:
      logits: [B, V], or [V, B].
      axis: the one of V.
    """
    vocabulary = logits.shape[axis]
    size = math.gcd(vocabulary, _BLOCK)  # no padding, which would copy the logits
    shape = list(logits.shape)
    shape[axis : axis + 1] = [vocabulary // size, size]
    blocks = logits.reshape(shape)
    best = jnp.max(blocks, axis=axis + 1)
    top = jnp.max(best, axis=axis, keepdims=True)
    block = jnp.argmax(~(best < top), axis=axis)  # [B]
    at = jnp.expand_dims(block, (axis, axis + 1))
    inside = jnp.take_along_axis(blocks, at, axis=axis).squeeze(axis)
    return (block * size + jnp.argmax(~(inside < top), axis=axis)).astype(jnp.int32)


def logprobs_of(
    logits: jax.Array,  # [B, V] float32
    tokens: jax.Array,  # [B] int32
    count: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of the model itself (before temperature and filters).

    Returns (of `tokens` [B] float32, ids [B, count] int32 and log-probabilities [B, count] float32
    of the likeliest tokens, likeliest first).
    """
    logp = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0]
    top, ids = jax.lax.top_k(logp, count)
    return chosen, ids.astype(jnp.int32), top


def _without_early_stop(logits, sampling, generated):
    """Stop tokens cannot be chosen before `min_tokens`."""

    early = (generated < sampling.min_tokens)[:, None] & (sampling.stop_ids >= 0)
    column = jnp.where(early, sampling.stop_ids, logits.shape[1])  # out of range: dropped
    row = jnp.broadcast_to(jnp.arange(logits.shape[0])[:, None], column.shape)
    return logits.at[row, column].set(-jnp.inf, mode="drop")


def _keep_top_k(p, sampling):
    k = jnp.where(sampling.top_k > 0, sampling.top_k, p.shape[1]).astype(jnp.float32)
    bits = _threshold(p, jnp.ones_like(p), k)
    return jnp.where(_bits(p) >= bits[:, None], p, 0.0)


def _keep_top_p(p, sampling):
    target = sampling.top_p * jnp.sum(p, axis=-1)
    bits = _threshold(p, p, target)
    keep = (_bits(p) >= bits[:, None]) | (sampling.top_p >= 1)[:, None]
    return jnp.where(keep, p, 0.0)


def _bits(p: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(p, jnp.int32)


def _threshold(p, weight, target) -> jax.Array:
    """Largest bit pattern t with sum(weight where bits(p) >= t) >= target, by bisection; [B] int32.

    Thirty passes over the row: exact, and far cheaper than a sort of the vocabulary. Tokens equal
    to the last one kept are kept with it.
    """
    bits = _bits(p)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.sum(jnp.where(bits >= middle[:, None], weight, 0.0), axis=-1) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros(p.shape[:1], jnp.int32)
    high = jnp.full(p.shape[:1], _ONE + 1, jnp.int32)
    return jax.lax.fori_loop(0, 30, halve, (low, high))[0]


def _draw(p: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverse of the cumulative distribution, in two levels (blocks of 128, then inside one)."""
    rows, vocabulary = p.shape
    p = jnp.pad(p, ((0, 0), (0, -vocabulary % _BLOCK))).reshape(rows, -1, _BLOCK)
    totals = jnp.cumsum(jnp.sum(p, axis=-1), axis=-1)  # [B, blocks]
    target = uniform * totals[:, -1]
    block = jnp.sum(totals <= target[:, None], axis=-1)
    block = jnp.minimum(block, p.shape[1] - 1)
    before = jnp.where(
        block > 0, jnp.take_along_axis(totals, jnp.maximum(block - 1, 0)[:, None], axis=-1)[:, 0], 0
    )
    inside = jnp.take_along_axis(p, block[:, None, None], axis=1)[:, 0]  # [B, 128]
    reached = jnp.cumsum(inside, axis=-1) <= (target - before)[:, None]
    # Rounding may leave no token past the target, or one without probability: take the last likely.
    last = _BLOCK - 1 - jnp.argmax((inside > 0)[:, ::-1], axis=-1)
    index = jnp.minimum(jnp.sum(reached, axis=-1), last)
    return (block * _BLOCK + index).astype(jnp.int32)
