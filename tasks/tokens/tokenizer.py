"""The target's tokenizer and chat template: where they come from and how they are told apart.

Knows transformers and the files of a model folder; does not know prompts. Invariant: two tokenizers
with the same `TokenizerIdentity` turn the same conversation into the same ids.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)


class TokenizerError(ValueError):
    """The tokenizer cannot be loaded or used; the message names it and what to do."""


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """SHA-256 of the tokenizer's files and of its chat template, for the run's fingerprint."""

    files_sha256: str
    chat_template_sha256: str


@dataclass(frozen=True, slots=True)
class TargetTokenizer:
    """A loaded tokenizer with what has to be known about its model.

    `vocab_size` is the model's (embedding rows), which can be more or fewer than the tokenizer's: the served
    model's where it is known, else `config_vocab_size`, that of the config.json beside the tokenizer, else
    as many as the tokenizer has;
    `context_length` is the model's own limit in tokens, or None when its config does not tell;
    `stop_ids` are those that end an answer: the tokenizer's, and those that the model's files name.
    """

    name: str
    tokenizer: Any
    identity: TokenizerIdentity
    vocab_size: int
    context_length: int | None
    stop_ids: frozenset[int] = frozenset()
    config_vocab_size: int | None = None


def load_tokenizer(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    served_vocab_size: int | None = None,
) -> TargetTokenizer:
    """Load a tokenizer by folder or Hub id; `served_vocab_size` is how many ids the served model has.

    Raises:
        TokenizerError: not found, not loadable, or without a chat template.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install PyTorch
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # waking threads for short texts costs more CPU
    from transformers import AutoTokenizer  # imported here: it costs seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as exc:  # damaged files raise anything, a bare Exception included
        first_line = str(exc).strip().split("\n", 1)[0]
        raise TokenizerError(
            f"target.tokenizer {name!r} cannot be loaded ({first_line}); "
            "give a folder with tokenizer.json, or the id of a model on the Hub that this machine can reach"
        ) from exc
    template = tokenizer.chat_template
    if not template:
        raise TokenizerError(
            f"target.tokenizer {name!r} has no chat template; use the instruct model's tokenizer"
        )
    config = _read_model_config(name, revision)
    config_vocab_size = _int_or_none(config.get("vocab_size")) or None
    generation = _read_json(name, "generation_config.json", revision)
    return TargetTokenizer(
        name=name,
        tokenizer=tokenizer,
        identity=TokenizerIdentity(
            files_sha256=_hash_files(name, revision),
            chat_template_sha256=hashlib.sha256(
                json.dumps(template, sort_keys=True, ensure_ascii=False).encode()
            ).hexdigest(),
        ),
        vocab_size=served_vocab_size or config_vocab_size or len(tokenizer),
        context_length=_int_or_none(config.get("max_position_embeddings")),
        stop_ids=frozenset(
            [
                *_list_ids(tokenizer.eos_token_id),
                *_list_ids(generation.get("eos_token_id")),
                *_list_ids(config.get("eos_token_id")),
            ]
        ),
        config_vocab_size=config_vocab_size,
    )


def _find_file(name: str, filename: str, revision: str | None) -> Path | None:
    folder = Path(name)
    if folder.is_dir():
        path = folder / filename
        return path if path.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(
        name,
        filename,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return Path(found) if found else None


def _hash_files(name: str, revision: str | None) -> str:
    digest = hashlib.sha256()
    for filename in _TOKENIZER_FILES:
        path = _find_file(name, filename, revision)
        if path is not None:
            digest.update(filename.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _read_model_config(name: str, revision: str | None) -> dict[str, Any]:
    """config.json, with the language model's part of a multimodal one on top; {} when there is none."""
    config = _read_json(name, "config.json", revision)
    return {**config, **(config.get("text_config") or {})}


def _read_json(name: str, filename: str, revision: str | None) -> dict[str, Any]:
    path = _find_file(name, filename, revision)
    if path is None:
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _list_ids(value: Any) -> list[int]:
    """A config names one id, several or none."""
    return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]


def _int_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) else None
