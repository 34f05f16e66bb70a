"""Full prompt pages found again by content, as one value that lives beside the memory.

    cache = init(num_pages=1024, page_size=16)
    memory, cache, found = admit(memory, cache, row, tokens, length, salt)   # adopts what is known
    memory, cache = release(memory, cache, finished)          # pages stay, for the next prompt
    memory, cache, count = evict(memory, cache, pages)        # until the free list needs them

A page is found by a chained hash of (the pages before it, its tokens, a salt), and believed only
after its tokens, its salt and the page before it have been compared: by induction the whole prefix
is equal, so a hash collision can never serve another prompt's keys and values. Sequences with
different salts share nothing.

The cache holds one reference (a pin) to each of its pages. A page whose only reference is the pin
is idle and may be evicted: the least recently used first, and of one chain the tail before the
head, so that what is left can always be found. Whoever holds a cached page holds all the cached
pages before it; therefore no page is ever idle, or older, before those that follow it.

Only full pages of *prompts* are cached. Keys and values of generated tokens come from the decode
program, whose sums may round otherwise than the prefill program's; if they were found again, the
tokens of a prompt would depend on what ran before.

`admit` enters pages before their content is computed: the caller computes prompts in the order in
which they were admitted, so that content is there before anyone reads it, or calls `clear`.

Every function is pure and may run under `jit`. `lookup` costs O(pages of the prompt); `admit`
counts the idle pages and so reads N counters; `evict` sorts the N pages' ages, once for any number
of pages, and none of the three is part of a decode step.
"""

import dataclasses
import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxattn import allocator
from paxattn import memory as paged
from paxattn.memory import PagedMemory

WINDOW = 8  # places of the table in which a page may stand
_CHAIN = 0x9E3779B1  # odd, so it has an inverse modulo 2**32
_NEVER = np.iinfo(np.int32).max


class PrefixCache(NamedTuple):
    """What is known of each of N pages, and a table of S >= 2N places to find them by hash."""

    table: jax.Array  # [S] int32: the page that stands in each place, 0 for none
    place: jax.Array  # [N] int32: where each page stands; -1 while it is not cached
    hashes: jax.Array  # [N] uint32: of the whole prefix that ends with the page
    parents: jax.Array  # [N] int32: the page before it; 0 for a first page
    depth: jax.Array  # [N] int32: pages before it
    tokens: jax.Array  # [N, P] int32
    salts: jax.Array  # [N, 4] uint32
    used: jax.Array  # [N] int32: `clock` when a sequence last had it
    clock: jax.Array  # [] int32


class Admission(NamedTuple):
    """What became of a prompt."""

    ok: jax.Array  # [] bool: False changes nothing
    cached_tokens: jax.Array  # [] int32: tokens whose keys and values are in adopted pages
    hits: jax.Array  # [] int32: pages adopted
    misses: jax.Array  # [] int32: full pages that could have been adopted and were not known
    evicted: jax.Array  # [] int32: pages that the cache gave up for this prompt


def init(num_pages: int, page_size: int) -> PrefixCache:
    """An empty cache for a memory of `num_pages` (N, the null page included) pages."""
    places = 1 << (2 * num_pages - 1).bit_length()
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
    return PrefixCache(
        table=zeros(places),
        place=jnp.full(num_pages, -1, jnp.int32),
        hashes=jnp.zeros(num_pages, jnp.uint32),
        parents=zeros(num_pages),
        depth=zeros(num_pages),
        tokens=zeros(num_pages, page_size),
        salts=jnp.zeros((num_pages, 4), jnp.uint32),
        used=zeros(num_pages),
        clock=jnp.int32(0),
    )


def salt_of(text: str | None) -> np.ndarray:
    """128 bits of SHA-256 of a salt, ``[4]`` uint32; zeros for None, which all share."""
    if text is None:
        return np.zeros(4, np.uint32)
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.uint32)


