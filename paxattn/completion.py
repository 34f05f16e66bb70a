"""What becomes of a token on the host: text, log-probabilities, the end of a sequence, outputs."""

from typing import Any

from paxattn.detokenize import append_token
from paxattn.inputs import Prompt
from paxattn.request import CompletionOutput, Logprob, RequestOutput, Sequence


def accept(s: Sequence, token: int, logprobs: tuple | None, tokenizer: Any) -> None:
    """Gives a sequence one more output token, and ends it where the token ends it."""
    s.outputs.append(token)
    if s.params.logprobs is not None and logprobs is not None:
        s.logprobs.append(_logprobs(token, logprobs, s.params.logprobs, tokenizer))
    if tokenizer is not None:
        stop = append_token(tokenizer, s)
        if stop is not None:
            s.finish_reason, s.stop_reason = "stop", stop
    if s.finish_reason is None:
        if token in s.stop_ids and len(s.outputs) > s.params.min_tokens:
            s.finish_reason, s.stop_reason = "stop", token
        elif len(s.outputs) >= s.limit:
            s.finish_reason = "length"


def _logprobs(token: int, logprobs: tuple, count: int, tokenizer: Any) -> dict[int, Logprob]:
    chosen, ids, values = logprobs
    ranks = {int(t): r + 1 for r, t in enumerate(ids)}
    entries = {
        int(t): Logprob(float(v), ranks[int(t)])
        for t, v in zip(ids[:count], values[:count], strict=True)
    }
    entries.setdefault(token, Logprob(float(chosen), ranks.get(token)))
    if tokenizer is not None:
        for t, entry in entries.items():
            entry.decoded_token = tokenizer.decode([t])
    return entries


def request_output(samples: list[Sequence]) -> RequestOutput:
    """All that a request's sequences have so far."""
    first = samples[0]
    return RequestOutput(
        request_id=str(first.index),
        prompt=first.prompt,
        prompt_token_ids=list(first.prompt_ids),
        outputs=[_completion(s) for s in samples],
        finished=all(s.finish_reason for s in samples),
    )


def _completion(s: Sequence) -> CompletionOutput:
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


def refused(index: int, prompt: Prompt, error: str) -> RequestOutput:
    """The output of a request that can never be served."""
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
    return RequestOutput(
        request_id=str(index),
        prompt=prompt.text,
        prompt_token_ids=list(prompt.token_ids),
        outputs=[completion],
        error=error,
    )
