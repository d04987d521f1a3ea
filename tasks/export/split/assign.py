"""Which split a conversation belongs to.

Knows a seed and what the user said first, nothing else: not the order of rows, not the dataset, the system
prompt, the tools or the id. Invariant: conversations with the same first user turn are in one split, in every
export with this seed, and so are the turns of one; raising eval_fraction moves conversations to eval only.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from tasks.records.prompt_file import hash_id

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")


def make_split_key(messages: Sequence[Mapping[str, Any]]) -> int:
    """64 bits of the first user turn, white space around it ignored; without one, of all messages."""
    for message in messages:
        if message.get("role") == "user":
            return hash_id(str(message.get("content") or "").strip())
    return hash_id(orjson.dumps(messages, option=orjson.OPT_SORT_KEYS).decode())


def assign_split(key: int, *, seed: int, eval_fraction: float) -> Split:
    """Train or eval by a hash of seed and split key; 64 bits of BLAKE2b, the same everywhere."""
    digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") / 2**64 < eval_fraction else "train"
