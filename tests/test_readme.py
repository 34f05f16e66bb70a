"""README.md: its examples run, in their order, and every script and picture that it names is there."""

import functools
import importlib
import re
import sys
from pathlib import Path

import pytest
import tiny

import paxattn

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "experiments"
sys.path.insert(0, str(FOLDER))
README = (ROOT / "README.md").read_text("utf-8")
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.slow
def test_the_examples_run(monkeypatch, capsys):
    """`LLM()` is a small random model here; with the default one they take minutes."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = CHAT
    model = tiny.model(tokenizer=tokenizer)
    small = functools.partial(paxattn.LLM, model, compilation_cache=False)
    monkeypatch.setattr(paxattn, "LLM", small)
    examples = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    known = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), known)
    assert len(examples) == 4
    said = capsys.readouterr().out
    assert "row 1: empty -> 6 tokens in pages 1 3" in said
    assert "freed: 1 2" in said
    assert known["saved"].nbytes < 1000
    assert len(known["beams"][0].outputs) == 4
    assert not known["llm"].has_unfinished_requests()


def test_what_the_tables_name_exists():
    named = set(re.findall(r"`([a-z_]+)\.py`", README))
    assert named <= {path.stem for path in FOLDER.glob("*.py")}
    assert set(importlib.import_module("all").discover(FOLDER)) <= named


def test_local_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#\s]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).is_file(), target
