"""Runs any paged attention, ours or a stranger's, against a float64 oracle.

    python -m pallas_kernels.conformance --target pallas_kernels:paged_attention --dialect jax_gpu

Dialects:
  jax_gpu     f(q, k_pages, v_pages [K,N,P,D], block_tables, lengths, k_scales_pages, v_scales_pages)
  nhd         the same with pages [N,P,K,D], scales [N,P,K]
  jax_ragged  f(q, kv_pages [N,P,2K,D], kv_lens, page_indices, cu_q_lens, num_seqs)

Prints one line a case with the outcome of its clean and its dirty run (see `conformance_cases`), then
the smallest failing case of each check that failed. "n/a" is a feature that the target does not
offer: it does not know the keyword, or raises NotImplementedError. Exit status: 0 if nothing failed,
1 if something did, 2 if the target cannot be loaded.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.conformance_cases import Arrays, Case, build, decode_cases, ragged_cases
from pallas_kernels.conformance_oracle import attend_ragged

DIALECTS = ("jax_gpu", "jax_ragged", "nhd")
# Relative Frobenius error against float64, of each query row. Float32 rounds sums of up to a few
# hundred terms; 16-bit outputs alone carry 2^-9 (bfloat16) and 2^-12 (float16), and a kernel may
# round its weights to 16 bits before the second product.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


class Outcome(NamedTuple):
    """What came of one run of a case."""

    status: str  # "pass", "FAIL" or "n/a"
    error: float  # worst relative error of a row; nan if there is none
    detail: str


class Report(NamedTuple):
    """A case, its two outcomes, and if it failed the smallest case found that fails too."""

    case: Case
    clean: Outcome
    dirty: Outcome
    smallest: str  # "" if nothing failed


def cases_of(dialect: str) -> list[Case]:
    """The cases that a dialect can express."""
    return ragged_cases() if dialect == "jax_ragged" else decode_cases()


def run_case(target: Callable[..., Any], dialect: str, case: Case, dirty: bool) -> Outcome:
    """Runs one case and compares it with the oracle."""
    arrays = build(case, dirty)
    try:
        out, lse = _call(target, dialect, case, arrays)
    except NotImplementedError as error:
        return Outcome("n/a", np.nan, _first_line(error))
    except TypeError as error:
        unknown = "unexpected keyword" in str(error)
        return Outcome("n/a" if unknown else "FAIL", np.nan, _first_line(error))
    except Exception as error:  # a stranger's kernel may raise anything
        return Outcome("FAIL", np.nan, f"{type(error).__name__}: {_first_line(error)}")
    expected, expected_lse = _expected(case, arrays)
    # Rounding the weights to the dtype of 16-bit pages is a kernel's right.
    stored = case.kv_dtype if case.kv_dtype in TOLERANCE else case.dtype
    outcome = compare(out, expected, TOLERANCE[stored])
    if outcome.status == "pass" and case.return_lse:
        outcome = _compare_lse(lse, expected_lse, outcome)
    if outcome.status == "pass" and case.neighbours:
        return _check_neighbours(target, dialect, case, arrays, out, outcome)
    return outcome


def compare(out: np.ndarray, expected: np.ndarray, tolerance: float) -> Outcome:
    """Compares rows of an output with those of the oracle; a row of zeros must be zeros."""
    if out.shape != expected.shape:
        return Outcome("FAIL", np.nan, f"shape {out.shape}, expected {expected.shape}")
    rows, wanted = out.reshape(len(out), -1), expected.reshape(len(expected), -1)
    if not np.isfinite(rows).all():
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist()
        return Outcome("FAIL", np.inf, f"not finite in rows {bad}")
    size = np.linalg.norm(wanted, axis=1)
    error = np.linalg.norm(rows - wanted, axis=1)
    relative = np.where(
        size > 0, error / np.where(size > 0, size, 1), np.where(error > 0, np.inf, 0)
    )
    worst = int(np.argmax(relative))
    if relative[worst] > tolerance:
        what = f"row {worst} is off by {relative[worst]:.1e} (allowed {tolerance:.0e})"
        return Outcome("FAIL", float(relative[worst]), what)
    return Outcome("pass", float(relative[worst]), "")


def _expected(case: Case, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    q_lens = np.array(case.q_lens if case.q_lens is not None else [1] * len(case.lengths))
    return attend_ragged(
        arrays.q.astype(np.float64),
        arrays.k_pages.astype(np.float64),
        arrays.v_pages.astype(np.float64),
        arrays.clean_tables,
        np.array(case.lengths),
        q_lens,
        arrays.features,
    )


def _call(
    target: Callable[..., Any], dialect: str, case: Case, arrays: Arrays
) -> tuple[np.ndarray, np.ndarray | None]:
    positional, keywords = _arguments(dialect, case, arrays)
    function = functools.partial(target, **keywords)
    if case.traced_scale:
        scale = jnp.float32(keywords.pop("sm_scale"))
        function = functools.partial(target, **keywords)
        result = jax.jit(lambda s, *xs: function(*xs, sm_scale=s))(scale, *positional)
    elif case.under_jit:
        result = jax.jit(function)(*positional)
    else:
        result = function(*positional)
    if case.return_lse:
        return np.asarray(result[0], np.float64), np.asarray(result[1], np.float64)
    return np.asarray(result, np.float64), None


def _arguments(dialect: str, case: Case, arrays: Arrays) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of a case, in a dialect's words and layout."""
    features = arrays.features
    keywords: dict[str, Any] = {}
    if case.sm_scale != 1.0 or dialect == "nhd":
        keywords["sm_scale"] = case.sm_scale
    for name in ("sliding_window", "sinks", "alibi_slopes"):
        value = getattr(features, name)
        if value is not None:
            keywords[name] = jnp.asarray(value) if isinstance(value, np.ndarray) else value
    if case.return_lse:
        keywords["return_lse"] = True
    ragged = dialect == "jax_ragged"
    if features.soft_cap is not None:
        keywords["soft_cap" if ragged else "attn_logits_soft_cap"] = features.soft_cap
    for letter, scale in (("k", features.k_scale), ("v", features.v_scale)):
        if scale is not None:
            value = _scale_for(dialect, scale, arrays.k_pages.shape)
            name = f"{letter}_scale" if ragged else f"{letter}_scales_pages"
            keywords[name] = float(value) if ragged and value.ndim == 0 else jnp.asarray(value)
    q = jnp.asarray(arrays.q)
    if ragged:
        n, p, k, d = arrays.k_pages.shape
        pages = np.stack([arrays.k_pages, arrays.v_pages], axis=3).reshape(n, p, 2 * k, d)
        rest = (arrays.lengths, arrays.tables, arrays.cu_q_lens, arrays.num_seqs)
        return [q, jnp.asarray(pages), *(jnp.asarray(x) for x in rest)], keywords
    order = (2, 0, 1, 3) if dialect == "jax_gpu" else (0, 1, 2, 3)
    k_pages, v_pages = (jnp.asarray(x.transpose(order)) for x in (arrays.k_pages, arrays.v_pages))
    lengths = None if case.no_lengths else jnp.asarray(arrays.lengths)
    return [q, k_pages, v_pages, jnp.asarray(arrays.tables), lengths], keywords