def prefix_hashes(tokens: jax.Array, salt: jax.Array) -> jax.Array:
    """Hash of the prefix that ends with each page; ``[M, P]`` int32 and ``[4]`` to ``[M]`` uint32.

    h[j] = C * h[j-1] + g[j] modulo 2**32, with g a hash of the page and h[-1] one of the salt, in
    closed form: C**j * (h[-1] + sum of g[i] / C**i for i <= j), so a running sum and no loop.
    """
    pages, size = tokens.shape
    place = jnp.arange(1, size + 1, dtype=jnp.uint32) * np.uint32(0x85EBCA77)
    own = jnp.sum(_mix(tokens.astype(jnp.uint32) ^ place[None, :]), axis=1, dtype=jnp.uint32)
    start = jnp.sum(_mix(salt + jnp.arange(1, 5, dtype=jnp.uint32)), dtype=jnp.uint32)
    inverse = pow(_CHAIN, -1, 2**32)
    up = np.asarray([pow(_CHAIN, j, 2**32) for j in range(pages)], np.uint32)
    down = np.asarray([pow(inverse, j, 2**32) for j in range(pages)], np.uint32)
    return _mix(jnp.asarray(up) * (start + jnp.cumsum(_mix(own) * down, dtype=jnp.uint32)))


def lookup(cache: PrefixCache, tokens: jax.Array, count: jax.Array, salt: jax.Array) -> jax.Array:
    """The longest known prefix of a prompt.

    Args:
      cache: the cache.
      tokens: ``[M, P]`` int32, the prompt cut into pages; what is past `count` pages is ignored.
      count: ``[]`` int32, full pages to look for.
      salt: ``[4]`` uint32, see `salt_of`.

    Returns:
      ``[M]`` int32: the pages in order, 0 from the first that is not known.
    """
    return _lookup(cache, tokens, count, salt, prefix_hashes(tokens, salt))


def _lookup(cache, tokens, count, salt, hashes):
    column = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    candidates = cache.table[_places(cache, hashes)]  # [M, WINDOW]
    likely = (candidates != 0) & (cache.hashes[candidates] == hashes[:, None])
    likely &= cache.depth[candidates] == column[:, None]
    first = jnp.argmax(likely, axis=1)[:, None]
    page = jnp.take_along_axis(jnp.where(likely, candidates, 0), first, axis=1)[:, 0]
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), page[:-1]])
    equal = (page != 0) & (cache.parents[page] == before)
    equal &= jnp.all(cache.tokens[page] == tokens, axis=1)
    equal &= jnp.all(cache.salts[page] == salt[None, :], axis=1)
    known = jnp.cumprod((equal & (column < count)).astype(jnp.int32), dtype=jnp.int32)
    return jnp.where(known == 1, page, 0)


