"""Sampling against plain NumPy: which tokens survive the filters, and how often each is drawn."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxattn import sampling as rules
from paxattn.sampling import SamplingArrays, logprobs_of
from paxattn.sampling_params import SamplingParams

sample = jax.jit(rules.sample, static_argnames="greedy")  # eager loops compile at each call


def arrays(rows, **values):
    made = dict(
        temperature=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.stack([np.zeros(rows), np.arange(rows)], 1).astype(np.uint32),
        min_tokens=np.zeros(rows, np.int32),
        stop_ids=np.full((rows, 2), -1, np.int32),
    )
    for name, value in values.items():
        made[name] = np.broadcast_to(np.asarray(value, made[name].dtype), made[name].shape)
    return SamplingArrays(**{k: jnp.asarray(v) for k, v in made.items()})


def survivors(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after the filters, by sorting, in float64."""
    p = np.exp((logits - logits.max()) / temperature, dtype=np.float64)
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_draws_follow_the_filtered_distribution(filters):
    vocabulary, draws = 300, 20_000  # more than one block of the two-level search
    logits = np.random.default_rng(0).normal(0, 2.5, vocabulary).astype(np.float32)
    want = survivors(logits.astype(np.float64), **filters)
    drawn = sample(
        jnp.broadcast_to(jnp.asarray(logits), (draws, vocabulary)),
        arrays(draws, **filters),
        jnp.zeros(draws, jnp.int32),
        greedy=False,
    )
    counts = np.bincount(np.asarray(drawn), minlength=vocabulary)
    assert counts[want == 0].sum() == 0
    error = np.abs(counts / draws - want)
    # five standard deviations of a binomial share, and never less than one draw
    assert (error <= 5 * np.sqrt(want * (1 - want) / draws) + 1 / draws).all()


def test_temperature_zero_is_argmax_beside_sampled_rows():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 500)), jnp.float32)
    sampling = arrays(4, temperature=np.array([0, 1, 0, 1]))
    got = np.asarray(sample(logits, sampling, jnp.zeros(4, jnp.int32), greedy=False))
    best = np.asarray(logits).argmax(1)
    assert got[0] == best[0]
    assert got[2] == best[2]
    np.testing.assert_array_equal(
        sample(logits, sampling, jnp.zeros(4, jnp.int32), greedy=True), best
    )


def test_a_row_draws_the_same_whatever_stands_beside_it():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(6, 1000)), jnp.float32)
    sampling = arrays(6, temperature=0.9, top_p=0.8)
    position = jnp.full(6, 3, jnp.int32)
    together = np.asarray(sample(logits, sampling, position, greedy=False))
    for i in range(6):
        one = jax.tree.map(lambda x, i=i: x[i : i + 1], sampling)
        alone = sample(logits[i : i + 1], one, position[:1], greedy=False)
        assert int(alone[0]) == together[i]


def test_position_and_seed_change_the_draw():
    logits = jnp.zeros((1, 4096), jnp.float32)
    draw = lambda seed, at: int(  # noqa: E731
        sample(logits, arrays(1, seed=[[0, seed]]), jnp.asarray([at], jnp.int32), greedy=False)[0]
    )
    assert len({draw(s, p) for s in range(4) for p in range(4)}) == 16
    assert draw(2, 3) == draw(2, 3)


def test_extreme_logits_give_a_token_that_can_be():
    logits = np.full((3, 200), -np.inf, np.float32)
    logits[0, 7] = 0
    logits[1, 199] = 3e38
    logits[2, [0, 150]] = -1e30
    got = np.asarray(
        sample(jnp.asarray(logits), arrays(3, top_p=0.5), jnp.zeros(3, jnp.int32), greedy=False)
    )
    assert got[0] == 7
    assert got[1] == 199
    assert got[2] in (0, 150)


def test_stop_tokens_cannot_come_before_min_tokens():
    logits = np.zeros((2, 50), np.float32)
    logits[:, 9] = 50
    sampling = arrays(2, temperature=0, min_tokens=3, stop_ids=[[9, -1]])
    got = sample(jnp.asarray(logits), sampling, jnp.asarray([2, 3], jnp.int32), greedy=True)
    assert int(got[0]) != 9
    assert int(got[1]) == 9


def test_logprobs_are_the_models_own():
    logits = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)
    chosen, ids, top = logprobs_of(jnp.asarray(logits), jnp.asarray([5, 6], jnp.int32), 4)
    want = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    np.testing.assert_allclose(chosen, [want[0, 5], want[1, 6]], atol=1e-6)
    order = np.argsort(-logits, axis=1)[:, :4]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(top, np.take_along_axis(want, order, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"temperature": 10**400}, "temperature"),
        ({"stop": {"a": 1}}, "stop"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_bad_parameters_are_named(bad, named):
    value = next(iter(bad.values()))
    value = value[0] if isinstance(value, list) else value
    with pytest.raises(ValueError, match=rf"^{named} must .*{re.escape(repr(value))}"):
        SamplingParams(**bad)


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5))
    assert params.max_tokens == 3
