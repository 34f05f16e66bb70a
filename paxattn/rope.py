"""Rotary position embeddings, every type of the LLaMA family (RoFormer, arXiv 2104.09864).

A rope type is a choice of inverse frequencies and of one factor on the cos/sin: `default`, `linear`
(position interpolation), `dynamic` (NTK by length), `llama3` (Llama 3.1's smoothed bands), `yarn`
(arXiv 2309.00071). Everything but `dynamic` is a constant of the configuration.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from paxattn.llama_config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig) -> tuple[np.ndarray, float]:
    """Returns (inverse frequencies [D/2] float32, factor on cos and sin) of a configuration.

    For `dynamic` these are the frequencies up to the trained length; see `cos_sin`.
    """
    half = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    plain = (1.0 / np.power(np.float32(config.rope_theta), half)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type in ("default", "dynamic"):
        return plain, 1.0
    if scaling.rope_type == "linear":
        return (plain / scaling.factor).astype(np.float32), 1.0
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.rope_type == "yarn":
        return _yarn(config, scaling)
    raise ValueError(f"rope type {scaling.rope_type!r} is not implemented")


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    trained = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    smooth = (trained / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * plain / scaling.factor + smooth * plain
    low = wavelength > trained / scaling.low_freq_factor
    high = wavelength < trained / scaling.high_freq_factor
    return np.where(low, plain / scaling.factor, np.where(high, plain, blended)).astype(np.float32)


def _yarn(config: LlamaConfig, s: RopeScaling) -> tuple[np.ndarray, float]:
    dim, base = config.head_dim, config.rope_theta
    trained = s.original_max_position_embeddings

    def dim_of(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(s.beta_fast), dim_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of zero width would divide by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    plain = 1.0 / np.power(np.float32(base), np.arange(0, dim, 2, dtype=np.float32) / dim)
    return (plain / s.factor * ramp + plain * (1 - ramp)).astype(np.float32), s.attention_scaling


def cos_sin(
    config: LlamaConfig,
    positions: jax.Array,  # [T] int32
    context_lens: jax.Array,  # [T] int32
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin, each [T, D/2] float32, of tokens at `positions`.

    `context_lens` is how many tokens the token's sequence had when the token was computed first
    (the prompt's length for a prompt token, position + 1 for a generated one). Only `dynamic`
    reads it: keys are stored rotated, so a token keeps the base that it was first rotated with,
    as it does in transformers' cache.
    """
    frequencies, factor = inverse_frequencies(config)
    inverse = jnp.asarray(frequencies)[None, :]
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        trained = scaling.original_max_position_embeddings
        length = jnp.maximum(context_lens, trained).astype(jnp.float32)
        dim = config.head_dim
        base = jnp.float32(config.rope_theta) * jnp.power(
            scaling.factor * length / trained - (scaling.factor - 1), dim / (dim - 2)
        )
        exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
        inverse = 1.0 / jnp.power(base[:, None], exponent[None, :])
    angle = positions.astype(jnp.float32)[:, None] * inverse
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(
    x: jax.Array,  # [T, heads, D]
    cos: jax.Array,  # [T, D/2] float32
    sin: jax.Array,  # [T, D/2] float32
) -> jax.Array:
    """Rotates each pair (x[d], x[d + D/2]) by its token's angle; float32 in and out."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
