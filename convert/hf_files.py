"""A Hugging Face folder: config.json, safetensors (sharded or not), tokenizer. Never pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from convert.assemble import DTYPES, Params, assemble
from convert.errors import BadCheckpoint
from convert.names import Source
from paxattn.llama_config import LlamaConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# safetensors' names of the dtypes that weights come in.
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Buffers that old checkpoints carry and that the model computes itself.
_COMPUTED = (".rotary_emb.inv_freq", ".attention.bias", ".masked_bias")


class Entry(NamedTuple):
    """Where a tensor lies: `file[begin:end]`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      BadCheckpoint: not readable, not JSON, or not an object; names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: not readable as JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_config(folder: Path) -> LlamaConfig:
    """The model that `folder/config.json` describes.

    Raises:
      BadCheckpoint: unreadable, or a model that cannot be run (the field is named).
    """
    path = folder / "config.json"
    raw = read_json(path)
    try:
        return LlamaConfig.from_hf(raw)
    except ValueError as error:
        raise BadCheckpoint(f"{path}: {error}") from None


def read_params(
    folder: Path, config: LlamaConfig, dtype: str = "auto", progress: bool = False
) -> Params:
    """The parameters in `folder`'s safetensors files; see `assemble` for what is refused.

    Args:
      folder: holds `model.safetensors`, or shards with `model.safetensors.index.json`.
      config: the model.
      dtype: "float32", "bfloat16", or "auto": that of the embedding in the file; float16 and
        float64 files become float32.
      progress: show a bar on the terminal.
    """
    entries = read_entries(folder)
    if config.tie_word_embeddings:
        _drop_tied_head(entries, folder)
    if dtype == "auto":
        embedding = entries.get("model.embed_tokens.weight")
        own = embedding.dtype if embedding else "F32"
        dtype = "bfloat16" if own == "BF16" else "float32"
    shapes = {name: entry.shape for name, entry in entries.items()}

    def read(source: Source) -> np.ndarray:
        return read_tensor(entries[source.name], source.name)

    return assemble(config, "hf", shapes, read, DTYPES[dtype], str(folder), progress)


def read_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor in the folder's safetensors files, by name.

    Raises:
      BadCheckpoint: no safetensors, only pickles, a missing shard, a damaged file, an index that
        does not match its shards, or a dtype that no weight should have.
    """
    files, index = _weight_files(folder)
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name in entries:
                raise BadCheckpoint(f"{file}: tensor {name} is also in {entries[name].file}")
            if index is not None and index.get(name) != file.name:
                raise BadCheckpoint(
                    f"{file}: tensor {name} is not where {INDEX} says ({index.get(name)})"
                )
            entries[name] = entry
    for name in index or ():
        if name not in entries:
            raise BadCheckpoint(f"{folder / INDEX}: lists tensor {name}, which is in no shard")
    for name in [n for n in entries if n.endswith(_COMPUTED)]:
        del entries[name]
    for name, entry in entries.items():
        if entry.dtype not in _DTYPES:
            raise BadCheckpoint(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}; "
                f"weights come as {', '.join(_DTYPES)} (quantised weights: use a GGUF file)"
            )
    return entries


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise BadCheckpoint(f"{folder / INDEX}: has no weight_map")
        for shard in index.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise BadCheckpoint(f"{folder / INDEX}: {shard!r} is not a file name")
        files = [folder / shard for shard in sorted(set(index.values()))]
        for file in files:
            if not file.is_file():
                raise BadCheckpoint(f"{file}: this shard is missing; fetch the model again")
        return files, index
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], None
    others = sorted(p.name for p in folder.glob("*.safetensors") if p.is_file())
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles and not others:
        raise BadCheckpoint(
            f"{folder}: has only pickled weights ({pickles[0]}), which can run any code when "
            "read and are refused; convert them to safetensors first"
        )
    seen = f"; found {', '.join(others)}" if others else ""
    raise BadCheckpoint(f"{folder}: has neither {SINGLE} nor {INDEX}{seen}")


def _read_header(file: Path) -> dict[str, Entry]:
    try:
        # The library checks that the header is sound and covers the file exactly.
        with safetensors.safe_open(str(file), "numpy"):
            pass
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise BadCheckpoint(
            f"{file}: not a readable safetensors file ({error}); was the download cut short?"
        ) from None
    header.pop("__metadata__", None)
    base = 8 + size
    return {
        name: Entry(
            file,
            info["dtype"],
            tuple(info["shape"]),
            base + info["data_offsets"][0],
            base + info["data_offsets"][1],
        )
        for name, info in header.items()
    }


def read_tensor(entry: Entry, name: str) -> np.ndarray:
    """A tensor's values as the file has them, `[*entry.shape]` in the file's dtype."""
    dtype = _DTYPES[entry.dtype]
    count = (entry.end - entry.begin) // dtype.itemsize
    values = np.fromfile(entry.file, dtype, count, offset=entry.begin)
    if values.size != count:
        raise BadCheckpoint(f"{entry.file}: ends inside tensor {name}")
    return values.reshape(entry.shape)


def _drop_tied_head(entries: dict[str, Entry], folder: Path) -> None:
    """Let a tied model carry an equal copy of its embedding as lm_head, as some do."""
    head, embedding = entries.get("lm_head.weight"), entries.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return
    same = head.shape == embedding.shape and np.array_equal(
        read_tensor(head, "lm_head.weight"), read_tensor(embedding, "model.embed_tokens.weight")
    )
    if not same:
        raise BadCheckpoint(
            f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from "
            "model.embed_tokens.weight; correct the config.json"
        )
    del entries["lm_head.weight"]


def read_tokenizer(folder: Path, own: bool = False) -> tuple[Any | None, str]:
    """(tokenizer, "") or (None, why there is none). No code from the folder is run.

    Args:
      folder: holds the tokenizer's files.
      own: the folder is a checkpoint of this project's, whose tokenizer.json says everything; a
        foreign folder may need the class that its tokenizer_config.json names.
    """
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        return None, (
            f"{folder} has no tokenizer (none of {', '.join(names)}); copy the model's "
            "tokenizer.json there, or pass token ids"
        )
    import transformers

    kind = transformers.PreTrainedTokenizerFast if own else transformers.AutoTokenizer
    try:
        found = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library's errors are of many kinds
        reason = " ".join(str(error).split())[:300]
        return None, f"{folder}: the tokenizer cannot be read ({reason})"
    return found, ""
