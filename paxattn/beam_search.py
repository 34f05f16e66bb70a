"""Beam search on shared pages: beams fork copy-on-write, and dead beams give their pages back.

After each step the best continuations are chosen among all beams of a request. A beam that has
several children keeps its row for one of them; the others take the rows of beams that died, with
the full pages shared and the partial last one copied, on the device. So no cache is ever reordered.

The rules are those of `transformers` (`num_beams` beams, no sampling), token for token.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from paxattn import batch, checks
from paxattn.decode import Choice
from paxattn.loop import Loop
from paxattn.request import CompletionOutput, RequestOutput, Sequence
from paxattn.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """One request's beam search.

    Args:
      beam_width: beams, and the most completions that are found.
      max_tokens: the most tokens of a completion.
      length_penalty: a finished completion of n tokens is ranked by its log-probability / n **
        length_penalty; above 0 favours long ones.
      early_stopping: True stops as soon as there are `beam_width` finished completions; False when
        no beam seems able to beat the worst of them at its present length; "never" only when none
        can at any length.
      n: completions that are returned, the best ones first; None for `beam_width`.
      stop_token_ids: token ids that end a completion, beside the model's end-of-sequence ids.
      ignore_eos: the model's end-of-sequence ids do not end it.

    Raises:
      ValueError: a value outside its range; the message names it.
    """

    beam_width: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if isinstance(self.early_stopping, np.bool_):
            object.__setattr__(self, "early_stopping", bool(self.early_stopping))
        for name in ("beam_width", "max_tokens"):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), 1))
        checks.number("length_penalty", self.length_penalty, -50, 50)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                f"early_stopping must be True, False or 'never'; got {self.early_stopping!r}"
            )
        if self.n is None:
            return
        if not checks.is_integer(self.n) or not 1 <= self.n <= self.beam_width:
            raise ValueError(f"n must be from 1 to beam_width={self.beam_width}; got {self.n!r}")
        object.__setattr__(self, "n", int(self.n))

    def sampling(self) -> SamplingParams:
        """What the beams' sequences are run with."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


class Child(NamedTuple):
    """A beam of the next step."""

    parent: int  # which of the present beams it continues
    token: int
    logprob: float  # of all its output tokens


class Finished(NamedTuple):
    """A completion."""

    score: float
    logprob: float
    tokens: list[int]
    stopped: bool  # at a stop token, and not at its limit


class Beams:
    """The beams of one request: log-probabilities and finished completions, no pages.

    Args:
      params: the request's.
      limit: output tokens at which a beam ends.
      stop_ids: tokens that end it.
    """

    def __init__(self, params: BeamSearchParams, limit: int, stop_ids: tuple[int, ...]):
        self.params, self.limit, self.stop_ids = params, limit, frozenset(stop_ids)
        self.tokens: list[list[int]] = [[]]
        self.logprobs = [0.0]
        self.finished: list[Finished] = []  # the best first
        self.done = False

    def advance(self, ids: np.ndarray, logprobs: np.ndarray) -> list[Child]:
        """One step.

        Args:
          ids, logprobs: ``[beams, C]``, the likeliest next tokens of each beam; C at least
            `candidates(params, stop ids)`, or the whole vocabulary.

        Returns:
          The next beams, the likeliest first; none if the search is over.
        """
        width, penalty = self.params.beam_width, self.params.length_penalty
        length = len(self.tokens[0]) + 1
        children = [
            Child(beam, int(token), self.logprobs[beam] + float(logprob))
            for beam in range(len(self.tokens))
            for token, logprob in zip(ids[beam], logprobs[beam], strict=True)
        ]
        # Python's sort is stable: of equals the earlier beam and the likelier token come first.
        children.sort(key=lambda c: -c.logprob)
        children = children[: candidates(self.params, len(self.stop_ids))]
        going_on = []
        for rank, child in enumerate(children):
            stops = child.token in self.stop_ids
            if not stops and length < self.limit:
                going_on.append(child)
            elif rank < width:
                score = child.logprob / length**penalty
                tokens = [*self.tokens[child.parent], child.token]
                self.finished.append(Finished(score, child.logprob, tokens, stops))
        self.finished = sorted(self.finished, key=lambda f: -f.score)[:width]
        going_on = going_on[:width]
        self.done = not going_on or not self._can_improve(going_on[0].logprob, length)
        if self.done:
            return []
        self.tokens = [[*self.tokens[c.parent], c.token] for c in going_on]
        self.logprobs = [c.logprob for c in going_on]
        return going_on

    def _can_improve(self, best: float, length: int) -> bool:
        """Whether a beam may still become better than the worst finished completion."""
        how = self.params.early_stopping
        if len(self.finished) < self.params.beam_width:
            return True
        if how is True:
            return False
        penalty = self.params.length_penalty
        at = self.limit if how == "never" and penalty > 0 else length
        return best / at**penalty > self.finished[-1].score


