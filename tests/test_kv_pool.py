"""A pool of one array for all layers holds and serves what one array a layer does."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from paxattn import kv_pool
from paxattn.decode import decode_logits
from paxattn.llama import Llama, init_params, looped

L, N, P, K, D = 3, 6, 4, 2, 16
LAYOUTS = ["KNPD", "NPKD", "NKPD", "NKDP"]
write = jax.jit(kv_pool.write)


def filled(stacked, dtype="float32", layout=None):
    """Both kinds of pool with the same numbers on pages 1 to 5 of every layer."""
    pool = kv_pool.init(L, N, P, K, D, dtype, layout, stacked=stacked)
    slots = jnp.arange(P, N * P, dtype=jnp.int32)
    for layer in range(L):
        k, v = jax.random.normal(jax.random.key(layer), (2, len(slots), K, D))
        pool = (
            write(pool, jnp.int32(layer), k, v, slots)
            if stacked
            else kv_pool.write(pool, layer, k, v, slots)
        )
    return pool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_function_agrees_with_separate_arrays(layout, dtype):
    pages = lambda *xs: jnp.array(xs, jnp.int32)  # noqa: E731

    def history(stacked):
        pool = filled(stacked, dtype, layout)
        assert (pool.stacked, pool.num_pages, pool.page_size) == (stacked, N, P)
        yield pool
        pool = kv_pool.copy_pages(pool, pages(1, 4, 0), pages(3, 5, 0))
        yield pool
        taken = kv_pool.take_pages(pool, pages(2, 5, 0))
        assert (taken.num_pages, taken.num_layers) == (3, L)
        yield taken
        pool = kv_pool.fill_pages(pool, pages(2, 5), float("nan"))
        yield pool
        yield kv_pool.put_pages(pool, pages(5, 1, 0), taken)

    for one, many in zip(history(True), history(False), strict=True):
        assert one.nbytes == many.nbytes
        assert np.array_equal(kv_pool.page_bytes(one), kv_pool.page_bytes(many))
        for layer in range(L):
            table = pages(2, 1)
            got, want = (kv_pool.gather(pool, layer, table) for pool in (one, many))
            assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize("slot", [-1, -P - 1, N * P, N * P + 1, L * N * P])
def test_a_slot_outside_of_a_layer_is_not_one_of_the_next(slot):
    pool = filled(stacked=True)
    new = jnp.full((2, K, D), 7.0)
    after = kv_pool.write(pool, 1, new, new, jnp.array([slot, P]))
    changed = kv_pool.page_bytes(after) != kv_pool.page_bytes(pool)
    assert {tuple(x) for x in np.argwhere(changed)[:, :2]} == {(1, 0)}  # the other slot, P


def test_layers_that_int32_slots_cannot_count_are_kept_apart():
    def shape(pages):
        return jax.eval_shape(lambda: kv_pool.init(2, pages, 2, 1, 8))

    assert shape(2**29 - 1).stacked
    assert not shape(2**29).stacked


def test_looped_agrees_and_traces_attention_once():
    config = replace(tiny.CONFIG, num_layers=4)
    params, model = init_params(config, jax.random.key(0)), Llama(config)
    tokens = jnp.array([3, 5, 7], jnp.int32)
    at = jnp.arange(3, dtype=jnp.int32)
    traced = []

    def attend(layer, q, k, v, seen):
        traced.append(layer)
        # what comes back must differ by layer, and the cache must go through all of them
        return q * (1 + layer) + jnp.tile(k - v, (1, 2, 1)), seen.at[layer].add(jnp.sum(v))

    def run(f):
        traced.clear()
        return jax.jit(lambda p: f(p, tokens, at, at + 1, jnp.zeros(4), attend))(params)

    want = run(lambda p, *rest: model.apply({"params": p}, *rest))
    assert traced == [0, 1, 2, 3]
    got = run(lambda p, *rest: looped(model, p, *rest))
    assert len(traced) == 1
    np.testing.assert_allclose(got[0], want[0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=2e-6, atol=2e-6)
    assert np.count_nonzero(got[1]) == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("windows", [None, (5, None, 3)])
def test_a_decode_step_is_the_same_on_both_and_in_place(windows, dtype):
    """Layers that see equally far are looped over, others are not."""
    config = replace(tiny.CONFIG, num_layers=L, sliding_window=windows)
    model = Llama(config, jnp.dtype(dtype))
    params = init_params(config, jax.random.key(0), dtype)
    inputs = (
        jnp.array([3, 5], jnp.int32),
        jnp.array([[1, 2, 3], [4, 5, 0]], jnp.int32),
        jnp.array([9, 6], jnp.int32),
        jnp.array([3 * P, 5 * P + 1], jnp.int32),
    )

    def step(pool, params, *inputs):
        return decode_logits(model, params, pool, *inputs)

    program = jax.jit(step, donate_argnums=0)
    logits, pools = zip(
        *(program(filled(stacked, dtype), params, *inputs) for stacked in (True, False)),
        strict=True,
    )
    np.testing.assert_allclose(*logits, rtol=2e-5, atol=2e-5)
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    for layer in range(L):
        table = jnp.arange(N, dtype=jnp.int32)
        one, many = (jnp.stack(kv_pool.gather(pool, layer, table)) for pool in pools)
        np.testing.assert_allclose(
            one.astype(jnp.float32), many.astype(jnp.float32), rtol=tolerance, atol=tolerance
        )

    if windows is None:  # attention stands in one program once, in the other once a layer
        sizes = [
            program.lower(filled(stacked, dtype), params, *inputs).compile().as_text().count(" = ")
            for stacked in (True, False)
        ]
        assert sizes[0] < sizes[1] * 2 / 3  # of 3 layers

    large = jax.eval_shape(lambda: kv_pool.init(L, 20_000, P, K, D, dtype, stacked=True))
    memory = program.lower(large, params, *inputs).compile().memory_analysis()
    assert memory.alias_size_in_bytes == large.nbytes
    assert memory.temp_size_in_bytes < large.nbytes / 50