def admit(
    memory: PagedMemory,
    cache: PrefixCache,
    row: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    salt: jax.Array,
    spare: jax.Array | int = 0,
) -> tuple[PagedMemory, PrefixCache, Admission]:
    """Give an empty row the pages of a prompt: those that are known, and new ones for the rest.

    At least the last token is left to compute, in a page of the row's own, so a prompt that is
    known as a whole still gets its logits. The prompt's other full pages are entered, for
    sequences that are admitted later. Idle pages are evicted if the free list is too short.

    Args:
      memory: the memory.
      cache: its cache.
      row: ``[]`` int32.
      tokens: ``[M', P]`` int32, the prompt and padding; M' pages, at most the table's width.
      length: ``[]`` int32, tokens of the prompt.
      salt: ``[4]`` uint32.
      spare: ``[]`` int32, pages that must be free or idle beyond the prompt's.

    Returns:
      The next memory, in which the row holds `length` tokens; the next cache; what happened.
      Not ok, and nothing changed: the row is in use, the prompt is empty or longer than `tokens`,
      or pages run short. (Pages that are adopted are not idle any more when pages are counted.)
    """
    size, width = memory.page_size, memory.block_tables.shape[1]
    wide = tokens.shape[0]
    column = jnp.arange(wide, dtype=jnp.int32)
    hashes = prefix_hashes(tokens, salt)
    full = length // size
    known = _lookup(cache, tokens, full, salt, hashes)
    num_known = jnp.sum(known != 0, dtype=jnp.int32)
    could = jnp.maximum(length - 1, 0) // size
    hits = jnp.minimum(num_known, could)
    adopted = jnp.where(column < hits, known, 0)

    need = -(-length // size) - hits
    pages = _allocator_of(memory)
    idle = _idle(memory, cache).at[adopted].set(False)
    available = pages.num_free + jnp.sum(idle, dtype=jnp.int32)
    ok = (memory.lengths[row] == 0) & (length > 0) & (length <= wide * size)
    ok &= need + spare <= available

    pages, _ = allocator.share(pages, adopted, (adopted != 0) & ok)
    memory = dataclasses.replace(memory, allocator=pages)
    memory, cache, evicted = evict(memory, cache, jnp.where(ok, need - pages.num_free, 0))
    pages, new, _ = allocator.take(
        _allocator_of(memory), jnp.where(ok, need, 0)[None], hits[None], width
    )
    held = new[0] + jnp.zeros(width, jnp.int32).at[:wide].set(jnp.where(ok, adopted, 0))
    at = jnp.where(ok, row, memory.lengths.shape[0])
    memory = dataclasses.replace(
        memory,
        allocator=pages,
        block_tables=memory.block_tables.at[at].set(held, mode="drop"),
        lengths=memory.lengths.at[at].set(length, mode="drop"),
    )

    cache = cache._replace(clock=cache.clock + 1)
    fresh = ok & (column >= num_known) & (column < full)
    memory, cache, kept = _enter(memory, cache, held[:wide], fresh, tokens, salt, hashes)
    touched = jnp.where(kept | (ok & (adopted != 0)), held[:wide], cache.used.shape[0])
    cache = cache._replace(used=cache.used.at[touched].set(cache.clock, mode="drop"))
    return (
        memory,
        cache,
        Admission(
            ok=ok,
            cached_tokens=jnp.where(ok, hits * size, 0),
            hits=jnp.where(ok, hits, 0),
            misses=jnp.where(ok, could - hits, 0),
            evicted=evicted,
        ),
    )


def _enter(memory, cache, pages, wanted, tokens, salt, hashes):
    """Enters the `wanted` ([M] bool) ones of a row's pages, up to the first that finds no place."""
    places = _places(cache, hashes)
    table, found = cache.table, jnp.full(pages.shape, -1, jnp.int32)
    dropped = table.shape[0]
    for i in range(WINDOW):  # every page tries its i-th place; the largest page number wins one
        trying = wanted & (found < 0) & (table[places[:, i]] == 0)
        table = table.at[jnp.where(trying, places[:, i], dropped)].max(pages, mode="drop")
        found = jnp.where(trying & (table[places[:, i]] == pages), places[:, i], found)
    # A page whose parent is not cached could never be found, and would outlive its meaning.
    chained = jnp.cumprod((~wanted | (found >= 0)).astype(jnp.int32), dtype=jnp.int32) == 1
    kept = wanted & chained
    lost = (found >= 0) & ~kept
    table = table.at[jnp.where(lost, found, dropped)].set(0, mode="drop")

    at = jnp.where(kept, pages, cache.place.shape[0])
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), pages[:-1]])
    put = lambda array, new: array.at[at].set(new, mode="drop")  # noqa: E731
    state, _ = allocator.share(memory.allocator, pages, kept)  # the pin
    cache = cache._replace(
        table=table,
        place=put(cache.place, found),
        hashes=put(cache.hashes, hashes),
        parents=put(cache.parents, before),
        depth=put(cache.depth, jnp.arange(pages.shape[0], dtype=jnp.int32)),
        tokens=put(cache.tokens, tokens),
        salts=put(cache.salts, jnp.broadcast_to(salt[None, :], (pages.shape[0], 4))),
    )
    return dataclasses.replace(memory, allocator=state), cache, kept