def _scale_for(dialect: str, scale: np.ndarray, pages: tuple[int, ...]) -> np.ndarray:
    """JAX's GPU contract knows scales per token and head only, as [K, N, P]."""
    if dialect != "jax_gpu":
        return scale
    return np.broadcast_to(scale, pages[:3]).transpose(2, 0, 1)


def _compare_lse(lse: np.ndarray | None, expected: np.ndarray, outcome: Outcome) -> Outcome:
    if lse is None or lse.shape != expected.shape:
        got = None if lse is None else lse.shape
        return Outcome("FAIL", np.nan, f"log-sum-exp of shape {got}, expected {expected.shape}")
    absent = np.isneginf(expected)
    if not np.array_equal(np.isneginf(lse), absent):
        return Outcome("FAIL", np.inf, "log-sum-exp is -inf in other rows than it should be")
    # Logits are sums in float32 (or of 16-bit products) of size one.
    error = float(np.abs(np.where(absent, 0, lse) - np.where(absent, 0, expected)).max())
    if error > 2e-5:
        return Outcome("FAIL", error, f"log-sum-exp is off by {error:.1e}")
    return outcome


def _check_neighbours(
    target: Callable[..., Any],
    dialect: str,
    case: Case,
    arrays: Arrays,
    out: np.ndarray,
    outcome: Outcome,
) -> Outcome:
    """The first sequence's rows must not change by a bit when the other sequences do."""
    lengths, rows = arrays.lengths.copy(), 1 if case.q_lens is None else case.q_lens[0]
    for b in range(1, len(case.lengths)):
        lengths[b] = max(case.q_lens[b] if case.q_lens else 1, lengths[b] // 2)
    q = arrays.q.copy()
    q[rows:] = q[rows:] * -3
    other, _ = _call(target, dialect, case, dataclasses.replace(arrays, q=q, lengths=lengths))
    if np.array_equal(out[:rows], other[:rows]):
        return outcome
    return Outcome("FAIL", np.nan, "a sequence's output changes with its neighbours")


def shrink(target: Callable[..., Any], dialect: str, case: Case, dirty: bool) -> Case:
    """A smaller case that fails too: fewer sequences, heads and pages, as far as a few tries go."""

    def fails(candidate: Case) -> bool:
        return run_case(target, dialect, candidate, dirty).status == "FAIL"

    for i in sorted(range(len(case.lengths)), key=lambda i: case.lengths[i]):
        q_lens = None if case.q_lens is None else (case.q_lens[i],)
        if q_lens == (0,) or case.neighbours:
            continue
        alone = dataclasses.replace(case, lengths=(case.lengths[i],), q_lens=q_lens)
        if fails(alone):
            case = alone
            break
    for name in ("groups", "kv_heads"):
        fields: dict[str, Any] = {name: 1}
        smaller = dataclasses.replace(case, **fields)
        if smaller != case and fails(smaller):
            case = smaller
    return case


def run(
    target: Callable[..., Any],
    dialect: str,
    cases: Iterable[Case],
    *,
    clean_only: bool = False,
    shrinking: bool = True,
    show: Callable[[str], None] = lambda line: None,
) -> list[Report]:
    """Runs cases, clean and dirty, and reports each."""
    reports = []
    for case in cases:
        clean = run_case(target, dialect, case, dirty=False)
        skipped = Outcome("-", np.nan, "")
        dirty = skipped if clean_only else run_case(target, dialect, case, dirty=True)
        smallest = ""
        if "FAIL" in (clean.status, dirty.status):
            small = case
            if shrinking:
                small = shrink(target, dialect, case, dirty=clean.status != "FAIL")
            smallest = small.describe()
        reports.append(Report(case, clean, dirty, smallest))
        show(format_line(reports[-1]))
    return reports


def format_line(report: Report) -> str:
    """One line of the table."""
    clean, dirty = report.clean, report.dirty
    error = "" if np.isnan(clean.error) else f"{clean.error:.1e}"
    detail = clean.detail or dirty.detail
    return f"{report.case.check:46.46}  {clean.status:5} {dirty.status:5} {error:8} {detail:.110}".rstrip()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def load(path: str) -> Callable[..., Any]:
    """Imports "module:function"."""
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f'--target must be "module:function"; got {path!r}.')
    return getattr(importlib.import_module(module), name)


