"""LlamaConfig.from_hf against transformers' own config classes, and what it refuses."""

import json

import pytest

from paxattn.llama_config import LlamaConfig, RopeScaling

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA = {"model_type": "llama", **SIZES}
MISTRAL = {"model_type": "mistral", "num_key_value_heads": 2, **SIZES}
QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2, **SIZES}


def test_sizes_and_defaults_of_a_bare_llama():
    config = LlamaConfig.from_hf(LLAMA)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (128, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 4)
    assert config.head_dim == 16
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 10000.0, None)
    switches = (config.tie_word_embeddings, config.attention_bias, config.attention_out_bias)
    assert (*switches, config.mlp_bias) == (False, False, False, False)
    assert config.sliding_window is None
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


def test_frozen_and_hashable():
    config = LlamaConfig.from_hf(LLAMA)
    assert hash(config) == hash(LlamaConfig.from_hf(dict(LLAMA)))
    with pytest.raises(AttributeError):
        config.vocab_size = 1


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LlamaConfig", {}),
        ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-5}),
        ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("LlamaConfig", {"eos_token_id": [1, 5, 7], "rope_theta": 500000.0}),
        ("MistralConfig", {"sliding_window": None}),
        ("MistralConfig", {"sliding_window": 24}),
        ("Qwen2Config", {}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    ],
)
@pytest.mark.parametrize("use_diff", [True, False])
def test_agrees_with_the_class_that_wrote_it(name, fields, use_diff):
    import transformers

    theirs = getattr(transformers, name)(**{**SIZES, "num_key_value_heads": 2, **fields})
    ours = LlamaConfig.from_hf(json.loads(theirs.to_json_string(use_diff=use_diff)))
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == fields.get("head_dim", 16)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.attention_bias == (name == "Qwen2Config" or fields.get("attention_bias", False))
    assert ours.attention_out_bias == fields.get("attention_bias", False)
    assert ours.mlp_bias == fields.get("mlp_bias", False)
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (
        () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    )
    windows = [ours.layer_window(i) for i in range(3)]
    if name == "Qwen2Config":
        kinds = theirs.layer_types
        assert windows == [
            theirs.sliding_window if k == "sliding_attention" else None for k in kinds
        ]
    else:
        assert windows == [getattr(theirs, "sliding_window", None)] * 3


def test_windows_that_agree_are_one_number():
    qwen = {**QWEN2, "use_sliding_window": True, "sliding_window": 8}
    assert LlamaConfig.from_hf({**qwen, "max_window_layers": 0}).sliding_window == 8
    assert LlamaConfig.from_hf({**qwen, "max_window_layers": 2}).sliding_window == (None, None, 8)
    assert LlamaConfig.from_hf({**qwen, "max_window_layers": 3}).sliding_window is None
    assert LlamaConfig.from_hf({**qwen, "use_sliding_window": False}).sliding_window is None


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2.5}, RopeScaling("linear", 2.5, 2048)),
        ({"rope_type": "dynamic", "factor": 2.0}, RopeScaling("dynamic", 2.0, 2048)),
        ({"rope_type": "llama3", **LLAMA3}, RopeScaling("llama3", 8.0, 512, 1.0, 4.0)),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            RopeScaling("yarn", 4.0, 512),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "truncate": False, "mscale": 0.7},
            RopeScaling("yarn", 4.0, 2048, beta_fast=16, mscale=0.7, truncate=False),
        ),
    ],
)
def test_rope_in_both_spellings(rope, expected):
    new = {**LLAMA, "rope_parameters": {**rope, "rope_theta": 5000.0}}
    old_rope = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    old = {**LLAMA, "rope_theta": 5000.0, "rope_scaling": old_rope}
    for config in (LlamaConfig.from_hf(new), LlamaConfig.from_hf(old)):
        assert config.rope_theta == 5000.0
        assert config.rope_scaling == expected


def test_attention_scaling_of_yarn_is_that_of_transformers():
    pytest.importorskip("torch")
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for extra in ({}, {"attention_factor": 1.5}, {"mscale": 0.7, "mscale_all_dim": 0.4}):
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
        theirs = transformers.LlamaConfig(**SIZES, rope_parameters={**rope, **extra})
        _, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        ours = LlamaConfig.from_hf({**LLAMA, "rope_parameters": {**rope, **extra}})
        assert ours.rope_scaling.attention_scaling == pytest.approx(factor, rel=1e-12)
    assert RopeScaling("linear", 4.0).attention_scaling == 1.0


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (LLAMA, {"model_type": "gpt2"}, "model_type='gpt2'"),
        (LLAMA, {"model_type": None}, "model_type=None"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp=2"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config="),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts=8"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved=True"),
        (LLAMA, {"rope_scaling": {"type": "longrope"}}, "rope_type.*longrope"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor.*None"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": -1}}, "factor.*-1"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (LLAMA, {"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (LLAMA, {"hidden_size": 66, "num_attention_heads": 4}, "hidden_size 66"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size must be an integer"),
        (LLAMA, {"num_key_value_heads": 3}, "num_kv_heads"),
        (LLAMA, {"head_dim": 15}, "head_dim must be even"),
        (LLAMA, {"vocab_size": 0}, "vocab_size must be a positive"),
        (LLAMA, {"rms_norm_eps": 0.0}, "rms_norm_eps"),
        (LLAMA, {"eos_token_id": "2"}, "eos_token_id"),
        (LLAMA, {"bos_token_id": "1"}, "token ids must be integers from 0, got '1'"),
        (MISTRAL, {"attention_bias": True}, "attention_bias=True"),
        (MISTRAL, {"mlp_bias": True}, "mlp_bias=True"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window"),
        (MISTRAL, {"layer_types": ["full_attention"] * 3}, "layer_types"),
        (QWEN2, {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types.*1 entries for 3"),
    ],
)
def test_refuses_by_name_and_value(base, change, named):
    with pytest.raises(ValueError, match=named):
        LlamaConfig.from_hf({**base, **change})


@pytest.mark.parametrize("field", list(SIZES))
def test_a_size_that_is_missing_is_named(field):
    with pytest.raises(ValueError, match=f"lacks the field {field}"):
        LlamaConfig.from_hf({key: value for key, value in LLAMA.items() if key != field})


def test_not_a_mapping():
    with pytest.raises(ValueError, match="JSON object"):
        LlamaConfig.from_hf(["llama"])
