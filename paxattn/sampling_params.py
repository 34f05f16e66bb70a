"""How a request is sampled and when it stops: the names that vLLM's users know."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paxattn import checks

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling.

    Args:
      n: completions of one prompt. They share the prompt's pages; each has a seed of its own, see
        `sampling.sample_seed`.
      temperature: 0 takes the likeliest token (greedy); otherwise logits are divided by it.
      top_k: keep the k likeliest tokens; 0 or -1 keeps all.
      top_p: keep the likeliest tokens whose probabilities sum to at least this; in (0, 1].
      min_p: keep tokens at least this times as likely as the likeliest; in [0, 1].
      seed: the same seed gives the same tokens, whatever else is in the batch. Without one a
        request takes its seed from the `LLM`'s and from how many requests came before it.
      max_tokens: the most tokens that are generated.
      min_tokens: no stop token and no stop string counts before this many.
      stop: strings at which the text ends; they are not part of it.
      stop_token_ids: token ids that end a request, beside the model's end-of-sequence ids.
      ignore_eos: the model's end-of-sequence ids do not end the request.
      logprobs: for each token its log-probability and those of this many likeliest tokens.

    Raises:
      ValueError: a value outside its range; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: Sequence[str] | str = field(default_factory=tuple)
    stop_token_ids: Sequence[int] = field(default_factory=tuple)
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        ids = _tuple("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        checks.integer("n", self.n, 1)
        checks.number("temperature", self.temperature, 0.0)
        if 0 < self.temperature < 1e-6:
            raise ValueError(
                f"temperature={self.temperature} is too small to divide by; use 0 for greedy"
            )
        checks.integer("top_k", self.top_k, -1)
        checks.number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p <= 0:
            raise ValueError(f"top_p must be in (0, 1]; got {self.top_p}")
        checks.number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            checks.integer("seed", self.seed, -(2**63), 2**64 - 1)
        checks.integer("max_tokens", self.max_tokens, 1)
        checks.integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for s in stop:
            if not isinstance(s, str) or not s:
                raise ValueError(f"stop must hold non-empty strings; got {s!r}")
        for i in self.stop_token_ids:
            checks.integer("stop_token_ids", i, 0)
        if self.logprobs is not None:
            checks.integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(value))  # NumPy's integers overflow
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))


def _tuple(name: str, values) -> tuple:
    if values is None:
        return ()
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, (bytes, Mapping)):
        raise ValueError(f"{name} must be a list; got {values!r}")
    return tuple(values)
