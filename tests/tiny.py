"""A random two-layer model and the plainest possible way to run it: the tests' oracle."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from paxattn.llama import Llama, init_params
from paxattn.llama_config import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    eos_token_ids=(0,),
)


def model(config=CONFIG, seed=0, tokenizer=None):
    """What `convert.load` returns, with random weights large enough for varied output."""
    params = init_params(config, jax.random.key(seed))
    params = jax.tree.map(lambda x: x * 8 if x.ndim == 2 else x, params)
    return SimpleNamespace(config=config, params=params, tokenizer=tokenizer, source="random")


def prompts(count=8, seed=0, longest=70, config=CONFIG):
    rng = np.random.default_rng(seed)
    lengths = [1, *rng.integers(1, longest, count - 1).tolist()]
    return [rng.integers(1, config.vocab_size, n).tolist() for n in lengths]


def greedy(loaded, prompt, count):
    """`count` greedy tokens by running the whole sequence through dense attention each time."""
    config = loaded.config
    net = Llama(config)
    length = len(prompt) + count

    def attend(layer, q, k, v, cache):
        group = config.num_heads // config.num_kv_heads
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
        scores = jnp.where(seen[None], scores, -jnp.inf)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v), cache

    @jax.jit
    def logits(tokens):
        at = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        hidden, _ = net.apply({"params": loaded.params}, tokens, at, at + 1, None, attend)
        return net.apply({"params": loaded.params}, hidden, method="unembed")

    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    for at in range(len(prompt), length):
        tokens[at] = int(np.argmax(np.asarray(logits(tokens)[at - 1])))
    return tokens[len(prompt) :].tolist()


def byte_tokenizer():
    """A tokenizer with one token a byte: characters of several bytes span several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)
