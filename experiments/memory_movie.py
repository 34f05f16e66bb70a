"""A movie of the memory: one page that plays allocation, sharing, eviction and preemption.

The engine serves a few requests from a pool that is too small for them, and each program that
changes the memory leaves a frame: the pool page by page, the block tables beside it, who waits, and
in words what has just happened. The movie is one HTML file that needs no network: space plays,
the arrows step, a button for each kind of event goes to the next one.

By default the prompts share a system prompt (prefix caching), one request has three samples (fork,
copy-on-write), and the requests want more pages than there are (waiting, eviction, preemption),
once with preemption by recomputation and once by swapping to host memory. `--prompts` takes your
own, one a line. `--quick` runs a small random model that reads and writes bytes.

JSON keys:
  runs     list of {name, frames, events (by the engine's kind of program), effects (frames that
           show each thing), not_seen (what this run does not show), refused (prompts that can
           never fit, and why), stats (of the engine)}
  html     {file, bytes}
  environment, config
"""

import argparse
import functools
import html
import json
import re
from pathlib import Path

import common
import models
import movie_frames

from paxattn import LLM, SamplingParams
from paxattn.batch import PREFILL_BUCKETS
from paxattn.geometry import PageGeometry

FOLDER = Path(__file__).resolve().parent / "movie"
SYSTEM = "You are a careful teacher of computer science. Answer in one short sentence."
QUESTIONS = (
    "What is a page table?",
    "Name something that two processes may share.",
    "What does copy-on-write mean, and why is it useful to a system that forks often?",
    "What is fragmentation?",
    "Why is a cache smaller than memory?",
    "Which page should be evicted first when memory is full and everybody wants more of it?",
    "What is a page table?",
    "What is swapping?",
    "Name something that two processes may share.",
    "What is a translation lookaside buffer, and what happens when it misses?",
    "What is fragmentation?",
    "Why are pages of equal size?",
)
BRANCHING = 1  # the request with several samples
WAYS = {"recompute": "by recomputation", "swap": "by swapping"}


def options(parser):
    models.option(parser)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="your prompts, one a line")
    parser.add_argument("--page-size", type=int, default=8, help="tokens in a page (default: 8)")
    parser.add_argument(
        "--num-pages",
        type=int,
        help="pages of the pool (default: a third of what "
        "the requests would take at once without sharing)",
    )
    parser.add_argument(
        "--n", type=int, default=3, help="samples of the second request (default: 3)"
    )
    parser.add_argument("--max-tokens", type=common.positive, help="longest answer (default: 40)")
    parser.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the pages of prompts for later prompts (default: yes)",
    )
    parser.add_argument(
        "--preemption", choices=(*WAYS, "both"), default="both", help="default: a run of each"
    )


# --- what is served ---------------------------------------------------------------------------


def texts(args):
    """The questions."""
    if args.prompts is None:
        return list(QUESTIONS)
    try:
        lines = args.prompts.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        common.fail(f"cannot read {args.prompts}: {error}")
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        common.fail(f"{args.prompts} holds no prompt: write one a line")
    return found


def prompts_of(args, model):
    """Token ids of each prompt; the model's own questions share a system prompt."""
    found = texts(args)
    tokenizer = model.tokenizer
    if tokenizer is None:  # the random model reads bytes
        head = "" if args.prompts else "You are terse. Answer now.\n"
        return [list((head + t).encode()[:200]) for t in found]
    if args.prompts or not getattr(tokenizer, "chat_template", None):
        return [tokenizer.encode(t) for t in found]
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": t}] for t in found]
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        )
        for c in chats
    ]


def sampling(args, count):
    """Longest answers of different lengths, so that requests end one after the other."""
    most = args.max_tokens or (24 if args.quick else 40)
    share = (0.6, 0.8, 1.0, 0.5, 0.9, 0.7, 1.0)
    return [
        SamplingParams(
            n=args.n if i == min(BRANCHING, count - 1) else 1,
            temperature=0.8,
            seed=args.seed * 1000 + i,
            max_tokens=max(1, round(most * share[i % len(share)])),
            ignore_eos=args.quick,
        )
        for i in range(count)
    ]


