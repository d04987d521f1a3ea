"""Reading GGUF headers and rebuilding their tokenizers."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from serving.embedded.errors import GgufError
from serving.embedded.gguf import build_tokenizer, read_gguf_header, write_tokenizer_folder


def encode_value(value) -> bytes:
    """A GGUF value with its type in front."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + encode_string(value)
    items = [encode_value(item) for item in value]
    kind = struct.unpack("<I", items[0][:4])[0]
    return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(item[4:] for item in items)


def encode_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def encode_gguf(header: dict, *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    pairs = b"".join(encode_string(key) + encode_value(value) for key, value in header.items())
    return magic + struct.pack("<IQQ", version, 0, len(header)) + pairs


def tiny_header(**changes) -> dict:
    """A byte-level BPE model with one merge and three special tokens."""
    letters = [
        letter for letter, _ in sorted(zip(pre_tokenizers.ByteLevel.alphabet(), range(256), strict=True))
    ]
    tokens = ["<s>", "</s>", "<tool>", *letters, "he"]
    header = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}</s>",
    }
    return {key: value for key, value in {**header, **changes}.items() if value is not None}


def write(path: Path, header: dict, **options) -> Path:
    path.write_bytes(encode_gguf(header, **options))
    return path


def test_a_header_is_read_back(tmp_path):
    """Strings, numbers, flags and arrays come back as they were written."""
    header = {"a": "grüße", "b": 7, "c": True, "d": ["x", "y"], "e": [1, 2, 3], "f": 0.5}
    assert read_gguf_header(write(tmp_path / "m.gguf", header)) == header


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_header_that_is_cut_short_is_refused(tmp_path, share):
    """A file that ends inside its header is named, whatever it ends in."""
    whole = encode_gguf(tiny_header())
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(GgufError, match=r"cut\.gguf"):
        read_gguf_header(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a wheel, not a model", encode_gguf({}, version=1)])
def test_what_is_no_gguf_is_refused(tmp_path, content):
    """Empty files, other formats and unknown versions are refused with the path."""
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=r"other\.gguf"):
        read_gguf_header(path)


def test_a_missing_file_is_refused(tmp_path):
    """A path that does not exist is a GgufError too."""
    with pytest.raises(GgufError, match=r"gone\.gguf"):
        read_gguf_header(tmp_path / "gone.gguf")


def test_the_folder_loads_with_autotokenizer(tmp_path):
    """The written folder is a plain tokenizer with its template, special tokens and merges."""
    write_tokenizer_folder(write(tmp_path / "m.gguf", tiny_header()), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    vocab = tokenizer.get_vocab()
    assert tokenizer.encode("he</s><tool>") == [vocab["he"], 1, 2]
    assert tokenizer.decode([vocab["he"], 2, 1], skip_special_tokens=True) == "he<tool>"
    assert tokenizer.eos_token_id == 1
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], return_dict=False)
    assert rendered == [vocab["he"], 1]


@pytest.mark.parametrize(("pre", "pieces"), [("gpt-2", 1), ("smollm", 3)])
def test_digits_are_split_as_the_pre_tokenizer_says(pre, pieces):
    """The digits of a number stay apart for the models that were trained so, and merge for the others."""
    merges = ["1 2", "12 3"]
    tokens = [*tiny_header()["tokenizer.ggml.tokens"], "12", "123"]
    header = tiny_header(
        **{
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges,
        }
    )
    assert len(build_tokenizer(header).encode("123").ids) == pieces


def test_a_bos_token_is_added_where_the_header_asks_for_it():
    """add_bos_token puts the start token in front, once."""
    assert build_tokenizer(tiny_header(**{"tokenizer.ggml.add_bos_token": True})).encode("he").ids[0] == 0


@pytest.mark.parametrize(
    "changes",
    [{"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "qwen2"}, {"tokenizer.ggml.pre": None}],
)
def test_a_tokenizer_that_cannot_be_rebuilt_exactly_is_refused(changes):
    """Rather no tokenizer than one with other ids; the message says what to put where."""
    with pytest.raises(GgufError, match=r"tokenizer\.json"):
        build_tokenizer(tiny_header(**changes))


def test_a_header_without_a_tokenizer_is_refused(tmp_path):
    """A GGUF that lacks its merges is named together with what is missing."""
    path = write(tmp_path / "m.gguf", tiny_header(**{"tokenizer.ggml.merges": None}))
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.merges"):
        write_tokenizer_folder(path, tmp_path)
