"""Measured facts of XLA's CPU backend, in one place: what it is told beside the program.

A GPU's programs are compiled as they are.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from paxattn.llama import ProductForm, linear

# Decode steps are 2-5% faster in vectors of 512 bits than in the 256 that LLVM prefers; where there
# are none, LLVM takes what there is.
_VECTORS: dict[str, Any] = {"xla_cpu_prefer_vector_width": 512}
# Products with the conversions around them as calls of XLA's library of micro-kernels. The option
# replaces the default list, so sums are named as well: without them attention takes 2.7x as long.
_LIBRARY: dict[str, Any] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_DOT"
}


class Products(NamedTuple):
    """How a program multiplies by the weights."""

    options: dict[str, Any]  # of the compiler
    form: ProductForm


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_PARTS = min(2, _cores())
_FORMS = {
    "plain": Products(_VECTORS, ProductForm(columns=False, parts=_PARTS)),
    "library": Products(_VECTORS | _LIBRARY, ProductForm(columns=False, parts=_PARTS)),
    "columns": Products(_VECTORS, ProductForm(columns=True, parts=_PARTS)),
}


def products(many_rows: bool, dtype: Any) -> Products:
    """The fastest form of a program's products on this backend.

    Args:
      many_rows: they have hundreds of rows (a prefill), not some tens (a decode step). All decode
        steps get the same form, so that a row's bits do not depend on its batch. All programs
        get as many parts, because they share their weights.
      dtype: of the products.
    """
    if jax.default_backend() != "cpu":
        return Products({}, ProductForm())
    rows, name = 256 if many_rows else 32, jnp.dtype(dtype).name
    if name != "bfloat16":
        return _FORMS["plain"]
    measure = partial(_fastest_form, rows)
    return _FORMS[_remembered(f"fastest form of {rows} rows in bfloat16", measure, tuple(_FORMS))]


def narrow_attention(dtype: Any) -> bool:
    """Whether a prefill's attention is faster on this backend with products in the pages' type."""
    if jax.default_backend() != "cpu" or jnp.dtype(dtype) != jnp.bfloat16:
        return False
    return _remembered("narrow attention", _narrow_attention_is_faster, (True, False))


def return_freed_memory() -> None:
    """Gives the system back what compiling or loading has freed, where glibc would keep it.

    Measured with SmolLM2-135M in bfloat16: 150 MB after loading, 70 MB after the programs.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):  # where there is no glibc
        ctypes.CDLL(None).malloc_trim(0)


def tied_to_step(params: Any, step: jax.Array) -> Any:
    """The parameters, in a loop over decode steps.

    Otherwise XLA's CPU backend converts all narrow weights to float32 before the loop: 120 ms a
    call, twice the memory, and twice the bytes to read in each step.
    """
    if jax.default_backend() != "cpu":
        return params
    return jax.lax.optimization_barrier((params, step))[0]


# Runs of every form, each beside the others: fewer leave a gain of 1.2 to the machine's noise.
_ROUNDS = 41


@cache
def _surroundings() -> str:
    """What an answer depends on: the kind of CPU, XLA, and how this module asks."""
    told = [platform.machine(), platform.processor(), str(_cores())]
    told += [jaxlib.__version__, os.environ.get("XLA_FLAGS", ""), repr(_FORMS)]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        named = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        told += sorted({line for line in lines if line.startswith(named)})
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _cache_folder() -> str | None:
    return jax.config.values["jax_compilation_cache_dir"]


_answers: dict[tuple[str | None, str], Any] = {}  # of this process


def _remembered(question: str, measure: Callable[[], Any], answers: tuple[Any, ...]) -> Any:
    """What was measured here once, one of `answers`.

    Once in a process, and kept in a file beside the compiled programs, so that other processes need
    not measure and compute the same bits. Of several that measure at once the first answer holds.
    """
    folder = _cache_folder()
    if not folder or "://" in folder:
        folder = None
    if (folder, question) not in _answers:
        kept = None
        if folder is not None:
            name = f"measured-{question.replace(' ', '-')}-{_surroundings()[:16]}.json"
            kept = pathlib.Path(folder) / name
        answer = _read(kept, answers)
        if answer is None:
            answer = measure()
            _write_once(kept, answer)
            first = _read(kept, answers)
            answer = answer if first is None else first
        _answers[folder, question] = answer
    return _answers[folder, question]


