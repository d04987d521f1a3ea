"""Read a GGUF header and write the Hugging Face tokenizer folder it describes.

Knows the GGUF container and byte-level BPE; knows nothing of tensors, and loads neither torch nor llama.cpp.
Invariant: the folder's ids equal llama.cpp's for every text. A pre-tokenizer whose rules are not known here
is refused rather than guessed: `AutoTokenizer.from_pretrained(..., gguf_file=…)` of transformers 5 guesses,
drops the splitting of digits, and gives other ids.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from serving.embedded.errors import GgufError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_CONTROL, _USER_DEFINED = 3, 4
# llama.cpp's names: these split on single digits first and then use GPT-2's pattern …
_DIGIT_SPLITTING = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
# … and these use GPT-2's pattern alone.
_PLAIN_GPT2 = frozenset({"gpt-2", "gpt2", "mpt", "olmo", "phi-2", "jais"})


def read_gguf_header(path: Path) -> dict[str, Any]:
    """Return every key and value of a GGUF header; the tensors are not touched.

    Raises:
        GgufError: the file is missing, cut short, or not GGUF version 2 or 3.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).read()
    except OSError as exc:
        raise GgufError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:  # what mmap says of an empty file, and what _Header says of a wrong one
        raise GgufError(f"{path} is not a usable GGUF file: {exc}") from exc
    except (struct.error, IndexError) as exc:
        raise GgufError(f"{path} ends inside its GGUF header: copy or download it again") from exc


def build_tokenizer(header: Mapping[str, Any]) -> Tokenizer:
    """Rebuild the byte-level BPE tokenizer that a GGUF header describes.

    Raises:
        GgufError: another kind of tokenizer, or a pre-tokenizer that is not known here.
    """
    kind = header.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise GgufError(
            f"the GGUF's tokenizer is {kind!r}, only byte-level BPE ('gpt2') can be rebuilt: {_ADVICE}"
        )
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_split_merge(merge) for merge in header["tokenizer.ggml.merges"]],
            fuse_unk=False,
            byte_fallback=False,
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(header.get("tokenizer.ggml.pre"))
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = header.get("tokenizer.ggml.token_type", [])
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind_of_token in zip(tokens, kinds, strict=False)
            if kind_of_token == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    if tokenizer.get_vocab_size() != len(tokens):
        raise GgufError(f"the GGUF's {len(tokens)} tokens are not all different: {_ADVICE}")
    bos = _token(header, "bos")
    if bos is not None and header.get("tokenizer.ggml.add_bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, header["tokenizer.ggml.bos_token_id"])],
        )
    return tokenizer


def write_tokenizer_folder(gguf: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and config.json of a GGUF into an existing folder.

    `AutoTokenizer.from_pretrained(folder)` then needs no network, no torch and no custom code.
    """
    header = read_gguf_header(gguf)
    try:
        build_tokenizer(header).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(header))
        _write_json(folder / "config.json", _model_config(header))
    except KeyError as exc:
        raise GgufError(f"{gguf} has no {exc.args[0]!r} in its header: {_ADVICE}") from exc


_ADVICE = "put the model's own tokenizer.json and tokenizer_config.json beside the GGUF file"


class _Header:
    """A cursor over the header of a GGUF file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 0

    def read(self) -> dict[str, Any]:
        if self._data[:4] != _MAGIC:
            raise ValueError(f"it starts with {self._data[:4]!r}, not {_MAGIC!r}")
        self._offset = 4
        version, _tensors, pairs = self._unpack("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, known are {_VERSIONS}")
        header = {}
        for _ in range(pairs):
            key = self._string()
            (kind,) = self._unpack("I")
            header[key] = self._value(kind)
        return header

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._unpack(self._scalar(kind))[0]

    def _array(self) -> list[Any]:
        kind, count = self._unpack("IQ")
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        if count > len(self._data):
            raise IndexError(count)
        return list(self._unpack(f"{count}{self._scalar(kind)}"))

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        if self._offset + length > len(self._data):
            raise IndexError(length)
        raw = self._data[self._offset : self._offset + length]
        self._offset += length
        return raw.decode("utf-8")

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"it has a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._data, self._offset)
        self._offset += struct.calcsize(f"<{layout}")
        return values


def _pre_tokenizer(name: str | None) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _PLAIN_GPT2:
        return byte_level
    if name in _DIGIT_SPLITTING:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    known = ", ".join(sorted(_PLAIN_GPT2 | _DIGIT_SPLITTING))
    raise GgufError(f"the GGUF's pre-tokenizer {name!r} is not known here ({known}): {_ADVICE}")


def _split_merge(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _token(header: Mapping[str, Any], role: str) -> str | None:
    index = header.get(f"tokenizer.ggml.{role}_token_id")
    return None if index is None else str(header["tokenizer.ggml.tokens"][index])


def _tokenizer_config(header: Mapping[str, Any]) -> dict[str, Any]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header[f"{header['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": _token(header, "bos"),
        "eos_token": _token(header, "eos"),
        "pad_token": _token(header, "padding"),
        "unk_token": _token(header, "unknown"),
        "chat_template": header.get("tokenizer.chat_template"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _model_config(header: Mapping[str, Any]) -> dict[str, Any]:
    arch = header["general.architecture"]
    config = {
        "model_type": arch,
        "vocab_size": len(header["tokenizer.ggml.tokens"]),
        "max_position_embeddings": header[f"{arch}.context_length"],
        "hidden_size": header.get(f"{arch}.embedding_length"),
        "intermediate_size": header.get(f"{arch}.feed_forward_length"),
        "num_hidden_layers": header.get(f"{arch}.block_count"),
        "num_attention_heads": header.get(f"{arch}.attention.head_count"),
        "num_key_value_heads": header.get(f"{arch}.attention.head_count_kv"),
        "bos_token_id": header.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.get("tokenizer.ggml.eos_token_id"),
    }
    if arch == "llama":
        config["architectures"] = ["LlamaForCausalLM"]
        config["rms_norm_eps"] = round(header["llama.attention.layer_norm_rms_epsilon"], 9)
        config["rope_theta"] = header.get("llama.rope.freq_base", 10000.0)
        config["hidden_act"] = "silu"
    return {key: value for key, value in config.items() if value is not None}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
