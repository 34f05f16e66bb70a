"""The gradient through pages: against dense attention's, and against differences of the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, ragged_paged_attention
from pallas_kernels.conformance_oracle import Features, attend_ragged

K, G, D, P, N = 2, 2, 8, 4, 16
LENGTHS, Q_LENS = (9, 22, 5), (9, 3, 1)
# Sequences 0 and 1 share their first two pages, as after a fork.
TABLES = np.array([[3, 7, 1, 0, 0, 0], [3, 7, 2, 9, 12, 5], [4, 15, 0, 0, 0, 0]], np.int32)
CU = np.array([0, 9, 12, 13], np.int32)
ROWS = 15  # two rows of padding


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((ROWS, K * G, D)).astype(np.float32)
    k, v = (rng.standard_normal((N, P, K, D)).astype(np.float32) for _ in range(2))
    return q, k, v, rng.standard_normal(q.shape).astype(np.float32)


def ragged(q, k, v, implementation, **options):
    return ragged_paged_attention(
        q,
        (k, v),
        jnp.array(LENGTHS, jnp.int32),
        jnp.array(TABLES),
        jnp.array(CU),
        jnp.array([3], jnp.int32),
        kv_layout="NPKD",
        sm_scale=options.pop("sm_scale", D**-0.5),
        implementation=implementation,
        **options,
    )


def dense(q, k, v):
    """Causal attention of each sequence over its own contiguous keys, in plain JAX."""
    outs = []
    for b, (length, q_len) in enumerate(zip(LENGTHS, Q_LENS, strict=True)):
        slots = np.array([TABLES[b, p // P] * P + p % P for p in range(length)])
        keys, values = (jnp.repeat(x.reshape(N * P, K, D)[slots], G, axis=1) for x in (k, v))
        s = jnp.einsum("qhd,shd->hqs", q[CU[b] : CU[b + 1]], keys, precision="highest") * D**-0.5
        causal = np.arange(length)[None, :] <= np.arange(length - q_len, length)[:, None]
        weights = jax.nn.softmax(jnp.where(causal[None], s, -jnp.inf), axis=-1)
        outs.append(jnp.einsum("hqs,shd->qhd", weights, values, precision="highest"))
    return jnp.concatenate([*outs, jnp.zeros((ROWS - CU[-1], K * G, D))])


def gradient(loss, arguments, argnums=(0, 1, 2)):
    """The gradient in one compiled program: many small ones take longer to compile."""
    return jax.jit(jax.grad(loss, argnums))(*arguments)


def relative(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("implementation", ["xla", "reference", "interpret"])
def test_equals_dense_attentions_gradient(implementation):
    q, k, v, g = arrays()
    expected = gradient(lambda *x: jnp.sum(dense(*x) * g), (q, k, v))
    got = gradient(lambda *x: jnp.sum(ragged(*x, implementation) * g), (q, k, v))
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < 1e-5  # float32 sums of a few dozen terms
    assert not np.asarray(got[0])[CU[-1] :].any()
    used = sorted(set(TABLES[TABLES > 0].tolist()))
    unused = [n for n in range(N) if n not in used]
    assert not np.asarray(got[1])[unused].any()


def test_a_shared_page_receives_the_sum():
    q, k, v, g = arrays()

    @jax.jit
    def page_gradient(weight):
        return jax.grad(lambda v: jnp.sum(ragged(q, k, v, "xla") * weight))(v)[3]

    def only(start, stop):
        weight = np.zeros_like(g)
        weight[start:stop] = g[start:stop]
        return weight

    first, second, both = (page_gradient(only(*rows)) for rows in ((0, 9), (9, 12), (0, 12)))
    assert jnp.abs(first).max() > 0.1
    assert jnp.abs(second).max() > 0.01
    np.testing.assert_allclose(first + second, both, rtol=1e-5, atol=1e-6)


OPTIONS = {
    "soft_cap": 2.0,
    "sliding_window": 7,
    "sinks": np.array([0.5, -1.0, 0.0, 1.0], np.float32),
    "alibi_slopes": np.array([0.5, 0.25, 0.1, 0.0], np.float32),
}


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_every_option_against_differences_of_the_float64_oracle(implementation):
    """Central differences of the oracle along random directions, the log-sum-exp's gradient too."""
    q, k, v, g = arrays(1)
    rng = np.random.default_rng(2)
    g_lse = rng.standard_normal((ROWS, K * G)).astype(np.float32)
    scale = np.float32(0.4)

    def loss(q, k, v, sm_scale, sinks, alibi_slopes):
        options = dict(OPTIONS, sm_scale=sm_scale, sinks=sinks, alibi_slopes=alibi_slopes)
        out, lse = ragged(q, k, v, implementation, return_lse=True, **options)
        return jnp.sum(out * g) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0) * g_lse)

    def oracle(q, k, v, sm_scale, sinks, alibi_slopes):
        features = Features(sm_scale, OPTIONS["soft_cap"], 7, sinks, alibi_slopes)
        lengths, q_lens = np.array(LENGTHS), np.array(Q_LENS)
        out, lse = attend_ragged(q, k, v, TABLES, lengths, q_lens, features)
        return np.sum(out * g) + np.sum(np.where(np.isneginf(lse), 0, lse) * g_lse)

    at = (q, k, v, scale, OPTIONS["sinks"], OPTIONS["alibi_slopes"])
    gradients = gradient(loss, at, tuple(range(6)))
    at64 = [np.asarray(x, np.float64) for x in at]
    for i, got in enumerate(gradients):
        direction = rng.standard_normal(np.shape(at[i]))
        up, down = list(at64), list(at64)
        up[i], down[i] = at64[i] + 1e-5 * direction, at64[i] - 1e-5 * direction
        difference = (oracle(*up) - oracle(*down)) / 2e-5
        assert np.sum(np.asarray(got) * direction) == pytest.approx(difference, rel=3e-5)


