"""The suite passes what is right and fails what is wrong: ours, JAX's builtin, and planted mutants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import conformance, paged_attention, ragged_paged_attention
from pallas_kernels.conformance_oracle import Features, attend_token

nhd = functools.partial(paged_attention, kv_layout="NPKD")


def statuses(target, dialect, only, **options):
    cases = [case for case in conformance.cases_of(dialect) if only(case.check)]
    assert cases
    reports = conformance.run(target, dialect, cases, **options)
    return {r.case.check: (r.clean.status, r.dirty.status) for r in reports}


def everything(check):
    return True


def test_the_oracle_by_hand():
    # Two tokens in page 1 with weights 1 and 3, values 4 and 8.
    k, v = np.zeros((2, 2, 1, 1)), np.zeros((2, 2, 1, 1))
    k[1, :, 0, 0], v[1, :, 0, 0] = [0.0, np.log(3.0)], [4.0, 8.0]
    out, lse = attend_token(np.ones((1, 1)), k, v, np.array([1]), 2, Features())
    assert out[0, 0] == pytest.approx(7.0)
    assert lse[0] == pytest.approx(np.log(4.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dialect"),
    [(paged_attention, "jax_gpu"), (ragged_paged_attention, "jax_ragged")],
)
def test_ours_passes_everything(target, dialect):
    got = statuses(target, dialect, everything)
    assert set(got.values()) == {("pass", "pass")}, got


FEW = ("lengths 1, P-1", "length 0", "shared tables", "page size 12", "everything at once")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_ours_passes_in_the_pools_own_layout(implementation):
    target = functools.partial(nhd, implementation=implementation)
    got = statuses(target, "nhd", lambda check: check.startswith(FEW))
    assert set(got.values()) == {("pass", "pass")}, got


def swapped(q, k, v, *rest, **options):
    return nhd(q, v, k, *rest, **options)


def one_short(q, k, v, tables, lengths, **options):
    return nhd(q, k, v, tables, jnp.maximum(lengths - 1, 0), **options)


def one_long(q, k, v, tables, lengths, **options):
    return nhd(q, k, v, tables, jnp.minimum(lengths + 1, tables.shape[1] * k.shape[1]), **options)


def stale_page(q, k, v, tables, lengths, **options):
    """The last page of each sequence is the one that the table named before it grew."""
    last = jnp.maximum(lengths - 1, 0) // k.shape[1]
    row = jnp.arange(tables.shape[0])
    return nhd(q, k, v, tables.at[row, last].set(tables[:, 0]), lengths, **options)


def unmasked_v(q, k, v, tables, lengths, *, sm_scale=1.0):
    """Logits are masked, values are not: 0 * NaN is NaN."""
    n, _, heads, d = k.shape
    ids = jnp.clip(tables, 0, n - 1)
    keys, values = (x[ids].reshape(len(q), -1, heads, d) for x in (k, v))
    grouped = q.reshape(len(q), heads, -1, d) * sm_scale
    s = jnp.einsum("bkgd,bskd->bkgs", grouped, keys, precision="highest")
    dead = jnp.arange(s.shape[-1])[None, :] >= lengths[:, None]
    weights = jax.nn.softmax(jnp.where(dead[:, None, None, :], -jnp.inf, s), axis=-1)
    out = jnp.einsum("bkgs,bskd->bkgd", weights, values, precision="highest")
    return out.reshape(q.shape)


MUTANTS = {
    "swapped": (swapped, ("FAIL", "FAIL")),
    "one_short": (one_short, ("FAIL", "FAIL")),
    "one_long": (one_long, ("FAIL", "FAIL")),
    "stale_page": (stale_page, ("FAIL", "FAIL")),
    "unmasked_v": (unmasked_v, ("pass", "FAIL")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_fails(name):
    mutant, expected = MUTANTS[name]
    check = "lengths 1, P-1, P, P+1, full"
    got = statuses(jax.jit(mutant), "nhd", lambda c: c == check, shrinking=False)
    assert got[check] == expected


def test_a_ragged_mutant_fails():
    def no_chunk_offset(q, pages, kv_lens, tables, cu, count):
        """Takes the queries for the first tokens of their sequence."""
        return ragged_paged_attention(
            q, pages, jnp.minimum(kv_lens, cu[1:] - cu[:-1]), tables, cu, count
        )

    got = statuses(
        no_chunk_offset, "jax_ragged", lambda c: c.startswith("prefill,"), shrinking=False
    )
    assert set(got.values()) == {("FAIL", "FAIL")}


def test_neighbours_that_leak_fail():
    def leaky(q, k, v, tables, lengths, sm_scale=1.0):
        out = nhd(q, k, v, tables, lengths, sm_scale=sm_scale)
        return out.at[0].multiply(1 + 1e-7 * (lengths[1] % 2))

    got = statuses(leaky, "nhd", lambda c: c.startswith("neighbours"), shrinking=False)
    assert set(got.values()) == {("FAIL", "FAIL")}


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_jaxs_builtin_reads_past_the_length():
    """What the docs say of it: right on clean pages, NaN when a slot past the length holds NaN."""
    builtin = pytest.importorskip("jax.experimental.pallas.ops.gpu.paged_attention")
    target = functools.partial(builtin.paged_attention, interpret=True)
    got = statuses(target, "jax_gpu", lambda c: c in ("one sequence", "sm_scale", "table width 3"))
    assert got == {
        "one sequence": ("pass", "FAIL"),
        "sm_scale": ("n/a", "n/a"),
        "table width 3": ("FAIL", "FAIL"),
    }


def test_a_failure_is_shrunk():
    case = next(c for c in conformance.cases_of("nhd") if c.check.startswith("groups of 3"))
    (report,) = conformance.run(one_short, "nhd", [case])
    assert report.smallest.startswith("lengths=[1] kv_heads=1 groups=1 ")


def test_the_command_line(capsys):
    target = ["--target", "pallas_kernels:paged_attention", "--dialect", "nhd"]
    assert conformance.main([*target, "--with", "kv_layout=NPKD", "--only", "one sequence"]) == 0
    assert "1 passed, 0 failed, 0 not offered" in capsys.readouterr().out
    assert conformance.main([*target, "--only", "one sequence"]) == 1  # KNPD pages were expected
    assert "one sequence: lengths=[13]" in capsys.readouterr().out
    assert conformance.main(["--target", "nothing_here:f", "--dialect", "nhd"]) == 2
    assert "cannot load nothing_here:f" in capsys.readouterr().err
