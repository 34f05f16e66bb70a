"""Attention over pages and the write into them: one body for every implementation and layout."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import append_kv, paged_attention, ragged_paged_attention, xla_virtual
from pallas_kernels.conformance import compare
from pallas_kernels.conformance_cases import Case, build
from pallas_kernels.conformance_oracle import attend_ragged
from pallas_kernels.options import AttentionOptions

pytestmark = pytest.mark.optimized

SPLIT_LAYOUTS = ["KNPD", "NPKD", "NKPD", "NKDP"]
AXES = {"NPKD": (0, 1, 2, 3), "KNPD": (2, 0, 1, 3), "NKPD": (0, 2, 1, 3), "NKDP": (0, 2, 3, 1)}
IMPLEMENTATIONS = ["xla", "reference"]


def in_layout(k, v, kv_layout):
    """Pages from [N, P, K, D] into a layout; one array for the interleaved one."""
    k, v = jnp.asarray(k), jnp.asarray(v)
    if kv_layout == "NP2KD":
        n, p, heads, d = k.shape
        return jnp.stack([k, v], axis=3).reshape(n, p, 2 * heads, d)
    v_axes = AXES["NKPD" if kv_layout == "NKDP" else kv_layout]
    return k.transpose(AXES[kv_layout]), v.transpose(v_axes)


def oracle(case, arrays):
    wide = (x.astype(np.float64) for x in (arrays.q, arrays.k_pages, arrays.v_pages))
    q_lens = np.array(case.q_lens or [1] * len(case.lengths))
    lengths = np.array(case.lengths)
    return attend_ragged(*wide, arrays.clean_tables, lengths, q_lens, arrays.features)


def assert_equals_oracle(case, kv_layout, implementation):
    """A decode with everything that bends its logits."""
    arrays = build(case, dirty=True)
    out, lse = paged_attention(
        arrays.q,
        *in_layout(arrays.k_pages, arrays.v_pages, kv_layout),
        arrays.tables,
        arrays.lengths,
        kv_layout=kv_layout,
        sm_scale=case.sm_scale,
        attn_logits_soft_cap=case.soft_cap,
        sliding_window=case.sliding_window,
        sinks=arrays.features.sinks,
        alibi_slopes=arrays.features.alibi_slopes,
        return_lse=True,
        implementation=implementation,
    )
    expected, expected_lse = oracle(case, arrays)
    assert compare(np.asarray(out, np.float64), expected, 1e-5).status == "pass"
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5, rtol=0)


DECODE = Case(
    "decode",
    lengths=(0, 1, 7, 8, 9, 45),
    kv_heads=3,
    groups=3,
    soft_cap=4.0,
    sliding_window=30,
    sinks=True,
    alibi=True,
    sm_scale=0.5,
)


@pytest.mark.parametrize("kv_layout", SPLIT_LAYOUTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode(implementation, kv_layout):
    assert_equals_oracle(DECODE, kv_layout, implementation)


RAGGED = Case(
    "ragged",
    lengths=(19, 45, 8, 12, 37),
    q_lens=(19, 11, 1, 0, 1),
    padded_rows=4,
    padded_seqs=2,
    kv_heads=3,
    groups=3,
    sliding_window=17,
)


@pytest.mark.parametrize("kv_layout", [*SPLIT_LAYOUTS, "NP2KD"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ragged(implementation, kv_layout):
    arrays = build(RAGGED, dirty=True)
    out, lse = ragged_paged_attention(
        arrays.q,
        in_layout(arrays.k_pages, arrays.v_pages, kv_layout),
        arrays.lengths,
        arrays.tables,
        arrays.cu_q_lens,
        arrays.num_seqs,
        kv_layout=kv_layout,
        sliding_window=17,
        return_lse=True,
        implementation=implementation,
    )
    expected, expected_lse = oracle(RAGGED, arrays)
    assert compare(np.asarray(out, np.float64), expected, 1e-5).status == "pass"
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5, rtol=0)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "uint16"])
def test_narrow_products_round_to_the_type_of_bfloat16_pages(stored):
    """And with dirty pages: NaN wherever no token is."""
    case = dataclasses.replace(RAGGED, kv_dtype="float32" if stored == "float32" else "bfloat16")
    arrays = build(case, dirty=True)
    pages = (arrays.k_pages, arrays.v_pages)
    if stored == "uint16":
        pages = tuple(x.view(np.uint16) for x in pages)
    rest = (arrays.lengths, arrays.tables, arrays.cu_q_lens, arrays.num_seqs)
    wide, narrow = (
        np.asarray(
            ragged_paged_attention(
                arrays.q,
                in_layout(*pages, "NKDP"),
                *rest,
                kv_layout="NKDP",
                kv_dtype="bfloat16" if stored == "uint16" else None,
                sliding_window=17,
                narrow_products=products,
                implementation="xla",
            ),
            np.float64,
        )
        for products in (False, True)
    )
    expected = oracle(case, arrays)[0]
    assert compare(wide, expected, 1e-5).status == "pass"
    error = np.abs(narrow - expected).max() / np.abs(expected).max()
    if stored == "float32":
        np.testing.assert_array_equal(narrow, wide)
    else:  # of q, of the weights: 2^-9 each, relative, and a logit may be several
        assert 1e-4 < error < 2e-2


@pytest.mark.parametrize("kv_layout", ["NPKD", "NKDP"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_uint16_pages_are_bfloat16(implementation, kv_layout):
    case = Case("", lengths=(3, 40), kv_dtype="bfloat16", head_dim=32)
    arrays = build(case, dirty=True)
    bits = [x.view(np.uint16) for x in (arrays.k_pages, arrays.v_pages)]
    out = paged_attention(
        arrays.q,
        *in_layout(*bits, kv_layout),
        arrays.tables,
        arrays.lengths,
        kv_layout=kv_layout,
        kv_dtype="bfloat16",
        implementation=implementation,
    )
    # q is float32 and the pages' numbers are exact: no rounding to bfloat16 anywhere.
    assert compare(np.asarray(out, np.float64), oracle(case, arrays)[0], 1e-5).status == "pass"


@pytest.mark.parametrize("kv_layout", SPLIT_LAYOUTS)
def test_scales_per_token_follow_the_layout(kv_layout):
    case = Case("", lengths=(9, 30), kv_dtype="int8", scales="token")
    arrays = build(case, dirty=True)
    axes = [axis for axis in AXES[kv_layout] if axis != 3]
    k_scale, v_scale = (
        jnp.asarray(x.transpose(axes)) for x in (arrays.features.k_scale, arrays.features.v_scale)
    )
    for implementation in IMPLEMENTATIONS:
        out = paged_attention(
            arrays.q,
            *in_layout(arrays.k_pages, arrays.v_pages, kv_layout),
            arrays.tables,
            arrays.lengths,
            k_scale,
            v_scale,
            kv_layout=kv_layout,
            implementation=implementation,
        )
        assert compare(np.asarray(out, np.float64), oracle(case, arrays)[0], 1e-5).status == "pass"


# A sequence's result does not depend on what else is in the batch, to the last bit.


@pytest.mark.parametrize(("kv_layout", "stored"), [("NPKD", "float32"), ("NKDP", "uint16")])
@pytest.mark.parametrize("window", [None, 100])
def test_decode_rows_are_bit_identical_in_any_batch(kv_layout, stored, window):
    case = Case("", (300, 5, 17, 256), table_width=20, page_size=16, kv_heads=3, groups=3)
    arrays = build(case, dirty=True)
    pages = in_layout(arrays.k_pages, arrays.v_pages, kv_layout)
    if stored == "uint16":
        bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
        pages = [bits(x.astype(jnp.bfloat16)) for x in pages]

    @jax.jit
    def attend(q, tables, lengths):
        return paged_attention(
            q,
            *pages,
            tables,
            lengths,
            kv_layout=kv_layout,
            kv_dtype="bfloat16" if stored == "uint16" else None,
            sliding_window=window,
        )

    together = attend(arrays.q, arrays.tables, arrays.lengths)
    for row in range(4):
        # Alone (the others are empty), and at another place among copies of itself.
        alone = np.where(np.arange(4) == row, arrays.lengths, 0).astype(np.int32)
        np.testing.assert_array_equal(
            attend(arrays.q, arrays.tables, alone)[row], together[row], strict=True
        )
        copies = attend(
            *(np.stack([x[row]] * 4) for x in (arrays.q, arrays.tables, arrays.lengths))
        )
        np.testing.assert_array_equal(copies, np.stack([together[row]] * 4), strict=True)


@pytest.mark.parametrize(
    ("page_size", "kv_heads", "groups", "head_dim", "stored"),
    [
        (16, 8, 4, 64, "uint16"),
        (16, 2, 2, 128, "float32"),
        (32, 3, 3, 64, "float32"),
        (64, 1, 4, 32, "uint16"),
        (4, 2, 1, 16, "float32"),
    ],
)
def test_decode_rows_are_bit_identical_in_batches_of_all_sizes(
    page_size, kv_heads, groups, head_dim, stored
):
    """Rows are cut into spans, and taken in groups whose size depends on the batch's."""
    rng = np.random.default_rng(0)
    pages = -(-1700 // page_size)
    k, v = (
        rng.standard_normal((8 * pages + 1, kv_heads, *axes)).astype(np.float32)
        for axes in ((head_dim, page_size), (page_size, head_dim))
    )
    if stored == "uint16":
        k, v = (
            jax.lax.bitcast_convert_type(jnp.asarray(x, jnp.bfloat16), jnp.uint16) for x in (k, v)
        )
    q = rng.standard_normal((8, kv_heads * groups, head_dim)).astype(np.float32)
    tables = rng.permutation(np.arange(1, 8 * pages + 1)).reshape(8, pages).astype(np.int32)
    lengths = np.array([150, 3, 0, 1700, 384, 1, 385, 1025], np.int32)

    def attend(rows, tables=tables):
        return paged_attention(
            *(q[rows], k, v, tables[rows], lengths[rows]),
            kv_layout="NKDP",
            kv_dtype="bfloat16" if stored == "uint16" else None,
            return_lse=True,
        )

    few = attend(np.arange(8))
    longer_table = np.pad(tables, ((0, 0), (0, 2 * pages)))
    others = [(np.tile(np.arange(8), 4), tables), (np.array([7, 3, 3]), longer_table)]
    for rows, wide in others:
        for one, many in zip(few, attend(rows, wide), strict=True):
            np.testing.assert_array_equal(many, one[rows], strict=True)


@pytest.mark.parametrize("kv_layout", SPLIT_LAYOUTS)
@pytest.mark.parametrize("window", [None, 1, 500, 1400])
def test_decode_of_long_sequences(kv_layout, window):
    """Several chunks and spans, at and beside their ends; windows that begin anywhere in them."""
    case = Case(
        "",
        lengths=(1800, 384, 0, 385, 640, 1537, 130),
        table_width=225,
        soft_cap=8.0,
        sliding_window=window,
        sinks=True,
        alibi=True,
        sm_scale=0.5,
    )
    assert_equals_oracle(case, kv_layout, "xla")


@pytest.mark.parametrize(
    ("kv_layout", "narrow"), [("NPKD", False), ("NKDP", False), ("NKDP", True)]
)
def test_ragged_rows_are_bit_identical_however_packed_and_chunked(kv_layout, narrow):
    """One prompt of 200 tokens: whole, in chunks cut anywhere, and behind other sequences."""
    length, padded_rows, batch = 200, 256, 4
    dtype = "bfloat16" if narrow else "float32"
    sizes = dict(table_width=16, page_size=16, kv_heads=3, groups=3)
    case = Case("", (length, 150, 70), kv_dtype=dtype, **sizes)
    arrays = build(case, dirty=True)
    pages = in_layout(arrays.k_pages, arrays.v_pages, kv_layout)
    rng = np.random.default_rng(3)
    prompt = rng.standard_normal((length, 9, 16)).astype(np.float32)

    @jax.jit
    def attend(q, kv_lens, tables, cu, count):
        return ragged_paged_attention(
            *(q, pages, kv_lens, tables, cu, count),
            kv_layout=kv_layout,
            sm_scale=0.25,
            narrow_products=narrow,
        )

    def packed(parts):
        """parts: (sequence, first position, queries) in order."""
        q = rng.standard_normal((padded_rows, 9, 16)).astype(np.float32)
        kv_lens, tables = np.zeros(batch, np.int32), np.zeros((batch, 16), np.int32)
        cu = np.zeros(batch + 1, np.int32)
        for i, (sequence, first, queries) in enumerate(parts):
            cu[i + 1 :] = cu[i] + len(queries)
            q[cu[i] : cu[i + 1]] = queries
            kv_lens[i], tables[i] = first + len(queries), arrays.tables[sequence]
        out = attend(q, kv_lens, tables, cu, np.array([len(parts)], np.int32))
        return [np.asarray(out[cu[i] : cu[i + 1]]) for i in range(len(parts))]

    (whole,) = packed([(0, 0, prompt)])
    other = rng.standard_normal((30, 9, 16)).astype(np.float32)
    for cuts in ([0, 1, 16, 77, 200], [0, 63, 64, 129, 200]):
        for start, stop in itertools.pairwise(cuts):
            behind = packed([(1, 120, other), (0, start, prompt[start:stop]), (2, 69, other[:1])])
            np.testing.assert_array_equal(behind[1], whole[start:stop], strict=True)


def test_growing_tables_and_padding_change_no_bit():
    arrays = build(Case("", (40, 9), table_width=8), dirty=True)
    pages = in_layout(arrays.k_pages, arrays.v_pages, "NPKD")
    narrow = paged_attention(arrays.q, *pages, arrays.tables, arrays.lengths, kv_layout="NPKD")
    wide_tables = np.pad(arrays.tables, ((0, 0), (0, 30)), constant_values=-1)
    wide = paged_attention(arrays.q, *pages, wide_tables, arrays.lengths, kv_layout="NPKD")
    np.testing.assert_array_equal(narrow, wide)


# What the compiled programs hold and do.


def decode_program(kv_layout, stored, pages):
    shape = {"k": (pages, 3, 64, 16), "v": (pages, 3, 16, 64)}
    if kv_layout != "NKDP":
        shape = {"k": (pages, 16, 3, 64), "v": (pages, 16, 3, 64)}
    spec = jax.ShapeDtypeStruct
    options = AttentionOptions(
        kv_layout=kv_layout, kv_dtype="bfloat16" if stored == jnp.uint16 else None
    )
    form = xla_virtual.decode if kv_layout == "NKDP" else pallas_kernels.xla_decode.decode
    return (
        jax.jit(form)
        .lower(
            spec((8, 9, 64), jnp.float32),
            spec(shape["k"], stored),
            spec(shape["v"], stored),
            spec((8, 64), jnp.int32),
            spec((8,), jnp.int32),
            options,
        )
        .compile()
    )


@pytest.mark.parametrize("stored", [jnp.float32, jnp.uint16])
def test_virtual_gather_holds_neither_the_pool_nor_gathered_keys(stored):
    """The form is fast only as long as XLA fuses it; an unfused one holds [B, N, ..] arrays."""
    program = decode_program("NKDP", stored, 2048)
    gathered_chunk = 8 * xla_virtual.CHUNK_TOKENS * 3 * 64 * 4
    assert program.memory_analysis().temp_size_in_bytes < gathered_chunk / 2


def test_the_chunk_loop_holds_a_few_chunks():
    program = decode_program("NPKD", jnp.float32, 2048)
    assert program.memory_analysis().temp_size_in_bytes < 8 * (8 * 128 * 3 * 64 * 4)


def test_ragged_holds_no_pool_and_no_context_for_every_token():
    spec, tokens, pages = jax.ShapeDtypeStruct, 512, 8192
    compiled = (
        jax.jit(functools.partial(ragged_paged_attention, kv_layout="NKDP"))
        .lower(
            spec((tokens, 9, 64), jnp.float32),
            (spec((pages, 3, 64, 16), jnp.float32), spec((pages, 3, 16, 64), jnp.float32)),
            spec((32,), jnp.int32),
            spec((32, 64), jnp.int32),
            spec((33,), jnp.int32),
            spec((1,), jnp.int32),
        )
        .compile()
    )
    q_bytes = tokens * 9 * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * q_bytes  # a pool is 43 of these


# Writing into the pages.


@pytest.mark.parametrize("kv_layout", [*SPLIT_LAYOUTS, "NP2KD"])
@pytest.mark.parametrize("stored", ["float32", "uint16"])
def test_append(kv_layout, stored):
    rng = np.random.default_rng(0)
    n, p, heads, d = 5, 4, 2, 8
    k, v = (rng.standard_normal((n, p, heads, d)).astype(np.float32) for _ in range(2))
    new_k, new_v = (rng.standard_normal((6, heads, d)).astype(np.float32) for _ in range(2))
    slots = np.array([19, 4, 0, 9, -3, 20], np.int32)  # two to write, one null, two to drop
    kv_dtype = None
    if stored == "uint16":
        kv_dtype = "bfloat16"
        k, v = (np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).view(np.uint16) for x in (k, v))

    def narrow(x):
        return x if kv_dtype is None else np.asarray(jnp.asarray(x, jnp.bfloat16)).view(np.uint16)

    expected = []
    for pages, new in ((k, narrow(new_k)), (v, narrow(new_v))):
        flat = pages.copy().reshape(n * p, heads, d)
        flat[[19, 4, 9]] = new[[0, 1, 3]]
        expected.append(flat.reshape(n, p, heads, d))
    pages = in_layout(k, v, kv_layout)
    k_pages, v_pages = (pages, None) if kv_layout == "NP2KD" else pages
    got = append_kv(k_pages, v_pages, new_k, new_v, slots, kv_layout=kv_layout, kv_dtype=kv_dtype)
    wanted = in_layout(*expected, kv_layout)
    wanted = (wanted,) if kv_layout == "NP2KD" else wanted
    for a, b in zip(got, wanted, strict=False):
        page_axis = 1 if kv_layout == "KNPD" else 0
        a, b = (np.moveaxis(np.asarray(x), page_axis, 0)[1:] for x in (a, b))
        np.testing.assert_array_equal(a, b)  # all but the null page


