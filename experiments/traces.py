"""Request lengths: real ones from traces, drawn ones from stated distributions.

`read` takes any of these files and tells them apart by their content:

| trace | file | what it has |
|---|---|---|
| ShareGPT | JSON array, or JSON lines, of conversations | text; the first human and gpt turns |
| Azure LLM inference (2023, 2024) | CSV `TIMESTAMP,ContextTokens,GeneratedTokens` | arrivals |
| Mooncake | JSON lines with `input_length`, `output_length` | arrivals, prefix blocks |
| BurstGPT | CSV with `Request tokens`, `Response tokens` | arrivals |
| this project's table | CSV `prompt_tokens,output_tokens[,arrival_s]` | arrivals, or none |

A line that cannot be used ends the reading with a ValueError that names the file and the line.
Requests without a prompt or without an output (BurstGPT logs failed calls as 0 response tokens)
hold no generated token: they are left out and counted in `Trace.dropped`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

SHAREGPT_LENGTHS = Path(__file__).resolve().parent / "data" / "sharegpt_lengths.csv"

PAPER_MEANS = {"sharegpt": (161.3, 338.0), "alpaca": (19.3, 58.5)}
"""Mean prompt and output tokens of the two data sets (PagedAttention paper, Figure 11)."""

Count = Callable[[list[str]], list[int]]
"""Texts to their numbers of tokens."""

_MAX_TOKENS = 2**31 - 1
_LATEST = 1e15  # seconds or milliseconds: later than any clock


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival, one per position."""

    prompt_tokens: np.ndarray  # [R] int32, at least 1
    output_tokens: np.ndarray  # [R] int32, at least 1
    arrival_s: np.ndarray | None = None  # [R] float64, seconds from the first; None: not known
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    """Mooncake: the prompt's blocks of 512 tokens; equal ids are equal text. Else None."""
    source: str = ""
    """Where the requests come from, for tables and captions."""
    dropped: int = 0
    """Requests left out because their prompt or output has no tokens."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)


# --- choosing a trace -------------------------------------------------------------------------


def option(parser: argparse.ArgumentParser) -> None:
    """Add `--trace FILE`."""
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="request lengths: ShareGPT JSON, Azure CSV, Mooncake JSONL, BurstGPT CSV, or a table "
        "prompt_tokens,output_tokens (default: 2,000 real ShareGPT requests)",
    )


def of(args: argparse.Namespace, count: Count | None = None) -> Trace:
    """The trace that `--trace` names, by default the shipped ShareGPT lengths."""
    return read(args.trace or SHAREGPT_LENGTHS, count)


def read(path: Path | str, count: Count | None = None) -> Trace:
    """Read a trace of any known kind.

    Args:
      path: the file.
      count: counts tokens, for traces of text (ShareGPT); by default with the tokenizer of the
        default model.

    Raises:
      ValueError: unreadable, of no known kind, empty, or with a bad line; names file and line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such trace file; give the path of a ShareGPT JSON, Azure CSV or Mooncake "
            "JSONL file, or leave --trace out for the lengths that come with the project"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as a text file ({error})") from None
    first = text.lstrip()[:1]
    if not first:
        raise ValueError(f"{path}: the trace is empty")
    trace = _read_json(path, text, count) if first in "[{" else _read_csv(path, text)
    if len(trace) == 0:
        left = f" ({trace.dropped} without prompt or output)" if trace.dropped else ""
        raise ValueError(f"{path}: the trace has no usable request{left}")
    return trace


def head(trace: Trace, requests: int) -> Trace:
    """The first `requests` requests (all, if there are fewer)."""
    return take(trace, np.arange(min(requests, len(trace))))


def sample(trace: Trace, requests: int, seed: int) -> Trace:
    """`requests` requests drawn without replacement, kept in order of arrival.

    Raises:
      ValueError: the trace has fewer.
    """
    if requests > len(trace):
        raise ValueError(f"{trace.source} has {len(trace)} requests, {requests} were asked for")
    chosen = np.random.default_rng(seed).choice(len(trace), requests, replace=False)
    return take(trace, np.sort(chosen))


def fitting(trace: Trace, max_tokens: int) -> Trace:
    """The requests of at most `max_tokens` tokens, prompt and output together."""
    total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    return take(trace, np.flatnonzero(total <= max_tokens))


