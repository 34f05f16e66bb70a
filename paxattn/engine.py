"""`LLM`: prompts in, completions out, on paged memory with continuous batching.

The host decides who runs (`scheduler`), the device does everything else (`decode`): this file
turns sequences into padded arrays, calls a program, and hands its tokens back to the sequences.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxattn import contiguous, kv_pool, prefix_cache
from paxattn import memory as paged
from paxattn.capacity import Capacity, plan_capacity
from paxattn.decode import MAX_STEPS, Choice, DecodeInputs, PrefillInputs, Programs, State
from paxattn.detokenize import append_token
from paxattn.inputs import Prompt, compute_dtype, load_model, parse_prompts
from paxattn.llama import Llama
from paxattn.request import CompletionOutput, Logprob, RequestOutput
from paxattn.request import Sequence as Running
from paxattn.sampling import SamplingArrays, sample_seed
from paxattn.sampling_params import MAX_LOGPROBS, SamplingParams
from paxattn.scheduler import Chunk, Scheduler, children

# (packed tokens, sequences) of one prefill, and the fewest rows of one decode. With eight or more,
# a power of two, XLA's CPU backend gives a row the same bits in every bucket; below, its vector
# loops differ.
PREFILL_BUCKETS = ((64, 16), (256, 64), (512, 128))
FEWEST_ROWS = 8
STREAM_STEPS = 4  # decode steps between two looks of a streaming caller


class StepRecord(NamedTuple):
    """One program run, as `LLM.history` keeps it for measurements."""

    kind: str  # "prefill" or "decode"
    started: float  # seconds, time.perf_counter
    seconds: float
    compiled: bool  # a program was compiled in this time
    requests: tuple[int, ...]  # each running request's place in the call
    stored_before: tuple[int, ...]  # tokens in the pool of each running sequence
    stored_after: tuple[int, ...]
    steps: int  # decode steps; 1 for a prefill
    new_tokens: int  # output tokens that did not exist before
    waiting: int
    free_pages: int
    preemptions: int  # since the engine was made


class LLM:
    """A LLaMA-family model on paged KV memory.

    Args:
      model: a Hugging Face directory or hub id, a GGUF file, an Orbax checkpoint of `convert`, a
        value of `convert.load`, or None for SmolLM2-135M-Instruct.
      dtype: "auto" (the checkpoint's; float32 for a quantised GGUF on a CPU), "float32" or
        "bfloat16": of weights and KV pages.
      page_size: tokens in a page.
      kv_cache_bytes: budget of the KV pool; None takes what `max_num_seqs` sequences of
        `max_model_len` need, at most 1 GiB on a CPU and 80% of the free memory on a GPU.
      max_model_len: the most tokens of a sequence, prompt and output; None is the model's.
      max_num_seqs: the most sequences that run at once.
      cache: "paged", or "reserve-max", the traditional cache that keeps room for `max_model_len`
        tokens for each running sequence.
      seed: of the requests that bring none.
      enable_prefix_caching: full pages of prompts stay after their last user has gone, until the
        free list needs them, and later prompts that begin with the same tokens do not compute them
        again. Tokens are the same with and without. Off unless asked for: cached pages make one
        caller's prompt faster for what another one sent, so tenants who must not learn that of
        each other need a salt each: `{"prompt": ..., "cache_salt": "tenant"}`.
      compilation_cache: keep compiled programs in the user's cache folder for the next process.

    Raises:
      ValueError: an option that cannot be honoured, with its value and the remedy; or a model that
        cannot be read.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        dtype: str = "auto",
        page_size: int = 16,
        kv_cache_bytes: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        cache: str = "paged",
        seed: int = 0,
        enable_prefix_caching: bool = False,
        compilation_cache: bool = True,
    ):
        if cache not in ("paged", "reserve-max"):
            raise ValueError(f"cache must be 'paged' or 'reserve-max'; got {cache!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be an integer; got {seed!r}")
        wanted = compute_dtype(dtype)
        if compilation_cache:
            _use_compilation_cache()
        loaded = load_model(model, dtype)
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.source = loaded.source
        leaves = jax.tree.leaves(loaded.params)
        self.dtype = wanted or jnp.dtype(leaves[0].dtype)
        self.params = jax.tree.map(lambda x: jnp.asarray(x, self.dtype), loaded.params)
        self.cache = cache
        self.seed = seed
        self.prefix_caching = bool(enable_prefix_caching)
        if self.prefix_caching:
            _check_prefix_caching(self.config, cache)
        self.capacity: Capacity = plan_capacity(
            self.config,
            dtype=self.dtype,
            page_size=page_size,
            kv_cache_bytes=kv_cache_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            reserved=cache == "reserve-max",
        )
        windows = [self.config.layer_window(i) for i in range(self.config.num_layers)]
        self._window = None if None in windows else max(w for w in windows if w is not None)
        self.history: list[StepRecord] | None = None  # set to [] to record each program run
        self._programs = Programs(Llama(self.config, self.dtype))
        self._requests = 0
        self._preemptions = 0
        self._prefix = {"hits": 0, "misses": 0, "evictions": 0, "saved_tokens": 0}
        self._entry_steps = 0  # table entries, and pages in use, summed over decode steps
        self._page_steps = 0
        self._reset()

    def _reset(self) -> None:
        """An empty pool and an empty memory."""
        c, plan = self.config, self.capacity
        ops = contiguous if self.cache == "reserve-max" else paged
        self._state = State(
            kv_pool.init(
                c.num_layers, plan.num_pages, plan.page_size, c.num_kv_heads, c.head_dim, self.dtype
            ),
            ops.init(plan.num_pages, plan.max_rows, plan.pages_per_seq, plan.page_size),
            prefix_cache.init(plan.num_pages, plan.page_size) if self.prefix_caching else None,
        )
        self._scheduler = Scheduler(plan.max_rows, plan.page_size, self.cache == "reserve-max")

    # ------------------------------------------------------------------ what a user calls

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
          prompts: one prompt or a list of them; a prompt is a string, a list of token ids, or a
            chat (a list of {"role": ..., "content": ...}), or a dict with one of them as "prompt"
            and, with prefix caching, a "cache_salt".
          sampling_params: one for all prompts, or one for each.

        Returns:
          One `RequestOutput` a prompt, in the order of the prompts. A prompt that the model or the
          pool can never hold has `error` set and does not keep the others from running; if that
          is every prompt, the error is raised.

        Raises:
          ValueError: an empty prompt, a token id outside the vocabulary, text without a
            tokenizer, ...: before anything runs, naming the prompt.
        """
        outputs: dict[int, RequestOutput] = {}
        for output in self.completed(prompts, sampling_params):
            outputs[int(output.request_id)] = output
        if outputs and all(o.error for o in outputs.values()):
            raise ValueError(outputs[min(outputs)].error)
        return [outputs[i] for i in sorted(outputs)]

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a `RequestOutput` each time a request has new tokens.

        Each one holds all that the request has so far; `finished` marks its last. `request_id` is
        the prompt's place in the call.
        """
        return self._run(prompts, sampling_params, stream=True)

    def completed(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields each `RequestOutput` as soon as it is finished."""
        return self._run(prompts, sampling_params, stream=False)

    def batch_sizes(self) -> list[int]:
        """Rows of the decode programs that this engine may compile."""
        return sorted({_bucket(rows) for rows in range(1, self.capacity.max_rows + 1)})

    def stats(self) -> dict[str, Any]:
        """Pages, tokens and programs as they stand now.

        A page that several sequences share is one page used and several `page_entries`;
        `memory_saved` is the part of the entries that sharing saves, now, and `memory_saved_mean`
        over all decode steps since the engine was made (the paper's figure 15). `tokens_held` and
        `waste_tokens` count each sequence's tokens, shared or not. `pages_cached` are those that
        only the prefix cache holds: any sequence can have them. `prefix_hits` and `_misses` count
        full prompt pages when a request is admitted for the first time (not when it returns from
        a preemption), `prefix_saved_tokens` the prompt tokens that were therefore not computed.
        """
        plan, memory = self.capacity, self._state.memory
        tokens = int(jnp.sum(memory.lengths))
        ops = contiguous if self.cache == "reserve-max" else paged
        free = int(ops.free_pages(memory))
        cached = 0 if self._state.prefix is None else self._free_pages() - free
        used = plan.num_pages - 1 - free - cached
        entries, shared = self._sharing()
        return {
            "cache": self.cache,
            "page_size": plan.page_size,
            "pages_total": plan.num_pages - 1,
            "pages_free": free,
            "pages_used": used,
            "pages_cached": cached,
            "tokens_held": tokens - self._dropped_tokens(),
            "waste_tokens": entries * plan.page_size - tokens + self._dropped_tokens(),
            "pages_shared": shared,
            "page_entries": entries,
            "memory_saved": _saved(entries, used),
            "memory_saved_mean": _saved(self._entry_steps, self._page_steps),
            "kv_cache_bytes": self._state.pool.nbytes,
            "max_num_seqs": plan.max_rows,
            "max_model_len": plan.max_model_len,
            **{f"prefix_{name}": count for name, count in self._prefix.items()},
            "preemptions": self._preemptions,
            "requests": self._requests,
            "compiled_programs": sum(self._programs.compiled.values()),
            "compiled_by_kind": dict(self._programs.compiled),
        }

    # ------------------------------------------------------------------ the loop

    def _run(self, prompts: Any, sampling_params: Any, stream: bool) -> Iterator[RequestOutput]:
        parsed = parse_prompts(prompts, sampling_params, self.tokenizer, self.config.vocab_size)
        accepted: list[list[Running]] = []
        refused: list[RequestOutput] = []
        for i, prompt in enumerate(parsed):
            error = self.capacity.refusal(len(prompt.token_ids))
            if error is None:
                error = self.capacity.group_refusal(
                    len(prompt.token_ids), prompt.params.n, PREFILL_BUCKETS[-1][1]
                )
            if error is None:
                accepted.append(self._samples(i, prompt))
            else:
                refused.append(_refused(i, prompt, f"prompt {i}: {error}"))
        return self._serve(accepted, refused, stream)

    def _serve(self, accepted, refused, stream) -> Iterator[RequestOutput]:
        yield from refused
        scheduler = self._scheduler
        if scheduler.has_work():
            raise RuntimeError(
                "this LLM is serving another call; exhaust or close that iterator first"
            )
        for samples in accepted:
            for sequence in samples:
                sequence.arrived = time.perf_counter()
            # The traditional cache shares nothing: its samples are sequences like any others.
            for group in [[s] for s in samples] if scheduler.reserved else [list(samples)]:
                scheduler.add(group)
        try:
            while scheduler.has_work():
                touched = self._advance(stream)
                for samples in {s.index: s.siblings for s in touched}.values():
                    if stream or all(s.finish_reason for s in samples):
                        yield self._output(samples)
        finally:
            self._abandon()

    def _advance(self, stream: bool) -> list[Running]:
        """One program run; returns the sequences that have new tokens."""
        scheduler = self._scheduler
        if self._state.prefix is not None:
            self._admit_cached()
        elif admitted := scheduler.admit(self._free_pages()):
            self._reserve(admitted)
        chunks = scheduler.prefill_chunks(*PREFILL_BUCKETS[-1])
        if chunks:
            return self._prefill(chunks)
        self._leave_window(scheduler.decoding())
        while scheduler.starved(self._free_pages()) and scheduler.several_groups():
            rows = scheduler.preempt()
            self._preemptions += len(rows)
            self._release(rows)
        decoding = scheduler.decoding()
        self._make_room(decoding)
        return self._decode(decoding, stream)

    def _free_pages(self) -> int:
        """Pages that a sequence could have: free, or idle in the prefix cache."""
        if self.cache == "reserve-max":
            return 0
        if self._state.prefix is not None:
            return int(self._programs.available(self._state.memory, self._state.prefix))
        return int(self._state.memory.allocator.num_free)

    def _abandon(self) -> None:
        """Gives back what a closed or failed call left behind."""
        scheduler = self._scheduler
        rows = [s.row for s in scheduler.running]
        unfinished = any(not s.prefilled for s in scheduler.running)
        for sequence in list(scheduler.running):
            scheduler.finish(sequence)
        scheduler.waiting.clear()
        if _deleted(self._state):  # a program failed after it had taken the donated state
            self._reset()
        elif rows:
            self._release(rows)
            if unfinished and self._state.prefix is not None:
                # Pages were entered whose content has never been computed.
                self._keep(*self._programs.clear(self._state.memory, self._state.prefix))

    # ------------------------------------------------------------------ programs

    def _reserve(self, sequences: list[Running]) -> None:
        lengths = np.asarray(self._state.memory.lengths).copy()
        for s in sequences:
            lengths[s.row] = len(s.prompt_ids)
        memory, ok = self._programs.reserve(self._state.memory, lengths)
        self._state = self._state._replace(memory=memory)
        if not np.asarray(ok).all():
            raise RuntimeError("the allocator refused pages that the scheduler had counted as free")

    def _admit_cached(self) -> None:
        """Admits prompts one by one: what each one finds depends on those before it."""
        scheduler = self._scheduler
        size = self.capacity.page_size
        while (group := scheduler.next_group()) is not None:
            first = group[0]
            length = len(first.prompt_ids)
            tokens = np.zeros((self._table_width(scheduler.pages(length)), size), np.int32)
            tokens.reshape(-1)[:length] = first.prompt_ids
            memory, prefix, found = self._programs.admit(
                self._state.memory,
                self._state.prefix,
                np.int32(scheduler.free_rows[-1]),
                tokens,
                np.int32(length),
                prefix_cache.salt_of(first.cache_salt),
                np.int32(scheduler.beyond_prompt(group)),
            )
            self._keep(memory, prefix)
            found = jax.tree.map(int, jax.device_get(found))
            if not found.ok:
                return
            scheduler.place()
            first.stored = found.cached_tokens
            self._prefix["evictions"] += found.evicted
            if not first.preemptions:  # a prompt that comes back finds its own pages
                self._prefix["hits"] += found.hits
                self._prefix["misses"] += found.misses
                self._prefix["saved_tokens"] += found.cached_tokens

    def _table_width(self, pages: int) -> int:
        """Pages padded to 8, 32, 128, ...: few programs."""
        width = 8
        while width < pages:
            width *= 4
        return min(width, self.capacity.pages_per_seq)

    def _keep(self, memory: Any, prefix: Any) -> None:
        self._state = self._state._replace(memory=memory, prefix=prefix)

    def _leave_window(self, sequences: list[Running]) -> None:
        """Gives back pages that no layer's sliding window reaches any more.

        Not with a prefix cache, where whoever holds a page holds all those before it.
        """
        if self._window is None or self.prefix_caching or self.cache == "reserve-max":
            return
        positions = np.zeros(self.capacity.max_rows, np.int32)
        before = {s: s.dropped for s in sequences}
        for s in sequences:
            positions[s.row] = max(0, s.stored + 1 - self._window)  # seen by the next token
            s.dropped = int(positions[s.row]) // self.capacity.page_size
        if any(s.dropped > count for s, count in before.items()):
            memory = self._programs.release_before(self._state.memory, positions)
            self._state = self._state._replace(memory=memory)

    def _dropped_tokens(self) -> int:
        """Tokens of running sequences whose pages have been given back."""
        return sum(s.dropped for s in self._scheduler.running) * self.capacity.page_size

    def _make_room(self, sequences: list[Running]) -> None:
        """Evicts as many idle pages as a whole decode program may want beyond the free list."""
        if self._state.prefix is None:
            return
        pages = self._scheduler.pages
        want = -int(self._state.memory.allocator.num_free)
        for s in sequences:
            steps = min(MAX_STEPS, s.limit - s.in_play)
            want += pages(s.stored + steps) - pages(s.stored)
        if want > 0:
            memory, prefix, count = self._programs.evict(
                self._state.memory, self._state.prefix, np.int32(want)
            )
            self._keep(memory, prefix)
            self._prefix["evictions"] += int(count)

    def _release(self, rows: list[int]) -> None:
        mask = np.zeros(self.capacity.max_rows, bool)
        mask[rows] = True
        if self._state.prefix is not None:
            self._keep(*self._programs.release_cached(self._state.memory, self._state.prefix, mask))
            return
        self._state = self._state._replace(memory=self._programs.release(self._state.memory, mask))

    def _prefill(self, chunks: list[Chunk]) -> list[Running]:
        total = sum(c.count for c in chunks)
        samples = sum(1 + len(children(c.sequence)) for c in chunks)
        t, s = next((t, s) for t, s in PREFILL_BUCKETS if t >= total and s >= samples)
        inputs = PrefillInputs(
            tokens=np.zeros(t, np.int32),
            positions=np.zeros(t, np.int32),
            context_lens=np.zeros(t, np.int32),
            token_rows=np.full(t, -1, np.int32),
            seq_rows=np.full(s, -1, np.int32),
            cu_q_lens=np.full(s + 1, total, np.int32),
            kv_lens=np.zeros(s, np.int32),
            num_seqs=np.asarray([len(chunks)], np.int32),
            sampled_at=np.zeros(s, np.int32),
            generated=np.zeros(s, np.int32),
        )
        at = 0
        outputs: list[Running] = []  # whose next token each sampled one is
        for i, (sequence, start, count) in enumerate(
            (c.sequence, c.start, c.count) for c in chunks
        ):
            here = slice(at, at + count)
            inputs.tokens[here] = sequence.prompt_ids[start : start + count]
            inputs.positions[here] = np.arange(start, start + count)
            inputs.context_lens[here] = len(sequence.prompt_ids)
            inputs.token_rows[here] = sequence.row
            inputs.seq_rows[i] = sequence.row
            inputs.cu_q_lens[i] = at
            inputs.kv_lens[i] = start + count
            at += count
            for member in [sequence, *children(sequence)]:
                inputs.sampled_at[len(outputs)] = at - 1
                outputs.append(member)
        choice = _choice(outputs)
        record = self._record_start("prefill")
        self._state, sampled = self._programs.prefill(choice)(
            self.params, self._state, inputs, _sampling_arrays(outputs, s)
        )
        for chunk in chunks:
            chunk.sequence.stored += chunk.count
        self._fork([s for s in outputs if s.parent is not None and s.parent.prefilled])
        sampled = jax.tree.map(np.asarray, sampled)
        touched, new = [], 0
        for i, sequence in enumerate(outputs):
            if sequence.prefilled and not sequence.outputs:  # otherwise it is being replayed
                self._accept(sequence, *_pick(sampled, i))
                touched.append(sequence)
                new += 1
        self._record_end(record, 1, new)
        self._leave_finished(touched)
        return touched

    def _fork(self, sequences: list[Running]) -> None:
        """Each sequence takes the pages of its parent, whose prompt has just been computed."""
        if not sequences:
            return
        parents = np.full(self.capacity.max_rows, -1, np.int32)
        for s in sequences:
            assert s.parent is not None
            parents[s.row] = s.parent.row
        self._state, ok = self._programs.fork(self._state, parents)
        if not np.asarray(ok).all():
            raise RuntimeError("the allocator refused pages that the scheduler had counted as free")
        for s in sequences:
            s.stored, s.parent = len(s.prompt_ids), None

    def _decode(self, sequences: list[Running], stream: bool) -> list[Running]:
        b = _bucket(len(sequences))
        inputs = DecodeInputs(
            rows=np.full(b, -1, np.int32),
            tokens=np.zeros(b, np.int32),
            generated=np.zeros(b, np.int32),
            limit=np.zeros(b, np.int32),
            forced=np.zeros((b, MAX_STEPS), np.int32),
            num_forced=np.zeros(b, np.int32),
            steps=np.int32(STREAM_STEPS if stream else MAX_STEPS),
            until_one_ends=np.bool_(stream or bool(self._scheduler.waiting)),
        )
        for i, s in enumerate(sequences):
            inputs.rows[i] = s.row
            inputs.tokens[i] = s.outputs[s.in_play - 1]
            inputs.generated[i] = s.in_play
            inputs.limit[i] = s.limit
            replay = s.outputs[s.in_play : s.in_play + MAX_STEPS]
            inputs.forced[i, : len(replay)] = replay
            inputs.num_forced[i] = len(replay)
        record = self._record_start("decode")
        self._state, sampled, steps = self._programs.decode(_choice(sequences))(
            self.params, self._state, inputs, _sampling_arrays(sequences, b)
        )
        sampled = jax.tree.map(np.asarray, sampled)
        touched, new = [], 0
        for i, s in enumerate(sequences):
            emitted = int((sampled.tokens[i] >= 0).sum())
            replayed = int(inputs.num_forced[i])
            s.stored += emitted
            for j in range(replayed, emitted):
                if s.finish_reason:
                    break
                self._accept(s, *_pick(sampled, (i, j)))
                new += 1
            if emitted > replayed:
                touched.append(s)
        self._record_end(record, int(steps), new)
        if not self._scheduler.reserved:
            running = self._scheduler.running
            entries = sum(self._scheduler.pages(s.stored) - s.dropped for s in running)
            self._entry_steps += entries * int(steps)
            self._page_steps += (self.capacity.num_pages - 1 - self._free_pages()) * int(steps)
        self._leave_finished(touched)
        return touched

    def _accept(self, s: Running, token: int, logprobs: tuple | None) -> None:
        """One more output token: text, log-probabilities, and whether the sequence ends."""
        now = time.perf_counter()
        s.first_token_at = s.first_token_at or now
        s.outputs.append(token)
        if s.params.logprobs is not None and logprobs is not None:
            s.logprobs.append(self._logprobs(token, logprobs, s.params.logprobs))
        if self.tokenizer is not None:
            stop = append_token(self.tokenizer, s)
            if stop is not None:
                s.finish_reason, s.stop_reason = "stop", stop
        if s.finish_reason is None:
            if token in s.stop_ids and len(s.outputs) > s.params.min_tokens:
                s.finish_reason, s.stop_reason = "stop", token
            elif len(s.outputs) >= s.limit:
                s.finish_reason = "length"
        if s.finish_reason:
            s.finished_at = now

    def _logprobs(self, token: int, logprobs: tuple, count: int) -> dict[int, Logprob]:
        chosen, ids, values = logprobs
        ranks = {int(t): r + 1 for r, t in enumerate(ids)}
        entries = {
            int(t): Logprob(float(v), ranks[int(t)])
            for t, v in zip(ids[:count], values[:count], strict=True)
        }
        entries.setdefault(token, Logprob(float(chosen), ranks.get(token)))
        if self.tokenizer is not None:
            for t, entry in entries.items():
                entry.decoded_token = self.tokenizer.decode([t])
        return entries

    def _leave_finished(self, sequences: list[Running]) -> None:
        rows = []
        for s in sequences:
            if s.finish_reason:
                rows.append(s.row)
                self._scheduler.finish(s)
        if rows:
            self._release(rows)

    # ------------------------------------------------------------------ small parts

    def _sharing(self) -> tuple[int, int]:
        """Table entries of all sequences, and how many pages stand in several of them."""
        memory = self._state.memory
        if self.cache == "reserve-max":
            return int(contiguous.held_pages(memory).sum()), 0
        entries = np.asarray(memory.block_tables)
        entries = entries[entries != 0]
        _, holders = np.unique(entries, return_counts=True)
        return entries.size, int((holders > 1).sum())

    def _samples(self, index: int, prompt: Prompt) -> list[Running]:
        """The n sequences of one request."""
        params = prompt.params
        seed = params.seed
        if seed is None:
            seed = self.seed * 0x9E3779B97F4A7C15 + self._requests
        self._requests += 1
        stop_ids = list(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids += self.config.eos_token_ids
        room = self.capacity.group_outputs(len(prompt.token_ids), params.n)
        samples: list[Running] = []
        for i in range(params.n):
            own = sample_seed(seed, i)
            samples.append(
                Running(
                    index=index,
                    prompt=prompt.text,
                    prompt_ids=prompt.token_ids,
                    params=params,
                    limit=min(params.max_tokens, room),
                    stop_ids=tuple(dict.fromkeys(stop_ids)),
                    seed=(own >> 32, own % 2**32),
                    cache_salt=prompt.cache_salt,
                    sample=i,
                    siblings=samples,
                )
            )
        return samples

    def _output(self, samples: list[Running]) -> RequestOutput:
        first = samples[0]
        return RequestOutput(
            request_id=str(first.index),
            prompt=first.prompt,
            prompt_token_ids=list(first.prompt_ids),
            outputs=[_completion(s) for s in samples],
            finished=all(s.finish_reason for s in samples),
        )

    def _record_start(self, kind: str) -> tuple | None:
        if self.history is None:
            return None
        running = list(self._scheduler.running)
        compiled = sum(self._programs.compiled.values())
        return kind, time.perf_counter(), compiled, running, tuple(s.stored for s in running)

    def _record_end(self, record: tuple | None, steps: int, new_tokens: int) -> None:
        if record is None or self.history is None:
            return
        kind, started, compiled, running, before = record
        self.history.append(
            StepRecord(
                kind=kind,
                started=started,
                seconds=time.perf_counter() - started,
                compiled=sum(self._programs.compiled.values()) > compiled,
                requests=tuple(s.index for s in running),
                stored_before=before,
                stored_after=tuple(s.stored for s in running),
                steps=steps,
                new_tokens=new_tokens,
                waiting=len(self._scheduler.waiting),
                free_pages=self._free_pages(),
                preemptions=self._preemptions,
            )
        )


def _completion(s: Running) -> CompletionOutput:
    total = None
    if s.params.logprobs is not None:
        total = sum(entry[t].logprob for t, entry in zip(s.outputs, s.logprobs, strict=True))
    return CompletionOutput(
        index=s.sample,
        text=s.text,
        token_ids=list(s.outputs),
        cumulative_logprob=total,
        logprobs=list(s.logprobs) if s.params.logprobs is not None else None,
        finish_reason=s.finish_reason,
        stop_reason=s.stop_reason,
    )


def _saved(entries: int, pages: int) -> float:
    """The part of `entries` pages that is not there because `pages` are shared."""
    return 1 - pages / entries if entries else 0.0


def _bucket(rows: int) -> int:
    """Rows padded to 8, 16, 32, 64, ...: few programs."""
    size = FEWEST_ROWS
    while size < rows:
        size *= 2
    return size


def _choice(sequences: list[Running]) -> Choice:
    return Choice(
        greedy=all(s.params.temperature == 0 for s in sequences),
        logprobs=MAX_LOGPROBS if any(s.params.logprobs is not None for s in sequences) else 0,
    )


def _sampling_arrays(sequences: list[Running], rows: int) -> SamplingArrays:
    width = 4
    while width < max((len(s.stop_ids) for s in sequences), default=0):
        width *= 2
    arrays = SamplingArrays(
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.zeros((rows, 2), np.uint32),
        min_tokens=np.zeros(rows, np.int32),
        stop_ids=np.full((rows, width), -1, np.int32),
    )
    for i, s in enumerate(sequences):
        p = s.params
        arrays.temperature[i] = p.temperature
        arrays.top_k[i] = max(p.top_k, 0)
        arrays.top_p[i] = p.top_p
        arrays.min_p[i] = p.min_p
        arrays.seed[i] = s.seed
        arrays.min_tokens[i] = p.min_tokens
        arrays.stop_ids[i, : len(s.stop_ids)] = s.stop_ids
    return arrays


def _pick(sampled, at) -> tuple[int, tuple | None]:
    token = int(sampled.tokens[at])
    if sampled.logprobs is None:
        return token, None
    return token, (sampled.logprobs[at], sampled.top_ids[at], sampled.top_logprobs[at])


def _refused(index: int, prompt: Prompt, error: str) -> RequestOutput:
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
    return RequestOutput(
        request_id=str(index),
        prompt=prompt.text,
        prompt_token_ids=list(prompt.token_ids),
        outputs=[completion],
        error=error,
    )


def _check_prefix_caching(config: Any, cache: str) -> None:
    if cache == "reserve-max":
        raise ValueError(
            "enable_prefix_caching needs cache='paged': the traditional cache shares nothing"
        )
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        raise ValueError(
            "enable_prefix_caching cannot serve rope_type 'dynamic': there a key depends on the "
            "length of the whole prompt, so prompts of two lengths share no prefix"
        )


def _deleted(state: State) -> bool:
    return any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))


def _use_compilation_cache() -> None:
    """Compiled programs outlive the process, unless the user chose a place (or none) already."""
    import os
    import pathlib

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", os.path.join(home, "paxattn", "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
