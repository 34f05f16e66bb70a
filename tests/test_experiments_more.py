"""KV sizes, page sizes, alignment, and the report over all experiments."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

import alignment
import block_size
import common
import kv_size

everything = importlib.import_module("all")
FOLDER = everything.FOLDER


def outcome(module, tmp_path, *words):
    """Run a script's work in this process; its JSON."""
    args = parsed(module, tmp_path, *words)
    common.check_writable(args)
    module.run(args)
    assert (tmp_path / f"{module.__name__}.png").stat().st_size > 10_000
    return json.loads((tmp_path / f"{module.__name__}.json").read_text())


def parsed(module, tmp_path, *words):
    parser = common.parser(module.__doc__, module.__name__)
    module.options(parser)
    return parser.parse_args(["--quick", "--out", str(tmp_path), *words])


def trace_file(tmp_path, text):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    return str(path)


# --- timing -----------------------------------------------------------------------------------


def test_a_part_is_found_in_the_trace_of_a_step():
    import jax
    import jax.numpy as jnp
    import timing

    from paxattn import kv_pool

    def step(pool, x):
        with jax.named_scope("some"):
            y = jnp.sort(x[0, :4])
        with jax.named_scope("others"):
            y = jnp.sort(x @ x, axis=0) + y[0]
        return pool, y

    f = jax.jit(step, donate_argnums=0)
    program = timing.InPlace(f, kv_pool.init(1, 4, 8, 1, 4), jnp.ones((300, 300)))
    text = program.program.as_text()
    some, others = timing.operations(text, "some"), timing.operations(text, "others")
    assert any("sort" in name for name in some)
    assert any("sort" in name for name in others)
    assert not some & others
    for scope in ("some", "others"):
        milliseconds, share = timing.traced(program, scope, 2)
        assert milliseconds > 0
        assert 0 < share < 1
    assert timing.traced(program, "absent", 1) == (None, None)


# --- kv_size ----------------------------------------------------------------------------------


def test_the_size_of_llama_13b_and_the_quoted_numbers(tmp_path, capsys):
    found = outcome(kv_size, tmp_path)
    by_name = {row["model"]: row for row in found["models"]}
    row = by_name["llama-13b"]
    assert row["bytes_per_token"] == {
        "float32": 2 * 40 * 40 * 128 * 4,
        "bfloat16": 819_200,
        "float8_e4m3fn": 409_600,
    }
    assert row["attention"] == "MHA"
    assert row["request_bytes"] == 2048 * 819_200
    assert row["all_requests_bytes"] == 32 * 2048 * 819_200
    quoted = found["quoted"]
    assert quoted["tokens_in_request"] == 1586  # 1586 * 819200 <= 1.3e9 < 1587 * 819200
    assert quoted["all_gb_quoted_size"] == pytest.approx(41.6)
    assert quoted["request_gb_at_tokens"] == pytest.approx(1.6777216)
    assert "the claim holds" in capsys.readouterr().out


def test_grouped_heads_shrink_the_cache(tmp_path):
    found = outcome(
        kv_size, tmp_path, "--models", "llama-2-70b", "smollm2-135m", "--tokens", "1000"
    )
    large, small = found["models"]
    assert (large["attention"], large["mha_factor"]) == ("GQA", 8)
    assert large["request_bytes"] == 1000 * 2 * 80 * 8 * 128 * 2
    assert small["request_bytes"] == 1000 * 2 * 30 * 3 * 64 * 2
    assert small["mha_factor"] == 3


def test_sizes_over_a_trace(tmp_path):
    trace = trace_file(tmp_path, "prompt_tokens,output_tokens\n10,20\n30,40\n")
    found = outcome(kv_size, tmp_path, "--trace", trace, "--models", "llama-13b")["trace"]
    assert (found["mean"], found["longest"]) == (50, 70)
    assert found["request_gb"]["llama-13b"]["mean"] == pytest.approx(50 * 819_200 / 1e9)