def candidates(params: BeamSearchParams, stop_ids: int) -> int:
    """How many continuations of all beams are looked at: enough that `beam_width` go on."""
    return max(2, 1 + stop_ids) * params.beam_width


def check(
    params: BeamSearchParams, requests: list[list[Sequence]], max_rows: int, vocab_size: int
) -> None:
    """Raises ValueError for a search that can never run."""
    if params.beam_width > max_rows:
        raise ValueError(
            f"beam_width={params.beam_width} beams run together, but at most {max_rows} sequences "
            "can; lower beam_width or raise max_num_seqs"
        )
    stops = max((len(group[0].stop_ids) for group in requests), default=0)
    if candidates(params, stops) > vocab_size:
        raise ValueError(
            f"beam_width={params.beam_width} looks at {candidates(params, stops)} continuations, "
            f"more than the vocabulary's {vocab_size} tokens; lower beam_width"
        )


def serve(loop: Loop, requests: list[list[Sequence]], params: BeamSearchParams) -> Iterator:
    """Runs requests, each a group of `beam_width` sequences, and yields them as they are done."""
    device, scheduler = loop.device, loop.device.scheduler
    searches: dict[int, Beams] = {}
    for samples in requests:
        group = list(samples)
        searches[id(group)] = Beams(params, group[0].limit, group[0].stop_ids)
        scheduler.add(group)
    if not requests:
        return
    stops = max(len(samples[0].stop_ids) for samples in requests)
    choice = Choice(greedy=True, logprobs=candidates(params, stops))
    try:
        while scheduler.has_work():
            device.admit()
            chunks = scheduler.prefill_chunks(*batch.PREFILL_BUCKETS[-1])
            if chunks:
                ready = _first_tokens(loop, chunks, choice)
            else:
                device.leave_window(scheduler.decoding())
                while scheduler.starved(device.free_pages()) and scheduler.several_groups():
                    loop.preempt()
                ready = _next_tokens(loop, choice)
            moves: list[tuple[Sequence, Sequence]] = []
            over = []
            for group, ids, logprobs in ready:
                children = searches[id(group)].advance(ids, logprobs)
                if children:
                    moves += _assign(group, children)
                else:
                    over.append(group)
            _rearrange(device, moves)
            for group in over:
                search = searches.pop(id(group))
                finished = list(group)
                for sequence in finished:
                    sequence.finish_reason = "stop"
                device.leave(finished)
                yield finished[0], search.finished
    except BaseException:
        device.abandon()
        raise


