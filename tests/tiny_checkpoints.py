"""Tiny random models on disk, written by transformers and by the gguf library's writer."""

import json

import gguf
import numpy as np
import pytest

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def hf_model(name="Llama", seed=0, **fields):
    """A random transformers model in float32; biases and norms random too."""
    torch = pytest.importorskip("torch", reason="torch (of the test extra) writes the model")
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SIZES, **fields})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def arrays(model):
    """Name -> numpy array of a transformers model, the tied head left out."""
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def expected_params(state, config):
    """The parameters that the names say, built here once more, by hand."""
    get = state.__getitem__
    params = {
        "embed_tokens": {"embedding": get("model.embed_tokens.weight")},
        "norm": {"scale": get("model.norm.weight")},
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = {"kernel": get("lm_head.weight")}

    def linear(prefix, parts):
        layer = {"kernel": np.concatenate([get(f"{prefix}.{p}.weight") for p in parts])}
        if f"{prefix}.{parts[0]}.bias" in state:
            layer["bias"] = np.concatenate([get(f"{prefix}.{p}.bias") for p in parts])
        return layer

    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        params[f"layers_{i}"] = {
            "attn_norm": {"scale": get(f"{at}.input_layernorm.weight")},
            "attention": {
                "qkv": linear(f"{at}.self_attn", ["q_proj", "k_proj", "v_proj"]),
                "out": linear(f"{at}.self_attn", ["o_proj"]),
            },
            "mlp_norm": {"scale": get(f"{at}.post_attention_layernorm.weight")},
            "mlp": {
                "gate_up": linear(f"{at}.mlp", ["gate_proj", "up_proj"]),
                "down": linear(f"{at}.mlp", ["down_proj"]),
            },
        }
    return params


def rewrite_config(folder, **changes):
    """Change fields of `folder/config.json`; a value of None removes the field."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


_GGUF_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "self_attn.q_proj.": "attn_q.",
    "self_attn.k_proj.": "attn_k.",
    "self_attn.v_proj.": "attn_v.",
    "self_attn.o_proj.": "attn_output.",
    "mlp.gate_proj.": "ffn_gate.",
    "mlp.up_proj.": "ffn_up.",
    "mlp.down_proj.": "ffn_down.",
}


def gguf_name(name):
    for theirs, ours in _GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def interleaved(values, heads):
    """llama.cpp's order of q and k rows, row by row: 2i of a head is i, 2i + 1 is i + D/2."""
    out = np.empty_like(values)
    dim = values.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = values[head * dim + i]
            out[head * dim + 2 * i + 1] = values[head * dim + i + dim // 2]
    return out


def write_gguf(path, state, config, kind="F32", arch="llama", metadata=(), edit=None, writer=None):
    """Write a GGUF file of a transformers model's arrays; matrices are of quantisation `kind`.

    `metadata` is more (method of GGUFWriter, key or value...) calls; `edit` changes the dict of
    tensors before they are written; `writer` is a class to use instead of GGUFWriter.
    """
    writer = (writer or gguf.GGUFWriter)(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for method, *words in metadata:
        getattr(writer, method)(*words)
    tensors = {}
    for name, values in state.items():
        if arch == "llama" and "q_proj" in name:
            values = interleaved(values, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            values = interleaved(values, config.num_key_value_heads)
        tensors[gguf_name(name)] = values
    if edit is not None:
        edit(tensors)
    for name, values in tensors.items():
        quantised = gguf.GGMLQuantizationType[kind]
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(name, values.astype(np.float32))
        else:
            data = gguf.quants.quantize(values, quantised)
            writer.add_tensor(name, data, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
