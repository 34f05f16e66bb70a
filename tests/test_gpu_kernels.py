"""The GPU kernels against float64: interpreted on a CPU, compiled where there is a GPU.

Every slot that no sequence reaches holds NaN and every table entry past a length an absurd page id
(`build(case, dirty=True)`), in all tests.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    gpu_common,
    gpu_decode,
    gpu_ragged,
    paged_attention,
    ragged_paged_attention,
)
from pallas_kernels.conformance_cases import Case, build
from pallas_kernels.conformance_oracle import attend_ragged
from pallas_kernels.options import AttentionOptions

IMPLEMENTATION = "pallas" if jax.default_backend() == "gpu" else "interpret"
AXES = {"NPKD": (0, 1, 2, 3), "KNPD": (2, 0, 1, 3), "NKPD": (0, 2, 1, 3)}
LAYOUTS = [*AXES, "NP2KD"]
# float32 sums of a hundred terms; bfloat16 and float16 round the probabilities and the result.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def pages_of(arrays, layout):
    k, v = jnp.asarray(arrays.k_pages), jnp.asarray(arrays.v_pages)
    if layout == "NP2KD":
        n, p, heads, d = k.shape
        return jnp.stack([k, v], axis=3).reshape(n, p, 2 * heads, d), None
    return k.transpose(AXES[layout]), v.transpose(AXES[layout])


def scale_of(scale, layout):
    if scale is None or np.ndim(scale) < 3:
        return scale
    axes = [axis for axis in AXES.get(layout, AXES["NPKD"]) if axis != 3]
    return jnp.asarray(scale.transpose(axes))


def attend(case, layout="NPKD", **tiles):
    """Output and log-sum-exp of the kernel for a case, through the public calls."""
    arrays = build(case, dirty=True)
    features = arrays.features
    k_pages, v_pages = pages_of(arrays, layout)
    k_scale, v_scale = (scale_of(x, layout) for x in (features.k_scale, features.v_scale))
    shared = dict(
        kv_layout=layout,
        sm_scale=jnp.float32(case.sm_scale) if case.traced_scale else case.sm_scale,
        sliding_window=case.sliding_window,
        sinks=features.sinks,
        alibi_slopes=features.alibi_slopes,
        return_lse=True,
        implementation=IMPLEMENTATION,
        **tiles,
    )
    if case.q_lens is None:
        out = jax.jit(lambda *a: paged_attention(*a, attn_logits_soft_cap=case.soft_cap, **shared))(
            arrays.q, k_pages, v_pages, arrays.tables, arrays.lengths, k_scale, v_scale
        )
    else:
        pages = k_pages if v_pages is None else (k_pages, v_pages)
        out = jax.jit(
            lambda *a, **s: ragged_paged_attention(*a, soft_cap=case.soft_cap, **s, **shared)
        )(
            *(arrays.q, pages, arrays.lengths, arrays.tables, arrays.cu_q_lens, arrays.num_seqs),
            k_scale=k_scale,
            v_scale=v_scale,
        )
    return tuple(np.asarray(x, np.float64) for x in out)


def expected(case):
    arrays = build(case, dirty=True)
    wide = (np.asarray(x, np.float64) for x in (arrays.q, arrays.k_pages, arrays.v_pages))
    q_lens = np.array(case.q_lens or [1] * len(case.lengths))
    return attend_ragged(
        *wide, arrays.clean_tables, np.array(case.lengths), q_lens, arrays.features
    )


def error(case, layout="NPKD", **tiles):
    """Relative Frobenius error of the output; the log-sum-exp is checked on the way."""
    out, lse = attend(case, layout, **tiles)
    want, want_lse = expected(case)
    assert out.shape == want.shape
    np.testing.assert_allclose(lse, want_lse, atol=2e-5 if case.dtype == "float32" else 2e-2)
    return np.linalg.norm(out - want) / np.linalg.norm(want)


def check(case, layout="NPKD", **tiles):
    assert error(case, layout, **tiles) < TOLERANCE[case.dtype]


DECODE = Case("", lengths=(0, 1, 7, 8, 9, 45, 128), kv_heads=2, groups=3, head_dim=32)
RAGGED = Case(
    "",
    lengths=(19, 45, 8, 12, 37),
    q_lens=(19, 11, 1, 0, 1),
    padded_rows=4,
    padded_seqs=2,
    kv_heads=2,
    groups=3,
    head_dim=32,
)
ALL = dict(soft_cap=4.0, sliding_window=30, sinks=True, alibi=True, sm_scale=0.5)
FEATURES = {
    "soft cap": dict(soft_cap=3.0, query_size=4.0),
    "window": dict(sliding_window=11),
    "sinks": dict(sinks=True),
    "alibi": dict(alibi=True),
    "traced scale": dict(sm_scale=0.3, traced_scale=True),
}
# The interpreter's time goes into compiling, so a small tile costs nothing and finds more.
SMALL = dict(pages_per_compute_block=2)
SMALL_RAGGED = dict(num_kv_pages_per_block=2, num_queries_per_block=8)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("layout", list(AXES))
def test_decode_with_everything(layout, dtype):
    check(dataclasses.replace(DECODE, dtype=dtype, **ALL), layout, **SMALL)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_with_everything(layout, dtype):
    check(dataclasses.replace(RAGGED, dtype=dtype, **ALL), layout, **SMALL_RAGGED)


def test_interleaved_decode():
    check(DECODE, "NP2KD", **SMALL)


@pytest.mark.parametrize("feature", list(FEATURES))
def test_decode_feature(feature):
    check(dataclasses.replace(DECODE, **FEATURES[feature]), **SMALL)


@pytest.mark.parametrize("feature", list(FEATURES))
def test_ragged_feature(feature):
    check(dataclasses.replace(RAGGED, **FEATURES[feature]), **SMALL_RAGGED)


@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_quantised(stored, scales):
    """float32 queries: the stored numbers are exact, so float32's tolerance holds."""
    layout = {"tensor": "NPKD", "head": "NKPD", "token": "KNPD"}[scales]
    check(dataclasses.replace(DECODE, kv_dtype=stored, scales=scales), layout, **SMALL)


