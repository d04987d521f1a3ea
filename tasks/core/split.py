"""Which split a conversation belongs to.

Knows a seed and a conversation id, nothing else: not the order of rows, not the dataset. Invariant: the
turns of one conversation are in one split, in every export with this seed, and raising eval_fraction
moves conversations to eval only.
"""

import hashlib
from typing import Literal

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")


def assign_split(conversation_id: str, *, seed: int, eval_fraction: float) -> Split:
    """Train or eval by a hash of seed and conversation id; 64 bits of BLAKE2b, the same everywhere."""
    digest = hashlib.blake2b(f"{seed}\0{conversation_id}".encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") / 2**64 < eval_fraction else "train"
