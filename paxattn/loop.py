"""The engine's loop: one program run after another, until nobody is left.

The host decides who runs (`scheduler`), the device does everything else (`decode`). Here sequences
are handed to a program (`batch` makes arrays of them, `device_state` keeps their pages), and the
program's tokens back to the sequences (`completion`).
"""

import time
from typing import Any, NamedTuple

import jax
import numpy as np

from paxattn import batch, compiler, completion
from paxattn.batch import PREFILL_BUCKETS, row_bucket, row_bucket_below
from paxattn.decode import MAX_STEPS
from paxattn.device_state import DeviceState
from paxattn.request import Sequence as Running
from paxattn.scheduler import Chunk

# Decode steps between two looks of a streaming caller: with four, a request that arrives waits longer
# (a first token after 290 instead of 190 ms, 2 arrivals a second on 2 cores), and no more are served.
STREAM_STEPS = 2


class StepRecord(NamedTuple):
    """One program run, as `LLM.history` keeps it for measurements."""

    kind: str  # "prefill", "decode", or "mixed": chunks of prompts beside a decode step
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


class Loop:
    """What one engine does with its device, program run by program run.

    Args:
      device: the state and its programs.
      params: the model's.
      tokenizer: of the texts, or None.
      preemption: "auto", "recompute" or "swap".
      mixed: rows of the program that computes chunks of prompts beside a decode step; None where
        prompts are computed first.
    """

    def __init__(
        self, device: DeviceState, params: Any, tokenizer: Any, preemption: str, mixed: int | None
    ):
        self.device, self.params, self.tokenizer = device, params, tokenizer
        self.preemption, self.mixed = preemption, mixed
        self.history: list[StepRecord] | None = None
        self.preemptions = 0
        self.entry_steps = 0  # table entries, and pages in use, summed over decode steps
        self.page_steps = 0
        self._costs = {"prefill": 0.0, "decode": 0.0}  # seconds a token, and a row's step

    def advance(self, stream: bool) -> list[Running]:
        """One program run; returns the sequences that have new tokens."""
        device, scheduler = self.device, self.device.scheduler
        device.admit()
        mixed = self.mixed is not None and bool(scheduler.decoding())
        if not mixed:
            tokens, samples = PREFILL_BUCKETS[-1]
            chunks = scheduler.prefill_chunks(min(tokens, self.mixed or tokens), samples)
            if chunks:
                return self._prefill(chunks)
        device.leave_window(scheduler.decoding())
        while scheduler.starved(device.free_pages()) and scheduler.several_groups():
            self.preempt()
        decoding = scheduler.decoding()
        if mixed and self.mixed is not None:
            rows = row_bucket(self.device.capacity.max_rows)
            chunks = scheduler.prefill_chunks(self.mixed - rows, rows)
            if chunks:
                device.make_room(decoding, steps=1)
                return self._mixed_step(chunks, decoding, rows)
        device.make_room(decoding)
        return self._decode(decoding, stream)

    def preempt(self) -> None:
        group = self.device.scheduler.running[-1].group
        self.preemptions += len(group)
        if not (self._swap_is_better(group) and self.device.swap_out()):
            self.device.preempt()

    def _swap_is_better(self, group: list[Running]) -> bool:
        if self.preemption == "recompute" or not self.device.can_swap():
            return False
        swapping = self.device.swap_seconds_per_page
        if self.preemption == "swap" or swapping is None:
            return True  # what has never been done has no measured cost yet
        pages = sum(self.device.scheduler.pages(s.stored) - s.dropped for s in group)
        again = len(group[0].prompt_ids) * self._costs["prefill"]
        again += sum(s.in_play - 1 for s in group) * self._costs["decode"]
        return pages * swapping < again

    def _prefill(self, chunks: list[Chunk]) -> list[Running]:
        outputs = batch.sampled_sequences(chunks)
        tokens, samples = batch.prefill_bucket(chunks)
        inputs = batch.prefill_inputs(chunks, tokens, samples)
        device = self.device
        record = self.record_start("prefill")
        device.state, sampled = device.programs.prefill(batch.choice_of(outputs))(
            self.params, device.state, inputs, batch.sampling_arrays(outputs, samples)
        )
        touched = self._after_chunks(chunks, outputs, jax.tree.map(np.asarray, sampled))
        self.record_end(record, 1, len(touched), sum(c.count for c in chunks))
        device.leave(touched)
        return touched

    def _after_chunks(self, chunks, outputs, sampled) -> list[Running]:
        """Forks and first tokens of the sequences whose prompt is now computed."""
        for chunk in chunks:
            chunk.sequence.stored += chunk.count
        self.device.notify("prefill")
        self.device.fork([s for s in outputs if s.parent is not None and s.parent.prefilled])
        touched = []
        for i, sequence in enumerate(outputs):
            if sequence.prefilled and not sequence.outputs:  # otherwise it is being replayed
                completion.accept(sequence, *batch.pick(sampled, i), self.tokenizer)
                touched.append(sequence)
        return touched

    def _decode(self, sequences: list[Running], stream: bool) -> list[Running]:
        rows = row_bucket(len(sequences))
        inputs = batch.decode_inputs(
            sequences,
            rows,
            STREAM_STEPS if stream else MAX_STEPS,
            # Where nobody waits for a row to end, a program of fewer rows may go on at less cost.
            rows if stream or self.device.scheduler.waiting else row_bucket_below(rows),
        )
        device = self.device
        record = self.record_start("decode")
        device.state, sampled, steps = device.programs.decode(batch.choice_of(sequences))(
            self.params, device.state, inputs, batch.sampling_arrays(sequences, rows)
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
                completion.accept(s, *batch.pick(sampled, (i, j)), self.tokenizer)
                new += 1
            if emitted > replayed:
                touched.append(s)
        self.record_end(record, int(steps), new, int(steps) * len(sequences))
        self.count_sharing(int(steps))
        device.notify("decode")
        device.leave(touched)
        return touched

    def _mixed_step(self, chunks: list[Chunk], decoding: list[Running], rows: int) -> list[Running]:
        """Chunks of prompts and one decode step of the others, in one program."""
        assert self.mixed is not None
        outputs = batch.sampled_sequences(chunks)
        everyone = [*decoding, *outputs]
        device = self.device
        record = self.record_start("mixed")
        device.state, chosen, sampled = device.programs.mixed(batch.choice_of(everyone))(
            self.params,
            device.state,
            batch.decode_inputs(decoding, rows, 1, rows),
            batch.prefill_inputs(chunks, self.mixed - rows, rows),
            batch.sampling_arrays(decoding, rows),
            batch.sampling_arrays(outputs, rows),
        )
        chosen, sampled = jax.tree.map(np.asarray, (chosen, sampled))
        touched = self._after_chunks(chunks, outputs, sampled)
        for i, s in enumerate(decoding):
            s.stored += 1
            if s.in_play > len(s.outputs):  # otherwise it is being replayed
                completion.accept(s, *batch.pick(chosen, i), self.tokenizer)
                touched.append(s)
        self.record_end(record, 1, len(touched), 0)
        self.count_sharing(1)
        device.notify("decode")
        device.leave(touched)
        return touched

    def count_sharing(self, steps: int) -> None:
        if self.device.scheduler.reserved:
            return
        running = self.device.scheduler.running
        entries = sum(self.device.scheduler.pages(s.stored) - s.dropped for s in running)
        self.entry_steps += entries * steps
        self.page_steps += (self.device.capacity.num_pages - 1 - self.device.free_pages()) * steps

    def record_start(self, kind: str) -> tuple:
        running = list(self.device.scheduler.running)
        stored = tuple(s.stored for s in running)
        return kind, time.perf_counter(), self.device.compiled(), running, stored

    def record_end(self, record: tuple, steps: int, new_tokens: int, work: int) -> None:
        """Ends a program run; `work`, its tokens or row steps, prices a recomputation."""
        kind, started, before_compiled, running, before = record
        seconds = time.perf_counter() - started
        compiled = self.device.compiled() > before_compiled
        if compiled:
            compiler.return_freed_memory()
        if work and not compiled:
            old = self._costs[kind]
            self._costs[kind] = (old + seconds / work) / 2 if old else seconds / work
        if self.history is None:
            return
        self.history.append(
            StepRecord(
                kind=kind,
                started=started,
                seconds=seconds,
                compiled=compiled,
                requests=tuple(s.index for s in running),
                stored_before=before,
                stored_after=tuple(s.stored for s in running),
                steps=steps,
                new_tokens=new_tokens,
                waiting=len(self.device.scheduler.waiting),
                free_pages=self.device.free_pages(),
                preemptions=self.preemptions,
            )
        )