@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantised_products_in_float16(dtype, scales):
    """Queries far beyond float16's range must not overflow the products."""
    size = 1e5 if dtype == "bfloat16" else 1.0
    case = dataclasses.replace(
        RAGGED, dtype=dtype, kv_dtype="int8", scales=scales, query_size=size, sm_scale=1.0
    )
    # At logits of 1e5 a rounding of the query changes the winner; the outputs must stay finite.
    if size > 1:
        assert np.isfinite(attend(case, "NP2KD", **SMALL_RAGGED)[0]).all()
    else:
        check(case, "NP2KD", **SMALL_RAGGED)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 24])
def test_head_dims(head_dim):
    check(dataclasses.replace(DECODE, lengths=(1, 9, 40), head_dim=head_dim))


@pytest.mark.parametrize("page_size", [8, 12, 16, 32, 64, 128, 256])
def test_page_sizes(page_size):
    """Tiles of several pages, of one, of a part of one, and pages that no tile divides."""
    lengths = (1, page_size, 2 * page_size + 1)
    case = dataclasses.replace(DECODE, lengths=lengths, page_size=page_size, sliding_window=100)
    check(case, num_stages=2)


@pytest.mark.parametrize("heads", [(3, 1), (1, 20), (1, 70)])
def test_group_sizes(heads):
    kv_heads, groups = heads
    few = dict(kv_heads=kv_heads, groups=groups, head_dim=16)
    check(dataclasses.replace(DECODE, lengths=(3, 20), **few))
    check(dataclasses.replace(RAGGED, lengths=(9, 20), q_lens=(9, 2), padded_seqs=0, **few))


def test_many_work_items_merge():
    """A sequence of more tiles than one work item takes, beside short ones."""
    case = Case("", (700, 1, 0, 33), head_dim=16, table_width=96, sinks=True)
    check(case, pages_per_compute_block=2)
    check(case, pages_per_compute_block=2, k_splits=7)


@pytest.mark.parametrize("stored", ["uint16"])
def test_bits_of_bfloat16(stored):
    case = Case("", (3, 40), kv_dtype="bfloat16")
    arrays = build(case, dirty=True)
    k, v = (jnp.asarray(x.view(stored)) for x in (arrays.k_pages, arrays.v_pages))
    out = paged_attention(
        *(arrays.q, k, v, arrays.tables, arrays.lengths),
        kv_layout="NPKD",
        kv_dtype="bfloat16",
        implementation=IMPLEMENTATION,
    )
    want = expected(case)[0]
    assert np.linalg.norm(np.asarray(out) - want) / np.linalg.norm(want) < 1e-5


# --- a row depends on nothing else in the batch ------------------------------------------------


def test_decode_rows_do_not_depend_on_the_batch():
    case = Case("", (300, 5, 17, 256), table_width=40)
    arrays = build(case, dirty=True)
    run = jax.jit(
        lambda lengths: paged_attention(
            *(arrays.q, arrays.k_pages, arrays.v_pages, arrays.tables, lengths),
            kv_layout="NPKD",
            implementation=IMPLEMENTATION,
            pages_per_compute_block=4,
        )
    )
    together = run(arrays.lengths)
    for row in range(4):
        alone = np.where(np.arange(4) == row, arrays.lengths, 0).astype(np.int32)
        np.testing.assert_array_equal(run(alone)[row], together[row])