def take(trace: Trace, rows: np.ndarray) -> Trace:
    """The requests at positions `rows`."""
    hashes = trace.hash_ids
    return replace(
        trace,
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        arrival_s=None if trace.arrival_s is None else trace.arrival_s[rows],
        hash_ids=None if hashes is None else tuple(hashes[row] for row in rows),
    )


# --- distributions ----------------------------------------------------------------------------

# Standard deviation of the logarithm of (prompt, output) lengths. ShareGPT: measured on
# data/sharegpt_lengths.csv. Alpaca: chosen to look like Figure 11b of the paper.
_LOG_SIGMA = {"sharegpt": (1.4, 1.0), "alpaca": (0.4, 0.9)}


def drawn(like: str, requests: int, seed: int, max_tokens: int = 2048) -> Trace:
    """Requests with log-normal lengths whose means are those of the paper's data sets.

    Prompt and output are independent, each at least 1 and the two together at most `max_tokens`
    (the output is cut). Sources: PagedAttention paper, Section 6.1 and Figure 11.

    Args:
      like: "sharegpt" or "alpaca".
      requests: how many.
      seed: of the draw.
      max_tokens: the model's context, in tokens.
    """
    if like not in PAPER_MEANS:
        raise ValueError(f"like must be one of {', '.join(PAPER_MEANS)}, got {like!r}")
    rng = np.random.default_rng(seed)
    (prompt_mean, output_mean), (prompt_sigma, output_sigma) = PAPER_MEANS[like], _LOG_SIGMA[like]
    prompts = lognormal(requests, prompt_mean, prompt_sigma, rng, max_tokens // 2)
    outputs = lognormal(requests, output_mean, output_sigma, rng, max_tokens)
    outputs = np.minimum(outputs, max_tokens - prompts)
    return Trace(prompts, outputs, source=f"log-normal, means of {like} (seed {seed})")


def lognormal(
    requests: int, mean: float, sigma: float, rng: np.random.Generator, longest: int
) -> np.ndarray:
    """Log-normal lengths, clipped to 1..longest, whose mean after clipping is `mean`.

    Args:
      requests: how many.
      mean: in tokens, between 1 and `longest`.
      sigma: standard deviation of the logarithm.
      rng: the source of randomness.
      longest: the greatest length.

    Returns:
      `[requests]` int32.
    """
    if not 1 < mean < longest:
        raise ValueError(f"the mean must lie between 1 and longest={longest}, got {mean}")
    # The mean of a clipped log-normal has no handy closed form: evaluate it on a fixed large
    # sample of normal deviates and bisect for the location.
    deviates = np.random.default_rng(0).standard_normal(100_000)

    def lengths(mu: float, normal: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(np.exp(mu + sigma * normal)), 1, longest)

    low, high = -2.0, math.log(longest) + 2.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle, deviates).mean() < mean else (low, middle)
    return lengths(low, rng.standard_normal(requests)).astype(np.int32)


def poisson_arrivals(requests: int, per_second: float, seed: int) -> np.ndarray:
    """Arrival times of a Poisson process, `[requests]` float64 seconds, the first at 0."""
    if not (math.isfinite(per_second) and per_second > 0):
        raise ValueError(f"the arrival rate must be positive, got {per_second}")
    gaps = np.random.default_rng(seed).exponential(1 / per_second, requests)
    gaps[:1] = 0.0
    return np.cumsum(gaps)


# --- JSON -------------------------------------------------------------------------------------


def _bad(path: Path, line: int, message: str) -> NoReturn:
    raise ValueError(f"{path}, line {line}: {message}")


def _read_json(path: Path, text: str, count: Count | None) -> Trace:
    """ShareGPT (array or lines) or Mooncake (lines), by the keys of the first object."""
    objects = _objects(path, text)
    try:
        line, first = next(objects)
    except StopIteration:
        raise ValueError(f"{path}: the trace is empty") from None

    def all_objects() -> Iterator[tuple[int, dict[str, Any]]]:
        yield line, first
        yield from objects

    if "conversations" in first:
        return _read_sharegpt(path, all_objects(), count)
    if "input_length" in first:
        return _read_mooncake(path, all_objects())
    _bad(
        path,
        line,
        "expected `conversations` (ShareGPT) or `input_length` and `output_length` (Mooncake), "
        f"got the keys {', '.join(list(first)[:6]) or 'of an empty object'}",
    )


