"""A request on its way through the engine, and what a user gets back for it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from paxattn.kv_pool import KVPool
from paxattn.sampling_params import SamplingParams


@dataclass
class Logprob:
    """A token's log-probability under the model (before temperature) and its rank, 1 the likeliest.

    rank is None for a chosen token that is not among the likeliest that were asked for.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    finish_reason: "stop" (a stop token or string), "length" (max_tokens, or all that the model or
    the pool can hold), "error" (the request was refused), None while it runs.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A prompt and its completions; `error` says why a request was refused."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    error: str | None = None


class Swapped(NamedTuple):
    """The pages of a group of g sequences while they are in host memory."""

    entries: np.ndarray  # [g, M] int32: which of the pages each table entry is, from 1; 0 for none
    lengths: np.ndarray  # [g] int32
    num_pages: int  # distinct ones
    contents: KVPool  # their keys and values (NumPy arrays), padded

    @property
    def nbytes(self) -> int:
        return self.contents.nbytes


@dataclass(eq=False)
class Sequence:
    """One sequence of tokens while the engine works on it (host side, no arrays)."""

    index: int  # the prompt's place in the call
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    limit: int  # output tokens at which it ends
    stop_ids: tuple[int, ...]
    seed: tuple[int, int]
    cache_salt: str | None = None
    sample: int = 0  # which of its request's completions this is
    siblings: list["Sequence"] = field(default_factory=list)  # all samples of the request, in order
    group: list["Sequence"] = field(default_factory=list)  # those that come and go together
    parent: "Sequence | None" = None  # whose prompt pages it will share once they are computed
    outputs: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    text: str = ""
    pending: int = 0  # latest tokens that are not in `text` yet: bytes of an unfinished character
    row: int = -1  # memory row; -1 while it waits
    stored: int = 0  # tokens whose keys and values are in the pool
    dropped: int = 0  # its first pages, given back because they left the sliding window
    preemptions: int = 0
    swapped: Swapped | None = None  # of a group's first member: the group's pages, in host memory
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def prefilled(self) -> bool:
        return self.stored >= len(self.prompt_ids)

    @property
    def in_play(self) -> int:
        """Output tokens that the current stay in the batch has reached (fewer than `outputs`
        while a preempted sequence is replayed)."""
        return self.stored - len(self.prompt_ids) + 1
