"""Tokens to text as they come, and where a stop string ends it."""

from typing import Any

from paxattn.request import Sequence

# Only this many of the latest tokens are decoded again with each new one: enough for a character
# that spans tokens and for the white space that some tokenizers put before a word.
_CONTEXT = 8


def append_token(tokenizer: Any, sequence: Sequence) -> str | None:
    """Extends the text by the newest token; returns the stop string that ended it, if any.

    Bytes of an unfinished character wait for the rest. At a stop string the text ends before it.
    """
    tokens = sequence.outputs
    start = max(0, len(tokens) - 1 - sequence.pending - _CONTEXT)
    while start > 0 and _unfinished(tokenizer, tokens[start : len(tokens) - 1 - sequence.pending]):
        start -= 1
    settled = tokens[start : len(tokens) - 1 - sequence.pending]
    before = _decode(tokenizer, settled)
    now = _decode(tokenizer, tokens[start:])
    last = len(tokens) >= sequence.limit or tokens[-1] in sequence.stop_ids
    if now.endswith("�") and not last:
        sequence.pending += 1
        return None
    sequence.pending = 0
    old_length = len(sequence.text)
    sequence.text += now[len(before) :]
    if len(tokens) <= sequence.params.min_tokens:
        return None
    return _cut_at_stop(sequence, old_length)


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""


def _unfinished(tokenizer: Any, tokens: list[int]) -> bool:
    return _decode(tokenizer, tokens).startswith("�")


def _cut_at_stop(sequence: Sequence, old_length: int) -> str | None:
    found = None
    for stop in sequence.params.stop:
        at = sequence.text.find(stop, max(0, old_length - len(stop) + 1))
        if at >= 0 and (found is None or at < found[0]):
            found = (at, stop)
    if found is None:
        return None
    sequence.text = sequence.text[: found[0]]
    return found[1]
