"""The machine of test_state_machine.py: one compiled step for any operation of the memory."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxattn import invariants, kv_pool, memory, prefix_cache, swap, time_travel
from paxattn.decode import State
from paxattn.kv_pool import KVPool

N, B, M, P = 24, 5, 5, 4
PLACES = 2  # groups that can be outside at once
SIZES = {"num_pages": N, "max_seqs": B, "pages_per_seq": M, "page_size": P}
KINDS = (
    "reserve",
    "append",
    "fork",
    "release",
    "release_before",
    "admit",
    "evict",
    "clear",
    "swap_out",
    "swap_in",
    "drain",
    "save",
    "rewind",
)
STAMPS = 2**23 // (B * M * P)  # values that tokens hold are whole numbers below 2**24: exact


class Op(NamedTuple):
    kind: np.ndarray  # [] int32
    rows: np.ndarray  # [B] int32: an argument for each row
    number: np.ndarray  # [] int32: a row, a place, a count
    length: np.ndarray  # [] int32: of the prompt
    spare: np.ndarray  # [] int32
    salt: np.ndarray  # [4] uint32
    tokens: np.ndarray  # [M, P] int32
    content: np.ndarray  # [M * P] int32: what the prompt's tokens hold
    stamp: np.ndarray  # [] int32: makes what other tokens hold unique


class Outside(NamedTuple):
    """Groups of rows that were swapped out, PLACES of them."""

    full: jax.Array  # [S] bool
    entries: jax.Array  # [S, B, M]
    lengths: jax.Array  # [S, B]
    gone: jax.Array  # [S, B]
    count: jax.Array  # [S]
    contents: KVPool  # each array [S, ...]


class Carry(NamedTuple):
    state: State
    gone: jax.Array  # [B] int32: positions whose pages left the window
    outside: Outside
    saved: time_travel.Saved
    saved_gone: jax.Array  # [B]


class Seen(NamedTuple):
    """The state after a step, as compared with the oracle."""

    ok: jax.Array  # [B] bool
    first: jax.Array  # [B] int32: slots, sources, counts
    second: jax.Array  # [B] int32: targets
    tables: jax.Array
    lengths: jax.Array
    refcount: jax.Array
    free: jax.Array  # [N]: the free list from the bottom, -1 above the top
    cached: jax.Array  # [N] bool
    keys: jax.Array  # [B, M * P]: what is read through the tables
    values: jax.Array
    broken: jax.Array  # [rules] int32


def begin():
    pool = kv_pool.init(1, N, P, 1, 1)
    cache = prefix_cache.init(N, P)
    # so sparse that every page finds a place: the oracle has no hash table
    cache = cache._replace(table=jnp.zeros(4096, jnp.int32))
    state = State(pool, memory.init(**SIZES), cache)
    none = jnp.zeros((PLACES, B), jnp.int32)
    outside = Outside(
        full=jnp.zeros(PLACES, bool),
        entries=jnp.zeros((PLACES, B, M), jnp.int32),
        lengths=none,
        gone=none,
        count=none[:, 0],
        contents=jax.tree.map(lambda x: jnp.zeros((PLACES, B * M, *x.shape[1:]), x.dtype), pool),
    )
    gone = jnp.zeros(B, jnp.int32)
    return Carry(state, gone, outside, _save(state), gone)


def _save(state):
    """`time_travel.save` with room for every page, so that it has one shape and can be compiled."""
    used = state.memory.allocator.refcount > 0
    pages = jnp.where(used, jnp.arange(N, dtype=jnp.int32), 0)
    return time_travel.Saved(
        state._replace(pool=None), pages, kv_pool.take_pages(state.pool, pages)
    )


def _result(ok=True, first=0, second=0):
    wide = lambda x, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), (B,))  # noqa: E731
    return wide(ok, bool), wide(first, jnp.int32), wide(second, jnp.int32)


def _with(carry, **changes):
    return carry._replace(state=carry.state._replace(**changes))


def reserve(carry, op):
    lengths = carry.state.memory.lengths
    new, ok = memory.reserve(carry.state.memory, lengths + op.rows)
    return _with(carry, memory=new), _result(ok), lengths


def append(carry, op):
    lengths = carry.state.memory.lengths
    new, slots, ok = memory.append(carry.state.memory, op.rows > 0)
    return _with(carry, memory=new), _result(ok, slots), lengths


def fork(carry, op):
    new, (source, target), ok = memory.fork(carry.state.memory, op.rows)
    pool = kv_pool.copy_pages(carry.state.pool, source, target)
    born = (new.lengths != 0) & (carry.state.memory.lengths == 0)
    parent = jnp.where(born, op.rows, 0)
    carry = _with(carry, memory=new, pool=pool)
    carry = carry._replace(gone=jnp.where(born, carry.gone[parent], carry.gone))
    return carry, _result(ok, source, target), new.lengths


def release(carry, op):
    m, c = prefix_cache.release(carry.state.memory, carry.state.prefix, op.rows > 0)
    return _with(carry, memory=m, prefix=c), _result(), m.lengths


def release_before(carry, op):
    new = memory.release_before(carry.state.memory, op.rows)
    gone = jnp.clip(op.rows, 0, new.lengths) // P * P
    carry = _with(carry, memory=new)._replace(gone=jnp.maximum(carry.gone, gone))
    return carry, _result(), new.lengths


def admit(carry, op):
    m, c, found = prefix_cache.admit(
        carry.state.memory, carry.state.prefix, op.number, op.tokens, op.length, op.salt, op.spare
    )
    # what was adopted is not computed again
    computed = jnp.where(found.ok, found.cached_tokens, m.lengths[op.number])
    fresh = m.lengths.at[op.number].set(computed)
    numbers = jnp.stack([found.hits, found.misses, found.evicted])
    counts = jnp.zeros(B, jnp.int32).at[:3].set(numbers)
    return _with(carry, memory=m, prefix=c), _result(found.ok, counts), fresh


def evict(carry, op):
    m, c, count = prefix_cache.evict(carry.state.memory, carry.state.prefix, op.number)
    return _with(carry, memory=m, prefix=c), _result(True, count), m.lengths


def clear(carry, op):
    m, c = prefix_cache.clear(carry.state.memory, carry.state.prefix)
    return _with(carry, memory=m, prefix=c), _result(), m.lengths


def swap_out(carry, op):
    state, outside, at = carry.state, carry.outside, op.number
    empty = ~outside.full[at]
    mask = (op.rows > 0) & empty
    group = swap.pages_of(state.memory, mask)
    contents = swap.take_pages(state.pool, group.pages)
    new = Outside(
        jnp.ones((), bool),
        group.entries,
        jnp.where(mask, state.memory.lengths, 0),
        jnp.where(mask, carry.gone, 0),
        group.count,
        contents,
    )
    outside = jax.tree.map(
        lambda old, x: old.at[at].set(jnp.where(empty, x, old[at])), outside, new
    )
    m, c = prefix_cache.release(state.memory, state.prefix, mask)
    carry = _with(carry, memory=m, prefix=c)._replace(outside=outside)
    return carry, _result(True, group.count), m.lengths


def swap_in(carry, op):
    at = op.number
    group = jax.tree.map(lambda x: x[at], carry.outside)
    rows = jnp.where(group.full, op.rows, -1)
    m, pages, ok = swap.restore(carry.state.memory, rows, group.entries, group.lengths, group.count)
    ok &= group.full
    pool = swap.put_pages(carry.state.pool, pages, group.contents)
    full = carry.outside.full.at[at].set(group.full & ~ok)
    to = jnp.where(ok & (rows >= 0), rows, B)
    carry = _with(carry, memory=m, pool=pool)._replace(
        outside=carry.outside._replace(full=full),
        gone=carry.gone.at[to].set(group.gone, mode="drop"),
    )
    return carry, _result(ok), m.lengths


def drain(carry, op):
    every = jnp.ones(B, bool)
    m, c = prefix_cache.release(carry.state.memory, carry.state.prefix, every)
    m, c = prefix_cache.clear(m, c)
    outside = carry.outside._replace(full=jnp.zeros(PLACES, bool))
    carry = _with(carry, memory=m, prefix=c)._replace(outside=outside)
    return carry, _result(m.allocator.num_free == N - 1), m.lengths


def save(carry, op):
    carry = carry._replace(saved=_save(carry.state), saved_gone=carry.gone)
    return carry, _result(), carry.state.memory.lengths


def rewind(carry, op):
    state = time_travel.rewind(carry.state, carry.saved)
    carry = carry._replace(state=state, gone=carry.saved_gone)
    return carry, _result(), state.memory.lengths


def step(carry, op):
    """One operation, the tokens that it makes room for, and all that can be said afterwards."""
    # new functions each time: JAX would remember their traces when a mutant is put in
    branches = [partial(globals()[name]) for name in KINDS]
    carry, result, fresh = jax.lax.switch(op.kind, branches, carry, op)
    state = carry.state
    m = state.memory
    gone = jnp.where(m.lengths > 0, carry.gone, 0)
    carry = carry._replace(gone=gone)

    row = jnp.repeat(jnp.arange(B, dtype=jnp.int32), M * P)
    position = jnp.tile(jnp.arange(M * P, dtype=jnp.int32), B)
    stamped = (op.stamp * (B * M * P) + row * (M * P) + position).reshape(B, M * P)
    is_admit = op.kind == KINDS.index("admit")
    token = jnp.where(is_admit, op.content[None, :], stamped).ravel().astype(jnp.float32)
    new = (position >= fresh[row]) & (position < m.lengths[row])
    slots = memory.slot_mapping(m, jnp.where(new, row, -1), position)
    token = token[:, None, None]
    pool = kv_pool.write(state.pool, 0, token, -token, slots)
    carry = _with(carry, pool=pool)

    report = invariants.check(m, prefix_cache.pins(state.prefix), gone)
    a = m.allocator
    above = jnp.arange(N, dtype=jnp.int32) >= a.num_free
    return carry, Seen(
        *result,
        tables=m.block_tables,
        lengths=m.lengths,
        refcount=a.refcount,
        free=jnp.where(above, -1, a.free_list),
        cached=state.prefix.place >= 0,
        keys=pool.k[0][m.block_tables].reshape(B, M * P).astype(jnp.int32),
        values=pool.v[0][m.block_tables].reshape(B, M * P).astype(jnp.int32),
        broken=jnp.stack(report),
    )
