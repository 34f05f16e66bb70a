"""experiments/memory_movie.py: frames against hand-worked memory, and the page against its text."""

import argparse
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxattn import memory, prefix_cache
from paxattn.decode import State
from paxattn.device_state import Event

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

import common
import memory_movie
import movie_words
from movie_frames import Recorder

PAGE = 4
EVIL = "</script><b onmouseover=alert(1)>&'\"\u2028<!--"


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def mask(*values):
    return jnp.asarray(values, bool)


def at(frame, *names):
    return [frame[name] for name in names]


# --- frames, by hand --------------------------------------------------------------------------


def test_a_forked_prompt_frame_by_frame():
    recorder = Recorder(PAGE, samples={0: 2})
    rows = {0: (0, 0), 1: (0, 1)}
    state = memory.init(num_pages=8, max_seqs=2, pages_per_seq=4, page_size=PAGE)

    def tell(kind, waiting=()):
        recorder(Event(kind, rows, list(waiting)), State(None, state))
        return recorder.frames[-1]

    state, _ = memory.reserve(state, ints(6, 0))
    frame = tell("admit", waiting=[1, 2])
    assert frame["caption"] == (
        "Request 0 was admitted: pages 1 and 2 taken from the free list. "
        "In the queue: requests 1 and 2."
    )
    assert at(frame, "taken", "fill", "effects") == [
        [[0, 0, 1], [0, 0, 2]],
        [[1, 0], [2, 0]],  # reserved, not yet computed
        ["take"],
    ]
    assert frame["counters"] == {
        **{"free": 5, "used": 2, "cached": 0, "shared": 0, "utilisation": 0.0, "saved": 0.0}
    }

    frame = tell("prefill", waiting=[1, 2])
    assert (
        frame["caption"] == "The prompt of request 0 is computed: keys and values fill its pages."
    )
    assert at(frame, "fill", "effects", "taken") == [[[1, 4], [2, 2]], [], []]
    assert frame["counters"]["utilisation"] == 6 / 8

    state, _, _ = jax.jit(memory.fork)(state, ints(-1, 0))
    frame = tell("fork")
    assert frame["caption"] == (
        "Sequence 0.1 began as a twin: page 1 shared with its parent; the last page will be "
        "written, so it was copied (2 to 3)."
    )
    assert at(frame, "joined", "copied", "effects") == [
        [[0, 1, 1]],
        [[0, 1, 2, 3]],
        ["share", "copy"],
    ]
    assert frame["tables"] == [[0, 0, 6, 6, [1, 2]], [0, 1, 6, 6, [1, 3]]]
    assert frame["refcount"] == [0, 2, 1, 1, 0, 0, 0, 0]
    assert frame["counters"] == {
        **{"free": 4, "used": 3, "cached": 0, "shared": 1, "utilisation": 8 / 12, "saved": 1 / 4}
    }

    append = jax.jit(memory.append)
    for _ in range(3):
        state, _, _ = append(state, mask(True, True))
    frame = tell("decode")
    assert frame["caption"] == (
        "2 sequences wrote 3 tokens each: sequence 0.0 took page 4 and sequence 0.1 took page 5."
    )
    assert frame["fill"] == [[1, 4], [2, 4], [3, 4], [4, 1], [5, 1]]

    state, rows = memory.release(state, mask(True, False)), {1: (0, 1)}
    frame = tell("release")
    assert frame["caption"] == (
        "Sequence 0.0 finished: pages 2 and 4 freed, page 1 still held by others."
    )
    assert at(frame, "freed", "effects") == [[2, 4], ["finish"]]
    assert recorder.counts == {"admit": 1, "prefill": 1, "fork": 1, "decode": 1, "release": 1}
    json.dumps(recorder.frames, allow_nan=False)


