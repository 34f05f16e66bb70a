"""`LLM`: prompts in, completions out, on paged memory with continuous batching.

What a user calls, and nothing else: prompts become sequences here, and `loop` serves them.
"""

import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paxattn import beam_search, checks, compiler, completion, huge_pages
from paxattn.batch import PREFILL_BUCKETS, row_bucket
from paxattn.beam_search import BeamSearchParams
from paxattn.capacity import Capacity, plan_capacity
from paxattn.decode import State
from paxattn.device_state import DeviceState, Event, Snapshot
from paxattn.inputs import Prompt, compute_dtype, load_model, parse_prompts
from paxattn.llama import split
from paxattn.loop import Loop, StepRecord
from paxattn.request import RequestOutput
from paxattn.request import Sequence as Running
from paxattn.sampling import sample_seed
from paxattn.sampling_params import SamplingParams

SWAP_BYTES = 4 * 2**30  # host memory for swapped pages, unless the caller says otherwise


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
      preemption: what becomes of the pages of the youngest sequences when pages run out:
        "recompute" forgets them and computes them again, "swap" keeps them in host memory, "auto"
        takes the cheaper one by what both have cost so far. Tokens are the same with each.
      swap_bytes: the most host memory for swapped pages; beyond it pages are computed again.
      max_num_batched_tokens: token budget of a step. Prompts are then computed in chunks beside
        the decode steps of the others, so a long prompt stalls nobody for longer than one such
        step. None computes prompts first, up to 512 tokens at a time, which serves a batch
        soonest. Tokens are the same, but for ties within float rounding.
      compilation_cache: keep compiled programs in the user's cache folder for the next process.

    Attributes:
      history: set it to [] to have each program run recorded as a `StepRecord`.
      observer: a function of (`Event`, `State`) that is called after each program that changed the
        memory, or None. The state's arrays are valid during the call only.

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
        preemption: str = "auto",
        swap_bytes: int = SWAP_BYTES,
        max_num_batched_tokens: int | None = None,
        compilation_cache: bool = True,
    ):
        if cache not in ("paged", "reserve-max"):
            raise ValueError(f"cache must be 'paged' or 'reserve-max'; got {cache!r}")
        if preemption not in ("auto", "recompute", "swap"):
            raise ValueError(
                f"preemption must be 'auto', 'recompute' or 'swap'; got {preemption!r}"
            )
        for name, value in (
            ("enable_prefix_caching", enable_prefix_caching),
            ("compilation_cache", compilation_cache),
        ):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False; got {value!r}")
        if not checks.is_integer(seed):
            raise ValueError(f"seed must be an integer; got {seed!r}")
        swap_bytes = checks.integer("swap_bytes", swap_bytes, 0)
        wanted = compute_dtype(dtype)
        if compilation_cache:
            _use_compilation_cache()
        loaded = load_model(model, dtype)
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.source = loaded.source
        leaves = jax.tree.leaves(loaded.params)
        self.dtype = wanted or jnp.dtype(leaves[0].dtype)
        parts = compiler.products(False, self.dtype).form.parts
        self.params = huge_pages.copied(split(loaded.params, parts), self.dtype)
        self.cache = cache
        self.seed = int(seed)
        self.prefix_caching = enable_prefix_caching
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
        mixed = _mixed_tokens(max_num_batched_tokens, self.capacity.max_rows)
        self._device = DeviceState(
            self.config,
            self.dtype,
            self.capacity,
            cache == "reserve-max",
            self.prefix_caching,
            swap_bytes,
        )
        del loaded, leaves
        compiler.return_freed_memory()
        self._requests = 0
        self._caller: object | None = None  # the iterator that is being served
        self._loop = Loop(self._device, self.params, self.tokenizer, preemption, mixed)

    @property
    def history(self) -> list[StepRecord] | None:
        return self._loop.history

    @history.setter
    def history(self, records: list[StepRecord] | None) -> None:
        self._loop.history = records

    @property
    def observer(self) -> Callable[[Event, State], None] | None:
        return self._device.observer

    @observer.setter
    def observer(self, function: Callable[[Event, State], None] | None) -> None:
        self._device.observer = function

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

    def beam_search(
        self, prompts: Any, params: BeamSearchParams | None = None
    ) -> list[RequestOutput]:
        """The likeliest completions of each prompt, by beam search.

        Beams share their pages copy-on-write; several prompts run together, and a request's beams
        come and go together when pages run out. Prompts are computed first, whatever
        `max_num_batched_tokens` says.

        Args:
          prompts: as `generate`.
          params: of all prompts; None for four beams and 16 tokens.

        Returns:
          One `RequestOutput` a prompt, whose `outputs` are its completions, the best first, with
          their log-probability as `cumulative_logprob`.

        Raises:
          ValueError: as `generate`, a beam width that can never run, or a traditional cache.
        """
        params = BeamSearchParams() if params is None else params
        if not isinstance(params, BeamSearchParams):
            raise ValueError(
                f"beam_search takes BeamSearchParams; got {type(params).__name__}: {params!r:.200}"
            )
        if self.cache == "reserve-max":
            raise ValueError(
                "beam_search needs cache='paged': the traditional cache shares nothing"
            )
        parsed = parse_prompts(prompts, params.sampling(), self.tokenizer, self.config.vocab_size)
        requests = [self._samples(i, prompt) for i, prompt in enumerate(parsed)]
        beam_search.check(params, requests, self.capacity.max_rows, self.config.vocab_size)
        outputs: dict[int, RequestOutput] = {}
        for i, (prompt, error) in enumerate(
            zip(parsed, self._refusals(parsed, "beam_width"), strict=True)
        ):
            if error is not None:
                outputs[i] = completion.refused(i, prompt, error)
        if requests and len(outputs) == len(requests):
            raise ValueError(outputs[0].error)
        self._check_free()
        accepted = [samples for i, samples in enumerate(requests) if i not in outputs]
        for sequence, finished in beam_search.serve(self._loop, accepted, params):
            outputs[sequence.index] = beam_search.output(
                sequence, finished, params.n, self.tokenizer
            )
        return [outputs[i] for i in sorted(outputs)]

    def add_request(self, prompt: Any, sampling_params: SamplingParams | None = None) -> str:
        """Queues one prompt for `step`, for callers whose requests arrive while others run.

        Returns:
          The request's id, which its outputs carry.

        Raises:
          ValueError: as `generate`; also a prompt that can never fit. Nothing is queued then.
        """
        if self._caller is not None:
            self._check_free()
        if isinstance(prompt, numbers.Integral):
            raise ValueError(f"a prompt is a text, a list of token ids or a chat; got {prompt!r}")
        parsed = parse_prompts([prompt], sampling_params, self.tokenizer, self.config.vocab_size)
        (error,) = self._refusals(parsed)
        if error is not None:
            raise ValueError(error)
        index = self._requests
        self._queue(self._samples(index, parsed[0]))
        return str(index)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work()

    def step(self, stream: bool = True) -> list[RequestOutput]:
        """One program run on the queued requests; returns those that have new tokens.

        A request that is finished is returned once with `finished` set, and then forgotten.

        Args:
          stream: come back after a few tokens at most. False decodes up to 32 at once, at less cost
            a token, for callers who wait for whole answers and expect nobody.
        """
        if self._caller is not None:
            self._check_free()
        if not self._scheduler.has_work():
            return []
        try:
            touched = self._loop.advance(stream)
        except BaseException:
            self._device.abandon()
            raise
        return [completion.request_output(samples) for samples in _requests(touched)]

    def save(self) -> Snapshot:
        """The engine as it stands between two steps (of `step`, or of an iterator's loop).

        Costs the pages in use, not the pool. Its `state` can be compared with another's by
        `time_travel.diff`.
        """
        return self._device.save()._replace(requests=self._requests)

    def rewind(self, saved: Snapshot) -> None:
        """Back to a saved moment, to the last bit: what comes next is what came then.

        A request that was finished or added since is as it was; a saved value stays good, so
        several futures can be tried from one moment.

        Raises:
          ValueError: it is nothing that `save` returned, or was saved by an engine of another pool
            or another number of rows.
        """
        if not isinstance(saved, Snapshot):
            raise ValueError(f"rewind takes what save() returned; got {type(saved).__name__}")
        self._device.rewind(saved)
        self._requests = saved.requests

    def batch_sizes(self) -> list[int]:
        """Rows of the decode programs that this engine may compile."""
        return sorted({row_bucket(rows) for rows in range(1, self.capacity.max_rows + 1)})

    def stats(self) -> dict[str, Any]:
        """Pages, tokens and programs as they stand now.

        A page that several sequences share is one page used and several `page_entries`;
        `memory_saved` is the part of the entries that sharing saves, now, and `memory_saved_mean`
        over all decode steps since the engine was made (the paper's figure 15). `tokens_held` and
        `waste_tokens` count each sequence's tokens, shared or not. `pages_cached` are those that
        only the prefix cache holds: any sequence can have them. `prefix_hits` and `_misses` count
        full prompt pages when a request is admitted for the first time (not when it returns from
        a preemption), `prefix_saved_tokens` the prompt tokens that were therefore not computed.
        `pages_swapped_out` and `_in` count pages since the engine was made; `swap_bytes_used` is
        what host memory holds now.
        """
        plan, device = self.capacity, self._device
        free, used, cached = device.page_counts()
        entries, shared = device.sharing()
        tokens = device.tokens() - device.dropped_tokens()
        prefix = ("hits", "misses", "evictions", "saved_tokens")
        return {
            "cache": self.cache,
            "page_size": plan.page_size,
            "pages_total": plan.num_pages - 1,
            "pages_free": free,
            "pages_used": used,
            "pages_cached": cached,
            "tokens_held": tokens,
            "waste_tokens": entries * plan.page_size - tokens,
            "pages_shared": shared,
            "page_entries": entries,
            "memory_saved": _saved(entries, used),
            "memory_saved_mean": _saved(self._loop.entry_steps, self._loop.page_steps),
            "kv_cache_bytes": device.state.pool.nbytes,
            "max_num_seqs": plan.max_rows,
            "max_model_len": plan.max_model_len,
            **{f"prefix_{name}": device.counts[name] for name in prefix},
            "preemptions": self._loop.preemptions,
            "pages_swapped_out": device.counts["swapped_out"],
            "pages_swapped_in": device.counts["swapped_in"],
            "swap_bytes_used": device.swap_used,
            "requests": self._requests,
            "compiled_programs": device.compiled(),
            "compiled_by_kind": dict(device.programs.compiled),
        }

    # ------------------------------------------------------------------ the loop

    @property
    def _scheduler(self):
        return self._device.scheduler

    def _run(self, prompts: Any, sampling_params: Any, stream: bool) -> Iterator[RequestOutput]:
        parsed = parse_prompts(prompts, sampling_params, self.tokenizer, self.config.vocab_size)
        accepted: list[list[Running]] = []
        refused: list[RequestOutput] = []
        for i, (prompt, error) in enumerate(zip(parsed, self._refusals(parsed), strict=True)):
            if error is None:
                accepted.append(self._samples(i, prompt))
            else:
                refused.append(completion.refused(i, prompt, error))
        return self._serve(accepted, refused, stream)

    def _refusals(self, parsed: list[Prompt], option: str = "n") -> list[str | None]:
        """Why each prompt can never run, or None."""
        errors = []
        for i, prompt in enumerate(parsed):
            tokens = len(prompt.token_ids)
            error = self.capacity.refusal(tokens) or self.capacity.group_refusal(
                tokens, prompt.params.n, self._most_samples(), option
            )
            errors.append(None if error is None else f"prompt {i}: {error}")
        return errors

    def _most_samples(self) -> int:
        """The most samples of one prompt that its last chunk can be sampled for."""
        most = PREFILL_BUCKETS[-1][1]
        return most if self._loop.mixed is None else min(most, row_bucket(self.capacity.max_rows))

    def _serve(self, accepted, refused, stream) -> Iterator[RequestOutput]:
        yield from refused
        self._check_free()
        call = object()
        try:
            for samples in accepted:
                self._queue(samples)
            # Between its last tokens and its end a call owns nothing, and another may begin.
            while self._scheduler.has_work() and self._caller in (None, call):
                self._caller = call
                touched = self._loop.advance(stream)
                if not self._scheduler.has_work():
                    self._caller = None
                for samples in _requests(touched):
                    if stream or all(s.finish_reason for s in samples):
                        yield completion.request_output(samples)
        except BaseException as error:
            if self._caller is call:
                self._caller = None
                self._device.abandon(closed=isinstance(error, GeneratorExit))
            raise

    def _check_free(self) -> None:
        """Raises RuntimeError while another call, or a queued request, is not finished."""
        if self._caller is not None or self._scheduler.has_work():
            raise RuntimeError(
                "this LLM is serving another call; exhaust or close that iterator first (or call "
                "`step` until no queued request is left)"
            )

    def _queue(self, samples: list[Running]) -> None:
        # The traditional cache shares nothing: its samples are sequences like any others.
        for group in [[s] for s in samples] if self._scheduler.reserved else [list(samples)]:
            self._scheduler.add(group)

    # ------------------------------------------------------------------ small parts

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


def _requests(touched: list[Running]) -> list[list[Running]]:
    """The requests of some sequences, each with all its samples."""
    return list({id(s.siblings): s.siblings for s in touched}.values())


def _saved(entries: int, pages: int) -> float:
    """The part of `entries` pages that is not there because `pages` are shared."""
    return 1 - pages / entries if entries else 0.0


def _mixed_tokens(budget: Any, max_rows: int) -> int | None:
    """Rows of the program that mixes prompts and decodes."""
    if budget is None:
        return None
    least = 2 * row_bucket(max_rows)
    if not checks.is_integer(budget) or budget < least:
        raise ValueError(
            f"max_num_batched_tokens must be None or an integer of at least {least}, twice the "
            f"rows that max_num_seqs={max_rows} needs; got {budget!r}"
        )
    return int(budget)


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


def _use_compilation_cache() -> None:
    """Compiled programs outlive the process, unless the user chose a place (or none) already."""
    import os
    import pathlib

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", os.path.join(home, "paxattn", "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
