"""The Flax LLaMA against transformers, over every kind of configuration that it claims."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxattn.llama import Llama, ProductForm, init_params, linear, split
from paxattn.llama_config import LlamaConfig

BASE = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "model_type": "llama",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
CONFIGS = {
    "multi-head": {},
    "two query heads a KV head": {"num_key_value_heads": 4},
    "four query heads a KV head": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "one KV head": {"num_key_value_heads": 1, "rope_theta": 100000.0},
    "head_dim of its own": {"head_dim": 24, "num_key_value_heads": 2},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "dynamic rope, short": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    },
    "dynamic rope, beyond the trained length": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "max_position_embeddings": 32,
    },
    "llama3 rope": {"rope_parameters": LLAMA3, "num_key_value_heads": 2},
    "yarn rope": {"rope_parameters": YARN, "num_key_value_heads": 4},
    "yarn rope, its own attention factor": {
        "rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2}
    },
    "mistral, sliding window": {
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "sliding_window": 20,
    },
    "qwen2, biases on q, k and v": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2, a window in the upper layers": {
        "model_type": "qwen2",
        "num_key_value_heads": 4,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
    },
}


def attend_dense(config):
    """Attention written out plainly in float32, for one sequence without any cache."""

    def attend(layer, q, k, v, cache):
        group = config.num_heads // config.num_kv_heads
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        distance = jnp.arange(q.shape[0])[:, None] - jnp.arange(q.shape[0])[None, :]
        seen = distance >= 0
        if config.layer_window(layer) is not None:
            seen &= distance < config.layer_window(layer)
        scores = jnp.where(seen[None], scores, -jnp.inf)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v), cache

    return attend


def logits_of(config, params, tokens, form=ProductForm()):  # noqa: B008
    model, params = Llama(config, form=form), split(params, form.parts)
    t = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    lens = jnp.full(len(tokens), len(tokens), jnp.int32)
    hidden, _ = model.apply({"params": params}, t, positions, lens, None, attend_dense(config))
    return np.asarray(model.apply({"params": params}, hidden, method="unembed"))


def randomised(params, seed):
    """Biases and norms too: initial zeros and ones would hide a missing one."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape) + (x.ndim == 1), jnp.float32), params
    )