def test_a_prompt_is_adopted_and_idle_pages_are_evicted():
    recorder = Recorder(PAGE)
    paged = memory.init(num_pages=6, max_seqs=2, pages_per_seq=4, page_size=PAGE)
    state = State(None, paged, prefix_cache.init(6, PAGE))

    def admit(row, first, length):
        tokens = np.zeros((4, PAGE), np.int32)
        tokens.reshape(-1)[:length] = first + np.arange(length)
        salt = prefix_cache.salt_of(None)
        found = jax.jit(prefix_cache.admit)(
            state.memory, state.prefix, np.int32(row), tokens, np.int32(length), salt
        )
        return state._replace(memory=found[0], prefix=found[1])

    def release(row):
        gone = jnp.arange(2) == row
        found = jax.jit(prefix_cache.release)(state.memory, state.prefix, gone)
        return state._replace(memory=found[0], prefix=found[1])

    def tell(kind, rows):
        recorder(Event(kind, rows, []), state)
        return recorder.frames[-1]

    state = admit(0, 10, 9)
    assert tell("admit", {0: (0, 0)})["cached"] == [1, 2]
    tell("prefill", {0: (0, 0)})
    state = release(0)
    frame = tell("release", {})
    assert frame["caption"] == (
        "Request 0 finished: page 3 freed, pages 1 and 2 kept by the prefix cache."
    )
    assert frame["idle"] == [[1, 0, 0], [2, 0, 1]]  # page, request and logical page of its tokens
    assert frame["counters"]["cached"] == 2

    state = admit(1, 10, 10)
    frame = tell("admit", {1: (1, 0)})
    assert frame["joined"] == [[1, 0, 1], [1, 0, 2]]
    assert len(frame["taken"]) == 1
    assert "pages 1 and 2 adopted from the prefix cache" in frame["caption"]
    assert sorted(n for _, n in frame["fill"]) == [0, 4, 4]  # what is adopted is full already

    state = release(1)
    tell("release", {})
    state = admit(0, 50, 16)  # four new pages: three are free, the chain's tail must go
    frame = tell("admit", {0: (2, 0)})
    assert at(frame, "effects", "cached") == [["take", "evict"], sorted({1} | set(range(2, 6)))]
    assert frame["caption"].startswith("The free list ran short: the prefix cache gave up page 2,")
    assert sorted(p for _, _, p in frame["taken"]) == [2, 3, 4, 5]  # page 2 is not "adopted"


def test_pages_that_leave_the_window_are_dropped_entries():
    recorder = Recorder(PAGE)
    state = memory.init(num_pages=8, max_seqs=1, pages_per_seq=4, page_size=PAGE)
    state, _ = memory.reserve(state, ints(10))
    recorder(Event("admit", {0: (0, 0)}, []), State(None, state))
    state = memory.release_before(state, ints(8))
    recorder(Event("window", {0: (0, 0)}, []), State(None, state))
    frame = recorder.frames[-1]
    assert at(frame, "tables", "freed", "effects") == [
        [[0, 0, 10, 0, [0, 0, 3]]],
        [1, 2],
        ["window"],
    ]
    assert frame["caption"] == "Pages 1 and 2 left the sliding window and went back."


def test_preempted_and_swapped_requests_say_why_they_wait():
    for kind, back, words in (
        ("preempt", "admit", "Request 0 was admitted again: page 1 taken from the free list."),
        ("swap_out", "swap_in", "Request 0 came back from host memory: page 1 taken from the free"),
    ):
        recorder = Recorder(PAGE)
        empty = memory.init(num_pages=4, max_seqs=1, pages_per_seq=2, page_size=PAGE)
        full, _ = memory.reserve(empty, ints(3))
        recorder(Event("admit", {0: (0, 0)}, []), State(None, full))
        recorder(Event(kind, {}, [0]), State(None, empty))
        assert recorder.frames[-1]["waiting"] == [[0, {"why": kind, "pages": 1}]]
        assert recorder.frames[-1]["caption"].startswith("Pages ran out: request 0 ")
        recorder(Event(back, {0: (0, 0)}, []), State(None, full))
        assert recorder.frames[-1]["caption"].startswith(words)
        # what was swapped comes back with its tokens, what was preempted is computed again
        assert recorder.frames[-1]["fill"] == [[1, 3 if kind == "swap_out" else 0]]


def test_a_long_prompt_fills_its_pages_prefill_by_prefill():
    recorder = Recorder(PAGE, prefill_tokens=5)
    state = memory.init(num_pages=8, max_seqs=2, pages_per_seq=4, page_size=PAGE)
    state, _ = memory.reserve(state, ints(8, 3))
    rows = {0: (0, 0), 1: (1, 0)}
    recorder(Event("admit", rows, []), State(None, state))
    fills = []
    for _ in range(3):
        recorder(Event("prefill", rows, []), State(None, state))
        fills.append([n for _, n in recorder.frames[-1]["fill"]])
    assert fills == [[4, 1, 0], [4, 4, 2], [4, 4, 3]]
    before = len(recorder.frames)
    recorder(Event("evict", rows, []), State(None, state))
    assert len(recorder.frames) == before  # nothing changed: no frame


def test_words():
    assert [movie_words.listed(list(w)) for w in ("", "a", "ab", "abc")] == [
        *("", "a", "a and b", "a, b and c")
    ]
    assert movie_words._requests([4, 3, 5, 6]) == "requests 3 to 6"
    assert movie_words._pages(range(7)) == "7 pages"


# --- a real run -------------------------------------------------------------------------------


def arguments(tmp_path, *words):
    parser = common.parser(memory_movie.__doc__, "memory_movie")
    memory_movie.options(parser)
    return parser.parse_args(["--quick", "--out", str(tmp_path), *words])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("movie")
    file = out / "mine.txt"
    texts = (*memory_movie.QUESTIONS[:4], EVIL + " 1234567", *memory_movie.QUESTIONS[:4])
    file.write_text("\n".join(t.replace("\u2028", " ")[:44] for t in texts), "utf-8")
    memory_movie.run(arguments(out, "--prompts", str(file), "--max-tokens", "20"))
    return (out / "memory_movie.html").read_text("utf-8"), json.loads(
        (out / "memory_movie.json").read_text("utf-8")
    )


