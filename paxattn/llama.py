"""A LLaMA in Flax: tokens and a cache in, hidden states and the cache out.

It knows nothing of pages. Each layer hands its q, k and v to `attend`, a function of the caller's,
which stores k and v wherever the caller keeps them and returns the attention over what is stored.

Letters: T tokens (of any number of sequences), E hidden size, H query heads, K KV heads, D head dim,
F intermediate size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from paxattn import rope
from paxattn.llama_config import LlamaConfig

Cache = Any
# (layer, q [T, H, D], k [T, K, D], v [T, K, D], cache) -> (attention [T, H, D], cache)
Attend = Callable[[int, jax.Array, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [T, in] times kernel [out, in] transposed, plus bias [out]; float32 [T, out].

    Measured facts of XLA's CPU backend live here and nowhere else: a bfloat16 *output* makes it
    convert both operands to float32 at each call, so the product of two bfloat16 comes out in
    float32; `[out, in]` is 1.3x faster than `[in, out]`; a single row misses the matrix units (100x
    slower in bfloat16) and sums in another order than two or more rows do, so it is never alone;
    for some numbers of rows the rounding of x to bfloat16 is optimised away, and bits depend on the
    batch, unless it is asked for by name.
    """
    rows = x.shape[0]
    if kernel.dtype.itemsize < 4:
        info = jnp.finfo(kernel.dtype)
        x = jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)
    x = x.astype(kernel.dtype)
    if rows == 1:
        x = jnp.concatenate([x, x])
    y = jax.lax.dot_general(
        x, kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )[:rows]
    return y if bias is None else y + bias.astype(jnp.float32)[None, :]


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows `tokens` [T] of table [V, E], float32 [T, E].

    Narrow rows are taken as integers: XLA's CPU backend may otherwise convert the whole table to
    float32 before it takes them (27 ms a step for 49,152 rows of 576).
    """
    if table.dtype.itemsize != 2:
        return jnp.take(table, tokens, axis=0).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
    rows = jax.lax.bitcast_convert_type(jnp.take(bits, tokens, axis=0), table.dtype)
    return rows.astype(jnp.float32)


class Linear(nn.Module):
    """`linear` with its parameters: kernel [out, in], and bias [out] if asked."""

    out_features: int
    in_features: int
    use_bias: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.out_features, self.in_features)
        kernel = self.param("kernel", nn.initializers.normal(0.02), shape, self.dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, shape[:1], self.dtype)
        return linear(x, kernel, bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32."""

    eps: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], self.dtype)
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return normed * scale.astype(jnp.float32)[None, :]


class Attention(nn.Module):
    config: LlamaConfig
    layer: int
    dtype: Any

    @nn.compact
    def __call__(self, x, cos, sin, cache, attend):
        c = self.config
        h, k, d = c.num_heads, c.num_kv_heads, c.head_dim
        size = (h + 2 * k) * d
        qkv = Linear(size, c.hidden_size, c.attention_bias, self.dtype, name="qkv")(x)
        q, key, value = jnp.split(qkv.reshape(-1, h + 2 * k, d), (h, h + k), axis=1)
        q, key = rope.rotate(q, cos, sin), rope.rotate(key, cos, sin)
        out, cache = attend(
            self.layer,
            q.astype(self.dtype),
            key.astype(self.dtype),
            value.astype(self.dtype),
            cache,
        )
        out = out.reshape(-1, h * d)
        out = Linear(c.hidden_size, h * d, c.attention_out_bias, self.dtype, name="out")(out)
        return out, cache


class MLP(nn.Module):
    config: LlamaConfig
    dtype: Any

    @nn.compact
    def __call__(self, x):
        c = self.config
        f = c.intermediate_size
        gate_up = Linear(2 * f, c.hidden_size, c.mlp_bias, self.dtype, name="gate_up")(x)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return Linear(c.hidden_size, f, c.mlp_bias, self.dtype, name="down")(nn.silu(gate) * up)


class Layer(nn.Module):
    config: LlamaConfig
    layer: int
    dtype: Any

    @nn.compact
    def __call__(self, x, cos, sin, cache, attend):
        c = self.config
        attended, cache = Attention(c, self.layer, self.dtype, name="attention")(
            RMSNorm(c.rms_norm_eps, self.dtype, name="attn_norm")(x), cos, sin, cache, attend
        )
        x = x + attended
        x = x + MLP(c, self.dtype, name="mlp")(
            RMSNorm(c.rms_norm_eps, self.dtype, name="mlp_norm")(x)
        )
        return x, cache


class Llama(nn.Module):
    """A decoder of the LLaMA family.

    `apply({"params": params}, tokens, positions, context_lens, cache, attend)` returns (hidden
    [T, E] float32 after the last norm, cache); `apply(..., hidden, method="unembed")` the logits
    [T, V] float32. The residual stream is float32 whatever `dtype` the weights and the cache have.
    Tokens of several sequences may stand in one call: only `attend` knows which belong together.
    """

    config: LlamaConfig
    dtype: Any = jnp.float32

    def setup(self):
        c = self.config
        self.embed_tokens = nn.Embed(
            c.vocab_size, c.hidden_size, dtype=self.dtype, param_dtype=self.dtype
        )
        self.layers = [Layer(c, i, self.dtype) for i in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps, self.dtype)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.vocab_size, c.hidden_size, False, self.dtype)

    def __call__(
        self,
        tokens: jax.Array,  # [T] int32
        positions: jax.Array,  # [T] int32
        context_lens: jax.Array,  # [T] int32, see rope.cos_sin
        cache: Cache,
        attend: Attend,
    ) -> tuple[jax.Array, Cache]:
        cos, sin = rope.cos_sin(self.config, positions, context_lens)
        x = embed(self.embed_tokens.embedding, tokens)
        for layer in self.layers:
            x, cache = layer(x, cos, sin, cache, attend)
        return self.norm(x), cache

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits [T, V] float32 of hidden states [T, E]."""
        if self.config.tie_word_embeddings:
            return linear(hidden, self.embed_tokens.embedding)
        return self.lm_head(hidden)

    def initialise(self, tokens: jax.Array) -> jax.Array:
        """Touches every parameter, for `init`; tokens [T] int32."""
        attend = lambda layer, q, k, v, cache: (q, cache)  # noqa: E731
        hidden, _ = self(tokens, tokens, tokens, None, attend)
        return self.unembed(hidden)


def init_params(config: LlamaConfig, key: jax.Array, dtype: Any = jnp.float32) -> dict:
    """Random parameters of a configuration, as the tests and benchmarks use them."""
    tokens = jnp.zeros((2,), jnp.int32)
    return Llama(config, dtype).init(key, tokens, method="initialise")["params"]
