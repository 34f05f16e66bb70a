"""The specification against values worked out by hand, and its small parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import merge_attention, paged_attention, reference
from pallas_kernels.options import AttentionOptions

NAN = float("nan")


def one_head(k, v, table, length, q, **options):
    """Decode of one sequence with one head of dim 1: pages [N][P] of numbers."""
    k_pages, v_pages = (jnp.array(x, jnp.float32)[None, :, :, None] for x in (k, v))
    out, lse = paged_attention(
        jnp.array([[[q]]], jnp.float32),
        k_pages,
        v_pages,
        jnp.array([table], jnp.int32),
        jnp.array([length], jnp.int32),
        implementation="reference",
        return_lse=True,
        **options,
    )
    return float(out[0, 0, 0]), float(lse[0, 0])


def test_two_keys_by_hand():
    # Tokens: page 2 holds (k=0, v=10) and (k=ln 3, v=20); the query is 1.
    k = [[NAN, NAN], [NAN, NAN], [0.0, np.log(3.0)]]
    v = [[NAN, NAN], [NAN, NAN], [10.0, 20.0]]
    out, lse = one_head(k, v, table=[2, 10**7], length=2, q=1.0)
    assert out == pytest.approx((1 * 10 + 3 * 20) / 4, rel=1e-6)
    assert lse == pytest.approx(np.log(4.0), rel=1e-6)


def test_the_table_gives_the_order_and_the_length_the_end():
    # Positions 0..2 are page 1, offsets 0, 1, then page 0, offset 0. With ALiBi's slope ln 2 and
    # keys of zero the weights are 2^-2, 2^-1, 1 from the oldest to the newest.
    k = [[0.0, NAN], [0.0, 0.0]]
    v = [[7.0, NAN], [1.0, 3.0]]
    slope = jnp.array([np.log(2.0)], jnp.float32)
    out, _ = one_head(k, v, table=[1, 0], length=3, q=1.0, alibi_slopes=slope)
    assert out == pytest.approx((0.25 * 1 + 0.5 * 3 + 1 * 7) / 1.75, rel=1e-6)


def test_sliding_window_counts_the_query_itself():
    k, v = [[0.0, 0.0, 0.0, 0.0]], [[1.0, 2.0, 4.0, 8.0]]
    assert one_head(k, v, [0], 4, 1.0, sliding_window=1)[0] == pytest.approx(8.0)
    assert one_head(k, v, [0], 4, 1.0, sliding_window=3)[0] == pytest.approx(14 / 3)
    assert one_head(k, v, [0], 4, 1.0, sliding_window=9)[0] == pytest.approx(15 / 4)


def test_a_sink_takes_weight_and_has_no_value():
    sink = jnp.array([np.log(2.0)], jnp.float32)
    out, lse = one_head([[0.0, 0.0]], [[3.0, 5.0]], [0], 2, 1.0, sinks=sink)
    assert out == pytest.approx((3 + 5) / 4, rel=1e-6)
    assert lse == pytest.approx(np.log(4.0), rel=1e-6)


def test_scale_then_cap():
    # q.k = 3, scaled to 6, capped at 2: 2 tanh(3); the other logit is 0.
    out, _ = one_head(
        [[0.0, 3.0]], [[0.0, 1.0]], [0], 2, 1.0, sm_scale=2.0, attn_logits_soft_cap=2.0
    )
    weight = np.exp(2 * np.tanh(3.0))
    assert out == pytest.approx(weight / (1 + weight), rel=1e-6)


def test_scales_multiply_keys_and_values():
    k_scale, v_scale = jnp.float32(0.5), jnp.array([10.0], jnp.float32)
    out, _ = one_head(
        [[0.0, 2 * np.log(3.0)]],
        [[1.0, 2.0]],
        [0],
        2,
        1.0,
        k_scales_pages=k_scale,
        v_scales_pages=v_scale,
    )
    assert out == pytest.approx(10 * (1 + 3 * 2) / 4, rel=1e-6)


def test_no_token_is_zeros_even_beside_a_sink():
    sink = jnp.array([1.0], jnp.float32)
    assert one_head([[NAN]], [[NAN]], [10**7], 0, 1.0) == (0.0, -np.inf)
    assert one_head([[NAN]], [[NAN]], [10**7], 0, 1.0, sinks=sink) == (0.0, -np.inf)


def test_query_rows_of_a_packed_batch():
    rows = reference.query_rows(
        7,
        kv_lens=jnp.array([5, 9, 4, 77777], jnp.int32),
        cu_q_lens=jnp.array([0, 2, 2, 5, 99999], jnp.int32),
        num_seqs=jnp.int32(3),
    )
    assert rows.live.tolist() == [True] * 5 + [False] * 2
    assert rows.sequence[:5].tolist() == [0, 0, 2, 2, 2]
    assert rows.position[:5].tolist() == [3, 4, 1, 2, 3]


def test_parts_of_a_sequence_merge_into_the_whole():
    rng = np.random.default_rng(0)
    q = jnp.array(rng.standard_normal((2, 4, 8)), jnp.float32)
    k, v = (jnp.array(rng.standard_normal((2, 4, 4, 8)), jnp.float32) for _ in range(2))
    table = jnp.array([[1, 2, 3], [3, 2, 1]], jnp.int32)

    def part(table, lengths):
        lengths = jnp.array(lengths, jnp.int32)
        return paged_attention(q, k, v, table, lengths, return_lse=True, implementation="reference")

    whole = part(table, [11, 4])
    merged = merge_attention(*part(table[:, :1], [4, 4]), *part(table[:, 1:], [7, 0]))
    for got, expected in zip(merged, whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)
    nothing = merge_attention(*part(table, [0, 0]), *part(table, [0, 0]))
    assert not nothing[0].any()
    assert jnp.isneginf(nothing[1]).all()


def test_merge_refuses_what_does_not_match():
    out, lse = jnp.zeros((2, 4, 8)), jnp.zeros((2, 4))
    with pytest.raises(ValueError, match=r"out_a and out_b must match"):
        merge_attention(out, lse, out[:1], lse)
    with pytest.raises(ValueError, match=r"lse_a and lse_b must be \[2, 4\]"):
        merge_attention(out, lse, out, lse[:, :1])


def test_options_are_an_argument_of_jit():
    traces = []

    @jax.jit
    def scale_of(options):
        traces.append(options.soft_cap)
        return jnp.asarray(options.sm_scale) * 2

    assert scale_of(AttentionOptions(sm_scale=2.0, soft_cap=5.0)) == 4
    assert scale_of(AttentionOptions(sm_scale=3.0, soft_cap=5.0)) == 6
    assert traces == [5.0]  # the scale is data, the cap is static
    scale_of(AttentionOptions(sm_scale=3.0, soft_cap=6.0))
    assert traces == [5.0, 6.0]
