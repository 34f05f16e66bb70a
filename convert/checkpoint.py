"""An Orbax checkpoint of the converted model, written whole or not at all.

    OUT_DIR/
      params/         the parameters, by Orbax
      paxattn.json    the config and what else loading needs
      tokenizer...    the tokenizer's files, if the model has one

Everything is written into a hidden folder beside OUT_DIR that takes the name OUT_DIR in one
rename at the end, so a conversion that dies leaves no folder that loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from convert.assemble import DTYPES, Params, check_layers
from convert.errors import BadCheckpoint
from convert.hf_files import read_json
from convert.names import targets
from paxattn.llama_config import LlamaConfig, RopeScaling

MANIFEST = "paxattn.json"
_VERSION = 1
_PARTIAL = ".partial-"


def save(out: Path, config: LlamaConfig, params: Params, tokenizer: Any, source: str) -> None:
    """Write the checkpoint `out`.

    Args:
      out: a folder that does not exist yet, or an empty one.
      config: the model.
      params: its parameters, as `assemble` makes them.
      tokenizer: a transformers tokenizer, or None.
      source: where the weights came from, for the record.

    Raises:
      ValueError: `out` has something in it.
      OSError: the disk is full, or `out` cannot be written; nothing is left behind.
    """
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_space(out.parent, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
    with _whole_folder(out) as partial:
        _save_params(partial / "params", params, out)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(partial))
        dtype = str(jax.tree.leaves(params)[0].dtype)
        manifest = {
            "version": _VERSION,
            "config": dataclasses.asdict(config),
            "dtype": dtype,
            "tokenizer": tokenizer is not None,
            "source": source,
        }
        with open(partial / MANIFEST, "w", encoding="utf-8") as stream:
            json.dump(manifest, stream, indent=2)
            stream.flush()
            os.fsync(stream.fileno())


def check_free(out: Path) -> None:
    """Raises ValueError unless `out` is free to be written: absent, or an empty folder."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"{out} exists; remove it or choose another folder")


def _check_space(folder: Path, need: int) -> None:
    need += 32 * 2**20  # tokenizer, manifest and what the file system takes
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(
            errno.ENOSPC,
            f"no space left: the checkpoint takes up to {need / 1e6:,.0f} MB, "
            f"{free / 1e6:,.0f} MB are free",
            str(folder),
        )


def _save_params(target: Path, params: Params, out: Path) -> None:
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # the library logs each failure with five tracebacks
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(target, params)
    except Exception as error:  # a full disk comes as a ValueError of tensorstore's
        reason = " ".join(str(error).split())
        raise OSError(f"{out}: cannot be written ({reason[:120]} .. {reason[-80:]})") from None
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` that becomes `out` if the block ends well, else goes."""
    for left in out.parent.glob(f".{out.name}{_PARTIAL}*"):
        if not _alive(left.name.rpartition("-")[2]):  # of a conversion that was killed
            shutil.rmtree(left, ignore_errors=True)
    partial = out.parent.resolve() / f".{out.name}{_PARTIAL}{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        os.rename(partial, out)
    finally:
        for _ in range(20):  # a writer thread that is just failing may still make files
            shutil.rmtree(partial, ignore_errors=True)
            if not partial.exists():
                break
            time.sleep(0.05)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` is one that `save` finished."""
    return (folder / MANIFEST).is_file() and _PARTIAL not in folder.name


def read_config(folder: Path) -> LlamaConfig:
    """The model of a checkpoint.

    Raises:
      BadCheckpoint: the manifest is damaged or of another version.
    """
    return _config(folder, _manifest(folder))


def read_params(folder: Path, config: LlamaConfig, dtype: str = "auto") -> Params:
    """The parameters as they were saved, or cast to `dtype` ("float32" or "bfloat16").

    Raises:
      BadCheckpoint: an array is missing, extra, misshapen or unreadable.
    """
    own = _manifest(folder)["dtype"]
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            stored = checkpointer.metadata(folder / "params").item_metadata.tree
            found = {
                tuple(key.key for key in path): tuple(leaf.shape)
                for path, leaf in jax.tree_util.tree_leaves_with_path(stored)
            }
            check_layers(config, len(found), str(folder))
            wanted = {target.path: target.shape for target in targets(config, "hf")}
            _check(folder, wanted, found)
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored)
            restored = checkpointer.restore(
                folder / "params", args=ocp.args.PyTreeRestore(restore_args=as_numpy)
            )
    except BadCheckpoint:
        raise
    except Exception as error:  # the library's errors are of many kinds
        reason = " ".join(str(error).split())[:200]
        raise BadCheckpoint(f"{folder}: cannot be restored ({reason}); convert again") from None
    target = DTYPES[own if dtype == "auto" else dtype]
    return jax.tree.map(lambda leaf: leaf.astype(target, copy=False), restored)


def _check(folder: Path, wanted: dict, found: dict) -> None:
    for path in sorted(wanted.keys() | found.keys()):
        if wanted.get(path) != found.get(path):
            raise BadCheckpoint(
                f"{folder}: parameter {'/'.join(path)} has shape {found.get(path)}, the config "
                f"asks for {wanted.get(path)}; convert again"
            )


def _manifest(folder: Path) -> dict[str, Any]:
    manifest = read_json(folder / MANIFEST)
    if manifest.get("version") != _VERSION or manifest.get("dtype") not in DTYPES:
        raise BadCheckpoint(
            f"{folder / MANIFEST}: version {manifest.get('version')!r} with dtype "
            f"{manifest.get('dtype')!r} is not known; convert the model again"
        )
    return manifest


def _config(folder: Path, manifest: dict[str, Any]) -> LlamaConfig:
    try:
        raw = dict(manifest["config"])
        scaling, windows = raw.pop("rope_scaling"), raw.pop("sliding_window")
        return LlamaConfig(
            **{**raw, "eos_token_ids": tuple(raw["eos_token_ids"])},
            rope_scaling=None if scaling is None else RopeScaling(**scaling),
            sliding_window=tuple(windows) if isinstance(windows, list) else windows,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(
            f"{folder / MANIFEST}: the config is damaged ({error}); convert the model again"
        ) from None