def embedded(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_everything_happens_and_is_counted(made):
    page, result = made
    assert result["html"]["bytes"] == len(page.encode()) < 2_000_000
    assert [r["not_seen"] for r in result["runs"]] == [[], []]
    for run, movie in zip(result["runs"], embedded(page)["runs"], strict=True):
        frames, stats = movie["frames"], run["stats"]
        assert run["frames"] == len(frames)
        assert sum(len(f["evicted"]) for f in frames) == stats["prefix_evictions"] > 0
        adopted = sum(len(f["joined"]) for f in frames if f["kind"] == "admit")
        assert adopted >= stats["prefix_hits"] > 0
        if run["name"] == "by swapping":
            back = [f["taken"] + f["joined"] for f in frames if f["kind"] == "swap_in"]
            assert (
                len({(i, p) for i, f in enumerate(back) for _, _, p in f})
                == (stats["pages_swapped_in"])
            )
        assert stats["preemptions"] >= run["effects"]["preempt"] + run["effects"]["swap_out"] > 0
        assert frames[-1]["counters"]["used"] == stats["pages_used"] == 0
        assert frames[-1]["counters"]["cached"] == stats["pages_cached"]


def test_every_frame_agrees_with_its_reference_counts(made):
    for movie in embedded(made[0])["runs"]:
        for frame in movie["frames"]:
            count = [0] * movie["num_pages"]
            for *_, table in frame["tables"]:
                for page in filter(None, table):
                    count[page] += 1
            for page in frame["cached"]:
                count[page] += 1
            assert count == frame["refcount"]
            counters = frame["counters"]
            assert counters["free"] == count[1:].count(0)
            assert counters["free"] + counters["used"] + counters["cached"] == len(count) - 1
            assert all(0 <= n <= movie["page_size"] for _, n in frame["fill"])
            assert frame["caption"] != "Nothing changed."


def test_a_frame_shows_the_tokens_that_the_engine_gave(made):
    """The last frame in which a sequence runs holds its prompt and all but the last token."""
    for movie in embedded(made[0])["runs"]:
        longest = {}
        for frame in movie["frames"]:
            for request, sample, length, *_ in frame["tables"]:
                longest[request, sample] = length
        for (request, sample), length in longest.items():
            known = movie["requests"][request]
            assert length == len(known["prompt"]) + len(known["samples"][sample]) - 1


# --- the page ---------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.attributes += attrs


def test_text_from_prompts_stays_text():
    movies = [{"requests": [{"prompt": [EVIL, "{{script}}"], "samples": [[EVIL]]}], "frames": []}]
    page = memory_movie.page(movies, f"{EVIL}, a model", f"python x.py {EVIL}")
    plain = memory_movie.page([], "a model", "python x.py")
    tags, expected = Tags(), Tags()
    tags.feed(page)
    expected.feed(plain)
    assert tags.found == expected.found
    assert not any(name.startswith("on") for name, _ in tags.attributes)
    assert embedded(page)["runs"] == movies
    assert "\u2028" not in page.split('id="data">')[1].split("</script>")[0]


def test_the_page_loads_nothing(made):
    tags = Tags()
    tags.feed(made[0])
    loads = [(k, v) for k, v in tags.attributes if k in ("src", "href", "data", "action", "srcset")]
    assert loads == []
    assert "link" not in tags.found
    style = memory_movie.FOLDER.joinpath("page.css").read_text("utf-8")
    assert "@import" not in style
    assert "url(" not in style
    script = memory_movie.FOLDER.joinpath("page.js").read_text("utf-8")
    assert not re.search(r"fetch\(|XMLHttp|import\(|innerHTML|insertAdjacent|eval\(", script)
    assert "default-src 'none'" in made[0]


# --- the command line -------------------------------------------------------------------------


def test_what_cannot_be_filmed_is_refused(tmp_path):
    for words, message in (
        (["--num-pages", "0"], "--num-pages must be at least 1"),
        (["--n", "-1"], "--n must be at least 1"),
        (["--prompts", str(tmp_path / "no.txt")], "cannot read"),
        (["--prompts", str(tmp_path / "empty.txt")], "holds no prompt"),
    ):
        (tmp_path / "empty.txt").write_text("\n \n")
        with pytest.raises(common.Failure, match=message):
            memory_movie.run(arguments(tmp_path, *words))
    recorder = Recorder(PAGE)
    with pytest.raises(ValueError, match="cache='paged'"):
        recorder(Event("admit", {}, []), State(None, argparse.Namespace()))