def _keyword(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f'must be NAME=VALUE; got "{text}".')
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.conformance",
        description="Runs a paged attention against a float64 oracle.",
        epilog="example: python -m pallas_kernels.conformance --dialect nhd "
        "--target pallas_kernels:paged_attention --with kv_layout=NPKD",
    )
    parser.add_argument("--target", required=True, help="module:function")
    parser.add_argument("--dialect", required=True, choices=DIALECTS)
    parser.add_argument(
        "--with",
        dest="keywords",
        type=_keyword,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument for every call; may be repeated",
    )
    parser.add_argument("--only", default="", help="only checks whose name contains this")
    parser.add_argument("--clean-only", action="store_true", help="no NaN and no absurd ids")
    options = parser.parse_args(arguments)
    try:
        target = load(options.target)
    except (ImportError, AttributeError, ValueError) as error:
        print(f"cannot load {options.target}: {error}", file=sys.stderr)
        return 2
    if options.keywords:
        target = functools.partial(target, **dict(options.keywords))
    cases = [case for case in cases_of(options.dialect) if options.only in case.check]
    print(
        f"{options.target} as {options.dialect} on {jax.default_backend()}, jax {jax.__version__}"
    )
    print(f"{'check':46}  {'clean':5} {'dirty':5} {'error':8}")
    reports = run(target, options.dialect, cases, clean_only=options.clean_only, show=print)
    failed = [r for r in reports if r.smallest]
    absent = sum(r.clean.status == "n/a" for r in reports)
    passed = len(reports) - len(failed) - absent
    print(f"{passed} passed, {len(failed)} failed, {absent} not offered")
    for report in failed:
        print(f"  {report.case.check}: {report.smallest}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