def _objects(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each object in a JSON array or in JSON lines."""
    decoder = json.JSONDecoder()
    at = _skip(text, 0, " \t\r\n")
    array = text[at] == "["
    at = _skip(text, at + array, " \t\r\n")
    line, counted = 1, 0
    while at < len(text) and not (array and text[at] == "]"):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            _bad(path, error.lineno, f"not JSON ({error.msg}, column {error.colno})")
        except (ValueError, RecursionError) as error:  # a number or a nesting beyond all use
            _bad(path, line, f"not readable as JSON ({error})")
        if not isinstance(value, dict):
            _bad(path, line, f"expected a JSON object, got {type(value).__name__}")
        yield line, value
        at = _skip(text, at, " \t\r\n")
        if array:
            if text[at : at + 1] not in (",", "]"):
                _bad(path, text.count("\n", 0, at) + 1, "the JSON array ends here, expected , or ]")
            at = _skip(text, at + (text[at] == ","), " \t\r\n")
    if array and at >= len(text):
        _bad(path, text.count("\n") + 1, "the JSON array is not closed; was the file cut short?")


def _skip(text: str, at: int, blanks: str) -> int:
    while at < len(text) and text[at] in blanks:
        at += 1
    return at


def _read_mooncake(path: Path, objects: Iterable[tuple[int, dict[str, Any]]]) -> Trace:
    rows, hashes = [], []
    for line, item in objects:
        prompt = _tokens(path, line, "input_length", item.get("input_length"))
        output = _tokens(path, line, "output_length", item.get("output_length"))
        stamp = _number(path, line, "timestamp", item.get("timestamp"))
        blocks = item.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(isinstance(b, int) for b in blocks):
            _bad(path, line, f"hash_ids must be a list of integers, got {str(blocks)[:60]!r}")
        rows.append((prompt, output, stamp / 1000))
        hashes.append(tuple(blocks))
    return _trace(rows, f"Mooncake trace {path.name}", hashes)


def _read_sharegpt(
    path: Path, objects: Iterable[tuple[int, dict[str, Any]]], count: Count | None
) -> Trace:
    pairs = [pair for line, item in objects if (pair := first_turns(path, line, item))]
    if not pairs:
        raise ValueError(f"{path}: no conversation begins with a human and a gpt turn")
    count = count or default_count()
    prompts = count([prompt for prompt, _ in pairs])
    outputs = count([output for _, output in pairs])
    rows = [(p, o, None) for p, o in zip(prompts, outputs, strict=True)]
    return _trace(rows, f"ShareGPT {path.name}")


def first_turns(path: Path, line: int, item: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first human and gpt turns of a conversation; None where it does not begin with them.

    Raises:
      ValueError: the object is not a ShareGPT conversation; names file and line.
    """
    turns = item.get("conversations")
    if not isinstance(turns, list):
        _bad(path, line, f"expected `conversations` as a list of turns, got {str(turns)[:60]!r}")
    for turn in turns[:2]:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            _bad(path, line, f'expected a turn {{"from": .., "value": text}}, got {turn!s:.60}')
        try:
            turn["value"].encode()
        except UnicodeEncodeError as error:
            _bad(path, line, f"a turn is no valid Unicode ({error.reason})")
    if len(turns) < 2 or turns[0].get("from") not in ("human", "user"):
        return None
    if turns[1].get("from") not in ("gpt", "assistant", "chatgpt", "bing", "bard"):
        return None
    return turns[0]["value"], turns[1]["value"]


def default_count() -> Count:
    """Counts tokens as the default model's tokenizer does, special tokens aside.

    Raises:
      ValueError: the tokenizer cannot be had.
    """
    import convert

    tokenizer = convert.load_tokenizer()
    inner = tokenizer.backend_tokenizer

    def count(texts: list[str]) -> list[int]:
        lengths = []
        for start in range(0, len(texts), 1000):  # bounds the memory of the encodings
            batch = inner.encode_batch(texts[start : start + 1000], add_special_tokens=False)
            lengths += [len(encoding) for encoding in batch]
        return lengths

    return count


# --- CSV --------------------------------------------------------------------------------------

# Kind -> (columns of prompt, output, arrival; whether the arrival must be there).
_TABLES = {
    "Azure": ("ContextTokens", "GeneratedTokens", "TIMESTAMP"),
    "BurstGPT": ("Request tokens", "Response tokens", "Timestamp"),
    "table": ("prompt_tokens", "output_tokens", "arrival_s"),
}


def _read_csv(path: Path, text: str) -> Trace:
    lines = text.splitlines()
    start = next((i for i, s in enumerate(lines) if s.strip() and not s.startswith("#")), None)
    if start is None:
        raise ValueError(f"{path}: the trace is empty")
    header = [name.strip() for name in _cells(path, start + 1, lines[start])]
    kind = next((k for k, (p, o, _) in _TABLES.items() if p in header and o in header), None)
    if kind is None:
        wanted = "; ".join(f"{p},{o} ({k})" for k, (p, o, _) in _TABLES.items())
        _bad(path, start + 1, f"expected a header with the columns {wanted}; got {header!s:.80}")
    prompt_name, output_name, time_name = _TABLES[kind]
    for name in _TABLES[kind]:
        if header.count(name) > 1:
            _bad(path, start + 1, f"the column {name} is there {header.count(name)} times")
    prompt_at, output_at = header.index(prompt_name), header.index(output_name)
    time_at = header.index(time_name) if time_name in header else None
    if time_at is None and kind != "table":
        _bad(path, start + 1, f"expected the column {time_name}; got {header!s:.80}")
    stamp = _datetime if kind == "Azure" else _number
    rows = []
    for line, raw in enumerate(lines[start + 1 :], start + 2):
        if not raw.strip() or raw.startswith("#"):
            continue
        cells = _cells(path, line, raw) if '"' in raw else raw.split(",")
        if len(cells) != len(header):
            _bad(path, line, f"expected {len(header)} columns, got {len(cells)}: {raw[:60]!r}")
        prompt = _tokens(path, line, prompt_name, cells[prompt_at])
        output = _tokens(path, line, output_name, cells[output_at])
        when = None if time_at is None else stamp(path, line, time_name, cells[time_at])
        rows.append((prompt, output, when))
    label = {"Azure": "Azure trace", "BurstGPT": "BurstGPT trace", "table": "table"}[kind]
    return _trace(rows, f"{label} {path.name}")


def _cells(path: Path, line: int, raw: str) -> list[str]:
    try:
        return next(csv.reader([raw]))
    except csv.Error as error:
        _bad(path, line, f"not readable as CSV ({error})")


def _tokens(path: Path, line: int, name: str, value: Any) -> int:
    """A number of tokens: a whole number from 0 that int32 holds."""
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str):
        try:
            number = int(value)
        except ValueError:  # some tables write 12.0; and no number has 4,300 digits
            number = int(float(value)) if _whole(value) else None
    if number is None or not 0 <= number <= _MAX_TOKENS:
        _bad(path, line, f"{name} must be a whole number of tokens from 0, got {value!r:.60}")
    return number