def release(
    memory: PagedMemory, cache: PrefixCache, mask: jax.Array
) -> tuple[PagedMemory, PrefixCache]:
    """As `memory.release`; the rows' cached pages stay, as the most recently used ones."""
    clock = cache.clock + 1
    tables = memory.block_tables
    leaving = mask[:, None] & (tables != 0)
    used = cache.used.at[jnp.where(leaving, tables, cache.used.shape[0])].set(clock, mode="drop")
    return paged.release(memory, mask), cache._replace(used=used, clock=clock)


def evict(
    memory: PagedMemory, cache: PrefixCache, count: jax.Array
) -> tuple[PagedMemory, PrefixCache, jax.Array]:
    """Put up to `count` ([] int32) idle pages on the free list; returns how many there were."""
    return jax.lax.cond(
        count > 0,
        lambda: _evict(memory, cache, count),
        lambda: (memory, cache, jnp.int32(0)),
    )


def _evict(memory, cache, count):
    idle = _idle(memory, cache)
    count = jnp.minimum(count, jnp.sum(idle, dtype=jnp.int32))
    order = jnp.lexsort((-cache.depth, jnp.where(idle, cache.used, _NEVER))).astype(jnp.int32)
    going = jnp.arange(order.shape[0], dtype=jnp.int32) < count
    pages, _ = allocator.give(memory.allocator, order, going)
    places = jnp.where(going, cache.place[order], cache.table.shape[0])
    gone = jnp.where(going, order, cache.place.shape[0])
    cache = cache._replace(
        table=cache.table.at[places].set(0, mode="drop"),
        place=cache.place.at[gone].set(-1, mode="drop"),
    )
    return dataclasses.replace(memory, allocator=pages), cache, count


def _allocator_of(memory: PagedMemory) -> allocator.Allocator:
    """The free list itself: idle pages of this cache take the part of recently released ones."""
    if not isinstance(memory.allocator, allocator.Allocator):
        raise ValueError("a prefix cache works on memory without recent_pages; init it with 0")
    return memory.allocator


def clear(memory: PagedMemory, cache: PrefixCache) -> tuple[PagedMemory, PrefixCache]:
    """Forget every page; those that no sequence holds become free."""
    pinned = pins(cache) > 0
    every = jnp.arange(pinned.shape[0], dtype=jnp.int32)
    pages, _ = allocator.give(_allocator_of(memory), every, pinned)
    empty = cache._replace(table=jnp.zeros_like(cache.table), place=jnp.full_like(cache.place, -1))
    return dataclasses.replace(memory, allocator=pages), empty


def pins(cache: PrefixCache) -> jax.Array:
    """References that the cache holds, ``[N]`` int32: what `invariants.check` must be told."""
    return (cache.place >= 0).astype(jnp.int32)


def idle_pages(memory: PagedMemory, cache: PrefixCache) -> jax.Array:
    """Pages that nobody but the cache holds, ``[]`` int32."""
    return jnp.sum(_idle(memory, cache), dtype=jnp.int32)


def _idle(memory: PagedMemory, cache: PrefixCache) -> jax.Array:
    return (cache.place >= 0) & (memory.allocator.refcount == 1)


def _places(cache: PrefixCache, hashes: jax.Array) -> jax.Array:
    """Where a page with each hash may stand, ``[M]`` to ``[M, WINDOW]`` int32."""
    start = (hashes % np.uint32(cache.table.shape[0])).astype(jnp.int32)
    window = jnp.arange(WINDOW, dtype=jnp.int32)
    return (start[:, None] + window[None, :]) % cache.table.shape[0]


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: every bit of a uint32 depends on every bit of another."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