def _first_tokens(loop, chunks, choice):
    """Computes chunks of prompts; candidates of the groups whose prompt is now complete."""
    device = loop.device
    outputs = batch.sampled_sequences(chunks)
    tokens, samples = batch.prefill_bucket(chunks)
    record = loop.record_start("prefill")
    device.state, sampled = device.programs.prefill(choice)(
        loop.params,
        device.state,
        batch.prefill_inputs(chunks, tokens, samples),
        batch.sampling_arrays(outputs, samples),
    )
    for chunk in chunks:
        chunk.sequence.stored += chunk.count
    loop.record_end(record, 1, 0, sum(c.count for c in chunks))
    device.notify("prefill")
    device.fork([s for s in outputs if s.parent is not None and s.parent.prefilled])
    ready = []
    for i, s in enumerate(outputs):
        if s is s.group[0] and s.prefilled and not s.outputs:
            # The prompt is one beam; its children are told apart by their first tokens.
            here = slice(i, i + 1)
            ready.append((s.group, *_host(sampled.top_ids[here], sampled.top_logprobs[here])))
    return ready


def _next_tokens(loop, choice):
    """One decode step of every beam; candidates of each group that is not being replayed."""
    device, scheduler = loop.device, loop.device.scheduler
    sequences = scheduler.decoding()
    device.make_room(sequences, steps=1)
    rows = batch.row_bucket(len(sequences))
    record = loop.record_start("decode")
    device.state, sampled, _ = device.programs.decode(choice)(
        loop.params,
        device.state,
        batch.decode_inputs(sequences, rows, 1, rows),
        batch.sampling_arrays(sequences, rows),
    )
    ids, logprobs = _host(sampled.top_ids[:, 0], sampled.top_logprobs[:, 0])
    place = {}
    for i, s in enumerate(sequences):
        s.stored += 1
        place[s] = i
    loop.record_end(record, 1, len(sequences), len(sequences))
    loop.count_sharing(1)
    device.notify("decode")
    groups = {id(s.group): s.group for s in sequences}.values()
    ready = []
    for group in groups:
        if group[0].in_play > len(group[0].outputs):
            at = [place[s] for s in group]
            ready.append((group, ids[at], logprobs[at]))
    return ready


def _host(*arrays: jax.Array) -> list[np.ndarray]:
    return [np.asarray(x) for x in arrays]


def _assign(group: list[Sequence], children: list[Child]) -> list[tuple[Sequence, Sequence]]:
    """Gives each child a sequence: its parent's where it is the first, else a dead beam's.

    Puts the group in the children's order; returns (sequence, whose pages it takes) of the others.
    """
    histories = [s.outputs for s in group]
    first_step = not histories[0]  # every member holds the prompt already
    keeps = {c.parent: i for i, c in reversed(list(enumerate(children)))}
    unused = iter([s for i, s in enumerate(group) if first_step or i not in keeps])
    moves, members = [], []
    for i, child in enumerate(children):
        parent = group[child.parent]
        if not first_step and keeps[child.parent] == i:
            member = parent
        else:
            member = next(unused)
            if not first_step:
                moves.append((member, parent))
        members.append(member)
    for member, child in zip(members, children, strict=True):
        member.outputs = [*histories[child.parent if not first_step else 0], child.token]
    group[:] = members
    return moves


def _rearrange(device, moves: list[tuple[Sequence, Sequence]]) -> None:
    """Dead beams give their pages back, and their rows become copies of other beams."""
    if not moves:
        return
    device.release([child.row for child, _ in moves])
    for child, parent in moves:
        child.stored, child.parent = 0, parent
    device.fork([child for child, _ in moves])


def output(sequence: Sequence, finished: list[Finished], n: int | None, tokenizer: Any):
    """The completions of one request, the best first."""
    completions = []
    for i, f in enumerate(finished[:n]):
        text = "" if tokenizer is None else tokenizer.decode(f.tokens, skip_special_tokens=True)
        completions.append(
            CompletionOutput(
                index=i,
                text=text,
                token_ids=f.tokens,
                cumulative_logprob=f.logprob,
                finish_reason="stop" if f.stopped else "length",
                stop_reason=f.tokens[-1] if f.stopped else None,
            )
        )
    return RequestOutput(
        request_id=str(sequence.index),
        prompt=sequence.prompt,
        prompt_token_ids=list(sequence.prompt_ids),
        outputs=completions,
    )
