"""Which tensor of a checkpoint goes where in the model's parameters.

One table serves both formats: a row is (place in the parameters, Hugging Face names, GGUF
names). Several names in one row are stacked by rows in that order, which is how q, k, v and
gate, up are fused. Kernels stay `[out, in]`, as both formats have them.

Letters: V vocabulary, E hidden size, H query heads, K KV heads, D head dim, F MLP size.
"""

from __future__ import annotations

from typing import NamedTuple

from paxattn.llama_config import LlamaConfig


class Source(NamedTuple):
    """One tensor that a checkpoint must hold."""

    name: str
    shape: tuple[int, ...]
    rotary_heads: int
    """Heads whose rows a LLaMA GGUF stores interleaved (q, k); 0 for every other tensor."""


class Target(NamedTuple):
    """One array of the model's parameters and the tensors that it is stacked from."""

    path: tuple[str, ...]
    sources: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.sources[0].shape
        return (sum(source.shape[0] for source in self.sources), *first[1:])


_Row = tuple[str, tuple[str, ...], tuple[str, ...]]
"""(place, names by Hugging Face, names by GGUF); `{}` is the layer."""

_LAYER: tuple[_Row, ...] = (
    ("attn_norm/scale", ("input_layernorm.weight",), ("attn_norm.weight",)),
    (
        "attention/qkv/kernel",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    ),
    (
        "attention/qkv/bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    ),
    ("attention/out/kernel", ("self_attn.o_proj.weight",), ("attn_output.weight",)),
    ("attention/out/bias", ("self_attn.o_proj.bias",), ("attn_output.bias",)),
    ("mlp_norm/scale", ("post_attention_layernorm.weight",), ("ffn_norm.weight",)),
    (
        "mlp/gate_up/kernel",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ("ffn_gate.weight", "ffn_up.weight"),
    ),
    (
        "mlp/gate_up/bias",
        ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        ("ffn_gate.bias", "ffn_up.bias"),
    ),
    ("mlp/down/kernel", ("mlp.down_proj.weight",), ("ffn_down.weight",)),
    ("mlp/down/bias", ("mlp.down_proj.bias",), ("ffn_down.bias",)),
)
_BEFORE: tuple[_Row, ...] = (
    ("embed_tokens/embedding", ("model.embed_tokens.weight",), ("token_embd.weight",)),
)
_AFTER: tuple[_Row, ...] = (
    ("norm/scale", ("model.norm.weight",), ("output_norm.weight",)),
    ("lm_head/kernel", ("lm_head.weight",), ("output.weight",)),
)
FORMATS = ("hf", "gguf")
_PREFIX = {"hf": "model.layers.{}.", "gguf": "blk.{}."}


def _shapes(config: LlamaConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Shapes of the sources of each place; a place that this config lacks is absent."""
    c = config
    heads, kv, hidden, mlp = c.num_heads, c.num_kv_heads, c.hidden_size, c.intermediate_size
    qkv = (heads * c.head_dim, kv * c.head_dim, kv * c.head_dim)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "embed_tokens/embedding": ((c.vocab_size, hidden),),
        "attn_norm/scale": ((hidden,),),
        "attention/qkv/kernel": tuple((rows, hidden) for rows in qkv),
        "attention/out/kernel": ((hidden, heads * c.head_dim),),
        "mlp_norm/scale": ((hidden,),),
        "mlp/gate_up/kernel": ((mlp, hidden), (mlp, hidden)),
        "mlp/down/kernel": ((hidden, mlp),),
        "norm/scale": ((hidden,),),
    }
    if c.attention_bias:
        shapes["attention/qkv/bias"] = tuple((rows,) for rows in qkv)
    if c.attention_out_bias:
        shapes["attention/out/bias"] = ((hidden,),)
    if c.mlp_bias:
        shapes["mlp/gate_up/bias"] = ((mlp,), (mlp,))
        shapes["mlp/down/bias"] = ((hidden,),)
    if not c.tie_word_embeddings:
        shapes["lm_head/kernel"] = ((c.vocab_size, hidden),)
    return shapes


def targets(config: LlamaConfig, file_format: str) -> tuple[Target, ...]:
    """Every parameter of the model `config` describes, with the tensors it is made from.

    Args:
      config: the model.
      file_format: "hf" or "gguf", whose names the sources have.
    """
    shapes = _shapes(config)
    rotary = {0: config.num_heads, 1: config.num_kv_heads}

    def row(entry: _Row, prefix: str, folder: tuple[str, ...]) -> list[Target]:
        place, *spellings = entry
        names = spellings[FORMATS.index(file_format)]
        if place not in shapes:
            return []
        fused = place.startswith("attention/qkv/")
        sources = tuple(
            Source(prefix + name, shape, rotary.get(i, 0) if fused else 0)
            for i, (name, shape) in enumerate(zip(names, shapes[place], strict=True))
        )
        return [Target((*folder, *place.split("/")), sources)]

    found: list[Target] = []
    for entry in _BEFORE:
        found += row(entry, "", ())
    for layer in range(config.num_layers):
        for entry in _LAYER:
            found += row(entry, _PREFIX[file_format].format(layer), (f"layers_{layer}",))
    for entry in _AFTER:
        found += row(entry, "", ())
    return tuple(found)
