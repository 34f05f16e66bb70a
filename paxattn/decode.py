"""The compiled steps of the engine: the only place where it jits and donates.

The programs, each compiled once for each shape bucket:
  prefill   a packed chunk of prompt tokens of several sequences in one ragged call, and the first
            token of every sequence whose prompt it completes;
  decode    up to `MAX_STEPS` tokens for each row, page allocation included, without returning to
            the host; it comes back when a row ends (enough rows, where nobody waits for one),
            pages run out or the step budget is used up;
  mixed     chunks of prompts and one token for each of the rows that decode, in one call;
  tables    reserve or release rows;
  prefix    the same with a prefix cache: admit a prompt, release rows, evict idle pages;
  window    release the pages that left the sliding window;
  fork      rows that share their parents' full pages and copy the partial last one;
  swap      which pages rows hold, their contents to the host, and from the host into new pages.

A row's arithmetic does not depend on what else is in the batch: dense products of two or more
rows give each row the same bits whatever their number, and attention cuts a sequence at absolute
positions. So greedy tokens are identical in any batch, and after any preemption.
"""

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import paged_attention, ragged_paged_attention
from paxattn import compiler, contiguous, kv_pool, prefix_cache, swap, time_travel
from paxattn import memory as paged
from paxattn.kv_pool import KVPool
from paxattn.llama import Llama, looped
from paxattn.llama_config import LlamaConfig
from paxattn.prefix_cache import PrefixCache
from paxattn.sampling import HostArray, SamplingArrays, logprobs_of, sample

MAX_STEPS = 32  # decode steps of one program run: the width of its output


class State(NamedTuple):
    """Everything that persists between steps; donated to each step and returned by it."""

    pool: KVPool
    memory: Any  # paxattn.memory.PagedMemory or paxattn.contiguous.ReserveMax
    prefix: PrefixCache | None = None


class PrefillInputs(NamedTuple):
    """Packed chunks of prompts; T tokens, S sequences, both padded to their bucket."""

    tokens: HostArray  # [T] int32
    positions: HostArray  # [T] int32
    context_lens: HostArray  # [T] int32: the length of the whole prompt, see rope.cos_sin
    token_rows: HostArray  # [T] int32: memory row of each token; -1 is padding
    seq_rows: HostArray  # [S] int32: memory row of each sequence; -1 is padding
    cu_q_lens: HostArray  # [S + 1] int32
    kv_lens: HostArray  # [S] int32: tokens of each sequence stored after this chunk
    num_seqs: HostArray  # [1] int32
    sampled_at: HostArray  # [S] int32: place in `tokens` after which output s is sampled
    generated: HostArray  # [S] int32: output position of the token that is sampled


class DecodeInputs(NamedTuple):
    """One row a running sequence; b rows, padded to their bucket."""

    rows: HostArray  # [b] int32: memory row; -1 is padding
    tokens: HostArray  # [b] int32: the last token, whose key and value are not stored yet
    generated: HostArray  # [b] int32: output tokens so far, `tokens` included
    limit: HostArray  # [b] int32: output tokens at which the row ends
    forced: HostArray  # [b, MAX_STEPS] int32: tokens to replay after a preemption
    num_forced: HostArray  # [b] int32
    steps: HostArray  # [] int32, at most MAX_STEPS
    enough: HostArray  # [] int32: come back when a row has ended and no more than so many are left


class Sampled(NamedTuple):
    """Tokens and, if asked, log-probabilities; leading axes [S] or [b, MAX_STEPS]."""

    tokens: jax.Array  # int32; -1 where there is none
    logprobs: jax.Array | None  # float32, of `tokens`
    top_ids: jax.Array | None  # [..., count] int32
    top_logprobs: jax.Array | None  # [..., count] float32


class Choice(NamedTuple):
    """Static: how tokens are chosen."""

    greedy: bool  # no row samples
    logprobs: int  # 0: none; otherwise how many of the likeliest tokens come with each


def ops_of(memory: Any) -> ModuleType:
    """The module of functions that work on this kind of memory."""
    return contiguous if isinstance(memory, contiguous.ReserveMax) else paged


def _choose(logits, sampling, generated, choice: Choice, columns: bool = False) -> Sampled:
    tokens = sample(logits, sampling, generated, greedy=choice.greedy, columns=columns)
    if not choice.logprobs:
        return Sampled(tokens, None, None, None)
    return Sampled(tokens, *logprobs_of(logits, tokens, choice.logprobs))