def pool_pages(args, prompts, params):
    """Pages of the pool: what was asked for, or a third of what all would take at once."""
    pages = lambda tokens: -(-tokens // args.page_size)  # noqa: E731
    each = [p.n * pages(len(t) + p.max_tokens) for t, p in zip(prompts, params, strict=True)]
    return args.num_pages or max(max(each), sum(each) // 3)


def engine(args, model, prompts, params, way):
    """An engine whose pool has that many pages beside the null page."""
    import jax

    c, dtype = model.config, jax.tree.leaves(model.params)[0].dtype
    page = PageGeometry(c.num_layers, c.num_kv_heads, c.head_dim, args.page_size, dtype)
    longest = max(len(t) + p.max_tokens for t, p in zip(prompts, params, strict=True))
    return LLM(
        model,
        page_size=args.page_size,
        kv_cache_bytes=(pool_pages(args, prompts, params) + 1) * page.page_bytes,
        max_model_len=min(longest + 1, c.max_position_embeddings),
        max_num_seqs=max(16, args.n),
        enable_prefix_caching=args.prefix_caching,
        preemption=way,
        seed=args.seed,
    )


def record(args, model, prompts, params, way):
    """Serves the prompts; returns the run as the page wants it, and what the JSON says of it."""
    llm = engine(args, model, prompts, params, way)
    recorder = movie_frames.Recorder(
        args.page_size, {i: p.n for i, p in enumerate(params)}, PREFILL_BUCKETS[-1][0]
    )
    llm.observer = recorder
    said, refused = [[[] for _ in range(p.n)] for p in params], []
    with common.bar(sum(p.n for p in params), f"preemption {WAYS[way]}", "answer") as bar:
        for output in llm.stream(prompts, params):
            if output.error:
                refused.append(output.error)
                common.report(f"refused: {output.error}")
            said[int(output.request_id)] = [c.token_ids for c in output.outputs]
            bar.update(0 if not output.finished else len(output.outputs))
    if not recorder.frames:
        common.fail("no prompt could be served: raise --num-pages or shorten the prompts")
    words = spelling(model)
    movie = {
        "name": WAYS[way],
        "page_size": args.page_size,
        "num_pages": llm.capacity.num_pages,
        "requests": [
            {"prompt": [words(t) for t in ids], "samples": [[words(t) for t in s] for s in answers]}
            for ids, answers in zip(prompts, said, strict=True)
        ],
        "frames": recorder.frames,
    }
    effects = movie_frames.seen(recorder.frames)
    facts = {
        "name": WAYS[way],
        "frames": len(recorder.frames),
        "events": dict(recorder.counts),
        "effects": effects,
        "refused": refused,
        "not_seen": [e for e in expected(args, model, way) if not effects[e]],
        "stats": llm.stats(),
    }
    return movie, facts


def expected(args, model, way):
    """What the movie is there to show."""
    other = ("swap_out", "swap_in") if way == "recompute" else ("preempt",)
    windows = [model.config.layer_window(i) for i in range(model.config.num_layers)]
    none = {*other, *(("window",) if None in windows or args.prefix_caching else ())}
    return [e for e in movie_frames.EFFECTS if e not in none]


def spelling(model):
    """From a token id to the text of that token alone."""
    if model.tokenizer is None:
        return lambda t: chr(t) if 31 < t < 127 or t == 10 else f"⟨{t}⟩"
    return functools.cache(lambda t: model.tokenizer.decode([t]))


# --- the page ---------------------------------------------------------------------------------


def page(movies, about, command):
    """The HTML file: template, style and script of the folder `movie` with the frames in it.

    What comes from prompts is JSON without <, > and &, and the script shows it as text only.
    """
    data = json.dumps({"runs": movies}, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    parts = {
        "title": html.escape(about.partition(",")[0]),
        "about": html.escape(about),
        "command": html.escape(command),
        "style": (FOLDER / "page.css").read_text("utf-8"),
        "script": (FOLDER / "page.js").read_text("utf-8"),
        "data": data,
    }
    template = (FOLDER / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def run(args):
    for name in ("page_size", "n", "max_tokens", "num_pages"):
        value = getattr(args, name)
        if value is not None and value < 1:
            common.fail(f"--{name.replace('_', '-')} must be at least 1; got {value}")
    texts(args)  # before the model is read
    model = models.choose(args, **models.TINY)
    prompts = prompts_of(args, model)
    params = sampling(args, len(prompts))
    ways = list(WAYS) if args.preemption == "both" else [args.preemption]
    made = [record(args, model, prompts, params, way) for way in ways]
    movies, facts = [m for m, _ in made], [f for _, f in made]
    pages = movies[0]["num_pages"] - 1
    about = (
        f"{Path(str(model.source)).name}, {len(prompts)} requests, {pages} pages of "
        f"{args.page_size} tokens, prefix caching {'on' if args.prefix_caching else 'off'}"
    )
    path = common.path_of(args, ".html")
    with common.atomic(path) as temporary:
        temporary.write_text(page(movies, about, common.command()), encoding="utf-8")
    common.report(
        common.table(
            ("frames that show", *[f["name"] for f in facts]),
            [
                (words, *[f["effects"][effect] for f in facts])
                for effect, words in movie_frames.EFFECTS.items()
            ],
            about,
        ),
        "",
        *[
            f"{f['name']}: {f['frames']} frames; not seen in this run: "
            + (", ".join(f["not_seen"]) or "nothing, all that was expected happened")
            for f in facts
        ],
        f"wrote {path} ({path.stat().st_size / 1e6:.2f} MB): open it in a browser",
    )
    common.write_json(
        args,
        {
            "runs": facts,
            "html": {"file": path.name, "bytes": path.stat().st_size},
            "environment": common.environment(),
            "config": {
                "model": str(model.source),
                "pages": pages,
                "page_size": args.page_size,
                "prompt_tokens": [len(t) for t in prompts],
                "samples": [p.n for p in params],
                "max_tokens": [p.max_tokens for p in params],
                "prefix_caching": args.prefix_caching,
                "preemption": args.preemption,
                "seed": args.seed,
                "quick": args.quick,
            },
        },
    )


if __name__ == "__main__":
    common.main(__doc__, run, options)
