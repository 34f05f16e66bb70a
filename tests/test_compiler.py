"""How products are computed: forms that the compiler knows, chosen by measurement on CPUs."""

import itertools
import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxattn import compiler
from paxattn.batch import row_bucket, row_bucket_below
from paxattn.llama import ProductForm, linear

FORMS = sorted(compiler._FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_options_compile(monkeypatch, form):
    monkeypatch.setattr(compiler, "_remembered", lambda *_: form)
    x = jnp.ones((16, 16), jnp.bfloat16)
    for many in (False, True):
        options = compiler.products(many, jnp.bfloat16).options
        assert (len(options) == 2) == (form == "library")
        jax.jit(lambda x: x @ x, compiler_options=options)(x)


def test_a_gpu_gets_none(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiler.products(True, jnp.bfloat16) == ({}, ProductForm(columns=False, parts=1))


@pytest.mark.parametrize(
    ("library", "columns", "fastest"),
    [(1.0, 2.0, "library"), (1.95, 1.95, "plain"), (3.0, 3.0, "plain"), (1.9, 1.5, "columns")],
)
def test_a_form_must_be_clearly_faster(monkeypatch, library, columns, fastest):
    """By a clock on which a plain product takes two seconds."""
    now, ticks = 0.0, itertools.cycle((0.0, 2.0, 0.0, library, 0.0, columns))  # start, end; ...

    def clock():
        nonlocal now
        now += next(ticks)
        return now

    monkeypatch.setattr(compiler, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(compiler, "_columns_keep_bits", lambda: True)
    assert compiler._fastest_form(32) == fastest


def test_columns_are_not_chosen_where_bits_would_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(compiler, "_columns_keep_bits", lambda: False)
    monkeypatch.setattr(compiler, "_ROUNDS", 3)
    assert compiler._fastest_form(32) != "columns"


@pytest.mark.parametrize(
    "found", [None, "{", "[]", '{"question; other CPU": "b"}', "unwritable", "other answers"]
)
def test_a_measurement_is_remembered(monkeypatch, tmp_path, found):
    """Whatever is found in its place."""
    folder = tmp_path / "xla"
    monkeypatch.setattr(compiler, "_cache_folder", lambda: str(folder))
    monkeypatch.setattr(compiler, "_cpu", lambda: "this CPU")
    key = f"question; jax {jax.__version__}; this CPU"
    if found == "unwritable":
        folder.write_text("a file in the folder's place")
    elif found is not None:
        folder.mkdir()
        text = json.dumps({key: "c"}) if found == "other answers" else found
        (folder / "measured.json").write_text(text)
    measured = []

    def measure():
        measured.append(1)
        return "a"

    for _ in range(2):
        assert compiler._remembered("question", measure, ("a", "b")) == "a"
    assert len(measured) == (2 if found == "unwritable" else 1)
    if found != "unwritable":
        kept = json.loads((folder / "measured.json").read_text())
        assert kept[key] == "a"
        assert ("question; other CPU" in kept) == (found is not None and "other CPU" in found)
        assert [p.name for p in folder.iterdir()] == ["measured.json"]


def test_without_a_cache_every_process_measures(monkeypatch):
    monkeypatch.setattr(compiler, "_cache_folder", lambda: None)
    assert compiler._remembered("question", lambda: 3, (3,)) == 3


def test_a_cpu_is_told_from_another():
    assert len(compiler._cpu()) > 10


def test_a_form_that_cannot_run_is_not_chosen(monkeypatch):
    def product(form, rows):
        if form == "library":
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option")

        def run():
            if form == "columns":
                raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: BF16 x BF16 = F32")
            return jnp.zeros(1)

        return run

    monkeypatch.setattr(compiler, "_product", product)
    assert compiler._fastest_form(32) == "plain"
    assert not compiler._columns_keep_bits()
    monkeypatch.setattr(compiler, "_columns_keep_bits", lambda: True)
    assert compiler._fastest_form(32) == "plain"


def test_the_check_of_bits_sees_a_difference(monkeypatch):
    exact = {rows: np.ones((4, rows), np.float32) for rows in (8, 32, 64)}
    monkeypatch.setattr(compiler, "_product", lambda form, rows: lambda: exact[rows])
    assert compiler._columns_keep_bits()
    exact[32][2, 7] = np.nextafter(np.float32(1), np.float32(2))
    assert not compiler._columns_keep_bits()


@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_the_batch(form):
    """Shapes for which the library keeps or drops the rounding of x, by the number of rows."""
    rng = np.random.default_rng(0)
    options, (columns, parts) = compiler._FORMS[form]
    for dtype in ("float32", "bfloat16"):
        if columns and (dtype == "float32" or not compiler._columns_keep_bits()):
            continue  # not chosen
        program = jax.jit(partial(linear, columns=columns), compiler_options=options)
        for out, inside in ((32, 64), (320, 160), (1000, 288)):
            kernel = jnp.asarray(rng.standard_normal((out, inside)), dtype)
            kernel = tuple(jnp.array_split(kernel, parts))
            x = jnp.asarray(rng.standard_normal((64, inside)), jnp.float32)

            def product(rows, x=x, kernel=kernel, program=program):
                y = program(x[:rows].T if columns else x[:rows], kernel)
                return np.asarray(y.T if columns else y)

            expected = product(64)
            for rows in (8, 16, 24, 32, 48):
                np.testing.assert_array_equal(product(rows), expected[:rows])


def test_the_bucket_below_is_the_next_smaller_one():
    buckets = sorted({row_bucket(n) for n in range(1, 2049)})
    assert buckets[:7] == [8, 16, 24, 32, 48, 64, 96]
    assert all(row_bucket(n) >= n for n in range(1, 2049))
    assert [row_bucket_below(b) for b in buckets] == [0, *buckets[:-1]]
