"""A LLaMA in Flax: tokens and a cache in, hidden states and the cache out.

It knows nothing of pages. Each layer hands its q, k and v to `attend`, a function of the caller's,
which stores k and v wherever the caller keeps them and returns the attention over what is stored.

Letters: T tokens (of any number of sequences), E hidden size, H query heads, K KV heads, D head dim,
F intermediate size, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from paxattn import rope
from paxattn.llama_config import LlamaConfig

Cache = Any
# (layer, q [T, H, D], k [T, K, D], v [T, K, D], cache) -> (attention [T, H, D], cache)
Attend = Callable[
    [int | jax.Array, jax.Array, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]
]


class ProductForm(NamedTuple):
    """How products by the weights are computed, see `linear`."""

    columns: bool = False
    parts: int = 1  # arrays that each kernel is split into, see `split`


def linear(
    x: jax.Array,
    kernel: jax.Array | tuple[jax.Array, ...],
    bias: jax.Array | None = None,
    columns: bool = False,
    turn: bool = False,
) -> jax.Array:
    """x [T, in] times kernel [out, in] transposed, plus bias [out]; float32 [T, out].

    Or, by columns, kernel times x [in, T], plus bias: float32 [out, T]. `turn` goes from rows to
    columns: x is [T, in] there too. A kernel may be a tuple of parts, one below the other.

    Measured facts of XLA's CPU backend live here and nowhere else: a bfloat16 *output* makes it
    convert both operands to float32 at each call, so the product of two bfloat16 comes out in
    float32; so does an operand or an output that it lays out transposed; `[out, in]` is 1.3x faster
    than `[in, out]`; a single token misses the matrix units (100x slower in bfloat16), and one or
    two, or 65, are summed in another order than other numbers of them, so tokens come in eights;
    for some numbers the rounding of x to bfloat16 is optimised away, and bits depend on the batch,
    unless it is asked for by name. What stands on the right is repacked at each call, so with few
    tokens it should be x: by columns, an MLP's two products take 0.8 of the time with 8 to 32
    tokens in bfloat16 with matrix units. And two products at a time on a core each are faster than
    one after the other on two: in halves they take 0.8 of the time.
    """
    kernels = kernel if isinstance(kernel, tuple) else (kernel,)
    dtype = kernels[0].dtype
    axis = 1 if columns and not turn else 0  # of the tokens in x
    tokens = x.shape[axis]
    if dtype.itemsize < 4:
        info = jnp.finfo(dtype)
        x = jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)
    x = x.astype(dtype)
    margin = ((0, -tokens % 8), (0, 0))
    x = jnp.pad(x, margin[::-1] if axis else margin)
    if columns:
        x = with_layout_constraint(x, Layout((0, 1)))
        y = jnp.concatenate([_product(k, x, 1 - axis) for k in kernels])[:, :tokens]
    else:
        y = jnp.concatenate([_product(x, k, 1) for k in kernels], axis=1)[:tokens]
    return y if bias is None else y + _beside(bias, columns)


def split(params: Any, parts: int) -> Any:
    """The parameters with each kernel cut along `out` into a tuple of so many NumPy arrays."""
    if parts == 1:
        return params

    def cut(path: tuple, x: Any) -> Any:
        is_kernel = getattr(path[-1], "key", None) == "kernel"
        return tuple(np.array_split(np.asarray(x), parts)) if is_kernel else x

    return jax.tree_util.tree_map_with_path(cut, params)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """x [A, C] times y over x's second axis and y's `axis`; float32."""
    contract = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, y, contract, preferred_element_type=jnp.float32)


def _beside(features: jax.Array, columns: bool) -> jax.Array:
    """A number for each feature, float32, to broadcast against tokens in rows or columns."""
    features = features.astype(jnp.float32)
    return features[:, None] if columns else features[None, :]


def _rows(y: jax.Array, columns: bool) -> jax.Array:
    """Tokens in rows, [T, out], of a product."""
    # The barrier keeps XLA from turning the product itself.
    return jax.lax.optimization_barrier(y).T if columns else y


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
    """`linear` with its parameters: kernel [out, in] or its parts, and bias [out] if asked."""

    out_features: int
    in_features: int
    use_bias: bool = False
    dtype: Any = jnp.float32
    form: ProductForm = ProductForm()
    turn: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        columns, parts = self.form
        shape = (self.out_features, self.in_features)

        def initial(key: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
            whole = nn.initializers.normal(0.02)(key, shape, self.dtype)
            return whole if parts == 1 else tuple(jnp.array_split(whole, parts))

        kernel = self.param("kernel", initial)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, shape[:1], self.dtype)
        return linear(x, kernel, bias, columns, self.turn)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32."""

    eps: float
    dtype: Any = jnp.float32
    columns: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axis = 0 if self.columns else 1
        scale = self.param("scale", nn.initializers.ones, x.shape[axis : axis + 1], self.dtype)
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=axis, keepdims=True) + self.eps)
        return normed * _beside(scale, self.columns)


