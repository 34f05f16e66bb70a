"""The cases of the conformance suite, and the arrays of a case.

A case is run twice: "clean", with zeros in every slot that no sequence reaches and page 0 in every
table entry past a length; and "dirty", with NaN in those slots (the null page included) and ids that
are no pages in those entries. A kernel that reads what it must not passes the first and fails the
second.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.conformance_oracle import Features

ABSURD_ID = 10_000_000


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; every array follows from these fields."""

    check: str  # what it is there to find
    lengths: tuple[int, ...]  # tokens of each sequence
    q_lens: tuple[int, ...] | None = None  # None: decode
    kv_heads: int = 2
    groups: int = 2
    head_dim: int = 16
    page_size: int = 8
    table_width: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None  # None: as q
    scales: str | None = None  # None, "tensor", "head" or "token"
    tables: str = "permuted"  # "permuted", "shared" or "aliased"
    query_size: float = 1.0  # size of the logits
    value_size: float = 1.0
    soft_cap: float | None = None
    sliding_window: int | None = None
    sinks: bool = False
    alibi: bool = False
    sm_scale: float = 1.0
    traced_scale: bool = False
    under_jit: bool = False
    no_lengths: bool = False  # decode with lengths=None
    return_lse: bool = False
    neighbours: bool = False  # also require bit-identical rows in another batch
    padded_seqs: int = 0  # ragged: rows past num_seqs, filled with nonsense
    padded_rows: int = 0  # ragged: rows of q past the last sequence

    def describe(self) -> str:
        """The fields that differ from the defaults, in one line."""
        parts = [f"lengths={list(self.lengths)}"]
        if self.q_lens is not None:
            parts.append(f"q_lens={list(self.q_lens)}")
        for field in dataclasses.fields(self)[3:]:
            value = getattr(self, field.name)
            always = field.name in ("kv_heads", "groups", "head_dim", "page_size", "table_width")
            if always or value != field.default:
                parts.append(f"{field.name}={value}")
        return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a case in numpy; pages in [N, P, K, D]."""

    q: np.ndarray  # [B, H, D] or [T, H, D], in the case's dtype
    k_pages: np.ndarray
    v_pages: np.ndarray
    tables: np.ndarray  # [B, M] int32
    lengths: np.ndarray  # [B] int32
    cu_q_lens: np.ndarray  # [B + 1] int32
    num_seqs: np.ndarray  # [1] int32
    features: Features
    clean_tables: np.ndarray  # [sequences, M]: what the oracle reads


def build(case: Case, dirty: bool, seed: int = 0) -> Arrays:
    """Makes the arrays of a case."""
    rng = np.random.default_rng(seed)
    present, width, size = len(case.lengths), case.table_width, case.page_size
    needed = [-(-n // size) for n in case.lengths]
    tables, num_pages = _tables(case, needed, rng)

    live = np.zeros((num_pages, size), bool)
    for b, length in enumerate(case.lengths):
        for position in range(length):
            live[tables[b, position // size], position % size] = True

    stored = np.dtype(jnp.dtype(case.kv_dtype or case.dtype))
    shape = (num_pages, size, case.kv_heads, case.head_dim)
    k_pages = _stored_numbers(rng, shape, stored)
    v_pages = _stored_numbers(rng, shape, stored, case.value_size)
    dead: Any = 0
    if dirty:
        dead = 127 if stored == np.int8 else np.nan
    k_pages[~live], v_pages[~live] = dead, dead

    heads = case.kv_heads * case.groups
    rows = present if case.q_lens is None else sum(case.q_lens) + case.padded_rows
    q = rng.standard_normal((rows, heads, case.head_dim)) * case.query_size
    q = (q / np.sqrt(case.head_dim) / case.sm_scale).astype(jnp.dtype(case.dtype))

    features = Features(
        sm_scale=case.sm_scale,
        soft_cap=case.soft_cap,
        sliding_window=case.sliding_window,
        sinks=rng.standard_normal(heads).astype(np.float32) if case.sinks else None,
        alibi_slopes=(2.0 ** -np.arange(1, heads + 1)).astype(np.float32) if case.alibi else None,
        k_scale=_scales(case, rng, live, dirty, stored),
        v_scale=_scales(case, rng, live, dirty, stored),
    )
    batch = present + case.padded_seqs
    padded = np.full((batch, width), ABSURD_ID if dirty else 0, np.int32)
    for b in range(present):
        padded[b, : needed[b]] = tables[b, : needed[b]]
        if dirty and b % 2:
            padded[b, needed[b] :] = -1
    lengths = np.full(batch, 77_777 if dirty else 0, np.int32)
    lengths[:present] = case.lengths
    cu = np.full(batch + 1, 99_999 if dirty else rows, np.int32)
    cu[: present + 1] = np.cumsum([0, *(case.q_lens or [1] * present)])
    return Arrays(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        tables=padded,
        lengths=lengths,
        cu_q_lens=cu,
        num_seqs=np.array([present], np.int32),
        features=features,
        clean_tables=tables,
    )


def _tables(case: Case, needed: list[int], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Block tables [sequences, M] over a shuffled pool, and the pool's pages."""
    spare = 3
    num_pages = 1 + sum(needed) + spare
    ids = (rng.permutation(num_pages - 1) + 1).astype(np.int32)
    tables = np.zeros((len(needed), case.table_width), np.int32)
    at = 0
    for b, count in enumerate(needed):
        tables[b, :count] = ids[at : at + count]
        at += count
    if case.tables == "shared":  # a common prefix of whole pages, as after a fork
        longest = int(np.argmax(needed))
        for b, length in enumerate(case.lengths):
            common = length // case.page_size // 2 + 1
            common = min(common, length // case.page_size)
            tables[b, :common] = tables[longest, :common]
    if case.tables == "aliased":  # one physical page at several places of one table
        for b, count in enumerate(needed):
            if count >= 3:
                tables[b, 1] = tables[b, 0]
    return tables, num_pages


def _stored_numbers(
    rng: np.random.Generator, shape: tuple[int, ...], stored: np.dtype, size: float = 1.0
) -> np.ndarray:
    if stored == np.int8:
        return rng.integers(-127, 128, shape).astype(np.int8)
    return (rng.standard_normal(shape) * size).astype(stored)


def _scales(
    case: Case, rng: np.random.Generator, live: np.ndarray, dirty: bool, stored: np.dtype
) -> np.ndarray | None:
    if case.scales is None:
        return None
    unit = 1 / 64 if stored == np.int8 else 1.0
    shapes = {"tensor": (), "head": (case.kv_heads,), "token": (*live.shape, case.kv_heads)}
    scales = rng.uniform(0.5 * unit, 1.5 * unit, shapes[case.scales])
    if case.scales == "token" and dirty:
        scales = np.where(live[..., None], scales, np.nan)
    return np.asarray(scales, np.float32)


def decode_cases() -> list[Case]:
    """One query token a sequence."""
    size = 8
    edges = (1, size - 1, size, size + 1, 37, 16 * size)
    case = Case("lengths 1, P-1, P, P+1, full", edges)
    some = dataclasses.replace(case, lengths=(1, 9, 40))

    def also(check: str, **fields: Any) -> Case:
        return dataclasses.replace(some, check=check, **fields)

    return [
        case,
        also("length 0 gives zeros", lengths=(0, 5, 0, 16)),
        also("one sequence", lengths=(13,)),
        also("lengths=None: all of the table", lengths=(128, 128), no_lengths=True),
        also("shared tables", lengths=(21, 33, 40), tables="shared"),
        also("aliased tables", lengths=(21, 33, 40), tables="aliased"),
        *(also(f"table width {m}", lengths=(1, 8 * m), table_width=m) for m in (1, 3, 17)),
        also("multi-query, 1 KV head, 8 queries", kv_heads=1, groups=8),
        also("one query a KV head", kv_heads=3, groups=1),
        also("groups of 3 over 3 KV heads", kv_heads=3, groups=3),
        also("groups of 20", kv_heads=1, groups=20),
        *(also(f"head dim {d}", head_dim=d) for d in (64, 80, 96, 128, 256, 24)),
        *(
            also(f"page size {p}", page_size=p, lengths=(1, p, 2 * p + 1))
            for p in (12, 16, 32, 64, 256)
        ),
        also("bfloat16", dtype="bfloat16"),
        also("float16", dtype="float16"),
        also("float16, sums past its range", dtype="float16", value_size=1e4, lengths=(128, 128)),
        also("float32 queries on bfloat16 pages", kv_dtype="bfloat16"),
        also("large logits", query_size=40.0),
        also("soft cap", soft_cap=3.0, query_size=4.0),
        also("neighbours change no bit", neighbours=True),
        also("under jax.jit", under_jit=True),
        also("int8, scales per token and head", kv_dtype="int8", scales="token"),
        also("int8, scales per head", kv_dtype="int8", scales="head"),
        also("int8, one scale", kv_dtype="int8", scales="tensor"),
        also("float8_e4m3fn, scales per token", kv_dtype="float8_e4m3fn", scales="token"),
        also("float8_e5m2, one scale", kv_dtype="float8_e5m2", scales="tensor"),
        also("sm_scale", sm_scale=0.3),
        also("sm_scale, traced", sm_scale=0.3, traced_scale=True),
        also("sliding window 1", sliding_window=1),
        also("sliding window P+3", sliding_window=size + 3, lengths=edges),
        also("attention sinks", sinks=True),
        also("ALiBi slopes", alibi=True),
        also("log-sum-exp", return_lse=True, lengths=(0, 9, 40)),
        also(
            "everything at once",
            soft_cap=3.0,
            sliding_window=20,
            sinks=True,
            alibi=True,
            sm_scale=0.3,
            return_lse=True,
            dtype="bfloat16",
            lengths=edges,
        ),
    ]


def ragged_cases() -> list[Case]:
    """Packed sequences, several query tokens each."""
    size = 8
    case = Case(
        "prefill, chunk, decode, nothing: mixed",
        lengths=(9, 40, 37, 12),
        q_lens=(9, 11, 1, 0),
    )

    def also(check: str, **fields: Any) -> Case:
        return dataclasses.replace(case, check=check, **fields)

    edges = (1, size - 1, size, size + 1, 16 * size)
    return [
        case,
        also("decodes only, lengths 1, P-1, P, P+1, full", lengths=edges, q_lens=(1,) * 5),
        also("prefills only, lengths 1, P-1, P, P+1, full", lengths=edges, q_lens=edges),
        also("one sequence", lengths=(13,), q_lens=(13,)),
        also("a long prefill", lengths=(100,), q_lens=(100,)),
        also("sequences without queries between", lengths=(5, 9, 3, 12), q_lens=(0, 2, 0, 3)),
        also("rows of q past the last sequence", padded_rows=7),
        also("rows past num_seqs", padded_seqs=3),
        also("both kinds of padding", padded_seqs=2, padded_rows=5),
        also("shared tables", lengths=(21, 33, 40), q_lens=(2, 1, 20), tables="shared"),
        also("aliased tables", lengths=(21, 33, 40), q_lens=(2, 1, 20), tables="aliased"),
        *(
            also(f"table width {m}", lengths=(1, 8 * m), q_lens=(1, 4), table_width=m)
            for m in (1, 3, 17)
        ),
        also("multi-query, 1 KV head, 8 queries", kv_heads=1, groups=8),
        also("groups of 3 over 3 KV heads", kv_heads=3, groups=3),
        *(also(f"head dim {d}", head_dim=d) for d in (64, 80, 96, 128, 256)),
        *(
            also(f"page size {p}", page_size=p, lengths=(p + 1, 3), q_lens=(5, 3))
            for p in (12, 16, 32, 64, 256)
        ),
        also("bfloat16", dtype="bfloat16"),
        also("float16", dtype="float16"),
        also("float16, sums past its range", dtype="float16", value_size=1e4),
        also("large logits", query_size=40.0),
        also("soft cap", soft_cap=3.0, query_size=4.0),
        also("sliding window 1", sliding_window=1),
        also("sliding window P+3", sliding_window=size + 3),
        also("sm_scale", sm_scale=0.3),
        also("sm_scale, traced", sm_scale=0.3, traced_scale=True),
        also("int8, one scale", kv_dtype="int8", scales="tensor"),
        also("float8_e5m2, one scale", kv_dtype="float8_e5m2", scales="tensor"),
        also("neighbours change no bit", neighbours=True),
        also("under jax.jit", under_jit=True),
        also("int8, scales per head", kv_dtype="int8", scales="head"),
        also("int8, scales per token and head", kv_dtype="int8", scales="token"),
        also("float8_e4m3fn, scales per token", kv_dtype="float8_e4m3fn", scales="token"),
        also("attention sinks", sinks=True),
        also("ALiBi slopes", alibi=True),
        also("log-sum-exp", return_lse=True, padded_rows=2),
        also(
            "everything at once",
            soft_cap=3.0,
            sliding_window=20,
            sinks=True,
            alibi=True,
            sm_scale=0.3,
            return_lse=True,
            dtype="bfloat16",
            padded_rows=3,
            padded_seqs=1,
        ),
    ]
