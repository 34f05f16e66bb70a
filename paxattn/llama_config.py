"""The shape of a LLaMA-family model, read from a Hugging Face `config.json`.

`LlamaConfig` is frozen and hashable, so it can be a static argument of a compiled function. What
`LlamaConfig.from_hf` accepts is exactly what the model in `paxattn.llama` can run; anything else
is refused with the name of the offending field, so that a checkpoint never runs with a part of
its configuration silently ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Rotary embeddings that can be run; `default` is `rope_scaling=None`."""

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}

# What transformers takes when a config.json leaves the field out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}

# Fields of neighbouring architectures: value at which each changes nothing.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "rope_interleaved": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}

_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor"),
    *("high_freq_factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned"),
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched, as transformers' `rope_parameters` has it.

    Every field but `rope_type` keeps its neutral value where the type does not use it.
    Sources: linear, Chen et al. 2023; dynamic NTK, emozilla 2023; yarn, Peng et al. 2023
    (arXiv 2309.00071); llama3, the Llama 3.1 release.
    """

    rope_type: str
    """One of linear, dynamic, llama3, yarn."""
    factor: float = 1.0
    """Ratio of the stretched to the original context length; at least 1 in practice."""
    original_max_position_embeddings: int = 0
    """Tokens of context before the stretch (llama3, yarn, dynamic)."""
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 4.0
    """llama3 only."""
    attention_factor: float | None = None
    """yarn only: scale of cos and sin; None derives it, see `attention_scaling`."""
    beta_fast: float = 32.0
    """yarn only: rotations above which a dimension is left alone."""
    beta_slow: float = 1.0
    """yarn only: rotations below which a dimension is interpolated."""
    mscale: float | None = None
    """yarn only."""
    mscale_all_dim: float | None = None
    """yarn only."""
    truncate: bool = True
    """yarn only: whether the correction range is rounded to whole dimensions."""

    @property
    def attention_scaling(self) -> float:
        """The number that cos and sin are multiplied by: 1 for every type but yarn."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor

        def magnitude(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1.0)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of one LLaMA-family decoder; all sizes in elements or tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    """None is the plain rotary embedding (`rope_type: default`)."""
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on the q, k and v projections."""
    attention_out_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases on gate, up and down."""
    sliding_window: int | tuple[int | None, ...] | None = None
    """Query i sees key j only if i - j < sliding_window. None: all keys. A tuple: per layer."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence; may be empty."""
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
            *("num_kv_heads", "head_dim", "max_position_embeddings"),
        ):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not _is_number(value) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        for token in (
            *self.eos_token_ids,
            *(() if self.bos_token_id is None else (self.bos_token_id,)),
        ):
            if not _is_int(token) or token < 0:
                raise ValueError(f"eos and bos token ids must be integers from 0, got {token!r}")
        windows = self.sliding_window
        if isinstance(windows, tuple) and len(windows) != self.num_layers:
            raise ValueError(
                f"sliding_window has {len(windows)} entries for {self.num_layers} layers"
            )
        for window in windows if isinstance(windows, tuple) else (windows,):
            if window is not None and (not _is_int(window) or window < 1):
                raise ValueError(f"sliding_window must be a positive integer, got {window!r}")

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of layer `layer` in tokens, None where it sees everything."""
        windows = self.sliding_window
        return windows[layer] if isinstance(windows, tuple) else windows

    @property
    def has_one_window(self) -> bool:
        """Whether all layers see equally far."""
        return len({self.layer_window(i) for i in range(self.num_layers)}) == 1

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a Hugging Face config (the dict of a `config.json`).

        Accepts `LlamaForCausalLM`, `MistralForCausalLM` and `Qwen2ForCausalLM` as transformers
        4 and 5 write them (`rope_parameters`, or `rope_theta` with `rope_scaling`).

        Raises:
          ValueError: a field that the model cannot honour, named with its value; or a size that
            is missing or impossible.
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"a config must be a JSON object, got {type(config).__name__}")
        model_type = _model_type(config)
        for name, allowed in _MUST_BE.items():
            if name in config and config[name] not in allowed:
                _refuse(name, config[name], f"only {allowed[0]!r} can be run")
        values = {**_DEFAULTS[model_type], **config}
        heads = _required_int(config, "num_attention_heads")
        hidden = _required_int(config, "hidden_size")
        layers = _required_int(config, "num_hidden_layers")
        head_dim = values.get("head_dim")
        if head_dim is None:
            if heads < 1 or hidden % heads:
                raise ValueError(
                    f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and "
                    "head_dim is not given"
                )
            head_dim = hidden // heads
        kv_heads = values.get("num_key_value_heads")
        theta, scaling = _rope(values)
        qkv_bias, out_bias, mlp_bias = _biases(model_type, values)
        return cls(
            vocab_size=_required_int(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required_int(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=values["max_position_embeddings"],
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            attention_bias=qkv_bias,
            attention_out_bias=out_bias,
            mlp_bias=mlp_bias,
            sliding_window=_windows(model_type, values, layers),
            eos_token_ids=_eos_ids(values.get("eos_token_id")),
            bos_token_id=values.get("bos_token_id"),
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse(name: str, value: Any, why: str) -> None:
    raise ValueError(f"this model cannot be run: {name}={value!r} ({why})")


def _required_int(config: Mapping[str, Any], name: str) -> int:
    if name not in config:
        raise ValueError(f"the config lacks the field {name}")
    if not _is_int(config[name]):
        raise ValueError(f"{name} must be an integer, got {config[name]!r}")
    return config[name]


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = str(config.get("model_type"))
    if model_type not in _CLASSES:
        _refuse("model_type", config.get("model_type"), "known: " + ", ".join(_CLASSES))
    architectures = config.get("architectures") or [_CLASSES[model_type]]
    if list(architectures) != [_CLASSES[model_type]]:
        _refuse("architectures", architectures, f"only ['{_CLASSES[model_type]}'] can be run")
    return model_type


def _biases(model_type: str, values: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Which projections have biases: (q k v, attention output, MLP)."""
    attention, mlp = bool(values.get("attention_bias")), bool(values.get("mlp_bias"))
    if model_type == "llama":
        return attention, attention, mlp
    # Mistral has none and Qwen2 always has q k v, whatever these fields say.
    if mlp:
        _refuse("mlp_bias", values["mlp_bias"], f"{model_type} has no biases in its MLP")
    if model_type == "mistral" and attention:
        _refuse("attention_bias", values["attention_bias"], "mistral has no attention biases")
    return model_type == "qwen2", False, False


