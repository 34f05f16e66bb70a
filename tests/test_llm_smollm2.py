"""`LLM` in float32 on a real model, token for token against transformers.

Greedy decoding is checked by one forward pass of transformers over prompt and output: at every
output position its likeliest token must be ours. That is what its own greedy loop would choose,
token by token, at a fraction of the time.
"""

import numpy as np
import pytest
from test_llama import plain_transformers_model

from paxattn import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.optimized]

PROMPTS = [
    "The capital of France is",
    "Q: What is 17 + 25?\nA:",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM users WHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    "<html>\n  <body>\n    <h1>",
    "你好，今天的天气",
    "请用中文解释什么是机器学习：",
    "日本の首都は",
    "Привет! Меня зовут",
    "I love pizza 🍕🍕 and",
    "😀",
    "a",
    "1, 1, 2, 3, 5, 8, 13,",
    "   \n\n\t  indented",
    "WHY ARE YOU SHOUTING? BECAUSE",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondria is the powerhouse of the cell. " * 6,
    "In the beginning there was a long sentence about nothing in particular. " * 116,
]
TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=20)


@pytest.fixture(scope="module")
def loaded():
    import convert

    try:
        return convert.load(dtype="float32")
    except convert.ModelNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reference(loaded):
    """transformers' log-probabilities after prompt + tokens, at the tokens' positions.

    In float64, so that the tolerance is spent on our rounding alone.
    """
    torch = pytest.importorskip("torch")
    model = plain_transformers_model(loaded).double()
    known = {}

    def log_probabilities(prompt_ids, output_ids):
        key = (tuple(prompt_ids), tuple(output_ids))
        if key not in known:
            with torch.no_grad():
                ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
                logits = model(ids, logits_to_keep=len(output_ids)).logits[0]
                known[key] = torch.log_softmax(logits, -1).numpy()
        return known[key]

    return log_probabilities


def check(outputs, reference):
    """Greedy choices and log-probabilities are transformers'."""
    for output in outputs:
        ids = output.outputs[0].token_ids
        assert len(ids) == TOKENS
        want = reference(output.prompt_token_ids, ids)
        np.testing.assert_array_equal(ids, want.argmax(1), err_msg=repr(output.prompt)[:80])
        for row, entry in zip(want, output.outputs[0].logprobs, strict=True):
            for token, got in entry.items():
                assert abs(row[token] - got.logprob) < 2e-4


@pytest.fixture(scope="module")
def first(loaded):
    """All prompts at page size 16, and the engine that ran them."""
    llm = LLM(loaded, page_size=16, max_model_len=2048, max_num_seqs=20)
    return llm, llm.generate(PROMPTS, GREEDY)


def test_prompts_are_as_varied_as_they_should_be(first):
    lengths = [len(o.prompt_token_ids) for o in first[1]]
    assert len(PROMPTS) == 20
    assert min(lengths) == 1
    assert max(lengths) >= 1500


def test_tokens_and_logprobs_are_those_of_transformers(first, reference):
    check(first[1], reference)


@pytest.mark.parametrize("page_size", [8, 32, 128])
def test_page_size_does_not_matter(loaded, first, reference, page_size):
    llm = LLM(loaded, page_size=page_size, max_model_len=2048, max_num_seqs=20)
    outputs = llm.generate(PROMPTS, GREEDY)
    check(outputs, reference)


def test_preemption_does_not_matter(loaded, first):
    page = first[0].capacity.bytes_per_page
    # The long prompt comes first and leaves a few pages, which the others soon outgrow.
    llm = LLM(loaded, page_size=16, max_model_len=2048, max_num_seqs=20, kv_cache_bytes=page * 120)
    outputs = llm.generate(PROMPTS[::-1], GREEDY)[::-1]
    assert llm.stats()["preemptions"] > 0
    assert llm.stats()["pages_free"] == llm.stats()["pages_total"]
    for got, want in zip(outputs, first[1], strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert got.outputs[0].logprobs == want.outputs[0].logprobs  # to the last bit


def test_alone_or_in_a_batch_to_the_last_bit(first):
    llm, outputs = first
    for i in (0, 7, 12):
        alone = llm.generate(PROMPTS[i], GREEDY)[0].outputs[0]
        assert alone.logprobs == outputs[i].outputs[0].logprobs


def test_text_is_what_the_tokenizer_says(loaded, first):
    for output in first[1]:
        ids = output.outputs[0].token_ids
        assert output.outputs[0].text == loaded.tokenizer.decode(ids, skip_special_tokens=True)


def test_a_chat_is_answered(first):
    llm, _ = first
    chat = [{"role": "user", "content": "What is the capital of Italy? Answer in one word."}]
    output = llm.generate(chat, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    assert "Rome" in output.text
    assert output.finish_reason == "stop"


def test_bfloat16_logits_are_close_to_float32(loaded):
    """All logits of a text, relative; weights, cache and products in bfloat16.

    A single position may be further off, where its logits are small: 5.6% is the worst seen.
    """
    import jax
    import jax.numpy as jnp

    from paxattn.llama import Llama, ProductForm, split

    c = loaded.config
    ids = loaded.tokenizer(PROMPTS[2] + PROMPTS[18])["input_ids"][:64]
    at = jnp.arange(len(ids), dtype=jnp.int32)
    seen = jnp.tril(jnp.ones((len(ids), len(ids)), bool))

    def attend(layer, q, k, v, cache):
        group = c.num_heads // c.num_kv_heads
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) * c.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, v), cache

    def logits(dtype, form=ProductForm()):  # noqa: B008
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), split(loaded.params, form.parts))
        net = Llama(c, dtype, form)
        tokens = jnp.asarray(ids, jnp.int32)
        hidden, _ = net.apply({"params": params}, tokens, at, at + 1, None, attend)
        return np.asarray(net.apply({"params": params}, hidden, method="unembed"), np.float64)

    exact = logits(jnp.float32)
    for form in (ProductForm(), ProductForm(columns=True, parts=2)):
        error = np.linalg.norm(logits(jnp.bfloat16, form) - exact) / np.linalg.norm(exact)
        assert 1e-4 < error < 2e-2, (form, error)