def _read(kept: pathlib.Path | None, answers: tuple[Any, ...]) -> Any:
    """The answer in a file, None where there is none of `answers`."""
    if kept is None:
        return None
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        found = None
    if found in answers:
        return found
    with contextlib.suppress(OSError):
        kept.unlink()  # of no use to anybody
    return None


def _write_once(kept: pathlib.Path | None, answer: Any) -> None:
    """Writes an answer whole, unless another process was first or the folder cannot be written."""
    if kept is None:
        return
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=kept.name, dir=kept.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(answer, file)
            os.link(draft, kept)
        finally:
            os.unlink(draft)


def _fastest_form(rows: int) -> str:
    """Which of `_FORMS` multiplies `rows` rows of bfloat16 fastest here: it depends on the CPU.

    Measured, because no table is right for every CPU: without matrix units the library is 1.4 times
    as fast with 256 rows, 1.3 with 32, but 0.8 with 8; with matrix units it is slower, and products
    by columns are 1.2 times as fast with 32 rows. In float32 the plain form is always among the
    fastest.
    """
    programs: dict[str, Callable[[], jax.Array]] = {}
    for name in _FORMS:
        if name == "columns" and (rows > 64 or not _columns_keep_bits()):
            continue
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # a compiler without the option
            programs[name] = _product(name, rows)
    gains = _gains(programs)
    best = max(gains, key=gains.__getitem__, default="plain")
    return best if gains.get(best, 0.0) > 1.05 else "plain"


def _narrow_attention_is_faster() -> bool:
    """Measured: with matrix units it takes half the time, without them more than in float32."""
    q = jnp.ones((12, 96, 64), jnp.bfloat16)  # blocks of queries and of keys, as in a prefill
    k = jnp.ones((12, 128, 64), jnp.bfloat16)

    def scores(of: Any) -> Callable[[], jax.Array]:
        def product(q: jax.Array, k: jax.Array) -> jax.Array:
            q, k = q.astype(of), k.astype(of)
            return jnp.einsum("wrd,wcd->wrc", q, k, preferred_element_type=jnp.float32)

        return partial(jax.jit(product, compiler_options=_VECTORS), q, k)

    gains = _gains({"plain": scores(jnp.float32), "narrow": scores(jnp.bfloat16)})
    return gains.get("narrow", 0.0) > 1.05


def _gains(programs: dict[str, Callable[[], jax.Array]]) -> dict[str, float]:
    """How many times as fast as the plain one each program is; those that cannot run are left out."""
    seconds: dict[str, list[float]] = {}
    for name, program in programs.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # types that this CPU cannot multiply
            jax.block_until_ready(program())
            seconds[name] = []
    if "plain" not in seconds:  # then whoever compiles it is told why
        return {}
    for _ in range(_ROUNDS):
        for name, times in seconds.items():
            start = time.perf_counter()
            jax.block_until_ready(programs[name]())
            times.append(time.perf_counter() - start)
    return {
        name: float(np.median(np.divide(seconds["plain"], times)))
        for name, times in seconds.items()
    }


def _product(form: str, rows: int) -> Callable[[], jax.Array]:
    """A compiled chain of products of `rows` rows, the same numbers whatever `rows`; [rows, 512].

    By several kernels, too many for a core's cache, because a model's are not there either.
    """
    options, (columns, parts) = _FORMS[form]
    wide = 1e-3 * jnp.sin(jnp.arange(2**20, dtype=jnp.float32)).reshape(2048, 512)
    shapes = (wide, wide.T) * (3 if rows <= 96 else 1)
    kernels = [tuple(jnp.array_split(k.astype(jnp.bfloat16), parts)) for k in shapes]
    x = jnp.cos(jnp.arange(rows * 512, dtype=jnp.float32)).reshape(rows, 512)

    def multiply(x: jax.Array, kernels: list[tuple[jax.Array, ...]]) -> jax.Array:
        x = linear(x, kernels[0], columns=columns, turn=True)
        for kernel in kernels[1:]:
            x = linear(x, kernel, columns=columns)
        return jax.lax.optimization_barrier(x).T if columns else x

    program = jax.jit(multiply).lower(x, kernels).compile(compiler_options=options)
    return partial(program, x, kernels)


def _columns_keep_bits() -> bool:
    """Whether a row's bits are the same in any number of rows, by columns on this CPU."""
    try:
        most = np.asarray(_product("columns", 96)())
        some = {rows: np.asarray(_product("columns", rows)()) for rows in (8, 16, 32, 48)}
    except jax.errors.JaxRuntimeError:  # it cannot multiply so
        return False
    return all(np.array_equal(y, most[:rows]) for rows, y in some.items())