class Attention(nn.Module):
    """The products around attention itself."""

    config: LlamaConfig
    dtype: Any
    form: ProductForm

    def setup(self):
        c = self.config
        size = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv = Linear(size, c.hidden_size, c.attention_bias, self.dtype, self.form)
        heads = c.num_heads * c.head_dim
        self.out = Linear(
            c.hidden_size, heads, c.attention_out_bias, self.dtype, self.form, turn=True
        )

    def project(self, x, cos, sin):
        """q [T, H, D], k and v [T, K, D] of x [T, E]."""
        h, k, d = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = _rows(self.qkv(x), self.form.columns).reshape(-1, h + 2 * k, d)
        q, key, value = jnp.split(qkv, (h, h + k), axis=1)
        q, key = rope.rotate(q, cos, sin), rope.rotate(key, cos, sin)
        return q.astype(self.dtype), key.astype(self.dtype), value.astype(self.dtype)

    def combine(self, attended):
        """[T, E] of attention [T, H, D]."""
        return self.out(attended.reshape(attended.shape[0], -1))


class MLP(nn.Module):
    config: LlamaConfig
    dtype: Any
    form: ProductForm

    @nn.compact
    def __call__(self, x):
        c = self.config
        f = c.intermediate_size
        how = (c.mlp_bias, self.dtype, self.form)
        gate_up = Linear(2 * f, c.hidden_size, *how, name="gate_up")(x)
        gate, up = jnp.split(gate_up, 2, axis=0 if self.form.columns else 1)
        return Linear(c.hidden_size, f, *how, name="down")(nn.silu(gate) * up)