@pytest.mark.parametrize("tokens", [1, 8])
def test_append_writes_in_place_under_donation(tokens):
    pools = [jax.ShapeDtypeStruct((512, 3, *d), jnp.uint16) for d in ((64, 16), (16, 64))]
    new = jax.ShapeDtypeStruct((tokens, 3, 64), jnp.float32)
    write = functools.partial(append_kv, kv_layout="NKDP", kv_dtype="bfloat16")
    compiled = (
        jax.jit(write, donate_argnums=(0, 1))
        .lower(*pools, new, new, jax.ShapeDtypeStruct((tokens,), jnp.int32))
        .compile()
    )
    pool_bytes = 512 * 3 * 64 * 16 * 2
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 10


def test_the_exponential_of_the_virtual_form():
    """Against float64, over its whole range; no weight below it, and a NaN stays one."""
    x = np.concatenate([-np.geomspace(1e-9, 87.0, 200_001), [0.0]]).astype(np.float32)
    got = np.asarray(jax.jit(xla_virtual._exp)(x)).astype(np.float64)
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=2e-7)
    ends = np.asarray(xla_virtual._exp(jnp.array([-88.0, -1e4, -2.4e38, -jnp.inf, jnp.nan])))
    np.testing.assert_array_equal(ends[:4], 0.0)
    assert np.isnan(ends[4])
