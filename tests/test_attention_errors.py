"""The traps between the dialects, and bad arguments: an error that names value and remedy, no numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import append_kv, chosen_implementation, paged_attention, ragged_paged_attention

B, H, K, D, N, P, M = 3, 4, 2, 8, 6, 4, 2
Q = np.ones((B, H, D), np.float32)
PAGES = np.ones((N, P, K, D), np.float32)  # as "NPKD"
TABLES = np.array([[1, 2], [3, -1], [10**7, 5]], np.int32)
LENGTHS = np.array([8, 3, 0], np.int32)
VARIED = np.random.default_rng(0).normal(size=(2, *PAGES.shape)).astype(np.float32)


def decode(q=Q, k=PAGES, v=PAGES, tables=TABLES, lengths=LENGTHS, *rest, **options):
    return paged_attention(q, k, v, tables, lengths, *rest, **{"kv_layout": "NPKD", **options})


def ragged(
    q=Q, pages=(PAGES, PAGES), kv_lens=LENGTHS, tables=TABLES, cu=None, count=None, **options
):
    cu = np.array([0, 2, 3, 3], np.int32) if cu is None else cu
    count = np.array([3], np.int32) if count is None else count
    options = {"kv_layout": "NPKD", **options}
    return ragged_paged_attention(q, pages, kv_lens, tables, cu, count, **options)


def test_the_good_calls_are_good():
    assert decode().shape == Q.shape
    assert ragged().shape == Q.shape


BAD_DECODE = {
    "jax's TPU order": (dict(tables=LENGTHS, lengths=TABLES), r"they are swapped.*JAX's TPU"),
    "no table": (dict(tables=LENGTHS), r"block_tables must be \[B, M\] with B = 3"),
    "table of another batch": (dict(tables=TABLES[:2]), r"B = 3 .* got shape \(2, 2\)"),
    "int16 table": (dict(tables=TABLES.astype(np.int16)), r"block_tables\.astype\(jnp\.int32\)"),
    "float lengths": (
        dict(lengths=LENGTHS.astype(np.float32)),
        r"lengths must be int32; got float32",
    ),
    "lengths of another batch": (dict(lengths=LENGTHS[:1]), r"lengths must have shape \(3,\)"),
    "q without heads": (dict(q=Q[:, 0]), r"q must be \[B, H, D\]"),
    "an empty batch": (
        dict(q=Q[:0], tables=TABLES[:0], lengths=LENGTHS[:0]),
        r"q has no rows \(shape \(0, 4, 8\)\): leave the call out",
    ),
    "int q": (
        dict(q=Q.astype(np.int32)),
        r"q must be one of float32, bfloat16, float16; got int32",
    ),
    "head dim": (dict(q=Q[..., :4]), r"q has head dim 4, the pages have 8"),
    "heads": (dict(q=Q[:, :3]), r"3 query heads must be a multiple of the 2 KV heads"),
    "another layout": (dict(kv_layout="KNPD"), r"query heads must be a multiple of the 6 KV heads"),
    "unknown layout": (dict(kv_layout="NHD"), r"KNPD, NPKD, .*got 'NHD'"),
    "3 axes": (dict(k=PAGES[0]), r"the 4 axes \[N,P,K,D\]"),
    "no pages": (dict(k=PAGES[:0], v=PAGES[:0]), r"at least one element"),
    "no v": (dict(v=None), r"needs k_pages and v_pages"),
    "v shape": (dict(v=PAGES[:-1]), r"v_pages must have shape \(6, 4, 2, 8\)"),
    "v not transposed": (
        dict(
            k=np.ones((N, K, D, P), np.float32),
            v=np.ones((N, K, D, P), np.float32),
            kv_layout="NKDP",
        ),
        r"v_pages must have shape \(6, 2, 4, 8\)",
    ),
    "v dtype": (dict(v=PAGES.astype(np.float16)), r"one dtype; got float32 and float16"),
    "bits without their dtype": (
        dict(k=PAGES.astype(np.uint16), v=PAGES.astype(np.uint16)),
        r'kv_dtype="bfloat16" \(got kv_dtype=None\)',
    ),
    "bits as another dtype": (
        dict(k=PAGES.astype(np.uint16), v=PAGES.astype(np.uint16), kv_dtype="float16"),
        r"got kv_dtype='float16'",
    ),
    "kv_dtype of float pages": (dict(kv_dtype="bfloat16"), r"these are float32: leave it out"),
    "int32 pages": (dict(k=PAGES.astype(np.int32), v=PAGES.astype(np.int32)), r"got int32"),
    "interleaved with v": (dict(kv_layout="NP2KD"), r"interleaves K and V in one array"),
    "scale None": (dict(sm_scale=None), r"sm_scale must be a number"),
    "scale nan": (dict(sm_scale=float("nan")), r"finite number .*got nan"),
    "scale a vector": (dict(sm_scale=np.ones(3, np.float32)), r"scalar array"),
    "cap 0": (dict(attn_logits_soft_cap=0.0), r"soft_cap must be a positive number.*got 0\.0"),
    "window 0": (dict(sliding_window=0), r"an integer >= 1.*got 0"),
    "window 1.5": (dict(sliding_window=1.5), r"got 1\.5"),
    "sinks": (dict(sinks=np.ones(2, np.float32)), r"sinks must be \[H\] = \[4\].*float32\[2\]"),
    "slopes": (dict(alibi_slopes=np.ones(4, np.int32)), r"alibi_slopes must be .* got int32\[4\]"),
    "scales": (
        dict(k_scales_pages=np.ones((K, N, P), np.float32)),
        r"k_scale must be a scalar, \[K\] = \[2\], or .*\[6, 4, 2\].*got \[2, 6, 4\]",
    ),
    "scale beyond float32": (dict(sm_scale=1e39), r"that float32 holds.*got 1e\+39"),
    "scale True": (dict(sm_scale=True), r"got True"),
    "cap beyond float32": (dict(attn_logits_soft_cap=1e39), r"float32 holds.*got 1e\+39"),
    "cap below float32": (dict(attn_logits_soft_cap=1e-300), r"float32 holds.*got 1e-300"),
    "cap an array": (dict(attn_logits_soft_cap=np.ones(2, np.float32)), r"soft_cap must be a pos"),
    "cap True": (dict(attn_logits_soft_cap=True), r"got True"),
    "sinks nan": (dict(sinks=np.full(4, np.nan, np.float32)), r"sinks must hold finite.*got nan"),
    "sinks inf": (dict(sinks=np.full(4, np.inf, np.float32)), r"sinks must hold finite.*got inf"),
    "scale an array of nan": (dict(sm_scale=np.float32(np.nan)), r"sm_scale must hold finite"),
    "cap a text": (dict(attn_logits_soft_cap="30"), r"soft_cap must be a pos.*got '30'"),
    "slopes nan": (dict(alibi_slopes=np.full(4, np.nan, np.float32)), r"alibi_slopes must hold"),
    "scale inf": (dict(k_scales_pages=np.float32(np.inf)), r"k_scale must hold finite.*got inf"),
    "a wrapped length": (
        dict(lengths=LENGTHS.astype(np.int64) + 2**32),
        r"lengths holds 42949\d+, which int32 cannot",
    ),
    "a wrapped page": (dict(tables=TABLES.astype(np.int64) - 2**33), r"block_tables holds -85"),
    "implementation": (dict(implementation="cuda"), r"implementation must be one of .*got 'cuda'"),
    "a length past the table": (
        dict(lengths=np.array([9, 3, 0], np.int32)),
        r"lengths\[0\] = 9, but block_tables has 2 pages of 4 tokens",
    ),
    "a negative length": (dict(lengths=np.array([8, -3, 0], np.int32)), r"lengths\[1\] = -3"),
    "padding within the length": (
        dict(lengths=np.array([8, 5, 0], np.int32)),
        r"block_tables\[1, 1\] = -1 is no page of a pool of 6.*-1 is not one",
    ),
}


@pytest.mark.parametrize("name", BAD_DECODE)
def test_decode_refuses(name):
    arguments, message = BAD_DECODE[name]
    with pytest.raises(ValueError, match=message):
        decode(**arguments)


BAD_RAGGED = {
    "jax's decode order": (dict(kv_lens=TABLES, tables=LENGTHS), r"The order is \(q, kv_pages"),
    "no tokens": (dict(q=Q[:0]), r"q has no rows"),
    "one array": (dict(pages=PAGES), r"needs kv_pages = \(k_pages, v_pages\); got one array"),
    "two arrays": (dict(kv_layout="NP2KD"), r"pass one interleaved array"),
    "odd heads": (
        dict(pages=np.ones((N, P, 3, D), np.float32), kv_layout="NP2KD"),
        r"must be even",
    ),
    "cu_q_lens": (dict(cu=np.array([0, 2, 3], np.int32)), r"cu_q_lens must have shape \(4,\)"),
    "num_seqs": (dict(count=np.array([1, 2], np.int32)), r"num_seqs must be \[1\] int32"),
    "more sequences than rows": (
        dict(count=np.array([4], np.int32)),
        r"num_seqs = 4 must be 0\.\.3",
    ),
    "q_lens past q": (dict(cu=np.array([0, 2, 4, 4], np.int32)), r"within the 3 rows of q"),
    "falling": (dict(cu=np.array([0, 2, 1, 3], np.int32)), r"never fall.*\[0, 2, 1, 3\]"),
    "a wrapped start": (
        dict(cu=np.array([0, 2, 3, 2**32 + 3])),
        r"cu_q_lens holds 4294967299, which int32 cannot",
    ),
    "not from 0": (dict(cu=np.array([1, 2, 3, 3], np.int32)), r"must start at 0"),
    "more queries than tokens": (
        dict(cu=np.array([0, 1, 2, 3], np.int32)),
        r"Sequence 2 has 1 query tokens but kv_lens\[2\] = 0.*write the new keys",
    ),
    "padding within the length": (
        dict(kv_lens=np.array([8, 5, 0], np.int32)),
        r"page_indices\[1, 1\] = -1",
    ),
}


@pytest.mark.parametrize("name", BAD_RAGGED)
def test_ragged_refuses(name):
    arguments, message = BAD_RAGGED[name]
    with pytest.raises(ValueError, match=message):
        ragged(**arguments)


def test_rows_past_num_seqs_are_not_looked_at():
    nonsense = np.array([8, -5, 99999], np.int32)
    out = ragged(
        kv_lens=nonsense, cu=np.array([0, 2, -7, 0], np.int32), count=np.array([1], np.int32)
    )
    assert np.asarray(out)[:2].any()
    assert not np.asarray(out)[2:].any()


def varied(**options):
    """A good call whose result depends on every argument."""
    return decode(k=VARIED[0], v=VARIED[1], **options)


def test_a_list_of_traced_lengths():
    out = jax.jit(lambda a, b: varied(lengths=[a, b, 0]))(jnp.int32(3), jnp.int32(2))
    want = varied(lengths=np.array([3, 2, 0], np.int32))
    np.testing.assert_allclose(out, want, rtol=1e-6)
    assert np.any(np.abs(out - varied()) > 1e-3)


def test_a_window_beyond_every_position_is_none():
    np.testing.assert_array_equal(varied(sliding_window=2**40), varied())
    assert np.any(np.asarray(varied(sliding_window=2)) != varied())


def test_a_sink_of_minus_infinity_is_none():
    none = np.full(4, -np.inf, np.float32)
    np.testing.assert_allclose(varied(sinks=none), varied(), rtol=1e-6)


@pytest.mark.parametrize("name", ["sliding_window", "attn_logits_soft_cap"])
def test_static_options_say_so_when_traced(name):
    with pytest.raises(ValueError, match=r"must be a Python number known at trace time"):
        jax.jit(lambda x: decode(**{name: x}))(3)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_bad_id_in_traced_code_is_a_page_without_tokens(implementation):
    """Values are unknown under jit: no error, but no stray read either."""
    lengths = np.array([8, 8, 0], np.int32)  # row 1 reaches its entry of -1
    tables = np.array([[1, 2], [3, -1], [0, 0]], np.int32)
    out = jax.jit(lambda *x: decode(tables=x[0], lengths=x[1], implementation=implementation))(
        tables, lengths
    )
    np.testing.assert_allclose(out[:2], 1.0, rtol=1e-6)  # every value is one


def test_auto_says_what_it_chose():
    assert chosen_implementation() == ("pallas" if jax.default_backend() == "gpu" else "xla")
    assert chosen_implementation("reference") == "reference"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU can run the kernels")
def test_pallas_without_a_gpu_names_what_can():
    with pytest.raises(NotImplementedError, match=r'needs an NVIDIA GPU.*use "xla"'):
        decode(implementation="pallas")


def test_jaxs_tile_parameters_are_accepted():
    tiles = dict(block_h=16, pages_per_compute_block=8, k_splits=16, num_warps=8, num_stages=2)
    np.testing.assert_array_equal(
        decode(**tiles, mask_value=-1e30, debug=False, implementation="xla"),
        decode(implementation="xla"),
    )
    tiles = dict(num_kv_pages_per_block=8, num_queries_per_block=16, vmem_limit_bytes=1 << 20)
    np.testing.assert_array_equal(
        ragged(**tiles, mask_value=-1e30, implementation="xla"), ragged(implementation="xla")
    )


def append(k_pages=PAGES, v_pages=PAGES, k=Q[:, :K], v=Q[:, :K], slots=LENGTHS, **options):
    return append_kv(k_pages, v_pages, k, v, slots, **{"kv_layout": "NPKD", **options})


BAD_APPEND = {
    "slots": (
        dict(slots=LENGTHS.astype(np.float32)),
        r"slots must be \[T\] int32; got float32\[3\]",
    ),
    "a wrapped slot": (dict(slots=[4, 5, 2**32 + 5]), r"slots holds 4294967301, which int32"),
    "a slot beyond 64 bits": (dict(slots=[4, 5, -(2**70)]), r"slots holds -1180591620717411303424"),
    "k": (dict(k=Q), r"k must be \[T, K, D\] = \[3, 2, 8\].*got \[3, 4, 8\]"),
    "v": (dict(v=Q[:2, :K]), r"v must be .*got \[2, 2, 8\]"),
    "bits": (dict(k_pages=PAGES.astype(np.uint16), v_pages=PAGES.astype(np.uint16)), r"kv_dtype="),
    "quantised": (
        dict(k_pages=PAGES.astype(np.int8), v_pages=PAGES.astype(np.int8)),
        r"quantise k \(now float32\)",
    ),
    "integers": (dict(k=Q[:, :K].astype(np.int32)), r"k must be floating point.*got int32"),
}


@pytest.mark.parametrize("name", BAD_APPEND)
def test_append_refuses(name):
    arguments, message = BAD_APPEND[name]
    with pytest.raises(ValueError, match=message):
        append(**arguments)


def test_append_accepts_numpy_and_quantised_pages_of_their_own_dtype():
    k_pages, _ = append(k_pages=PAGES * 0, slots=np.array([4, 9, 23], np.int32))
    assert float(jnp.sum(k_pages)) == 3 * K * D
    small = PAGES.astype(np.int8)
    k_pages, _ = append(small * 0, small, *(Q[:, :K].astype(np.int8),) * 2, LENGTHS + 4)
    assert int(jnp.sum(k_pages, dtype=jnp.int32)) == 3 * K * D
