"""Hugging Face folders: every tensor in its place, and what is refused."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny_checkpoints import arrays, expected_params, hf_model, rewrite_config

import convert
from convert import hf_files
from convert.assemble import all_finite
from convert.names import targets
from paxattn.llama_config import LlamaConfig


def same(left, right):
    equal = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.array_equal(np.float32(a), np.float32(b)),
        left,
        right,
    )
    return jax.tree.all(equal)


@pytest.fixture
def folder(tmp_path):
    """An untied llama in one file."""
    hf_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "head_dim": 16, "num_key_value_heads": 1}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": 7}),
        ("Qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_every_tensor_in_its_place(tmp_path, name, fields):
    model = hf_model(name, **fields)
    model.save_pretrained(tmp_path)
    loaded = convert.load(tmp_path)
    assert same(loaded.params, expected_params(arrays(model), model.config))
    assert loaded.source == str(tmp_path)
    assert loaded.config == LlamaConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))


def test_shards_give_what_one_file_gives(tmp_path):
    model = hf_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert same(convert.load(tmp_path).params, expected_params(arrays(model), model.config))


@pytest.mark.parametrize(
    ("stored", "asked", "got"),
    [
        ("float32", "auto", np.float32),
        ("bfloat16", "auto", ml_dtypes.bfloat16),
        ("float16", "auto", np.float32),
        ("float32", "bfloat16", ml_dtypes.bfloat16),
        ("bfloat16", "float32", np.float32),
    ],
)
def test_dtypes(tmp_path, stored, asked, got):
    torch = pytest.importorskip("torch")
    model = hf_model().to(getattr(torch, stored))
    model.save_pretrained(tmp_path)
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    # torch's own rounding to the dtype asked for is the reference.
    state = {n: t.to(torch.bfloat16).float() if got != np.float32 else t for n, t in state.items()}
    want = expected_params({n: t.numpy() for n, t in state.items()}, model.config)
    want = jax.tree.map(lambda leaf: leaf.astype(got), want)
    assert same(convert.load(tmp_path, asked).params, want)


def test_unknown_dtype(folder):
    with pytest.raises(ValueError, match=r"dtype must be auto.*'int8'"):
        convert.load(folder, "int8")


def test_an_equal_copy_of_the_tied_head_is_let_pass_a_different_one_is_not(tmp_path):
    model = hf_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    copy = arrays(model)["model.embed_tokens.weight"].copy()
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": copy}))
    assert "lm_head" not in convert.load(tmp_path).params
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": copy + 1}))
    with pytest.raises(convert.BadCheckpoint, match=r"lm_head\.weight differs"):
        convert.load(tmp_path)


def test_old_rotary_buffers_are_ignored(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    assert convert.load(folder).config.num_layers == 2


Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop(Q0), rf"missing tensors: {Q0}"),
        (lambda t: t.pop("lm_head.weight"), r"missing tensors: lm_head\.weight"),
        (lambda t: t.update(extra=np.ones(2, np.float32)), "no place for: extra"),
        (
            lambda t: t.update({Q0.replace("weight", "bias"): np.ones(32, np.float32)}),
            r"no place for: .*q_proj\.bias",
        ),
        (
            lambda t: t.update({Q0: t[Q0].T[:, :16].copy()}),
            rf"{Q0} has shape \[32, 16\].*\[32, 32\]",
        ),
        (lambda t: t.update({Q0: np.full_like(t[Q0], np.nan)}), rf"{Q0} holds NaN or infinity"),
        (lambda t: t.update({Q0: t[Q0].astype(np.int8)}), rf"{Q0} has dtype I8"),
        (
            lambda t: [t.update({f"x.{n}": t.pop(n)}) for n in list(t)],
            "missing tensors: .* and 17 more; has it other names",
        ),
    ],
)
def test_refuses_tensors_by_name(folder, edit, named):
    edit_tensors(folder, edit)
    with pytest.raises(convert.BadCheckpoint, match=named) as caught:
        convert.load(folder)
    assert str(folder) in str(caught.value)


def test_overflow_of_the_dtype_asked_for_is_refused(folder):
    def edit(tensors):
        tensors[Q0] = tensors[Q0].astype(np.float64)
        tensors[Q0][0, 0] = 1e300

    edit_tensors(folder, edit)
    with pytest.raises(convert.BadCheckpoint, match=f"{Q0} holds NaN or infinity"):
        convert.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_file_cut_short(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(convert.BadCheckpoint, match=r"model\.safetensors: not a readable"):
        convert.load(folder)


def test_a_foreign_file(folder):
    (folder / "model.safetensors").write_bytes(b"<html>Not found</html>" * 50)
    with pytest.raises(convert.BadCheckpoint, match="not a readable safetensors file"):
        convert.load(folder)


def test_only_pickled_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(convert.BadCheckpoint, match=r"only pickled weights.*refused"):
        convert.load(folder)
    with pytest.raises(convert.BadCheckpoint, match="pickled weights can run any code"):
        convert.load(folder / "pytorch_model.bin")


def test_a_file_instead_of_its_folder(folder):
    with pytest.raises(convert.BadCheckpoint, match="pass the folder it is in"):
        convert.load(folder / "model.safetensors")


def test_nesting_beyond_all_use(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(convert.BadCheckpoint, match=r"config\.json: not readable as JSON"):
        convert.load(folder)


def test_folder_without_weights_or_anything(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(convert.BadCheckpoint, match=r"neither model\.safetensors nor [^;]*$"):
        convert.load(folder)
    (folder / "model.safetensors").rmdir()
    with pytest.raises(convert.BadCheckpoint, match=r"neither model\.safetensors nor"):
        convert.load(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(convert.BadCheckpoint, match=r"no config\.json, no paxattn\.json"):
        convert.load(tmp_path / "empty")


def test_shards_that_do_not_match_their_index(tmp_path):
    hf_model().save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / hf_files.INDEX
    whole = json.loads(index.read_text())
    shards = sorted(tmp_path.glob("*.safetensors"))

    moved = {**whole, "weight_map": {**whole["weight_map"], Q0: shards[-1].name}}
    index.write_text(json.dumps(moved))
    with pytest.raises(convert.BadCheckpoint, match=rf"{Q0} is not where"):
        convert.load(tmp_path)

    ghost = {**whole, "weight_map": {**whole["weight_map"], "ghost": shards[0].name}}
    index.write_text(json.dumps(ghost))
    with pytest.raises(convert.BadCheckpoint, match="lists tensor ghost"):
        convert.load(tmp_path)

    outside = {**whole, "weight_map": {**whole["weight_map"], Q0: "../other.safetensors"}}
    index.write_text(json.dumps(outside))
    with pytest.raises(convert.BadCheckpoint, match="is not a file name"):
        convert.load(tmp_path)

    index.write_text(json.dumps(whole))
    shards[0].unlink()
    with pytest.raises(convert.BadCheckpoint, match="this shard is missing"):
        convert.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, r"config\.json: .*model_type='gpt2'"),
        ({"hidden_act": "gelu"}, r"config\.json: .*hidden_act='gelu'"),
        ({"hidden_size": None}, "lacks the field hidden_size"),
        ({"num_hidden_layers": 3}, r"missing tensors: model\.layers\.2"),
        ({"num_hidden_layers": 10**9}, "has 21 tensors, the config speaks of 1000000000 layers"),
        ({"num_hidden_layers": 1}, r"no place for: model\.layers\.1"),
        ({"tie_word_embeddings": True}, r"lm_head\.weight differs"),
    ],
)
def test_config_of_another_model(folder, changes, named):
    rewrite_config(folder, **changes)
    with pytest.raises(convert.BadCheckpoint, match=named):
        convert.load(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\ud800".encode("utf-16", "surrogatepass")])
def test_damaged_config(folder, text):
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(convert.BadCheckpoint, match=r"config\.json: "):
        convert.load(folder)


def test_missing_tokenizer_is_said(folder):
    loaded = convert.load(folder)
    assert loaded.tokenizer is None
    assert "no tokenizer" in loaded.tokenizer_note
    assert "tokenizer.json" in loaded.tokenizer_note
    with pytest.raises(convert.BadCheckpoint, match="no tokenizer"):
        convert.load_tokenizer(folder)


def test_tokenizer_of_the_folder(folder):
    import tokenizers
    import transformers

    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "!": 3}, [("a", "b")])
    )
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="!")
    saved.save_pretrained(folder)
    loaded = convert.load(folder)
    assert loaded.tokenizer("abab!")["input_ids"] == [2, 2, 3]
    assert loaded.tokenizer_note == ""
    assert convert.load_tokenizer(folder).eos_token == "!"


def test_damaged_tokenizer_is_said(folder):
    (folder / "tokenizer.json").write_text("{}")
    loaded = convert.load(folder)
    assert loaded.tokenizer is None
    assert "cannot be read" in loaded.tokenizer_note


def test_the_table_names_every_tensor_of_transformers():
    for name in ("Llama", "Qwen2"):
        model = hf_model(name)
        config = LlamaConfig.from_hf(json.loads(model.config.to_json_string()))
        named = {s.name: s.shape for t in targets(config, "hf") for s in t.sources}
        assert named == {n: tuple(t.shape) for n, t in model.state_dict().items()}


def test_all_finite():
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        fine = np.array([0, -1, 3e4, 1e-7], dtype)
        assert all_finite(fine)
        for bad in (np.nan, np.inf, -np.inf):
            assert not all_finite(np.array([0, bad, 1], dtype))