def _whole(text: str) -> bool:
    try:
        return float(text).is_integer()
    except ValueError:
        return False


def _number(path: Path, line: int, name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= _LATEST:
        _bad(path, line, f"{name} must be a number up to {_LATEST:g}, got {value!r:.60}")
    return number


def _datetime(path: Path, line: int, name: str, value: str) -> float:
    try:
        found = datetime.fromisoformat(value.strip())
    except ValueError:
        _bad(
            path,
            line,
            f"{name} must be a date and time such as 2023-11-16 18:15:46.6, got {value!r}",
        )
    # Without a zone: as UTC, so that no local change of clocks bends the gaps.
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _trace(
    rows: list[tuple[int, int, float | None]],
    source: str,
    hashes: list[tuple[int, ...]] | None = None,
) -> Trace:
    """Requests in order of arrival, those without prompt or output left out."""
    prompts = np.array([row[0] for row in rows], np.int32)
    outputs = np.array([row[1] for row in rows], np.int32)
    timed = bool(rows) and rows[0][2] is not None
    times = np.array([row[2] for row in rows], np.float64) if timed else None
    keep = np.flatnonzero((prompts > 0) & (outputs > 0))
    whole = Trace(prompts, outputs, times, tuple(hashes) if hashes else None, source)
    kept = take(whole, keep)
    if kept.arrival_s is not None and len(kept):
        kept = take(kept, np.argsort(kept.arrival_s, kind="stable"))
        assert kept.arrival_s is not None
        kept = replace(kept, arrival_s=kept.arrival_s - kept.arrival_s[0])
    return replace(kept, dropped=len(rows) - len(keep))