def test_ragged_rows_hardly_depend_on_the_chunks():
    """The same tiles in the same order; only the compiler's order inside a tile's sum may differ."""
    case = Case("", (90,), q_lens=(90,), table_width=16)
    arrays = build(case, dirty=True)
    run = jax.jit(
        lambda q, kv, cu, n: ragged_paged_attention(
            *(q, (arrays.k_pages, arrays.v_pages), kv, jnp.repeat(arrays.tables, 3, axis=0)),
            *(cu, n),
            kv_layout="NPKD",
            implementation=IMPLEMENTATION,
            **SMALL_RAGGED,
        )
    )
    one, three = np.array([1], np.int32), np.array([3], np.int32)
    whole = run(arrays.q, np.array([90] * 3, np.int32), np.array([0, 90, 90, 90], np.int32), one)
    cut = run(
        arrays.q, np.array([37, 41, 90], np.int32), np.array([0, 37, 41, 90], np.int32), three
    )
    np.testing.assert_allclose(whole, cut, atol=1e-6, rtol=0)


# --- the plans, without a kernel --------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("share", [1, 3, 64])
def test_the_work_items_cover_every_tile_once(share, window):
    rng = np.random.default_rng(share)
    lengths = rng.integers(0, 9000, 40).astype(np.int32)
    lengths[:4] = 0, 1, 64, 65
    work = gpu_decode.plan(jnp.asarray(lengths), 64, window, share)
    work = gpu_decode.Plan(*(np.asarray(x) for x in work))
    assert work.parts.max() <= gpu_decode.max_parts(9000, 64, share)
    for b, length in enumerate(lengths):
        first = 0 if window is None else max(0, int(length) - window) // 64
        want = list(range(first, -(-int(length) // 64)))
        items = range(work.ends[b] - work.parts[b], work.ends[b])
        assert work.ends[b] == work.parts[: b + 1].sum()
        got = []
        for part in range(len(items)):
            start = work.first_tile[b] + part * work.size[b]
            stop = min(work.first_tile[b] + work.tiles[b], start + work.size[b])
            assert start < stop <= start + gpu_decode.MAX_TILES
            got += range(start, stop)
        assert got == want


def test_the_block_map_covers_every_query_once():
    rng = np.random.default_rng(0)
    for _ in range(10):
        batch, present = 7, int(rng.integers(0, 8))
        q_lens = rng.integers(0, 40, present)
        ends = np.cumsum(q_lens)
        rows = int(ends[-1] if present else 0) + int(rng.integers(1, 20))
        cu = np.full(batch + 1, 12345, np.int32)
        cu[: present + 1] = [0, *ends]
        blocks = gpu_ragged.map_blocks(
            jnp.full((batch,), 50, jnp.int32), cu, np.int32(present), num_rows=rows, block_q=8
        )
        sequence, first, start, q_len, kv_len = (np.asarray(x) for x in blocks)
        seen = []
        for block in range(len(sequence)):
            if sequence[block] <= batch:
                s = sequence[block]
                stop = min(first[block] + 8, q_len[s])
                seen += [(s, start[s] + i) for i in range(first[block], stop)]
                assert kv_len[s] == (50 if s < present else 0)
        assert [row for _, row in sorted(seen, key=lambda x: x[1])] == list(range(rows))
        for s, row in seen:
            owner = int(np.searchsorted(ends, row, side="right"))
            assert s == owner if owner < present else s >= present


# --- refusals and the parts that only a compiled kernel has ------------------------------------


def shape(dims, dtype):
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def test_pools_whose_offsets_would_wrap_are_refused():
    wide = functools.partial(gpu_common.check_index_width, "k_pages")
    for fine in (
        shape((2**31 // 128, 128), "int8"),
        shape((2**32 // 128 + 1, 128), "int8"),  # 64-bit offsets
        shape((2**31 // 128, 128), "bfloat16"),
        shape((2**33 // 128, 128), "bfloat16"),
    ):
        wide(fine)
    for wraps in (2**31 // 128 + 1, 2**32 // 128):
        with pytest.raises(NotImplementedError, match="32-bit offsets would wrap"):
            wide(shape((wraps, 128), "float8_e5m2"))


def test_what_the_compiler_cannot_do_is_refused_first():
    q = shape((2, 4, 64), "bfloat16")
    pages = shape((8, 16, 2, 64), "float8_e4m3fn")
    tables, lengths = shape((2, 4), "int32"), shape((2,), "int32")
    run = functools.partial(
        gpu_decode.decode, options=AttentionOptions(kv_layout="NPKD"), interpret=True
    )
    with pytest.raises(NotImplementedError, match=r"8\.9 or later, this GPU has 8\.0"):
        jax.eval_shape(
            functools.partial(run, compute_capability="8.0"), q, pages, pages, tables, lengths
        )
    out, lse = jax.eval_shape(
        functools.partial(run, compute_capability=9.0), q, pages, pages, tables, lengths
    )
    assert (out.shape, out.dtype, lse.dtype) == ((2, 4, 64), jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("change", [dict(kv_layout="NKDP"), dict(dtype="uint8")])
def test_unknown_layouts_and_dtypes_name_another_backend(change):
    pages = shape((8, 16, 2, 64), change.get("dtype", "bfloat16"))
    options = AttentionOptions(kv_layout=change.get("kv_layout", "NPKD"))
    args = (shape((2, 4, 64), "bfloat16"), pages, pages)
    args += (shape((2, 4), "int32"), shape((2,), "int32"))
    with pytest.raises(NotImplementedError, match='implementation="xla"'):
        jax.eval_shape(functools.partial(gpu_decode.decode, options=options, interpret=True), *args)


def test_head_pieces_cover_the_head():
    for head_dim in range(1, 300):
        pieces = gpu_common.chunks(head_dim)
        assert sum(valid for _, _, valid in pieces) == head_dim
        for (start, width, valid), following in zip(pieces, [*pieces[1:], None], strict=True):
            assert width & (width - 1) == 0
            assert width >= 32
            assert valid == width or following is None
            assert following is None or following[0] == start + width


def test_the_int8_conversion_by_its_arithmetic():
    """What `_INT8_TO_F16` does to a byte, done in numpy."""
    x = np.arange(-128, 128).astype(np.int8)
    halves = (x.view(np.uint8) ^ np.uint8(0x80)).astype(np.uint16) | np.uint16(0x6400)
    bias = np.array([0x6480], np.uint16).view(np.float16)
    np.testing.assert_array_equal(halves.view(np.float16) - bias, x.astype(np.float16))
    assert "0x64646464, 0x4140" in gpu_common._INT8_TO_F16
    assert "mov.b32 bias, 0x64806480" in gpu_common._INT8_TO_F16


# --- a wrong kernel fails -----------------------------------------------------------------------


def mutant_swapped(monkeypatch):
    load = gpu_common._load_tile

    def other(spec, ref, page, offset, head, ok, one):
        return load(spec, other.refs[ref is other.refs[0]], page, offset, head, ok, one)

    attend_ = gpu_common.attend

    def remember(spec, pool, *rest):
        other.refs = (pool.k, pool.v)
        return attend_(spec, pool, *rest)

    monkeypatch.setattr(gpu_common, "_load_tile", other)
    monkeypatch.setattr(gpu_common, "attend", remember)


def mutant_one_long(monkeypatch):
    attend_ = gpu_common.attend

    def longer(spec, pool, row, head, rows, tiles, length):
        rows = rows._replace(position=rows.position + 1)
        return attend_(spec, pool, row, head, rows, tiles, length + 1)

    monkeypatch.setattr(gpu_common, "attend", longer)


def mutant_one_short(monkeypatch):
    attend_ = gpu_common.attend

    def shorter(spec, pool, row, head, rows, tiles, length):
        return attend_(spec, pool, row, head, rows, tiles, length - 1)

    monkeypatch.setattr(gpu_common, "attend", shorter)


def mutant_unmasked_v(monkeypatch):
    load = gpu_common._load_tile

    def unmasked(spec, ref, page, offset, head, ok, one):
        return load(spec, ref, page, offset, head, ok if one is None else None, one)

    monkeypatch.setattr(gpu_common, "_load_tile", unmasked)


def mutant_stale_page(monkeypatch):
    pages = gpu_common._tile_pages
    monkeypatch.setattr(
        gpu_common,
        "_tile_pages",
        lambda spec, tables, row, tile, end: pages(
            spec, tables, row, jnp.maximum(tile - 1, 0), end
        ),
    )


def mutant_window_off_by_one(monkeypatch):
    make = gpu_common.make_spec

    def wider(*args, **static):
        spec = make(*args, **static)
        return dataclasses.replace(spec, window=spec.window + 1)

    monkeypatch.setattr(gpu_common, "make_spec", wider)


MUTANTS = [
    mutant_swapped,
    mutant_one_long,
    mutant_one_short,
    mutant_unmasked_v,
    mutant_stale_page,
    mutant_window_off_by_one,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_fails(mutant, monkeypatch):
    mutant(monkeypatch)
    case = Case("", (9, 45, 128), sliding_window=40)
    with np.errstate(invalid="ignore"):
        out, _ = attend(case, **SMALL)
        want, _ = expected(case)
        wrong = np.linalg.norm(out - want) / np.linalg.norm(want)
    assert not wrong < TOLERANCE["float32"]
