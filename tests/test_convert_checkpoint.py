"""Orbax checkpoints: identical after restoring, whole or absent, damage named."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from tiny_checkpoints import hf_model

import convert
from convert import checkpoint
from convert.__main__ import main


@pytest.fixture
def folder(tmp_path):
    hf_model(attention_bias=True, eos_token_id=[2, 7]).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def converted(folder, tmp_path):
    assert main([str(folder), str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def assert_identical(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restores_identically(folder, tmp_path, dtype, capsys):
    out = tmp_path / "deep" / "out"
    assert main([str(folder), str(out), "--dtype", dtype]) == 0
    said = capsys.readouterr()
    assert f"wrote {out}" in said.out
    assert "no tokenizer" in said.err
    source, restored = convert.load(folder, dtype), convert.load(out)
    assert restored.config == source.config
    assert_identical(restored.params, source.params)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(restored.params))
    assert restored.tokenizer is None


def test_restores_in_another_dtype(folder, converted):
    assert_identical(
        convert.load(converted, "bfloat16").params, convert.load(folder, "bfloat16").params
    )


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        ),
    ],
)
def test_config_survives(tmp_path, name, fields):
    hf_model(name, **fields).save_pretrained(tmp_path / "hf")
    loaded = convert.load(tmp_path / "hf")
    checkpoint.save(tmp_path / "out", loaded.config, loaded.params, None, "here")
    assert convert.load(tmp_path / "out").config == loaded.config
    assert hash(convert.load(tmp_path / "out").config) == hash(loaded.config)


def test_tokenizer_survives(folder, tmp_path):
    import tokenizers
    import transformers

    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "!": 3}, [("a", "b")])
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="!")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    loaded = convert.load(folder)
    checkpoint.save(tmp_path / "out", loaded.config, loaded.params, tokenizer, "here")
    restored = convert.load(tmp_path / "out").tokenizer
    assert restored("abab!")["input_ids"] == [2, 2, 3]
    assert restored.eos_token == "!"
    assert restored.chat_template == tokenizer.chat_template


def test_an_occupied_folder_is_left_alone(folder, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    assert main([str(folder), str(out)]) == 0  # empty: free to take
    before = sorted(out.rglob("*"))
    assert main([str(folder), str(out)]) == 1
    assert "exists; remove it or choose another" in capsys.readouterr().err
    assert sorted(out.rglob("*")) == before


def test_full_disk(folder, tmp_path, capsys, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    assert main([str(folder), str(tmp_path / "out")]) == 1
    assert "no space left" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["hf"]


def test_unwritable_folder(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([str(folder), str(tmp_path / "file" / "out")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_an_error_on_the_way_leaves_nothing(folder, tmp_path):
    class Broken:
        def save_pretrained(self, folder):
            raise OSError("no space left")

    loaded = convert.load(folder)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(tmp_path / "out", loaded.config, loaded.params, Broken(), "here")
    assert os.listdir(tmp_path) == ["hf"]


_SLOW = """
import sys, time, convert
from convert import checkpoint
class Slow:
    def save_pretrained(self, folder):
        print("written", flush=True)
        time.sleep(60)
loaded = convert.load(sys.argv[1])
print("loaded", flush=True)
checkpoint.save(__import__("pathlib").Path(sys.argv[2]), loaded.config, loaded.params, Slow(), "x")
"""


@pytest.mark.parametrize("when", ["partial folder exists", "parameters are written"])
def test_a_killed_conversion_leaves_nothing_that_loads(folder, tmp_path, when):
    command = [sys.executable, "-c", _SLOW, str(folder), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "loaded\n"
        if when == "parameters are written":
            assert process.stdout.readline() == "written\n"
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob(".out*")) and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    (left,) = tmp_path.glob(".out*")
    assert not (tmp_path / "out").exists()
    left.rename(tmp_path / "renamed")
    for folder_left in (tmp_path / "renamed", tmp_path / "out"):
        with pytest.raises(ValueError, match=r"is no model|is not here"):
            convert.load(folder_left)
    (tmp_path / "renamed").rename(left)
    assert main([str(folder), str(tmp_path / "out")]) == 0
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]  # the remains are cleared away
    assert_identical(convert.load(tmp_path / "out").params, convert.load(folder).params)


# --- damage -----------------------------------------------------------------------------------


def edit_manifest(folder, **changes):
    path = folder / checkpoint.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_manifest_of_another_version_or_damaged(converted):
    path = converted / checkpoint.MANIFEST
    whole = path.read_text()
    edit_manifest(converted, version=99)
    with pytest.raises(convert.BadCheckpoint, match=r"paxattn\.json: version 99"):
        convert.load(converted)
    path.write_text(whole[:50])
    with pytest.raises(convert.BadCheckpoint, match="not readable as JSON"):
        convert.load(converted)
    path.write_text(whole)
    edit_manifest(converted, config={"vocab_size": 3})
    with pytest.raises(convert.BadCheckpoint, match="the config is damaged"):
        convert.load(converted)


def test_parameters_that_do_not_match_the_config(converted):
    config = json.loads((converted / checkpoint.MANIFEST).read_text())["config"]
    edit_manifest(converted, config={**config, "intermediate_size": 65})
    with pytest.raises(
        convert.BadCheckpoint, match=r"layers_0/mlp/down/kernel has shape \(32, 64\)"
    ):
        convert.load(converted)
    edit_manifest(converted, config={**config, "num_layers": 3})
    with pytest.raises(convert.BadCheckpoint, match="layers_2/attention/out/bias has shape None"):
        convert.load(converted)


_LOADS = """
import sys, convert
for folder in sys.argv[1:]:
    try:
        convert.load(folder)
    except convert.BadCheckpoint as error:
        print(error)
"""


def test_a_file_that_is_lost(converted, tmp_path):
    # In a process of its own: tensorstore's threads complain past the error that they return.
    damaged = []
    for i, pattern in enumerate(["_METADATA", "d/*", "manifest.ocdbt", ""]):
        damaged.append(shutil.copytree(converted, tmp_path / f"damaged{i}"))
        for path in (damaged[i] / "params").glob(pattern) if pattern else []:
            path.unlink()
    shutil.rmtree(damaged[-1] / "params")
    command = [sys.executable, "-c", _LOADS, *map(str, damaged)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert len(said) == len(damaged)
    for folder, line in zip(damaged, said, strict=True):
        assert line.startswith(f"{folder}: cannot be restored")


# --- the command line -------------------------------------------------------------------------


def test_errors_are_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "nothing.gguf"), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("convert: error: ")
    assert said.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
