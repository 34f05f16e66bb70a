"""How products are computed: forms that the compiler knows, chosen by measurement on CPUs."""

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

pytestmark = pytest.mark.optimized

FORMS = sorted(compiler._FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_options_compile(monkeypatch, form):
    monkeypatch.setattr(compiler, "_remembered", lambda *_: form)
    x = jnp.ones((16, 16), jnp.bfloat16)
    for many in (False, True):
        assert compiler.products(many, jnp.float32) == compiler._FORMS["plain"]
        options = compiler.products(many, jnp.bfloat16).options
        assert (len(options) == 2) == (form == "library")
        jax.jit(lambda x: x @ x, compiler_options=options)(x)


def test_a_gpu_gets_none(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiler.products(True, jnp.bfloat16) == ({}, ProductForm(columns=False, parts=1))


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({"plain": 2, "library": 1, "columns": 2}, "library"),
        ({"plain": 2, "library": 1.95, "columns": 1.95}, "plain"),
        ({"plain": 2, "library": 3, "columns": 3}, "plain"),
        ({"plain": 2, "library": 1.9, "columns": 1.5}, "columns"),
        ({"plain": 2, "columns": 1.5}, "columns"),
        ({"library": 2, "columns": 1.5}, "plain"),  # nothing to compare with
        ({}, "plain"),
    ],
)
def test_a_form_must_be_clearly_faster(monkeypatch, seconds, fastest):
    """By a clock that each form's program moves on; a form without seconds cannot run."""
    now = 0.0

    def product(form, rows):
        def run():
            nonlocal now
            if form not in seconds:
                raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: BF16 x BF16 = F32")
            now += seconds[form]
            return jnp.zeros(1)

        return run

    monkeypatch.setattr(compiler, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(compiler, "_product", product)
    monkeypatch.setattr(compiler, "_columns_keep_bits", lambda: True)
    assert compiler._fastest_form(32) == fastest


def test_columns_are_not_chosen_where_bits_would_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(compiler, "_columns_keep_bits", lambda: False)
    monkeypatch.setattr(compiler, "_ROUNDS", 3)
    assert compiler._fastest_form(32) != "columns"


@pytest.fixture
def forgetful(monkeypatch, tmp_path):
    """Asks as a new process would; the folder of its answers, and how often it measured."""
    folder = tmp_path / "xla"
    monkeypatch.setattr(compiler, "_cache_folder", lambda: str(folder))
    measured = []

    def ask(answer="a", new_process=True):
        if new_process:
            monkeypatch.setattr(compiler, "_answers", {})

        def measure():
            measured.append(1)
            return answer

        return compiler._remembered("some question", measure, ("a", "b"))

    return ask, folder, measured


@pytest.mark.parametrize("found", [None, "", "{", "[]", '"c"', "null"])
def test_a_measurement_is_remembered_whatever_stands_in_its_place(forgetful, found):
    ask, folder, measured = forgetful
    if found is not None:
        ask()
        (file,) = folder.iterdir()
        file.write_text(found)
        measured.clear()
    assert [ask("a"), ask("b"), ask("b", new_process=False)] == ["a", "a", "a"]
    assert len(measured) == 1
    (file,) = folder.iterdir()
    assert json.loads(file.read_text()) == "a"


@pytest.mark.parametrize("folder", [None, "", "gs://bucket", "unwritable"])
def test_without_a_folder_a_process_measures_once(forgetful, monkeypatch, tmp_path, folder):
    ask, _, measured = forgetful
    if folder == "unwritable":
        (tmp_path / "file").write_text("in the folder's place")
        folder = str(tmp_path / "file" / "xla")
    monkeypatch.setattr(compiler, "_cache_folder", lambda: folder)
    assert [ask("a"), ask("b", new_process=False)] == ["a", "a"]
    assert len(measured) == 1
    assert ask("b") == "b"


def test_of_two_that_measure_at_once_the_first_answer_holds(forgetful, monkeypatch):
    ask, folder, _ = forgetful

    def slow():
        monkeypatch.setattr(compiler, "_answers", {})
        assert ask("b") == "b"  # another process, meanwhile
        return "a"

    monkeypatch.setattr(compiler, "_answers", {})
    assert compiler._remembered("some question", slow, ("a", "b")) == "b"
    assert len(list(folder.iterdir())) == 1


def test_answers_are_of_one_kind_of_machine(monkeypatch):
    ask = compiler._surroundings.__wrapped__
    here = ask()
    assert ask() == here
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    assert ask() != here
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(compiler, "_cores", lambda: 77)
    assert ask() != here


def test_a_form_that_cannot_be_compiled_is_not_chosen(monkeypatch):
    def product(form, rows):
        if form == "plain":
            return lambda: jnp.zeros(1)
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option")

    monkeypatch.setattr(compiler, "_product", product)
    assert compiler._fastest_form(256) == "plain"
    assert not compiler._columns_keep_bits()


@pytest.mark.parametrize("rows", [8, 16, 32, 48, 96])
def test_the_check_of_bits_sees_a_difference(monkeypatch, rows):
    exact = {n: np.ones((n, 4), np.float32) for n in (8, 16, 32, 48, 96)}
    monkeypatch.setattr(compiler, "_product", lambda form, n: lambda: exact[n])
    assert compiler._columns_keep_bits()
    exact[rows][7, 2] = np.nextafter(np.float32(1), np.float32(2))
    assert not compiler._columns_keep_bits()


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize(
    ("form", "dtype"), [("plain", "float32"), *((form, "bfloat16") for form in FORMS)]
)
def test_bits_do_not_depend_on_the_batch(form, dtype, turn):
    """Shapes for which the library keeps or drops the rounding of x, by the number of rows."""
    rng = np.random.default_rng(0)
    options, (columns, parts) = compiler._FORMS[form]
    if columns and not compiler._columns_keep_bits():
        pytest.skip("products by columns are not chosen on this CPU")
    program = jax.jit(partial(linear, columns=columns, turn=turn), compiler_options=options)
    for out, inside in ((32, 64), (320, 160), (1000, 288)):
        kernel = jnp.asarray(rng.standard_normal((out, inside)), dtype)
        kernel = tuple(jnp.array_split(kernel, parts))
        x = jnp.asarray(rng.standard_normal((96, inside)), jnp.float32)

        def product(rows, x=x, kernel=kernel):
            y = program(x[:rows].T if columns and not turn else x[:rows], kernel)
            return np.asarray(y.T if columns else y)

        expected = product(96)
        for rows in (8, 16, 24, 32, 48, 64):
            np.testing.assert_array_equal(product(rows), expected[:rows])


def test_the_bucket_below_is_the_next_smaller_one():
    buckets = sorted({row_bucket(n) for n in range(1, 2049)})
    assert buckets[:7] == [8, 16, 24, 32, 48, 64, 96]
    assert all(row_bucket(n) >= n for n in range(1, 2049))
    assert [row_bucket_below(b) for b in buckets] == [0, *buckets[:-1]]
