"""Dynamic faults of a call, found where the values are at hand (outside `jax.jit`).

Under `jax.jit` values are unknown, so there a page id out of range inside a sequence's length counts
as a page without tokens: memory-safe, on every backend but "pallas", where it is undefined.
"""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels.layouts import Geometry
from pallas_kernels.options import AttentionOptions
from pallas_kernels.validate import require


def known(*arrays: jax.Array | None) -> bool:
    """Whether all values are at hand: not traced, and on this host."""
    return not any(isinstance(a, jax.core.Tracer) for a in arrays if a is not None)


def check_option_values(options: AttentionOptions) -> None:
    """Checks the numbers of the options that are arrays, where they are at hand.

    Not the scales of single tokens: those of unused places may be anything.
    """
    for name in ("sm_scale", "sinks", "alibi_slopes", "k_scale", "v_scale"):
        value = getattr(options, name)
        if value is None or not known(value) or np.ndim(value) > 1:
            continue
        numbers = np.asarray(value, np.float32).reshape(-1)
        good = np.isfinite(numbers)
        if name == "sinks":  # a sink of -inf is none
            good |= numbers == -np.inf
        if not good.all():
            raise ValueError(f"{name} must hold finite numbers; got {numbers[~good][0]}.")


def check_table_values(
    name: str,
    tables: jax.Array,  # [B, M] int32
    length_name: str,
    lengths: jax.Array,  # [B] int32
    geo: Geometry,
) -> None:
    """Checks lengths and every table entry that a sequence's length reaches."""
    table, length = np.asarray(tables), np.asarray(lengths)
    capacity = table.shape[1] * geo.page_size
    bad_rows = np.flatnonzero((length < 0) | (length > capacity))
    if bad_rows.size:
        row = bad_rows[0]
        raise ValueError(
            f"{length_name}[{row}] = {length[row]}, but {name} has {table.shape[1]} pages of "
            f"{geo.page_size} tokens a sequence: it must be 0..{capacity}."
        )
    reached = np.arange(table.shape[1])[None, :] * geo.page_size < length[:, None]
    bad = np.argwhere(reached & ((table < 0) | (table >= geo.num_pages)))
    if bad.size:
        row, column = bad[0]
        raise ValueError(
            f"{name}[{row}, {column}] = {table[row, column]} is no page of a pool of "
            f"{geo.num_pages}, yet sequence {row} of {length[row]} tokens reaches it. Entries past "
            "the length may hold anything; those within must be page ids (-1 is not one)."
        )


def check_ragged_values(
    q_rows: int,
    kv_lens: jax.Array,  # [B] int32
    cu_q_lens: jax.Array,  # [B + 1] int32
    num_seqs: jax.Array,  # [] int32
    batch: int,
) -> int:
    """Checks the packing of a ragged batch; returns num_seqs."""
    count, cu = int(num_seqs), np.asarray(cu_q_lens)
    require(0 <= count <= batch, f"num_seqs = {count} must be 0..{batch}, the rows of kv_lens.")
    if count == 0:
        return count
    cu, kv = cu[: count + 1], np.asarray(kv_lens)[:count]
    q_lens = np.diff(cu)
    require(
        cu[0] == 0 and bool((q_lens >= 0).all()) and cu[-1] <= q_rows,
        f"cu_q_lens must start at 0, never fall, and end within the {q_rows} rows of q; got "
        f"{cu.tolist()}.",
    )
    longer = np.flatnonzero(q_lens > kv)
    if longer.size:
        row = longer[0]
        raise ValueError(
            f"Sequence {row} has {q_lens[row]} query tokens but kv_lens[{row}] = {kv[row]}: "
            "kv_lens counts the tokens in the pages with this step's included; write the new keys "
            "and values first."
        )
    return count
