"""GGUF files: quantised types, llama.cpp's layout of q and k, metadata, damage."""

import gguf
import jax
import numpy as np
import pytest
from tiny_checkpoints import arrays, expected_params, hf_model, interleaved, write_gguf

import convert
from convert import gguf_files
from paxattn.llama_config import RopeScaling


def leaves(params):
    return {jax.tree_util.keystr(p): v for p, v in jax.tree_util.tree_leaves_with_path(params)}


def assert_same(left, right):
    left, right = leaves(left), leaves(right)
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


@pytest.fixture(scope="module")
def model():
    return hf_model()


@pytest.fixture
def write(tmp_path, model):
    def made(**options):
        return write_gguf(tmp_path / "m.gguf", arrays(model), model.config, **options)

    return made


# --- the values -------------------------------------------------------------------------------


def round_trip(values, kind):
    """What a quantisation keeps of `values` [.., n], worked out block by block in float64.

    The scale is stored as float16, the integers are exact: value = scale * (integer - zero) (+
    minimum), by the definitions in llama.cpp's ggml-quants.c.
    """
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    if kind in ("F16", "BF16", "F32"):
        wide = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32}[kind]
        bits = np.ascontiguousarray(packed).view(wide)
        if kind == "BF16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(np.float16 if kind == "F16" else np.float32).astype(np.float32)
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
    blocks = packed.reshape(-1, size)
    out = []
    for block in blocks:
        scale = float(block[:2].view(np.float16)[0])
        if kind == "Q8_0":
            out.append(scale * block[2:].view(np.int8).astype(np.float64))
            continue
        nibbles = block[2:] if kind == "Q4_0" else block[4:]
        integers = np.concatenate([nibbles & 15, nibbles >> 4]).astype(np.float64)
        if kind == "Q4_0":
            out.append(scale * (integers - 8))
        else:
            out.append(scale * integers + float(block[2:4].view(np.float16)[0]))
    return np.concatenate(out).reshape(values.shape).astype(np.float32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_values_of_each_type(model, write, kind):
    state = arrays(model)

    def through(name, values):
        if values.ndim == 1:
            return values
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        stored = round_trip(interleaved(values, heads) if heads else values, kind)
        if not heads:
            return stored
        back = np.empty_like(stored)
        dim = values.shape[0] // heads
        for row in range(values.shape[0]):
            head, i = divmod(row, dim)
            half, pair = divmod(i, dim // 2)
            back[row] = stored[head * dim + 2 * pair + half]
        return back

    want = expected_params({n: through(n, v) for n, v in state.items()}, model.config)
    loaded = convert.load(write(kind=kind), "float32")
    assert_same(loaded.params, want)


@pytest.mark.parametrize(
    ("kind", "asked", "got"),
    [
        ("F32", "auto", "float32"),
        ("F16", "auto", "float32"),
        ("BF16", "auto", "bfloat16"),
        ("Q8_0", "auto", "float32"),
        ("Q8_0", "bfloat16", "bfloat16"),
    ],
)
def test_dtype(write, kind, asked, got):
    params = convert.load(write(kind=kind), asked).params
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {got}


def test_quantised_is_bfloat16_on_accelerators(write, monkeypatch):
    file = gguf_files.open_gguf(write(kind="Q4_0"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert gguf_files.auto_dtype(file) == "bfloat16"


def test_k_quants_by_hand(tmp_path):
    # One block of 256 values each, made so that every value is the same simple number.
    half = np.array([0.5], np.float16).view(np.uint8)
    quarter = np.array([0.25], np.float16).view(np.uint8)
    # Q6_K: 0.5 * scale 2 * (1 - 32) = -31
    q6 = np.concatenate([np.full(128, 0x11), np.zeros(64), np.full(16, 2), half])
    # Q4_K: 0.5 * scale 3 * 5 - 0.25 * minimum 1 = 7.25
    scales = np.array([3] * 4 + [1] * 4 + [0x13] * 4)
    q4 = np.concatenate([half, quarter, scales, np.full(128, 0x55)])

    def written(path):
        writer = gguf.GGUFWriter(path, "llama")
        for name, block, kind in (("up", q6, "Q6_K"), ("down", q4, "Q4_K")):
            rows = np.tile(block.astype(np.uint8), (256, 1))
            writer.add_tensor(
                f"blk.0.ffn_{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType[kind]
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return gguf_files.open_gguf(path)

    file = written(tmp_path / "k.gguf")
    np.testing.assert_array_equal(gguf_files.read_tensor(file, "blk.0.ffn_up.weight"), -31.0)
    np.testing.assert_array_equal(gguf_files.read_tensor(file, "blk.0.ffn_down.weight"), 7.25)


def test_split_halves_undoes_the_interleaving():
    values = np.arange(2 * 6 * 3).reshape(12, 3)
    np.testing.assert_array_equal(gguf_files.split_halves(interleaved(values, 2), 2), values)
    np.testing.assert_array_equal(gguf_files.split_halves(np.arange(6), 1), [0, 2, 4, 1, 3, 5])


@pytest.mark.parametrize(
    ("name", "arch", "fields"),
    [
        ("Llama", "llama", {"tie_word_embeddings": True}),
        ("Llama", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", "qwen2", {}),
    ],
)
def test_biases_ties_and_qwen2(tmp_path, name, arch, fields):
    model = hf_model(name, **fields)
    path = write_gguf(tmp_path / "m.gguf", arrays(model), model.config, arch=arch)
    model.save_pretrained(tmp_path / "hf")
    from_gguf, from_hf = convert.load(path), convert.load(tmp_path / "hf")
    assert_same(from_gguf.params, from_hf.params)
    assert_same(from_gguf.params, expected_params(arrays(model), model.config))
    same = ("attention_bias", "attention_out_bias", "mlp_bias", "tie_word_embeddings")
    for field in (*same, "head_dim", "rms_norm_eps", "rope_theta", "num_kv_heads"):
        assert getattr(from_gguf.config, field) == getattr(from_hf.config, field), field


# --- the metadata -----------------------------------------------------------------------------


def test_config(write):
    ids = [("add_eos_token_id", 2), ("add_eot_token_id", 7), ("add_bos_token_id", 1)]
    config = convert.load(write(metadata=ids)).config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (48, 32, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_position_embeddings) == (8, 128)
    assert config.rms_norm_eps == 1e-6  # and not the float32 nearest to it
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 7), 1)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ([("add_rope_scaling_type", gguf.RopeScalingType.NONE)], None),
        (
            [
                ("add_rope_scaling_type", gguf.RopeScalingType.LINEAR),
                ("add_rope_scaling_factor", 2.5),
            ],
            RopeScaling("linear", 2.5),
        ),
        (
            [
                ("add_rope_scaling_type", gguf.RopeScalingType.YARN),
                ("add_rope_scaling_factor", 4.0),
                ("add_rope_scaling_orig_ctx_len", 32),
            ],
            RopeScaling("yarn", 4.0, 32),
        ),
    ],
)
def test_rope_scaling(write, metadata, expected):
    assert convert.load(write(metadata=metadata)).config.rope_scaling == expected


def test_llama3_rope_is_known_by_its_divisors(write, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for factor in (8.0, 32.0):
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        }
        theirs = transformers.LlamaConfig(
            hidden_size=128 * 4, num_attention_heads=4, rope_parameters=rope
        )
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
        plain = 500000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
        ours = RopeScaling("llama3", factor, 8192)
        divisors = gguf_files.llama3_divisors(ours, 128, 500000.0)
        np.testing.assert_allclose(divisors, (plain / frequencies).numpy(), rtol=1e-5)

    def stored(values):
        return lambda tensors: tensors.update({"rope_freqs.weight": np.float32(values)})

    ours = RopeScaling("llama3", 32.0, 8192)
    path = write(edit=stored(gguf_files.llama3_divisors(ours, 8, 10000.0)))
    assert convert.load(path).config.rope_scaling == ours
    with pytest.raises(convert.BadCheckpoint, match=r"rope_freqs\.weight is not"):
        convert.load(write(edit=stored([1, 2, 3, 4])))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ([("add_expert_count", 8)], r"llama\.expert_count=8"),
        ([("add_rope_dimension_count", 4)], r"llama\.rope\.dimension_count=4"),
        ([("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE)], "longrope"),
        ([("add_key_length", 6)], "value_length|has shape"),
    ],
)
def test_refuses_metadata_by_name(write, metadata, named):
    with pytest.raises(convert.BadCheckpoint, match=named):
        convert.load(write(metadata=metadata))


def test_another_architecture(write):
    with pytest.raises(convert.BadCheckpoint, match=r"architecture='gemma2'.*known: llama, qwen2"):
        convert.load(write(arch="gemma2"))


# --- tensors and damage -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop("blk.1.attn_k.weight"), r"missing tensors: blk\.1\.attn_k\.weight"),
        (lambda t: t.update({"blk.0.x": np.ones(2)}), r"no place for: blk\.0\.x"),
        (lambda t: t.update({"blk.0.attn_norm.weight": np.ones(5)}), r"attn_norm.*\[5\].*\[32\]"),
        (lambda t: t.update({"output_norm.weight": np.full(32, np.inf)}), "output_norm.*infinity"),
    ],
)
def test_refuses_tensors_by_name(write, edit, named):
    with pytest.raises(convert.BadCheckpoint, match=named):
        convert.load(write(edit=edit))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.6, 0.999])
