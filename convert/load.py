"""One call from a model's name to its config, parameters and tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from convert import checkpoint, gguf_files, gguf_tokenizer, hf_files
from convert.assemble import DTYPES, Params
from convert.errors import BadCheckpoint
from convert.find import find
from paxattn.llama_config import LlamaConfig


class LoadedModel(NamedTuple):
    """A model in memory."""

    config: LlamaConfig
    params: Params
    """Nested dict of numpy arrays by Flax module names, all in one dtype; kernels `[out, in]`."""
    tokenizer: Any | None
    """A transformers fast tokenizer; None: see `tokenizer_note`."""
    source: str
    """The path that was read."""
    tokenizer_note: str = ""
    """Why there is no tokenizer, and what to do; empty where there is one."""


def load(
    model: str | os.PathLike[str] | None = None, dtype: str = "auto", *, progress: bool = False
) -> LoadedModel:
    """Load a LLaMA-family model.

    Args:
      model: a Hugging Face folder, a `.gguf` file, a folder that `python -m convert` wrote, or a
        hub id; None is SmolLM2-135M-Instruct (see `convert.find.find` for where it is sought).
      dtype: of the parameters: "float32", "bfloat16", or "auto": what the checkpoint has if that
        is one of the two; float16 becomes float32. Quantised GGUF: float32 on CPUs, which
        compute in it, bfloat16 on accelerators.
      progress: show a bar on a terminal.

    Raises:
      ModelNotFound: there is no such model; says what to pass.
      BadCheckpoint: a file is damaged, foreign, or of a model that cannot be run; names the file
        and the tensor or field. Both are ValueErrors.
      ValueError: unknown dtype.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype must be auto, {' or '.join(DTYPES)}, got {dtype!r}")
    path = _locate(model)
    if path.is_file():
        file = gguf_files.open_gguf(path)
        config = gguf_files.read_config(file)
        params = gguf_files.read_params(file, config, dtype, progress)
        tokenizer, note = gguf_tokenizer.read_tokenizer(file)
    elif checkpoint.is_checkpoint(path):
        config = checkpoint.read_config(path)
        params = checkpoint.read_params(path.resolve(), config, dtype)
        tokenizer, note = hf_files.read_tokenizer(path, own=True)
    else:
        config = hf_files.read_config(path)
        params = hf_files.read_params(path, config, dtype, progress)
        tokenizer, note = hf_files.read_tokenizer(path)
    return LoadedModel(config, params, tokenizer, str(path), note)


def load_tokenizer(model: str | os.PathLike[str] | None = None) -> Any:
    """Only the tokenizer of what `load` loads.

    Raises:
      ModelNotFound, BadCheckpoint: as `load`; also where the model has no tokenizer.
    """
    path = _locate(model)
    if path.is_file():
        tokenizer, note = gguf_tokenizer.read_tokenizer(gguf_files.open_gguf(path))
    else:
        tokenizer, note = hf_files.read_tokenizer(path, own=checkpoint.is_checkpoint(path))
    if tokenizer is None:
        raise BadCheckpoint(note)
    return tokenizer


def _locate(model: str | os.PathLike[str] | None) -> Path:
    """A GGUF file, or a folder to load as a whole."""
    path = find(model)
    if path.is_file():
        _check_file(path)
        return path
    if (path / "config.json").is_file() or checkpoint.is_checkpoint(path):
        return path
    return _only_gguf(path)


def _only_gguf(folder: Path) -> Path:
    """The GGUF file of a folder that has one and nothing else to load."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise BadCheckpoint(f"{folder}: has several GGUF files; pass one of {names}")
    raise BadCheckpoint(
        f"{folder}: is no model: it has no config.json, no {checkpoint.MANIFEST} and no .gguf file"
    )


def _check_file(path: Path) -> None:
    """Refuse, with the reason, a file that is no GGUF."""
    if path.suffix in hf_files.PICKLES:
        raise BadCheckpoint(
            f"{path}: pickled weights can run any code when read and are refused; pass the folder "
            "of a safetensors model, or a .gguf file"
        )
    if path.suffix == ".safetensors":
        raise BadCheckpoint(f"{path}: pass the folder it is in, with its config.json")
    if not gguf_files.is_gguf(path):
        raise BadCheckpoint(f"{path}: is not a GGUF file (it does not begin with 'GGUF')")
