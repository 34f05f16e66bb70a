"""The tokenizer inside a GGUF file, as a transformers fast tokenizer.

Two families: byte-level BPE (`tokenizer.ggml.model` "gpt2"), whose way of splitting text before
merging is named by `tokenizer.ggml.pre`, and SentencePiece BPE ("llama"), whose merges follow
from the pieces' scores.
"""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from convert.gguf_files import GgufFile

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r")
_GPT2 = ("gpt-2", "gpt2")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")


def read_tokenizer(file: GgufFile) -> tuple[Any | None, str]:
    """(tokenizer, "") or (None, why there is none)."""
    fields = file.fields
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    remedy = "use the model's Hugging Face folder, or pass token ids"
    if not fields.get("tokenizer.ggml.tokens"):
        return None, f"{file.path} has no tokenizer; {remedy}"
    try:
        return _read(file, kind, pre, remedy)
    except Exception as error:  # tokens or merges that do not fit together
        reason = " ".join(str(error).split())[:200]
        return None, f"{file.path}: the tokenizer cannot be read ({reason}); {remedy}"


def _read(file: GgufFile, kind: Any, pre: Any, remedy: str) -> tuple[Any | None, str]:
    fields = file.fields
    known = (*_DIGIT_BY_DIGIT, *_GPT2, *_LLAMA3, *_QWEN2)
    if kind == "gpt2" and pre in known:
        inner = _byte_level(fields, pre)
    elif kind == "llama":
        inner = _sentencepiece(fields)
    else:
        return None, (
            f"{file.path}: tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={pre!r} is not "
            f"known (known: llama; gpt2 with {', '.join(known)}); {remedy}"
        )
    return _wrap(inner, fields), ""


def _byte_level(fields: dict[str, Any], pre: str) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    if pre in _DIGIT_BY_DIGIT or pre in _GPT2:
        split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if pre in _DIGIT_BY_DIGIT:
            digits = pre_tokenizers.Digits(individual_digits=True)
            split = pre_tokenizers.Sequence([digits, split])
    else:
        words = Regex(_WORDS % ("{1,3}" if pre in _LLAMA3 else ""))
        split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(words, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if pre in _QWEN2:
            inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = split
    inner.decoder = decoders.ByteLevel()
    _add_specials(inner, fields)
    _add_bos(inner, fields, default=pre in _LLAMA3)
    return inner


def _sentencepiece(fields: dict[str, Any]) -> Tokenizer:
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    inner = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(vocab, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    unpack: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        unpack.append(decoders.Strip(" ", 1, 0))
    inner.normalizer = normalizers.Sequence(steps)
    inner.decoder = decoders.Sequence(unpack)
    _add_specials(inner, fields)
    _add_bos(inner, fields, default=True)
    return inner


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two pieces, best score first: what SentencePiece does at run
    time, written down as merge rules."""
    found = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[index], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_specials(inner: Tokenizer, fields: dict[str, Any]) -> None:
    """Control tokens are matched whole in text and skipped when decoding; user-defined ones are
    matched and kept."""
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type") or []
    special = [t for t, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _UNKNOWN)]
    plain = [t for t, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    inner.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    inner.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])


def _add_bos(inner: Tokenizer, fields: dict[str, Any], default: bool) -> None:
    bos = _named(fields, "bos")
    if bos is None or not fields.get("tokenizer.ggml.add_bos_token", default):
        return
    inner.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, fields["tokenizer.ggml.bos_token_id"])],
    )


def _named(fields: dict[str, Any], role: str) -> str | None:
    index = fields.get(f"tokenizer.ggml.{role}_token_id")
    tokens = fields["tokenizer.ggml.tokens"]
    return tokens[index] if index is not None and index < len(tokens) else None


def _wrap(inner: Tokenizer, fields: dict[str, Any]) -> Any:
    import transformers

    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{ours}_token": _named(fields, theirs) for ours, theirs in roles.items()}
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        clean_up_tokenization_spaces=False,
        **{role: token for role, token in named.items() if token is not None},
    )
    wrapped.chat_template = fields.get("tokenizer.chat_template")
    return wrapped