class Layer(nn.Module):
    """What stands before attention (`project`) and after it (`finish`)."""

    config: LlamaConfig
    dtype: Any
    form: ProductForm

    def setup(self):
        c = self.config
        self.attn_norm = RMSNorm(c.rms_norm_eps, self.dtype, self.form.columns)
        self.attention = Attention(c, self.dtype, self.form)
        self.mlp_norm = RMSNorm(c.rms_norm_eps, self.dtype, self.form.columns)
        self.mlp = MLP(c, self.dtype, self.form)

    def project(self, x, cos, sin) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.attention.project(self.attn_norm(x), cos, sin)

    def finish(self, x, attended):
        x = x + self.attention.combine(attended)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """A decoder of the LLaMA family.

    `apply({"params": params}, tokens, positions, context_lens, cache, attend)` returns (hidden
    [T, E] float32 after the last norm, cache); `apply(..., hidden, method="unembed")` the logits
    [T, V] float32. The residual stream is float32 whatever `dtype` the weights and the cache have.
    Tokens of several sequences may stand in one call: only `attend` knows which belong together.
    In a form by columns hidden states are [E, T] inside; parameters must be `split` as it says.
    """

    config: LlamaConfig
    dtype: Any = jnp.float32
    form: ProductForm = ProductForm()

    def setup(self):
        c = self.config
        self.embed_tokens = nn.Embed(
            c.vocab_size, c.hidden_size, dtype=self.dtype, param_dtype=self.dtype
        )
        self.layers = [Layer(c, self.dtype, self.form) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps, self.dtype, self.form.columns)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(
                c.vocab_size, c.hidden_size, False, self.dtype, self.form, turn=True
            )

    def __call__(
        self,
        tokens: jax.Array,  # [T] int32
        positions: jax.Array,  # [T] int32
        context_lens: jax.Array,  # [T] int32, see rope.cos_sin
        cache: Cache,
        attend: Attend,
    ) -> tuple[jax.Array, Cache]:
        cos, sin = rope.cos_sin(self.config, positions, context_lens)
        x = self.first(tokens)
        for i, layer in enumerate(self.layers):
            q, k, v = layer.project(x, cos, sin)
            attended, cache = attend(i, q, k, v, cache)
            x = layer.finish(x, attended)
        return self.last(x), cache

    # The same in steps, for `looped`.

    def first(self, tokens: jax.Array) -> jax.Array:
        x = embed(self.embed_tokens.embedding, tokens)
        return x.T if self.form.columns else x

    def project(self, layer: int, x: jax.Array, cos: jax.Array, sin: jax.Array):
        return self.layers[layer].project(x, cos, sin)

    def finish(self, layer: int, x: jax.Array, attended: jax.Array) -> jax.Array:
        return self.layers[layer].finish(x, attended)

    def last(self, x: jax.Array) -> jax.Array:
        return _rows(self.norm(x), self.form.columns)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits [T, V] float32 of hidden states [T, E]."""
        if self.config.tie_word_embeddings:
            logits = linear(hidden, self.embed_tokens.embedding, None, self.form.columns, turn=True)
        else:
            logits = self.lm_head(hidden)
        return _rows(logits, self.form.columns)

    def initialise(self, tokens: jax.Array) -> jax.Array:
        """Touches every parameter, for `init`; tokens [T] int32."""
        attend = lambda layer, q, k, v, cache: (q, cache)  # noqa: E731
        hidden, _ = self(tokens, tokens, tokens, None, attend)
        return self.unembed(hidden)


def looped(
    model: Llama,
    params: Any,
    tokens: jax.Array,
    positions: jax.Array,
    context_lens: jax.Array,
    cache: Cache,
    attend: Attend,
) -> tuple[jax.Array, Cache]:
    """What `model.apply` returns, by a loop over layers in the compiled program.

    `attend` is traced once, for all layers, and is told which one by a traced number. Attention is
    most of a program, so this one is a tenth as large as the one that repeats it in every layer
    (SmolLM2-135M's decode step, float32 and bfloat16), compiles in a fifth of the time, takes as
    long to run and gives the same bits. The weights stay one array a layer and product, each
    layer's products being a branch of a switch: a scan over stacked weights is 10-15% slower.
    """
    flax_apply: Any = model.apply  # Flax's own type has mutable collections in it
    apply = partial(flax_apply, {"params": params})
    cos, sin = rope.cos_sin(model.config, positions, context_lens)
    count = model.config.num_layers
    x = apply(tokens, method="first")
    qkv = apply(0, x, cos, sin, method="project")

    def to_next(layer: int) -> Callable:
        """From layer `layer`'s attention to the next one's q, k and v."""

        def branch(x, attended):
            x = apply(layer, x, attended, method="finish")
            if layer + 1 < count:
                return x, apply(layer + 1, x, cos, sin, method="project")
            return x, jax.tree.map(jnp.zeros_like, qkv)

        return branch

    branches = [to_next(layer) for layer in range(count)]

    def body(layer, carry):
        x, qkv, cache = carry
        attended, cache = attend(layer, *qkv, cache)
        return *jax.lax.switch(layer, branches, x, attended), cache

    x, _, cache = jax.lax.fori_loop(0, count, body, (x, qkv, cache))
    return apply(x, method="last"), cache


def init_params(config: LlamaConfig, key: jax.Array, dtype: Any = jnp.float32) -> dict:
    """Random parameters of a configuration, as the tests and benchmarks use them."""
    tokens = jnp.zeros((2,), jnp.int32)
    return Llama(config, dtype).init(key, tokens, method="initialise")["params"]
