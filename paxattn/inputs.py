"""What a user hands to the engine, checked and brought into one form."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from paxattn.checks import is_integer
from paxattn.sampling_params import SamplingParams


class Prompt(NamedTuple):
    text: str | None
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None  # prompts share cached pages with those of equal salt only


def compute_dtype(name: str) -> jnp.dtype | None:
    """The dtype that a name asks for; None for "auto"."""
    if name == "auto":
        return None
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'auto', 'float32' or 'bfloat16'; got {name!r}")
    return jnp.dtype(name)


def load_model(model: Any, dtype: str) -> Any:
    """A loaded model (config, params, tokenizer, source) from whatever names one."""
    if hasattr(model, "config") and hasattr(model, "params"):
        return model
    # `convert` stands above this package and imports it; only this call looks up there.
    from convert import load

    return load(model, dtype=dtype)


def parse_prompts(
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Any,
    vocab_size: int,
) -> list[Prompt]:
    """One `Prompt` for each prompt, before anything runs.

    Raises:
      ValueError: naming the prompt and what is wrong with it.
    """
    items = _as_list(prompts)
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        params = [sampling_params] * len(items)
    else:
        if isinstance(sampling_params, str) or not isinstance(sampling_params, Sequence):
            raise ValueError(
                "sampling_params must be a SamplingParams or a list of them; got "
                f"{type(sampling_params).__name__}: {sampling_params!r:.200}"
            )
        params = list(sampling_params)
        if len(params) != len(items):
            raise ValueError(
                f"{len(params)} sampling_params for {len(items)} prompts; give one, or one each"
            )
        for i, p in enumerate(params):
            if not isinstance(p, SamplingParams):
                raise ValueError(f"sampling_params {i} is a {type(p).__name__}: {p!r}")
    return [
        _parse(i, item, p, tokenizer, vocab_size)
        for i, (item, p) in enumerate(zip(items, params, strict=True))
    ]


def _as_list(prompts: Any) -> list:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    unlisted = not isinstance(prompts, Sequence) and not hasattr(prompts, "tolist")
    if unlisted or isinstance(prompts, (bytes, bytearray)) or getattr(prompts, "shape", 0) == ():
        raise ValueError(
            "prompts must be a string, a list of token ids, a chat, or a list of those; got "
            f"{type(prompts).__name__}"
        )
    items = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if items and (is_integer(items[0]) or _is_message(items[0])):
        return [items]
    return items


def _is_message(x: Any) -> bool:
    return isinstance(x, Mapping) and "role" in x


def _parse(i: int, item: Any, params: SamplingParams, tokenizer: Any, vocab_size: int) -> Prompt:
    salt = item.get("cache_salt") if isinstance(item, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"prompt {i}: cache_salt must be a non-empty string; got {salt!r}")
    if salt is not None:
        _check_unicode(f"prompt {i}: cache_salt", salt)
    if isinstance(item, Mapping) and not _is_message(item):
        keys = [key for key in item if key != "cache_salt"]
        if len(keys) != 1 or keys[0] not in ("prompt", "prompt_token_ids"):
            raise ValueError(
                f"prompt {i} is a dict with the keys {sorted(map(str, item))}; give 'prompt' or "
                "'prompt_token_ids', and 'cache_salt' if you like"
            )
        item = item[keys[0]]
    text = None
    if hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, str):
        text, ids = item, _tokenize(i, item, tokenizer)
    elif isinstance(item, Sequence) and item and all(_is_message(m) for m in item):
        ids = _render_chat(i, item, tokenizer)
    elif (
        isinstance(item, Sequence)
        and not isinstance(item, (bytes, bytearray))
        and all(is_integer(t) for t in item)
    ):
        ids = [int(t) for t in item]
    else:
        raise ValueError(
            f"prompt {i} must be a string, a list of token ids or a list of chat messages; got "
            f"{item!r:.200}"
        )
    if not ids:
        raise ValueError(f"prompt {i} is empty: it has no token to continue from")
    for t in ids:
        if not 0 <= t < vocab_size:
            raise ValueError(
                f"prompt {i} holds token id {t}, outside the vocabulary of {vocab_size} tokens"
            )
    if params.stop and tokenizer is None:
        raise ValueError(
            f"prompt {i} asks for stop strings, but this model has no tokenizer; use stop_token_ids"
        )
    for t in params.stop_token_ids:
        if t >= vocab_size:
            raise ValueError(
                f"prompt {i}: stop_token_ids holds {t}, outside the vocabulary of {vocab_size}"
            )
    return Prompt(text, ids, params, salt)


def _tokenize(i: int, text: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise ValueError(
            f"prompt {i} is text, but this model has no tokenizer; pass token ids, or a model whose "
            "folder holds tokenizer.json"
        )
    _check_unicode(f"prompt {i}:", text)
    return list(tokenizer(text)["input_ids"])


def _check_unicode(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} {text!r:.80} is no valid Unicode ({error.reason})") from error


def _render_chat(i: int, messages: Sequence[Mapping], tokenizer: Any) -> list[int]:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"prompt {i} is a chat, but this model has no "
            f"{'tokenizer' if tokenizer is None else 'chat template'}; pass text or token ids"
        )
    for m in messages:
        if not isinstance(m.get("content"), str):
            raise ValueError(f"prompt {i}: a chat message needs a text 'content'; got {dict(m)!r}")
        _check_unicode(f"prompt {i}: the chat message", m["content"])
    rendered = tokenizer.apply_chat_template(
        [dict(m) for m in messages], add_generation_prompt=True, tokenize=False
    )
    # The template already wrote the special tokens.
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