def test_every_known_model_has_heads():
    assert set(kv_size.HEADS_AND_CONTEXT) == set(kv_size.KNOWN_MODELS)
    for model, (heads, _) in kv_size.HEADS_AND_CONTEXT.items():
        assert heads % kv_size.KNOWN_MODELS[model][1] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "0"), "--tokens must be at least 1"),
        (("--requests", "-1"), "--requests must be at least 1"),
        (("--trace", "nowhere.csv"), "no such trace file"),
    ],
)
def test_sizes_refuse_bad_input(tmp_path, words, message):
    with pytest.raises((common.Failure, ValueError), match=re.escape(message)):
        kv_size.run(parsed(kv_size, tmp_path, *words))


# --- alignment --------------------------------------------------------------------------------


def moved_by_bytes(start, rows, row_bytes, row_stride, word, piece):
    """Byte by byte: (pieces over all loads, distinct pieces), in bytes."""
    order = [start + r * row_stride + b for r in range(rows) for b in range(row_bytes)]
    per_load = word * 32
    loads = [order[i : i + per_load] for i in range(0, len(order), per_load)]
    requested = sum(len({byte // piece for byte in load}) for load in loads)
    return requested * piece, len({byte // piece for byte in order}) * piece


@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_counted_as_byte_by_byte(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        rows = int(rng.integers(1, 20))
        row_bytes = int(rng.integers(1, 40)) * 8
        stride = row_bytes + int(rng.integers(0, 9)) * 8
        start = int(rng.integers(0, 64)) * 4
        found = alignment.count(start, rows, row_bytes, stride)
        word = found["load_bytes"]
        for name, piece in (("sector", 32), ("line", 128)):
            expected = moved_by_bytes(start, rows, row_bytes, stride, word, piece)
            keys = (f"requested_{name}_bytes", f"distinct_{name}_bytes")
            assert tuple(found[key] for key in keys) == expected


def test_alignment_by_hand(tmp_path, monkeypatch):
    none = {"reason": "not in this test", "rows": []}
    monkeypatch.setattr(alignment, "compiled", lambda args: none)
    found = outcome(alignment, tmp_path, "--pool-mib", "2", "--repeats", "2")
    of = {(c["rows"], c["offset"]): c for c in found["counted"]}
    aligned, off = of["D 128, 16 bits, NPKD", 0], of["D 128, 16 bits, NPKD", 16]
    # a row of 256 bytes is 8 sectors or 2 lines; 16 bytes off it touches 9 and 3
    assert aligned["requested_sector_bytes"] == aligned["useful_bytes"] == 16 * 256
    assert off["requested_sector_bytes"] == 16 * 9 * 32
    assert off["requested_line_bytes"] == 16 * 3 * 128
    assert (off["page_bytes"], off["page_line_bytes"]) == (32768, 32768 + 128)
    assert of["D 128, 16 bits, NPKD", 8]["load_bytes"] == 8
    assert {t["offset"] for t in found["measured"]} == set(alignment.CPU_OFFSETS)
    assert all(t["ns_per_row"] > 0 for t in found["measured"])
    for bad in found["refused"]:
        assert bad["page_bytes"] % 128
        assert str(bad["page_bytes"]) in bad["reason"]
        assert str(bad["next_good_page_size"]) in bad["reason"]
    assert found["known_models_refused"] == 2


def test_compiled_loads_or_the_reason_why_not(tmp_path, monkeypatch):
    import aot
    import kernel_gate

    def missing(path):
        raise aot.MissingTools("get\n them")

    args = parsed(alignment, tmp_path)
    monkeypatch.setattr(aot, "find_tools", missing)
    assert alignment.compiled(args) == {"reason": "get them", "rows": []}
    monkeypatch.setattr(aot, "find_tools", lambda path: None)
    row = {"async_fraction": 1.0, "instructions_per_128_tokens": 257, "registers": 108, "more": 1}
    monkeypatch.setattr(kernel_gate, "spawn", lambda *order: row)
    found = alignment.compiled(args)
    assert [r["row_bytes"] for r in found["rows"]] == [256, 200]
    assert found["rows"][0]["async_fraction"] == 1.0
    monkeypatch.setattr(kernel_gate, "spawn", lambda *order: {"error": "it died"})
    assert alignment.compiled(args)["reason"] == "it died"


def test_readers_read_the_rows_at_the_offset():
    import jax.numpy as jnp

    memory = np.arange(2**16, dtype=np.float32).view(np.uint8)
    for row_bytes, offset in ((64, 0), (64, 16), (256, 48)):
        step = alignment.distance(row_bytes)
        chosen = np.array([3, 0, 7, 7] * 4, np.int32)
        at = (chosen[:, None] * step + offset) // 4 + np.arange(row_bytes // 4)
        rows = alignment.numpy_reader(memory, row_bytes, offset)(chosen)
        np.testing.assert_array_equal(rows, at.astype(np.float32))
        total = alignment.xla_reader(jnp.asarray(memory.view(np.float32)), row_bytes, offset)(
            jnp.asarray(chosen)
        )
        np.testing.assert_array_equal(np.asarray(total), at.sum(0).astype(np.float32))


@pytest.mark.parametrize("words", [("--pool-mib", "0"), ("--repeats", "0")])
def test_alignment_refuses_bad_input(tmp_path, words):
    with pytest.raises(common.Failure, match=words[0]):
        alignment.run(parsed(alignment, tmp_path, *words))


# --- block_size -------------------------------------------------------------------------------


def test_page_sizes_a_refused_one_included(tmp_path, capsys):
    words = ("--page-sizes", "1", "32", "--requests", "20", "--memory-tokens", "2304")
    words += ("--model", "smollm2-135m", "--dtype", "float8_e4m3fn", "--engine-requests", "0")
    trace = trace_file(tmp_path, "prompt_tokens,output_tokens\n" + "40,50\n" * 30)
    found = outcome(block_size, tmp_path, *words, "--trace", trace)
    small, large = found["by_page_size"]
    assert "192 bytes" in small["refused"]
    assert large["refused"] is None
    assert small["page_bytes"] == 2 * 30 * 3 * 64
    assert (small["table_bytes"], large["table_bytes"]) == (4 * 2048, 4 * 64)
    assert small["sharegpt"]["waste_percent"] == 0  # a page of one token is full
    assert 0 < large["sharegpt"]["waste_percent"] < 100 * 31 / (41 + 31)
    assert found["recommended"]["page_size"] == 32
    assert large["attention_ms"] > 0
    assert large["sharegpt"]["tokens_per_s"] is None
    pairs = {(r["model"], r["dtype"], r["page_size"]) for r in found["refused"]}
    assert pairs == {
        ("smollm2-135m", "float8_e4m3fn", 1),
        ("smollm2-360m", "float8_e4m3fn", 1),
    }
    assert re.search(r"^1 .*refused$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_the_engine_gives_equal_tokens_at_every_page_size():
    lengths = {"alpaca": SimpleNamespace(prompt_tokens=np.full(3, 4), output_tokens=np.full(3, 5))}
    setting = {"layers": 1, "rows": 4, "budget_tokens": 64, "longest": 32, "prompt": 8}
    found = block_size.throughput([8, 32], lengths, 3, setting, 1, 0)
    # the 64 slots are 8 small pages, room for three requests of 9 tokens: 4 steps after the first
    # token; or 2 large pages: two requests, and the third after them
    assert found[8]["alpaca"]["tokens_per_step"] == 15 / 4
    assert found[32]["alpaca"]["tokens_per_step"] == 15 / 8
    assert all(found[size]["alpaca"]["tokens_per_s"] > 0 for size in (8, 32))


def row(size, share, alpaca, refused=None):
    kinds = {
        kind: {"tokens_per_s": value, "requests_batched": 1.0, "waste_percent": 2.0}
        for kind, value in (("sharegpt", share), ("alpaca", alpaca))
    }
    return {"page_size": size, "refused": refused, **kinds}


def test_the_recommended_page_size():
    rows = [row(4, 90, 95), row(16, 100, 100), row(32, 99, 95), row(64, 98, 60)]
    assert block_size.recommend(rows)["page_size"] == 32
    assert block_size.near_best(rows, "sharegpt", "tokens_per_s") == [16, 32, 64]
    rows[2] = row(32, 99, 95, refused="misaligned")
    assert block_size.recommend(rows)["page_size"] == 16
    unmeasured = [row(4, None, None), row(16, None, None)]
    assert block_size.recommend(unmeasured)["page_size"] == 16
    assert block_size.recommend([row(1, None, None, "misaligned")])["page_size"] is None
    apart = [row(4, 50, 100), row(64, 100, 50)]
    assert block_size.recommend(apart)["page_size"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--page-sizes", "0"), "--page-sizes must be in 1..2048"),
        (("--memory-tokens", "100"), "--memory-tokens must be at least"),
        (("--requests", "0"), "--requests must be at least 1"),
        (("--trace", "nowhere.csv"), "no such trace file"),
    ],
)
def test_page_sizes_refuse_bad_input(tmp_path, words, message):
    with pytest.raises((common.Failure, ValueError), match=re.escape(message)):
        block_size.run(parsed(block_size, tmp_path, *words))


def test_a_trace_of_only_too_long_requests(tmp_path):
    trace = trace_file(tmp_path, "prompt_tokens,output_tokens\n5000,1\n")
    with pytest.raises(common.Failure, match="no request of at most 2,048"):
        block_size.run(parsed(block_size, tmp_path, "--trace", trace))


# --- all --------------------------------------------------------------------------------------

SCRIPT = '''"""Does {name} work? <Really>.

More.
"""
import sys
sys.path.insert(0, {folder!r})
import common

def run(args):
    print("the table of {name}", args.seed, args.quick)
    {body}

if __name__ == "__main__":
    common.main(__doc__, run)
'''
WORKS = """print("-----", "row  1", "", "prose", sep=chr(10))
    common.path_of(args, ".html").write_text("<p>a page of its own")
    common.write_json(args, {"environment": {"cpu": "x"}, "answer": 42})
    import base64
    picture = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    common.path_of(args, ".png").write_bytes(base64.b64decode(picture + "rkJggg=="))"""


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "experiments"
    made.mkdir()
    bodies = {
        "fails": 'common.fail("it broke")',
        "works": WORKS,
        "hangs": "import time; time.sleep(99)",
    }
    for name, body in bodies.items():
        text = SCRIPT.format(name=name, folder=str(FOLDER), body=body)
        (made / f"{name}.py").write_text(text)
    (made / "helper.py").write_text("def nothing(): pass\n")
    return made


def test_one_report_over_all_that_goes_on_after_a_failure(folder, tmp_path, capsys):
    out = tmp_path / "results"
    out.mkdir()
    (out / "fails.png").write_bytes(b"of an earlier run")
    os.utime(out / "fails.png", (1, 1))
    args = parsed(everything, out, "--skip", "hangs", "--seed", "7")
    with pytest.raises(common.Failure, match="1 of 2 experiments failed: fails"):
        everything.run(args, folder)
    found = json.loads((out / "all.json").read_text())
    assert [(e["name"], e["status"]) for e in found["experiments"]] == [
        ("fails", "failed"),
        ("works", "done"),
    ]
    assert "it broke" in found["experiments"][0]["reason"]
    assert found["experiments"][0]["files"] == []
    assert found["experiments"][1]["files"] == [
        "works.html",
        "works.json",
        "works.png",
    ]
    text = (out / "all.html").read_text()
    assert text.count('src="data:image/png;base64,') == 1
    assert "the table of works 7 True" in text
    assert "Does works work? &lt;Really&gt;." in text
    assert "&quot;answer&quot;: 42" in text
    assert '<img alt="works: Does works work? &lt;Really&gt;." src="data' in text
    # nothing from elsewhere; the script's own page lies beside the report
    assert re.findall(r"""(?:src|href)=["'](?!data:|#)([^"']*)""", text) == ["works.html"]
    assert (out / "works.html").is_file()
    boxes = re.findall(r'<div class="wide"><table>(.*?)</table></div>', text, re.DOTALL)
    assert len(boxes) == text.count("<table>") == 2  # no table is wider than the page
    assert "#works" in boxes[0]
    assert ".wide { overflow-x: auto; }" in text
    assert '<pre class="table">the table of works 7 True\n-----\nrow  1</pre>' in text
    assert '<pre class="prose">prose</pre>' in text
    assert "[2/2] works: done" in capsys.readouterr().out


def test_an_experiment_that_takes_too_long_is_ended(folder, tmp_path):
    args = parsed(everything, tmp_path, "--only", "hangs", "--timeout", "2")
    with pytest.raises(common.Failure, match="hangs"):
        everything.run(args, folder)
    entry = json.loads((tmp_path / "all.json").read_text())["experiments"][0]
    assert entry["reason"].startswith("took longer than 2 s")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "nothing"), "no experiment 'nothing'; there are: "),
        (("--skip", "nothing"), "no experiment 'nothing'"),
        (("--only", "works", "--skip", "works"), "nothing is left to run"),
        (("--timeout", "0"), "--timeout must be positive"),
    ],
)
def test_all_refuses_bad_input(folder, tmp_path, words, message):
    with pytest.raises(common.Failure, match=re.escape(message)):
        everything.run(parsed(everything, tmp_path, *words), folder)


def test_every_experiment_of_the_project_is_found():
    names = everything.discover(FOLDER)
    assert names[: len(everything.ORDER)] == list(everything.ORDER)
    assert not set(names) & everything.NO_EXPERIMENTS
    assert all(everything.question(FOLDER, name) for name in names)


def test_the_kernel_gate_is_skipped_with_a_reason_or_can_run(monkeypatch):
    fake = SimpleNamespace(
        returncode=1, stdout="", stderr="Traceback\naot.MissingTools: get\n them"
    )
    monkeypatch.setattr(everything, "asked", lambda code: fake)
    assert everything.obstacle(FOLDER, "kernel_gate", None) == "get them"
    fake.returncode, fake.stdout = 0, "cpu\n"
    assert everything.obstacle(FOLDER, "kernel_gate", None) is None
    assert everything.obstacle(FOLDER, "kernel_bench", None) == "needs a GPU; JAX sees cpu here"
    fake.stdout = "gpu\n"
    assert everything.obstacle(FOLDER, "kernel_bench", None) is None
    assert everything.obstacle(FOLDER, "kv_size", None) is None


def test_the_command_line_ends_with_a_status(tmp_path):
    command = [sys.executable, str(FOLDER / "all.py"), "--only", "nothing", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("all.py: error: no experiment 'nothing'")


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("attention_scaling", "--longest"),
        ("bench_engine", "--repetitions"),
        ("chunked_prefill", "--streams"),
        ("external_fragmentation", "--capacity"),
        ("internal_fragmentation", "--max-len"),
        ("memory_movie", "--max-tokens"),
        ("memory_waste", "--requests"),
        ("page_churn", "--steps"),
        ("preemption", "--page-size"),
        ("prefix_cache", "--output"),
        ("profile_step", "--rounds"),
        ("sharing", "--beam-requests"),
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "1.5"])
def test_a_count_of_none_is_not_the_default(capsys, script, option, value):
    module = importlib.import_module(script)
    with pytest.raises(SystemExit):
        common.main(module.__doc__, module.run, module.options, [option, value])
    assert f"{option}: must be an integer of at least 1; got {value}" in capsys.readouterr().err
