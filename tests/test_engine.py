"""The engine on a tiny random model: what comes out never depends on memory, batch or cache."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny

from paxattn import LLM, SamplingParams, compiler, completion
from paxattn.invariants import broken, check

PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of an 8-token page: k and v, layers, heads, dim, float32
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def want(loaded, prompts):
    return [tiny.greedy(loaded, p, 24) for p in prompts]


def engine(loaded, **options):
    options = {"page_size": 8, "max_num_seqs": 4, "compilation_cache": False, **options}
    return LLM(loaded, **options)


def tokens(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("page_size", [8, 16, 32, 128])
def test_greedy_tokens_are_those_of_dense_attention(loaded, prompts, want, page_size):
    llm = engine(loaded, page_size=page_size)
    assert tokens(llm.generate(prompts, GREEDY)) == want
    assert all(o.outputs[0].finish_reason == "length" for o in llm.generate(prompts[:1], GREEDY))
    stats = llm.stats()
    assert stats["pages_free"] == stats["pages_total"]
    assert not broken(check(llm._device.state.memory))


@pytest.mark.parametrize("pages", [14, 17, 23])
def test_preempted_requests_give_the_same_tokens(loaded, prompts, want, pages):
    llm = engine(loaded, kv_cache_bytes=PAGE * pages)
    assert tokens(llm.generate(prompts, GREEDY)) == want
    assert llm.stats()["preemptions"] > 0
    assert llm.stats()["pages_free"] == pages - 1


def test_reserved_cache_gives_the_same_tokens(loaded, prompts, want):
    llm = engine(loaded, cache="reserve-max", kv_cache_bytes=PAGE * (2 * 32 + 1))
    assert llm.capacity.max_rows == 2
    assert tokens(llm.generate(prompts, GREEDY)) == want


def test_requests_without_a_seed_differ_and_repeat_with_the_engine(loaded):
    params = SamplingParams(temperature=2.0, max_tokens=12)
    first = tokens(engine(loaded, seed=3).generate([[5, 6]] * 3, params))
    again = tokens(engine(loaded, seed=3).generate([[5, 6]] * 3, params))
    other = tokens(engine(loaded, seed=4).generate([[5, 6]] * 3, params))
    assert first == again
    assert len({tuple(t) for t in first + other}) == 6


def test_prompts_longer_than_a_chunk(want):
    config = tiny.CONFIG.__class__(**{**vars(tiny.CONFIG), "max_position_embeddings": 1300})
    loaded = tiny.model(config)
    prompt = np.random.default_rng(0).integers(1, 256, 1100).tolist()
    llm = engine(loaded, page_size=16)
    assert tokens(llm.generate([prompt], GREEDY)) == [tiny.greedy(loaded, prompt, 24)]


def test_one_bucket_compiles_once(loaded, prompts):
    llm = engine(loaded)
    llm.generate(prompts, GREEDY)
    compiled = llm.stats()["compiled_by_kind"]
    for seed in range(3):
        llm.generate(tiny.prompts(8, seed), GREEDY)
    assert llm.stats()["compiled_by_kind"] == compiled
    assert compiled["tables"] == 2  # reserve and release
    assert compiled["decode"] <= 2


def decode_memory(llm, monkeypatch):
    """What XLA says of the memory of the decode program."""
    seen = []
    original = llm._device.programs.decode

    def analyse(choice):
        def call(*args):
            seen.append(original(choice).lower(*args).compile().memory_analysis())
            return original(choice)(*args)

        return call

    monkeypatch.setattr(llm._device.programs, "decode", analyse)
    llm.generate([[1, 2, 3]], GREEDY)
    return seen[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_holds_no_second_pool(loaded, dtype, monkeypatch):
    llm = engine(loaded, dtype=dtype, max_num_seqs=128)
    memory = decode_memory(llm, monkeypatch)
    pool = llm._device.state.pool.nbytes
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool / 8


@pytest.mark.parametrize("form", sorted(compiler._FORMS))
def test_decoding_holds_no_second_weights(monkeypatch, form):
    """Narrow weights must not be converted before the loop, nor the embedding in it."""
    monkeypatch.setattr(compiler, "_fastest_form", lambda rows: form)
    monkeypatch.setattr(compiler, "_cache_folder", lambda: None)
    monkeypatch.setattr(compiler, "_answers", {})
    sizes = dict(hidden_size=256, intermediate_size=1024, vocab_size=4096)
    config = replace(tiny.CONFIG, tie_word_embeddings=True, **sizes)
    llm = engine(tiny.model(config), dtype="bfloat16")
    weights = sum(x.nbytes for x in jax.tree.leaves(llm.params))
    assert decode_memory(llm, monkeypatch).temp_size_in_bytes < weights / 4


def test_stop_tokens_and_min_tokens(loaded):
    llm = engine(loaded)
    prompt = [7, 8, 9]
    free = tokens(llm.generate([prompt], GREEDY))[0]
    stop = free[4]
    first = free.index(stop)
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop], ignore_eos=True)
    out = llm.generate([prompt], params)[0].outputs[0]
    assert out.token_ids == free[: first + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    params = SamplingParams(
        temperature=0, max_tokens=24, min_tokens=10, stop_token_ids=[stop], ignore_eos=True
    )
    out = llm.generate([prompt], params)[0].outputs[0]
    assert len(out.token_ids) >= 10
    assert stop not in out.token_ids[:9]


def test_the_models_own_end_token_ends_a_request_unless_ignored(loaded):
    llm = engine(loaded)
    free = tokens(llm.generate([[3, 1]], GREEDY))[0]
    config = tiny.CONFIG.__class__(**{**vars(tiny.CONFIG), "eos_token_ids": (free[3],)})
    ends = engine(tiny.model(config))
    out = ends.generate([[3, 1]], SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert out.token_ids == free[: free.index(free[3]) + 1]
    assert out.finish_reason == "stop"
    assert tokens(ends.generate([[3, 1]], GREEDY)) == [free]


def test_a_sequence_ends_where_the_model_or_the_pool_ends(loaded):
    long = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
    out = engine(loaded, max_model_len=40).generate([[1] * 30], long)[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (10, "length")
    out = engine(loaded, kv_cache_bytes=PAGE * 5).generate([[1] * 30], long)[0].outputs[0]
    assert len(out.token_ids) == 32 + 1 - 30  # four pages, and a last token that is not stored
    assert out.finish_reason == "length"


def test_text_stops_before_a_stop_string_and_keeps_whole_characters():
    loaded = tiny.model(tokenizer=tiny.byte_tokenizer())
    llm = engine(loaded)
    params = SamplingParams(temperature=1.5, max_tokens=60, seed=2, ignore_eos=True)
    out = llm.generate(["héllo 😀"], params)[0]
    assert len(out.prompt_token_ids) == len("héllo 😀".encode())
    text = loaded.tokenizer.decode(out.outputs[0].token_ids)
    assert out.outputs[0].text == text
    stop = next(c for c in text[8:] if c.isascii())
    params = SamplingParams(
        temperature=1.5, max_tokens=60, seed=2, ignore_eos=True, stop=["never there", stop]
    )
    cut = llm.generate(["héllo 😀"], params)[0].outputs[0]
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert len(cut.token_ids) < 60


def test_streaming_yields_growing_prefixes_of_the_same_result(loaded, prompts, want):
    llm = engine(loaded)
    seen = {i: [] for i in range(len(prompts))}
    for output in llm.stream(prompts, GREEDY):
        so_far = output.outputs[0].token_ids
        i = int(output.request_id)
        assert len(so_far) > (len(seen[i][-1]) if seen[i] else 0)
        seen[i].append(so_far)
    assert [s[-1] for s in seen.values()] == want
    assert all(len(s) > 3 for s in seen.values())


def test_a_closed_stream_gives_its_pages_back(loaded, prompts, want):
    llm = engine(loaded)
    for output in llm.stream(prompts, GREEDY):
        if len(output.outputs[0].token_ids) > 4:
            break
    stats = llm.stats()
    assert stats["pages_free"] == stats["pages_total"]
    assert tokens(llm.generate(prompts, GREEDY)) == want


def test_an_interrupted_call_leaves_an_engine_that_works(loaded, prompts, want, monkeypatch):
    llm = engine(loaded)
    original = completion.accept

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(completion, "accept", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY)
    monkeypatch.setattr(completion, "accept", original)
    assert llm.stats()["pages_free"] == llm.stats()["pages_total"]
    assert tokens(llm.generate(prompts, GREEDY)) == want


def test_logprobs_belong_to_the_tokens(loaded):
    llm = engine(loaded)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
    out = llm.generate([[4, 5]], params)[0].outputs[0]
    assert len(out.logprobs) == 5
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert entry[token].rank == 1
        values = [p.logprob for p in entry.values()]
        assert values == sorted(values, reverse=True)
        assert len(entry) == 3
    assert out.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(out.token_ids, out.logprobs, strict=True))
    )


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([[]], "prompt 0 is empty"),
        ([[1], [256]], "prompt 1 holds token id 256, outside the vocabulary of 256"),
        ([[1], [-1]], "prompt 1 holds token id -1"),
        (["text"], "no tokenizer"),
        ([[1.5]], "prompt 0 must be a string, a list of token ids"),
        ([{"role": "user", "content": "hi"}], "no tokenizer"),
        (7, "prompts must be"),
        ([b"a"], "prompt 0 must be a string, a list of token ids"),
        ({"prompt": [1], "cache_slat": "x"}, "keys .*cache_slat"),
        ({"prompt": [1], "prompt_token_ids": [2]}, "give 'prompt' or 'prompt_token_ids'"),
        ({"cache_salt": "x"}, "keys .*cache_salt"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(loaded, prompt, says):
    llm = engine(loaded)
    with pytest.raises(ValueError, match=says):
        llm.generate(prompt, GREEDY)
    assert llm.stats()["requests"] == 0


def test_a_prompt_that_can_never_fit_does_not_stop_the_others(loaded, prompts, want):
    llm = engine(loaded, max_model_len=120, kv_cache_bytes=PAGE * 14)
    outputs = llm.generate([prompts[0], [1] * 120, prompts[1], [1] * 110], GREEDY)
    assert tokens([outputs[0], outputs[2]]) == [want[0], want[1]]
    assert "max_model_len=120" in outputs[1].error
    assert "kv_cache_bytes" in outputs[3].error
    assert outputs[1].outputs[0].finish_reason == "error"
    with pytest.raises(ValueError, match="max_model_len=120"):
        llm.generate([[1] * 130], GREEDY)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"page_size": 0}, "page_size"),
        ({"page_size": -16}, "page_size"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"kv_cache_bytes": 100}, "budget"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes must be"),
        ({"max_model_len": 0}, "max_model_len must be"),
        ({"max_model_len": 100_000}, "max_position_embeddings"),
        ({"max_num_seqs": 0}, "max_num_seqs must be"),
        ({"cache": "infinite"}, "cache must be"),
        ({"cache": "reserve-max", "kv_cache_bytes": PAGE * 20}, "one sequence of max_model_len"),
        ({"seed": "x"}, "seed must be"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False"),
        ({"compilation_cache": 0}, "compilation_cache must be True or False"),
        ({"page_size": 10**9}, "would take .* bytes.*page_size=1000000000"),
        ({"kv_cache_bytes": 2**60, "max_num_seqs": 10**12}, "lower kv_cache_bytes="),
        ({"max_num_seqs": 2**40}, "max_num_seqs=1099511627776: the block tables"),
    ],
)
def test_bad_options_are_named(loaded, options, says):
    with pytest.raises(ValueError, match=says):
        engine(loaded, **options)


def test_sizes_may_be_numbers_of_numpy(loaded):
    sizes = dict(max_num_seqs=np.int32(2), max_model_len=np.int64(64), seed=np.int64(3))
    llm = engine(loaded, **sizes, swap_bytes=np.int64(0))
    assert (llm.capacity.max_rows, llm.capacity.max_model_len, llm.seed) == (2, 64, 3)


def test_text_that_is_no_unicode_is_refused():
    llm = engine(tiny.model(tokenizer=tiny.byte_tokenizer()))
    with pytest.raises(ValueError, match=r"prompt 1: .*no valid Unicode"):
        llm.generate(["a", "\ud800"], GREEDY)


def test_a_misaligned_page_is_refused_with_the_next_good_size():
    config = tiny.CONFIG.__class__(**{**vars(tiny.CONFIG), "num_kv_heads": 1, "head_dim": 2})
    with pytest.raises(ValueError, match=r"3 tokens.*next good page_size is 16"):
        engine(tiny.model(config), page_size=3)


def test_sampling_params_must_match_the_prompts(loaded):
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        engine(loaded).generate([[1], [2], [3]], [GREEDY, GREEDY])


def test_nothing_to_do(loaded):
    assert engine(loaded).generate([], GREEDY) == []
