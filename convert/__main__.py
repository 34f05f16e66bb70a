"""`python -m convert MODEL OUT_DIR`: write a model as an Orbax checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax

from convert import checkpoint
from convert.assemble import DTYPES
from convert.load import load


def main(argv: list[str] | None = None) -> int:
    """Convert as the words of the command line say; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m convert",
        description="Convert a LLaMA-family model to an Orbax checkpoint for paxattn.",
        epilog="example:\n  python -m convert ./Llama-3.2-1B ./llama-3.2-1b --dtype bfloat16\n"
        "  python -m convert model.Q8_0.gguf ./model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="Hugging Face folder, .gguf file or hub id")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="new folder to write")
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of the parameters (default: auto, the checkpoint's own)",
    )
    args = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        checkpoint.check_free(args.out)
        loaded = load(args.model, args.dtype, progress=True)
        leaves = jax.tree.leaves(loaded.params)
        size = sum(leaf.nbytes for leaf in leaves)
        print(f"read {loaded.source}: {len(leaves)} arrays, {size / 1e6:,.0f} MB", flush=True)
        checkpoint.save(args.out, loaded.config, loaded.params, loaded.tokenizer, loaded.source)
    except (ValueError, OSError) as error:
        print(f"convert: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("convert: interrupted; nothing was written", file=sys.stderr)
        return 130
    if loaded.tokenizer_note:
        print(f"note: {loaded.tokenizer_note}", file=sys.stderr)
    print(f"wrote {args.out} in {time.perf_counter() - started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
