"""Tokenizers out of GGUF metadata: built by hand, and the default model's real one."""

import subprocess
import sys

import gguf
import pytest
from tiny_checkpoints import arrays, hf_model, write_gguf

import convert
from convert.find import ModelNotFound, find
from convert.gguf_files import GgufFile
from convert.gguf_tokenizer import read_tokenizer

# The characters that byte-level BPE writes bytes as: printable ones stand for themselves.
_SELF = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = [chr(b) for b in _SELF] + [chr(256 + i) for i in range(256 - len(_SELF))]


def byte_level(pre="smollm", merges=(), **more):
    """Metadata of a byte-level BPE: two control tokens, the 256 bytes, then the merges."""
    tokens = ["<|start|>", "<|end|>", *_BYTES, *("".join(merge.split()) for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.{key}": value for key, value in more.items()},
    }


def made(fields, tmp_path):
    tokenizer, why = read_tokenizer(GgufFile(tmp_path / "m.gguf", fields, {}))
    assert tokenizer is not None, why
    return tokenizer


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def test_merges_in_order_and_specials(tmp_path):
    tokenizer = made(byte_level(merges=["a b", "ab c", "Ġ ab"]), tmp_path)
    assert pieces(tokenizer, "abc ab") == ["abc", "Ġab"]
    assert pieces(tokenizer, "<|start|>ab<|end|>") == ["<|start|>", "ab", "<|end|>"]
    assert tokenizer.decode(tokenizer("ab<|end|>")["input_ids"], skip_special_tokens=True) == "ab"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")


@pytest.mark.parametrize(
    ("pre", "split"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("gpt-2", ["1234"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
    ],
)
def test_how_digits_are_split(tmp_path, pre, split):
    merges = ["1 2", "12 3", "123 4"]
    tokenizer = made(byte_level(pre, merges, **{"ggml.add_bos_token": False}), tmp_path)
    assert pieces(tokenizer, "1234") == split


@pytest.mark.parametrize(
    ("pre", "said", "first"),
    [("smollm", None, "a"), ("smollm", True, "<|start|>"), ("llama-bpe", None, "<|start|>")],
)
def test_whether_a_bos_is_put_first(tmp_path, pre, said, first):
    more = {} if said is None else {"ggml.add_bos_token": said}
    assert pieces(made(byte_level(pre, **more), tmp_path), "a")[0] == first


def test_every_byte_round_trips(tmp_path):
    tokenizer = made(byte_level(), tmp_path)
    text = "".join(map(chr, range(256))) + "\t\n  héllo 世界 🎉👩‍👩‍👧"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template(tmp_path):
    template = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    tokenizer = made(byte_level(chat_template=template), tmp_path)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|start|>hi<|end|>"
    assert made(byte_level(), tmp_path).chat_template is None


def test_sentencepiece(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    plain = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello", "ell"]
    # Scores as SentencePiece gives them: minus the rank of the merge; characters come last.
    scores = [0.0] * 259 + [-20.0] * 5 + [-1.0, -2.0, -3.0, -4.0, -5.0, -1.5]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + plain,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(plain),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = made(fields, tmp_path)
    # By hand: ▁ h -> ▁h (-1); then "ell" cannot be made before el (-2); el + l -> ell (-1.5)
    # is then best, and nothing joins ▁h, ell and o.
    assert pieces(tokenizer, "hello") == ["<s>", "▁h", "ell", "o"]
    assert pieces(tokenizer, "é")[1:] == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("hello hello", "  two", "世 🎉"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert pieces(made({**fields, "tokenizer.ggml.add_bos_token": False}, tmp_path), "h") == ["▁h"]


def test_unknown_ways_to_split_are_said_and_not_guessed(tmp_path):
    for fields in (byte_level("tekken"), {**byte_level(), "tokenizer.ggml.model": "bert"}):
        tokenizer, why = read_tokenizer(GgufFile(tmp_path / "m.gguf", fields, {}))
        assert tokenizer is None
        assert "is not known" in why
        assert "token ids" in why


def test_damaged_merges_are_said(tmp_path):
    fields = {**byte_level(), "tokenizer.ggml.merges": ["a b"]}  # there is no token "ab"
    tokenizer, why = read_tokenizer(GgufFile(tmp_path / "m.gguf", fields, {}))
    assert tokenizer is None
    assert "cannot be read" in why


def test_through_a_file(tmp_path):
    fields = byte_level(merges=["a b"], chat_template="{{ messages[0]['content'] }}")
    model = hf_model(vocab_size=len(fields["tokenizer.ggml.tokens"]))
    metadata = [
        ("add_tokenizer_model", "gpt2"),
        ("add_tokenizer_pre", "smollm"),
        ("add_token_list", fields["tokenizer.ggml.tokens"]),
        ("add_token_types", [gguf.TokenType(t) for t in fields["tokenizer.ggml.token_type"]]),
        ("add_token_merges", fields["tokenizer.ggml.merges"]),
        ("add_bos_token_id", 0),
        ("add_eos_token_id", 1),
        ("add_chat_template", fields["tokenizer.chat_template"]),
    ]
    path = write_gguf(tmp_path / "m.gguf", arrays(model), model.config, metadata=metadata)
    loaded = convert.load(path)
    assert pieces(loaded.tokenizer, "ab 12<|end|>") == ["ab", "Ġ", "1", "2", "<|end|>"]
    assert loaded.config.eos_token_ids == (1,)
    assert pieces(convert.load_tokenizer(path), "ab") == ["ab"]


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import convert
for path in sys.argv[1:]:
    loaded = convert.load(path)
    print(len(loaded.tokenizer("ab 12").input_ids))
"""


def test_no_torch_is_needed(tmp_path):
    fields = byte_level(merges=["a b"])
    model = hf_model(vocab_size=len(fields["tokenizer.ggml.tokens"]))
    model.save_pretrained(tmp_path / "hf")
    made(fields, tmp_path).save_pretrained(tmp_path / "hf")
    metadata = [
        ("add_tokenizer_model", "gpt2"),
        ("add_tokenizer_pre", "smollm"),
        ("add_token_list", fields["tokenizer.ggml.tokens"]),
        ("add_token_merges", fields["tokenizer.ggml.merges"]),
    ]
    path = write_gguf(tmp_path / "m.gguf", arrays(model), model.config, metadata=metadata)
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(tmp_path / "hf"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["4", "4"], done.stderr


# --- the default model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    try:
        find()
    except ModelNotFound as error:
        pytest.skip(str(error))
    return convert.load_tokenizer()


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # The model's tokenizer splits off each digit first, then words as GPT-2 does; the ids are
        # the vocabulary's.
        ("Hello world", [19556, 905]),
        ("2024", [34, 32, 34, 36]),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
        ("a:\n\n1.", [81, 42, 1116, 33, 30]),
        ("", []),
    ],
)
def test_smollm2_ids(smollm2, text, ids):
    assert smollm2(text)["input_ids"] == ids  # and no BOS put first


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox's jump — 'quoted', \"twice\".  Two spaces.\n\n\tTab",
        "def f(x: int) -> list[int]:\n    return [x ** 2 for _ in range(10)]  # 1e-5\n",
        "你好，世界。今天天气很好，我们去公园散步吧！",
        "🎉 👩‍👩‍👧 🇩🇪 naïve café Ωμέγα",
        "0123456789 3.14159 1,000,000 2024-11-29",
        "\x00\x7f\xa0\u200b\ufeff mixed \r\n line ends",
    ],
)
def test_smollm2_round_trips(smollm2, text):
    assert smollm2.decode(smollm2(text)["input_ids"]) == text


@pytest.mark.model
def test_smollm2_chat(smollm2):
    chat = [{"role": "user", "content": "hi"}]
    assert smollm2.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.eos_token_id == 2
    assert len(smollm2) == 49152
