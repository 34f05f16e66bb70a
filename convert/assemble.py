"""Named tensors to the model's parameters, every shape checked, nothing ignored in silence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from convert.errors import BadCheckpoint
from convert.names import Source, Target, targets
from paxattn.llama_config import LlamaConfig

Params = dict[str, Any]
"""Nested dict of numpy arrays, keyed by the Flax module names."""

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def assemble(
    config: LlamaConfig,
    file_format: str,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[Source], np.ndarray],
    dtype: np.dtype,
    where: str,
    progress: bool = False,
) -> Params:
    """Build the parameters of `config` in `dtype`.

    Reads one tensor at a time, so that the peak is the result and one tensor.

    Args:
      config: the model.
      file_format: "hf" or "gguf".
      shapes: name -> shape of every tensor that the checkpoint holds.
      read: gives a tensor's values, `[*shape]` in any float dtype.
      dtype: of every parameter.
      where: the checkpoint's path, for messages.
      progress: show a bar on the terminal.

    Raises:
      BadCheckpoint: a tensor is missing, extra, misshapen, or not finite; named.
    """
    check_layers(config, len(shapes), where)
    wanted = targets(config, file_format)
    check_names(config, wanted, shapes, where)
    params: Params = {}
    total = sum(len(target.sources) for target in wanted)
    silent = not (progress and sys.stderr.isatty())
    with tqdm(total=total, desc="tensors", disable=silent, leave=False) as shown:
        for target in wanted:
            out = np.empty(target.shape, dtype)
            start = 0
            for source in target.sources:
                rows = out[start : start + source.shape[0]]
                with np.errstate(over="ignore"):  # what overflows is refused just below
                    rows[...] = read(source).astype(dtype, copy=False)
                if not all_finite(rows):
                    raise BadCheckpoint(
                        f"{where}: tensor {source.name} holds NaN or infinity (in {dtype}); the "
                        "file is damaged, fetch it again"
                    )
                start += source.shape[0]
                shown.update()
            _put(params, target.path, out)
    return params


def check_layers(config: LlamaConfig, tensors: int, where: str) -> None:
    """Refuse an absurd number of layers before its names are made."""
    if config.num_layers > tensors:
        raise BadCheckpoint(
            f"{where}: has {tensors} tensors, the config speaks of {config.num_layers} layers"
        )


def check_names(
    config: LlamaConfig,
    wanted: tuple[Target, ...],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of `config`.

    Raises:
      BadCheckpoint: naming the missing, extra or misshapen tensors.
    """
    sources = {source.name: source for target in wanted for source in target.sources}
    missing = [name for name in sources if name not in shapes]
    extra = [name for name in shapes if name not in sources]
    if missing:
        hint = "; has it other names?" if len(missing) == len(sources) else ""
        raise BadCheckpoint(f"{where}: missing tensors: {_listed(missing)}{hint}")
    if extra:
        raise BadCheckpoint(
            f"{where}: tensors that this config has no place for: {_listed(extra)}; "
            "the model would run without them"
        )
    for name, source in sources.items():
        if tuple(shapes[name]) != source.shape:
            raise BadCheckpoint(
                f"{where}: tensor {name} has shape {list(shapes[name])}, the config asks for "
                f"{list(source.shape)}"
            )


def _listed(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _put(params: Params, path: tuple[str, ...], value: np.ndarray) -> None:
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = value


def all_finite(values: np.ndarray) -> bool:
    """Whether no element is NaN or infinite; bfloat16 by its bits, which is ten times faster."""
    if values.dtype == DTYPES["bfloat16"]:
        exponent = np.uint16(0x7F80)
        return not bool(((values.view(np.uint16) & exponent) == exponent).any())
    return bool(np.isfinite(values).all())
