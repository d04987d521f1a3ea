"""The split keys of a dataset's conversations, by the id of their prompt.

Knows the lines of prompts.jsonl; does not know responses, nor which split a key is in. Invariant: a prompt
has the key of its messages, however much of the file was read before; a line that is no prompt is passed
over.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from tasks.export.split.assign import make_split_key
from tasks.records.prompt_file import hash_id
from tasks.records.rows import Prompt, RecordError

_PROMPT = np.dtype([("id_hash", "<u8"), ("key", "<u8")])
_MIN_PROMPTS = 1024  # that are read at once
_NONE = np.empty(0, np.uint64)


class SplitKeys:
    """One dataset's keys, asked for in about the order of its prompts.jsonl, which need not be there.

    The file is read once, and only as far as the ids that are asked for: it may have far more prompts than
    there are answers, and for each of them its index would take 36 bytes. This holds 17 bytes for each prompt
    that was read; once it is closed, 8 for each conversation.

    `used` are the keys of the conversations that were found, `unknown` those of rows without a prompt.
    """

    def __init__(self, path: Path) -> None:
        self.used = _NONE
        self.unknown = array("Q")
        self._prompts = _iter_prompts(path)
        self._id_hashes = _NONE  # ascending
        self._keys = _NONE
        self._is_used = np.empty(0, np.bool_)

    def find(self, prompt_id: str) -> int | None:
        """The key of a prompt; None where the file has no such prompt."""
        wanted = np.uint64(hash_id(prompt_id))
        while (place := self._locate(wanted)) is None:
            if not self._read_on():
                return None
        self._is_used[place] = True
        return int(self._keys[place])

    def make_unknown(self, conversation_id: str) -> int:
        """The key of a row whose prompt was not found."""
        key = hash_id(conversation_id)
        self.unknown.append(key)
        return key

    def close(self) -> None:
        """Read no more, and hold only `used` and `unknown`."""
        self.used = self._keys[self._is_used]
        self._prompts = iter(())
        self._id_hashes, self._keys, self._is_used = _NONE, _NONE, np.empty(0, np.bool_)

    def _locate(self, wanted: np.uint64) -> int | None:
        place = int(self._id_hashes.searchsorted(wanted))
        return place if place < len(self._id_hashes) and self._id_hashes[place] == wanted else None

    def _read_on(self) -> bool:
        """Take in the next prompts: the more, the more there are, for all of them are sorted again."""
        count = max(_MIN_PROMPTS, len(self._keys) // 4)
        more = np.fromiter(islice(self._prompts, count), _PROMPT)
        if not len(more):
            return False
        id_hashes = np.concatenate([self._id_hashes, more["id_hash"]])
        order = np.argsort(id_hashes, kind="stable")  # of one id twice the first counts
        self._id_hashes = id_hashes[order]
        self._keys = np.concatenate([self._keys, more["key"]])[order]
        self._is_used = np.concatenate([self._is_used, np.zeros(len(more), np.bool_)])[order]
        return True


def count_shared(datasets: Sequence[SplitKeys]) -> list[int]:
    """Of each dataset's conversations, how many have a first user turn that another dataset has too."""
    keys, counts = np.unique(
        np.concatenate([_NONE, *(np.unique(one.used) for one in datasets)]), return_counts=True
    )
    shared = keys[counts > 1]
    return [int(np.isin(one.used, shared).sum()) for one in datasets]


def count_different(datasets: Sequence[SplitKeys]) -> int:
    """How many keys there are, which is how finely the rows can be split."""
    every = [np.asarray(keys, np.uint64) for one in datasets for keys in (one.used, one.unknown)]
    return len(np.unique(np.concatenate([_NONE, *every])))


def _iter_prompts(path: Path) -> Iterator[tuple[int, int]]:
    """The hash of each prompt's id, and its key."""
    if path.exists():
        with path.open("rb", buffering=1 << 20) as lines:
            yield from (found for line in lines if (found := _read_prompt(line)) is not None)


def _read_prompt(line: bytes) -> tuple[int, int] | None:
    """None for a line that is damaged or was changed: the rows of its prompt are then counted as unknown."""
    try:
        prompt = Prompt.from_line(line)
        return hash_id(prompt.id), make_split_key(prompt.messages)
    except (RecordError, TypeError, AttributeError):
        return None