def test_interleaved_bfloat16_pages_and_nan_in_dead_slots():
    q, k, v, g = arrays()
    live = np.zeros((N, P), bool)
    for b, length in enumerate(LENGTHS):
        for p in range(length):
            live[TABLES[b, p // P], p % P] = True
    k[~live], v[~live] = np.nan, np.nan
    pages = jnp.asarray(np.stack([k, v], axis=3).reshape(N, P, 2 * K, D)).astype(jnp.bfloat16)
    rest = (jnp.array(LENGTHS), jnp.array(TABLES), jnp.array(CU), jnp.array([3]))
    q = jnp.asarray(q).astype(jnp.bfloat16)

    def loss(q, pages, implementation):
        out = ragged_paged_attention(q, pages, *rest, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) * g)

    ours = gradient(lambda *x: loss(*x, "xla"), (q, pages), (0, 1))
    spec = gradient(lambda *x: loss(*x, "reference"), (q, pages), (0, 1))
    for a, b in zip(ours, spec, strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.isfinite(np.asarray(a, np.float32)).all()
        assert relative(a, b) < 1e-2  # one rounding to bfloat16, of the output in delta too


@pytest.mark.parametrize("kv_layout", ["KNPD", "NKDP"])
def test_decode_has_the_same_gradient(kv_layout):
    q, k, v, g = arrays()
    q, g = q[:3], g[:3]
    v_axes = {"KNPD": (2, 0, 1, 3), "NKDP": (0, 2, 1, 3)}[kv_layout]
    k_axes = {"KNPD": (2, 0, 1, 3), "NKDP": (0, 2, 3, 1)}[kv_layout]
    k, v = k.transpose(k_axes), v.transpose(v_axes)
    lengths = jnp.array([9, 0, 5], jnp.int32)

    def loss(q, k, v, implementation):
        out = paged_attention(
            q, k, v, jnp.array(TABLES), lengths, kv_layout=kv_layout, implementation=implementation
        )
        return jnp.sum(out * g)

    ours = gradient(lambda *x: loss(*x, "xla"), (q, k, v))
    spec = gradient(lambda *x: loss(*x, "reference"), (q, k, v))
    for a, b in zip(ours, spec, strict=True):
        assert relative(a, b) < 1e-5


def test_queries_over_uint16_pages_have_a_gradient_and_quantised_ones_name_the_way():
    q, k, v, g = arrays()
    bits = [
        jax.lax.bitcast_convert_type(jnp.asarray(x).astype(jnp.bfloat16), jnp.uint16)
        for x in (k, v)
    ]
    rounded = [np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32) for x in (k, v)]
    got = gradient(lambda q: jnp.sum(ragged(q, *bits, "xla", kv_dtype="bfloat16") * g), (q,), 0)
    expected = gradient(lambda q: jnp.sum(dense(q, *rounded) * g), (q,), 0)
    assert relative(got, expected) < 1e-5
    stored = [np.clip(np.round(x * 30), -127, 127).astype(np.int8) for x in (k, v)]
    scale = jnp.float32(1 / 30)

    def quantised(q, implementation):
        out = ragged(q, *stored, implementation, k_scale=scale, v_scale=scale)
        return jnp.sum(out * g)

    with pytest.raises(NotImplementedError, match='implementation="reference"'):
        jax.grad(quantised)(q, "xla")
    assert jnp.isfinite(gradient(lambda q: quantised(q, "reference"), (q,), 0)).all()
