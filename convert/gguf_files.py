"""A GGUF file: its metadata as a config, its tensors dequantised as parameters.

The `gguf` library reads and dequantises; here stand the meaning of the keys and llama.cpp's two
departures from Hugging Face: q and k rows of a LLaMA are stored with the two halves of each head
interleaved, and Llama 3's rotary scaling is a tensor (`rope_freqs.weight`), not a setting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import numpy as np

from convert.assemble import DTYPES, Params, assemble
from convert.errors import BadCheckpoint
from convert.names import Source
from paxattn.llama_config import LlamaConfig, RopeScaling

ARCHITECTURES = ("llama", "qwen2")
_ROPE_FREQS = "rope_freqs.weight"
_FLOATS = {"F32", "F16", "F64", "BF16"}


class GgufFile(NamedTuple):
    """An opened GGUF file; tensors are mapped, not read."""

    path: Path
    fields: dict[str, Any]
    """Metadata: str, int, float, bool, or a list of them."""
    tensors: dict[str, Any]
    """Name -> `gguf.ReaderTensor`; shapes there are reversed, `[in, out]`."""


class _Reader(gguf.GGUFReader):
    """The library's reader on a plain array, since slicing a `memmap` half a million times is
    slow; and strict at the end of the file, since a damaged length would be walked to its end."""

    @property
    def data(self) -> Any:
        return self._bytes

    @data.setter
    def data(self, mapped: Any) -> None:
        self._bytes = np.asarray(mapped)

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if found.size < int(count):
            raise ValueError("the file ends early")
        return found


def is_gguf(path: Path) -> bool:
    """Whether the file begins as GGUF files do."""
    with open(path, "rb") as stream:
        return stream.read(4) == b"GGUF"


def open_gguf(path: Path) -> GgufFile:
    """Open `path` and read its metadata.

    Raises:
      BadCheckpoint: not GGUF, damaged, cut short, or one part of a split model.
    """
    try:
        reader = _Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # a damaged file fails in many ways inside the library
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadCheckpoint(
            f"{path}: not a readable GGUF file ({reason}); was the download cut short?"
        ) from None
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise BadCheckpoint(f"{path}: is a big-endian GGUF file; use a little-endian one")
    if fields.get("split.count", 1) > 1:
        raise BadCheckpoint(
            f"{path}: is one of {fields['split.count']} parts; merge them first with "
            "llama.cpp's `llama-gguf-split --merge`"
        )
    size = path.stat().st_size
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size or tensor.data.nbytes != tensor.n_bytes:
            raise BadCheckpoint(f"{path}: ends inside tensor {tensor.name}; fetch it again")
    return GgufFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})


def read_config(file: GgufFile) -> LlamaConfig:
    """The model that the metadata describes.

    Raises:
      BadCheckpoint: a key is missing, or asks for what cannot be run; named with its value.
    """
    arch = file.fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise BadCheckpoint(
            f"{file.path}: general.architecture={arch!r} cannot be run "
            f"(known: {', '.join(ARCHITECTURES)})"
        )

    try:
        return _config(file, arch)
    except BadCheckpoint:
        raise
    except (ValueError, TypeError, OverflowError) as error:  # a key of another type than its own
        raise BadCheckpoint(f"{file.path}: the metadata cannot be used: {error}") from None


def _config(file: GgufFile, arch: str) -> LlamaConfig:
    def get(key: str, default: Any = None) -> Any:
        value = file.fields.get(f"{arch}.{key}", default)
        return _shortest(value) if isinstance(value, float) else value

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise BadCheckpoint(f"{file.path}: the metadata lacks {arch}.{key}")
        return value

    for key in ("expert_count", "logit_scale", "residual_scale", "embedding_scale"):
        if get(key) not in (None, 0, 1, 1.0):
            raise BadCheckpoint(f"{file.path}: {arch}.{key}={get(key)!r} cannot be run")
    heads = need("attention.head_count")
    hidden = need("embedding_length")
    head_dim = get("attention.key_length", hidden // heads if heads else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise BadCheckpoint(
                f"{file.path}: {arch}.{key}={get(key)!r} cannot be run: it differs from the "
                f"head dimension {head_dim}"
            )
    theta = get("rope.freq_base", 10000.0)
    return LlamaConfig(
        vocab_size=get("vocab_size", len(file.fields.get("tokenizer.ggml.tokens") or [])),
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=need("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, get, head_dim, theta),
        max_position_embeddings=need("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        sliding_window=get("attention.sliding_window") or None,
        eos_token_ids=_eos_ids(file.fields),
        bos_token_id=file.fields.get("tokenizer.ggml.bos_token_id"),
    )


def read_params(
    file: GgufFile, config: LlamaConfig, dtype: str = "auto", progress: bool = False
) -> Params:
    """The parameters, dequantised; see `assemble` for what is refused.

    Args:
      file: an opened file.
      config: what `read_config` gave for it.
      dtype: "float32", "bfloat16", or "auto": see `auto_dtype`.
      progress: show a bar on the terminal.
    """
    if dtype == "auto":
        dtype = auto_dtype(file)
    shapes = {
        name: tuple(int(n) for n in reversed(tensor.shape))
        for name, tensor in file.tensors.items()
        if name != _ROPE_FREQS
    }
    interleaved = file.fields["general.architecture"] == "llama"

    def read(source: Source) -> np.ndarray:
        values = read_tensor(file, source.name)
        if interleaved and source.rotary_heads:
            values = split_halves(values, source.rotary_heads)
        return values

    return assemble(config, "gguf", shapes, read, DTYPES[dtype], str(file.path), progress)


def auto_dtype(file: GgufFile) -> str:
    """The file's own dtype if its matrices are plain bfloat16 or float; for quantised (and
    float16) ones float32 on CPUs, which compute in it, and bfloat16 on accelerators."""
    kinds = {t.tensor_type.name for t in file.tensors.values() if len(t.shape) > 1}
    if kinds <= {"BF16"}:
        return "bfloat16"
    if kinds <= {"F32", "F64"}:
        return "float32"
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def read_tensor(file: GgufFile, name: str) -> np.ndarray:
    """One tensor as float32, `[out, in]` or `[n]`.

    Raises:
      BadCheckpoint: of a type that the `gguf` library cannot dequantise.
    """
    tensor = file.tensors[name]
    kind = tensor.tensor_type
    if kind.name == "F64":
        return np.asarray(tensor.data).astype(np.float32)
    try:
        # Bit patterns of a damaged file may overflow; `assemble` refuses what is not finite.
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(np.asarray(tensor.data), kind)
    except NotImplementedError:
        raise BadCheckpoint(
            f"{file.path}: tensor {name} is of type {kind.name}, which cannot be dequantised; "
            "use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or a K-quant"
        ) from None
    return np.asarray(values, np.float32)


def split_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of rotary pairs: rows (0, 1, 2, 3, ..) of each head there are
    rows (0, D/2, 1, D/2 + 1, ..) of Hugging Face.

    Args:
      values: `[heads * D, ...]`, a q or k weight or bias.
      heads: query or KV heads.
    """
    half = values.shape[0] // heads // 2
    pairs = values.reshape(heads, half, 2, *values.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(values.shape)


def _shortest(value: float) -> float:
    """The decimal that a float32 was written for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _eos_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    """End of text, and end of turn where the file tells them apart."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [fields.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _rope_scaling(file: GgufFile, get: Any, head_dim: int, theta: float) -> RopeScaling | None:
    if _ROPE_FREQS in file.tensors:
        return _llama3_scaling(file, head_dim, theta, get("context_length", 0))
    kind = get("rope.scaling.type")
    factor = get("rope.scaling.factor", get("rope.scale_linear", 1.0))
    if kind in (None, "none", "linear"):
        return None if factor in (0.0, 1.0) else RopeScaling("linear", factor=factor)
    if kind != "yarn":
        raise ValueError(f"rope.scaling.type={kind!r} cannot be run (known: linear, yarn)")
    original = get("rope.scaling.original_context_length", get("context_length"))
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=get("rope.scaling.attn_factor"),
        beta_fast=get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=get("rope.scaling.yarn_beta_slow", 1.0),
    )


# Llama 3.1 and 3.3; 3.2. The file holds the divisors of the frequencies that these lead to.
_LLAMA3 = tuple(
    RopeScaling("llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    for factor in (8.0, 32.0)
)


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float, longest: int) -> RopeScaling:
    stored = read_tensor(file, _ROPE_FREQS)
    for scaling in _LLAMA3:
        if stored.shape == (head_dim // 2,) and np.allclose(
            stored, llama3_divisors(scaling, head_dim, theta), rtol=1e-3
        ):
            return scaling
    raise ValueError(
        f"{_ROPE_FREQS} is not the rotary scaling of Llama 3.1, 3.2 or 3.3; convert the model "
        "from its Hugging Face folder, whose config.json says how it scales"
    )


def llama3_divisors(scaling: RopeScaling, head_dim: int, theta: float) -> np.ndarray:
    """What each rotary frequency is divided by under llama3 scaling, `[head_dim / 2]` float64."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling.factor + smooth)