def test_a_file_cut_short(write, share):
    path = write()
    whole = path.read_bytes()
    path.write_bytes(whole[: max(int(len(whole) * share), 4)])
    with pytest.raises(convert.BadCheckpoint, match=r"m\.gguf: .*(cut short|ends inside)"):
        convert.load(path)


def test_a_damaged_header_never_escapes_as_another_error(write):
    path = write()
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(40):
        damaged = bytearray(whole)
        for at in rng.integers(4, 900, 6):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            loaded = convert.load(path)
        except convert.BadCheckpoint as error:
            errors.append(str(error))
        else:  # damage in a number that any value fits, such as the context length
            assert loaded.config.hidden_size == 32
    assert len(errors) > 20
    assert all(str(path) in error for error in errors)


def test_a_damaged_length_is_not_walked_to_its_end(write):
    path = write(metadata=[("add_array", "some.numbers", [1, 2, 3])])
    whole = bytearray(path.read_bytes())
    at = whole.index(b"some.numbers") + len("some.numbers") + 8  # past the two types
    whole[at : at + 8] = (2**60).to_bytes(8, "little")
    path.write_bytes(whole)
    with pytest.raises(convert.BadCheckpoint, match="not a readable GGUF file"):
        convert.load(path)


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("head_count", "string", "many"),
        ("rope.freq_base", "string", "x"),
        ("epsilon", "array", [1]),
    ],
)
def test_a_key_of_another_type(tmp_path, model, key, kind, value):
    class Odd(gguf.GGUFWriter):
        def add_key_value(self, name, given, *rest, **more):
            if name.endswith(key):
                types = {"string": gguf.GGUFValueType.STRING, "array": gguf.GGUFValueType.ARRAY}
                return super().add_key_value(name, value, types[kind])
            return super().add_key_value(name, given, *rest, **more)

    path = write_gguf(tmp_path / "m.gguf", arrays(model), model.config, writer=Odd)
    with pytest.raises(convert.BadCheckpoint, match="the metadata cannot be used"):
        convert.load(path)


def test_a_foreign_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(convert.BadCheckpoint, match="does not begin with 'GGUF'"):
        convert.load(path)


def test_one_part_of_a_split_model(write):
    with pytest.raises(convert.BadCheckpoint, match="one of 3 parts"):
        convert.load(write(metadata=[("add_uint16", "split.count", 3)]))


def test_the_only_gguf_of_a_folder(write):
    path = write()
    assert convert.load(path.parent).source == str(path)
    (path.parent / "n.gguf").write_bytes(path.read_bytes())
    with pytest.raises(convert.BadCheckpoint, match=r"several GGUF files.*m\.gguf, n\.gguf"):
        convert.load(path.parent)


def test_no_tokenizer_is_said(write):
    loaded = convert.load(write())
    assert loaded.tokenizer is None
    assert "no tokenizer" in loaded.tokenizer_note