def _windows(
    model_type: str, values: Mapping[str, Any], layers: int
) -> int | tuple[int | None, ...] | None:
    window = values.get("sliding_window")
    types = values.get("layer_types")
    if types is not None:
        if len(types) != layers:
            _refuse("layer_types", types, f"{len(types)} entries for {layers} layers")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                _refuse("layer_types", kind, "known: full_attention, sliding_attention")
    if model_type == "llama":
        if types is not None and "sliding_attention" in types:
            _refuse("layer_types", types, "a llama has full_attention in every layer")
        return None  # as transformers: LlamaForCausalLM has no window
    if model_type == "mistral":
        expected = "full_attention" if window is None else "sliding_attention"
        if types is not None and set(types) != {expected}:
            _refuse("layer_types", types, f"a mistral of this sliding_window is all {expected}")
        return window
    if not values.get("use_sliding_window"):
        window = None
    if types is None:
        first = values["max_window_layers"]
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    per_layer = tuple(window if kind == "sliding_attention" else None for kind in types)
    return per_layer[0] if len(set(per_layer)) == 1 else per_layer


def _eos_ids(value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(_is_int(i) for i in ids):
        raise ValueError(f"eos_token_id must be an integer or a list of them, got {value!r}")
    return tuple(ids)


def _rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(rope_theta, scaling), the old spelling (`rope_scaling`) first, as transformers does."""
    field = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(field) or {}
    if not isinstance(rope, Mapping):
        _refuse(field, rope, "expected an object")
    for key, value in rope.items():
        if isinstance(value, Mapping):
            _refuse(f"{field}[{key!r}]", value, "rotary parameters per layer type")
        if key not in _ROPE_KEYS and value is not None:
            _refuse(f"{field}[{key!r}]", value, "unknown rotary parameter")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        _refuse("partial_rotary_factor", rope["partial_rotary_factor"], "only 1.0 can be run")
    theta = rope.get("rope_theta")
    if theta is None:
        theta = values.get("rope_theta")
    theta = 10000.0 if theta is None else theta
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        _refuse(f"{field}['rope_type']", kind, "known: " + ", ".join(ROPE_TYPES))
    if kind == "default":
        return theta, None
    return theta, _scaling(kind, field, rope, values)


def _scaling(
    kind: str, field: str, rope: Mapping[str, Any], values: Mapping[str, Any]
) -> RopeScaling:
    longest = values["max_position_embeddings"]
    original = values.get("original_max_position_embeddings")
    if original is None:
        original = rope.get("original_max_position_embeddings")
    if original is None or kind == "dynamic":  # transformers' dynamic looks at this field only
        original = longest
    factor = rope.get("factor")
    if factor is None and kind == "yarn" and _is_number(original) and original > 0:
        factor = longest / original
    numbers = {"factor": factor, "original_max_position_embeddings": original}
    if kind == "llama3":
        numbers |= {key: rope.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    for key, value in numbers.items():
        if not _is_number(value) or not math.isfinite(value) or value <= 0:
            _refuse(f"{field}['{key}']", value, f"{kind} needs a positive number")
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        _refuse(f"{field}['high_freq_factor']", numbers["high_freq_factor"], "not the higher one")
    yarn: dict[str, Any] = {}
    if kind == "yarn":
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            yarn[key] = rope.get(key)
        yarn |= {"beta_fast": rope.get("beta_fast") or 32, "beta_slow": rope.get("beta_slow") or 1}
        for key, value in yarn.items():
            if value is not None and not _is_number(value):
                _refuse(f"{field}['{key}']", value, "expected a number")
        yarn["truncate"] = bool(rope.get("truncate", True))
    return RopeScaling(rope_type=kind, **numbers, **yarn)