def transformers_model(hf, config, params):
    """The same weights in transformers, split back into its own tensors."""
    torch = pytest.importorskip("torch")
    import transformers

    classes = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
    name = classes[hf["model_type"]]
    hf_config = getattr(transformers, f"{name}Config")(**hf)
    model = getattr(transformers, f"{name}ForCausalLM")(hf_config).eval()
    h, k, d = config.num_heads, config.num_kv_heads, config.head_dim
    state = {
        "model.embed_tokens.weight": params["embed_tokens"]["embedding"],
        "model.norm.weight": params["norm"]["scale"],
    }
    if not config.tie_word_embeddings:
        state["lm_head.weight"] = params["lm_head"]["kernel"]
    for i in range(config.num_layers):
        layer, prefix = params[f"layers_{i}"], f"model.layers.{i}."
        state[prefix + "input_layernorm.weight"] = layer["attn_norm"]["scale"]
        state[prefix + "post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        for ours, theirs in (("kernel", "weight"), ("bias", "bias")):
            splits = {
                "self_attn.{}_proj": ("attention", "qkv", "qkv", np.cumsum([h * d, k * d])),
                "mlp.{}_proj": ("mlp", "gate_up", ("gate", "up"), 2),
            }
            for pattern, (block, fused, parts, at) in splits.items():
                if ours in layer[block][fused]:
                    pieces = np.split(np.asarray(layer[block][fused][ours]), at)
                    for part, piece in zip(parts, pieces, strict=True):
                        state[f"{prefix}{pattern.format(part)}.{theirs}"] = piece
            for pattern, (block, name) in {
                "self_attn.o_proj": ("attention", "out"),
                "mlp.down_proj": ("mlp", "down"),
            }.items():
                if ours in layer[block][name]:
                    state[f"{prefix}{pattern}.{theirs}"] = layer[block][name][ours]
    state = {n: torch.tensor(np.array(x)) for n, x in state.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


def plain_transformers_model(loaded):
    """transformers' model of a loaded one without RoPE scaling, biases or windows."""
    c = loaded.config
    hf = {
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tie_word_embeddings,
    }
    return transformers_model(hf, c, loaded.params)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    hf = {**BASE, **CONFIGS[name]}
    config = LlamaConfig.from_hf(hf)
    params = randomised(init_params(config, jax.random.key(0)), 1)
    theirs = transformers_model(hf, config, params)
    tokens = np.random.default_rng(2).integers(0, 101, 60)
    with torch.no_grad():
        want = theirs(torch.tensor(tokens)[None]).logits[0].numpy()
    got = logits_of(config, params, tokens)
    assert np.std(want) > 0.1  # logits that are all alike would agree with anything
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_a_row_has_the_same_bits_in_any_number_of_rows():
    rng = np.random.default_rng(0)
    for n, k in ((96, 64), (960, 576), (576, 1536)):
        kernel = jnp.asarray(rng.normal(size=(n, k)), jnp.float32)
        x = jnp.asarray(rng.normal(size=(40, k)), jnp.float32)
        for dtype in (jnp.float32, jnp.bfloat16):
            f = jax.jit(linear)
            w = kernel.astype(dtype)
            whole = np.asarray(f(x, w))
            for rows in (1, 2, 3, 8, 32):
                np.testing.assert_array_equal(
                    np.asarray(f(x[7 : 7 + rows], w)), whole[7 : 7 + rows]
                )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_all_forms_of_products_agree(tied, tokens):
    """Kernels in parts of unequal sizes, tokens in rows and in columns, biases everywhere."""
    config = LlamaConfig.from_hf(
        {**BASE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": tied}
    )
    params = randomised(init_params(config, jax.random.key(0)), 1)
    ids = np.random.default_rng(2).integers(0, 101, tokens)
    want = logits_of(config, params, ids)
    assert np.ptp(want) > 1
    for form in itertools.product((False, True), (1, 2, 3)):
        got = logits_of(config, params, ids, ProductForm(*form))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_split_parameters_have_the_structure_that_the_form_asks_for():
    config = LlamaConfig.from_hf({**BASE, "attention_bias": True})
    params = init_params(config, jax.random.key(0))
    assert split(params, 1) is params
    tokens = jnp.zeros((2,), jnp.int32)
    model = Llama(config, form=ProductForm(parts=3))
    wanted = jax.eval_shape(partial(model.init, method="initialise"), jax.random.key(0), tokens)
    got = jax.tree.map(lambda x: x.shape, split(params, 3))
    assert got == jax.tree.map(lambda x: x.shape, wanted["params"])


def test_bfloat16_logits_are_close_to_float32():
    config = LlamaConfig.from_hf({**BASE, "num_key_value_heads": 2})
    params = randomised(init_params(config, jax.random.key(0)), 1)
    tokens = np.random.default_rng(2).integers(0, 101, 60)
    want = logits_of(config, params, tokens)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    model = Llama(config, jnp.bfloat16)
    t = jnp.asarray(tokens, jnp.int32)
    args = (t, jnp.arange(60, dtype=jnp.int32), jnp.full(60, 60, jnp.int32), None)

    def attend(layer, q, k, v, cache):
        out, _ = attend_dense(config)(layer, *(x.astype(jnp.float32) for x in (q, k, v)), cache)
        return out, cache

    hidden, _ = model.apply({"params": half}, *args, attend)
    got = np.asarray(model.apply({"params": half}, hidden, method="unembed"))
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-2


def test_parameters_have_the_documented_names():
    config = LlamaConfig.from_hf({**BASE, "attention_bias": True})
    params = init_params(dataclasses.replace(config, num_layers=1), jax.random.key(0))
    names = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)}
    assert "['layers_0']['attention']['qkv']['kernel']" in names
    assert "['layers_0']['attention']['out']['bias']" in names
    assert "['lm_head']['kernel']" in names
    assert params["layers_0"]["mlp"]["gate_up"]["kernel"].shape == (2 * 96, 64)