def _table_rows(memory: Any, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tables [b, M] and lengths [b] of memory rows; a padding row (-1) holds nothing."""
    safe = jnp.maximum(rows, 0)
    real = rows >= 0
    return (
        jnp.where(real[:, None], memory.block_tables[safe], 0),
        jnp.where(real, memory.lengths[safe], 0),
    )


def _prefill(
    model: Llama,
    narrow: bool,  # see `compiler.narrow_attention`
    choice: Choice,
    params,
    state: State,
    inputs: PrefillInputs,
    sampling,
) -> tuple[State, Sampled]:
    config = model.config
    pool, memory, _ = state
    slots = ops_of(memory).slot_mapping(memory, inputs.token_rows, inputs.positions)
    tables, _ = _table_rows(memory, inputs.seq_rows)

    def attend(layer, q, k, v, pool):
        pool = kv_pool.write(pool, layer, k, v, slots)
        pages, first, how = _pages_of(pool, layer, config)
        out = ragged_paged_attention(
            *(q, pages, inputs.kv_lens, tables + first, inputs.cu_q_lens, inputs.num_seqs),
            narrow_products=narrow,
            **how,
        )
        return out, pool

    tokens = (inputs.tokens, inputs.positions, inputs.context_lens)
    hidden, pool = _hidden(model, params, *tokens, pool, attend)
    # One sequence may be sampled several times: the samples of a prompt that is computed once.
    logits = _unembed(model, params, hidden[inputs.sampled_at])
    return state._replace(pool=pool), _choose(logits, sampling, inputs.generated, choice)


def _mixed(
    model: Llama,
    narrow: bool,
    choice: Choice,
    params,
    state: State,
    rows: DecodeInputs,
    chunks: PrefillInputs,
    rows_sampling: SamplingArrays,
    chunks_sampling: SamplingArrays,
) -> tuple[State, Sampled, Sampled]:
    """One decode step of b rows beside T tokens of prompts.

    The dense layers see one batch, so the weights are read once. Attention is asked twice, each
    kind of token as in its own program. Products of other sizes than there sum in another order,
    so hidden states may differ from theirs in the last bits. Returns the next token of each row,
    [b], and of each sampled place of the chunks, [S].
    """
    config = model.config
    ops = ops_of(state.memory)
    b = rows.rows.shape[0]
    max_rows = state.memory.lengths.shape[0]
    active = rows.rows >= 0
    at = jnp.where(active, rows.rows, max_rows)
    memory, slots, _ = ops.append(
        state.memory, jnp.zeros(max_rows, bool).at[at].set(True, mode="drop")
    )
    slots = jnp.where(active, slots[jnp.maximum(rows.rows, 0)], 0)
    slots = jnp.concatenate([slots, ops.slot_mapping(memory, chunks.token_rows, chunks.positions)])
    tables, lengths = _table_rows(memory, rows.rows)
    chunk_tables, _ = _table_rows(memory, chunks.seq_rows)

    def attend(layer, q, k, v, pool):
        pool = kv_pool.write(pool, layer, k, v, slots)
        pages, first, how = _pages_of(pool, layer, config)
        decoded = paged_attention(q[:b], *pages, tables + first, lengths, **how)
        prefilled = ragged_paged_attention(
            q[b:],
            pages,
            chunks.kv_lens,
            chunk_tables + first,
            chunks.cu_q_lens,
            chunks.num_seqs,
            narrow_products=narrow,
            **how,
        )
        return jnp.concatenate([decoded, prefilled]), pool

    tokens = jnp.concatenate([rows.tokens, chunks.tokens])
    positions = jnp.concatenate([jnp.maximum(lengths - 1, 0), chunks.positions])
    context_lens = jnp.concatenate([lengths, chunks.context_lens])
    hidden, pool = _hidden(model, params, tokens, positions, context_lens, state.pool, attend)
    logits = _unembed(model, params, jnp.concatenate([hidden[:b], hidden[b + chunks.sampled_at]]))
    return (
        state._replace(pool=pool, memory=memory),
        _choose(logits[:b], rows_sampling, rows.generated, choice),
        _choose(logits[b:], chunks_sampling, chunks.generated, choice),
    )


def _hidden(
    model: Llama, params, tokens, positions, context_lens, pool: KVPool, attend
) -> tuple[jax.Array, KVPool]:
    """Hidden states [T, E] of tokens [T], and the pool that holds their keys and values."""
    config = model.config
    if pool.stacked and config.has_one_window:
        return looped(model, params, tokens, positions, context_lens, pool, attend)
    apply: Any = model.apply  # Flax's own type has mutable collections in it
    return apply({"params": params}, tokens, positions, context_lens, pool, attend)


def _unembed(model: Llama, params, hidden: jax.Array) -> jax.Array:
    apply: Any = model.apply
    return apply({"params": params}, hidden, method="unembed")


def _pages_of(
    pool: KVPool, layer: int | jax.Array, config: LlamaConfig
) -> tuple[tuple[jax.Array, jax.Array], int | jax.Array, dict[str, Any]]:
    """The arrays that hold a layer's pages, the first of them, and how attention is to read them."""
    k, v, first = pool.of_layer(layer)
    how = dict(
        sm_scale=config.head_dim**-0.5,
        # a traced layer is one of a loop, whose layers are alike
        sliding_window=config.layer_window(0 if isinstance(layer, jax.Array) else layer),
        kv_layout=pool.layout,
        kv_dtype=pool.kv_dtype,
    )
    return (k, v), first, how


class _Loop(NamedTuple):
    step: jax.Array
    state: State
    tokens: jax.Array  # [b]
    generated: jax.Array  # [b]
    active: jax.Array  # [b] bool
    out: Sampled
    ended: jax.Array  # [] bool: some row ended in the last step


def _decode(
    model: Llama,
    choice: Choice,
    params,
    state: State,
    inputs: DecodeInputs,
    sampling: SamplingArrays,
) -> tuple[State, Sampled, jax.Array]:
    b = inputs.rows.shape[0]
    ops = ops_of(state.memory)
    max_rows = state.memory.lengths.shape[0]
    scatter_to = jnp.where(inputs.rows >= 0, inputs.rows, max_rows)

    def batch_wide(active):
        return jnp.zeros(max_rows, bool).at[scatter_to].set(active, mode="drop")

    def go_on(loop: _Loop) -> jax.Array:
        fits = _append_fits(loop.state.memory, batch_wide(loop.active))
        left = jnp.sum(loop.active, dtype=jnp.int32)
        stop = loop.ended & (left <= inputs.enough)
        return (loop.step < inputs.steps) & (left > 0) & fits & ~stop

    def step(loop: _Loop) -> _Loop:
        memory, slots, _ = ops.append(loop.state.memory, batch_wide(loop.active))
        slots = jnp.where(loop.active, slots[jnp.maximum(inputs.rows, 0)], 0)
        tables, lengths = _table_rows(memory, inputs.rows)
        lengths = jnp.where(loop.active, lengths, 0)
        weights = compiler.tied_to_step(params, loop.step)
        logits, pool = decode_logits(
            model, weights, loop.state.pool, loop.tokens, tables, lengths, slots
        )
        chosen = _choose(logits, sampling, loop.generated, choice, model.form.columns)
        forced = loop.step < inputs.num_forced
        tokens = jnp.where(forced, inputs.forced[:, loop.step], chosen.tokens)
        generated = loop.generated + 1
        stops = jnp.any(sampling.stop_ids == tokens[:, None], axis=1)
        stops &= (generated > sampling.min_tokens) & ~forced
        ends = loop.active & (stops | (generated >= inputs.limit))
        written = Sampled(jnp.where(loop.active, tokens, -1), *chosen[1:])
        return _Loop(
            loop.step + 1,
            loop.state._replace(pool=pool, memory=memory),
            jnp.where(loop.active, tokens, loop.tokens),
            jnp.where(loop.active, generated, loop.generated),
            loop.active & ~ends,
            jax.tree.map(lambda out, new: out.at[:, loop.step].set(new), loop.out, written),
            jnp.any(ends),
        )

    count = choice.logprobs
    steps = (b, MAX_STEPS)
    out = Sampled(
        jnp.full(steps, -1, jnp.int32),
        jnp.zeros(steps, jnp.float32) if count else None,
        jnp.zeros((*steps, count), jnp.int32) if count else None,
        jnp.zeros((*steps, count), jnp.float32) if count else None,
    )
    loop = jax.lax.while_loop(
        go_on,
        step,
        _Loop(
            jnp.int32(0),
            state,
            inputs.tokens,
            inputs.generated,
            (inputs.rows >= 0) & (inputs.generated < inputs.limit),
            out,
            jnp.zeros((), bool),
        ),
    )
    return loop.state, loop.out, loop.step


def decode_logits(
    model: Llama,
    params,
    pool: KVPool,
    tokens: jax.Array,  # [b] int32
    tables: jax.Array,  # [b, M] int32
    lengths: jax.Array,  # [b] int32: `tokens` included; 0 for a row that is padding
    slots: jax.Array,  # [b] int32: where the tokens' keys and values go
) -> tuple[jax.Array, KVPool]:
    """One decode step: logits [b, V] float32 after `tokens`, and the pool that holds them."""

    def attend(layer, q, k, v, pool):
        pool = kv_pool.write(pool, layer, k, v, slots)
        pages, first, how = _pages_of(pool, layer, model.config)
        return paged_attention(q, *pages, tables + first, lengths, **how), pool

    positions = jnp.maximum(lengths - 1, 0)
    hidden, pool = _hidden(model, params, tokens, positions, lengths, pool, attend)
    return _unembed(model, params, hidden), pool


def _append_fits(memory: Any, active: jax.Array) -> jax.Array:
    """Whether every active row can take one more token; the reserved cache always can."""
    if isinstance(memory, contiguous.ReserveMax):
        return jnp.ones((), bool)
    crossing = active & (memory.lengths % memory.page_size == 0)
    return jnp.sum(crossing, dtype=jnp.int32) <= memory.allocator.num_free


class Programs:
    """The compiled programs of one model, and how many there are.

    Counters are bumped while JAX traces, so they count compilations and cost nothing afterwards.
    """

    def __init__(self, model: Llama):
        self.compiled: dict[str, int] = {}
        many, few = (compiler.products(rows, model.dtype) for rows in (True, False))
        narrow = compiler.narrow_attention(model.dtype)
        prompts, steps = (model.clone(form=how.form) for how in (many, few))
        self.prefill = self._by_choice("prefill", partial(_prefill, prompts, narrow), many.options)
        self.decode = self._by_choice("decode", partial(_decode, steps), few.options)
        self.mixed = self._by_choice("mixed", partial(_mixed, prompts, narrow), many.options)
        self.pages_of = self._jit("swap", swap.pages_of, donate=())
        self.take_pages = self._jit("swap", kv_pool.take_pages, donate=())
        self.swap_in = self._jit("swap", _swap_in, donate=0)
        self.rewind = self._jit("rewind", time_travel.rewind, donate=0)
        self.reserve = self._jit("tables", _reserve, donate=0)
        self.release = self._jit("tables", _release, donate=0)
        self.release_before = self._jit("window", paged.release_before, donate=0)
        self.fork = self._jit("fork", _fork, donate=0)
        self.admit = self._jit("prefix", prefix_cache.admit, donate=(0, 1))
        self.release_cached = self._jit("prefix", prefix_cache.release, donate=(0, 1))
        self.evict = self._jit("prefix", prefix_cache.evict, donate=(0, 1))
        self.clear = self._jit("prefix", prefix_cache.clear, donate=(0, 1))
        self.available = self._jit("prefix", _available, donate=())

    def _jit(
        self,
        name: str,
        f: Callable,
        donate: int | tuple[int, ...],
        options: dict[str, Any] | None = None,
    ) -> Any:
        def traced(*args):
            self.compiled[name] = self.compiled.get(name, 0) + 1
            return f(*args)

        return jax.jit(traced, donate_argnums=donate, compiler_options=options)

    def _by_choice(
        self, name: str, f: Callable, options: dict[str, Any]
    ) -> Callable[[Choice], Any]:
        """The jitted program for each way of choosing tokens; its state is donated."""
        return cache(lambda choice: self._jit(name, partial(f, choice), 1, options))


def _reserve(memory: Any, lengths: jax.Array) -> tuple[Any, jax.Array]:
    return ops_of(memory).reserve(memory, lengths)


def _fork(state: State, parents: jax.Array) -> tuple[State, jax.Array]:
    """Rows b become copies of rows parents[b] ([B] int32; -1 for none), pages and content."""
    memory, (sources, targets), ok = paged.fork(state.memory, parents)
    return state._replace(pool=kv_pool.copy_pages(state.pool, sources, targets), memory=memory), ok


def _swap_in(
    state: State,
    rows: jax.Array,
    entries: jax.Array,
    lengths: jax.Array,
    count: jax.Array,
    contents: KVPool,
) -> tuple[State, jax.Array]:
    """Sequences come back from host memory to empty rows, see `swap.restore`."""
    memory, pages, ok = swap.restore(state.memory, rows, entries, lengths, count)
    width = contents.num_pages
    pages = jnp.pad(pages, (0, max(0, width - pages.shape[0])))[:width]
    return state._replace(pool=kv_pool.put_pages(state.pool, pages, contents), memory=memory), ok


def _available(memory: Any, cache: PrefixCache) -> jax.Array:
    return memory.allocator.num_free + prefix_cache.idle_pages(memory, cache)


def _release(memory: Any, mask: jax.Array) -> Any:
    return ops_of(memory).release(memory, mask)
