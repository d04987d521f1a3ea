"""prompts.jsonl and its index: prompts in dispatch order, found by position or by id.

Holds 16 bytes a prompt in memory, never the prompts. The index file is derived: it is built again
from prompts.jsonl whenever the two disagree.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson

from tasks.core.files import write_bytes_atomically
from tasks.core.records import Prompt

_ENTRY = np.dtype([("offset", "<u8"), ("id_hash", "<u8")])


def hash_id(prompt_id: str) -> int:
    """64 bits of BLAKE2b: the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "little")


class PromptFile:
    """Read-only view of one prepared dataset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        entries = _load_index(path)
        self._offsets = entries["offset"]
        self._order = np.argsort(entries["id_hash"], kind="stable")
        self._sorted_hashes = entries["id_hash"][self._order]

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, position: int) -> Prompt:
        """The prompt at a position of the dispatch order."""
        self._file.seek(int(self._offsets[position]))
        return Prompt.from_line(self._file.readline())

    def find(self, prompt_id: str) -> int | None:
        """The position of an id, or None when this dataset does not have it.

        Preparation gives every prompt an id whose hash is unique in its file, so the hash decides.
        """
        wanted = np.uint64(hash_id(prompt_id))
        at = int(np.searchsorted(self._sorted_hashes, wanted))
        if at < len(self._order) and self._sorted_hashes[at] == wanted:
            return int(self._order[at])
        return None

    def __iter__(self) -> Iterator[Prompt]:
        for position in range(len(self)):
            yield self.read(position)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_index(path: Path, offsets: list[int], id_hashes: list[int]) -> None:
    """Write the index beside a prompts.jsonl, after it."""
    entries = np.empty(len(offsets), dtype=_ENTRY)
    entries["offset"] = offsets
    entries["id_hash"] = id_hashes
    header = np.uint64(path.stat().st_size).tobytes()
    write_bytes_atomically(_index_path(path), header + entries.tobytes())


def _index_path(path: Path) -> Path:
    return path.with_suffix(".index")


def _load_index(path: Path) -> np.ndarray:
    size = path.stat().st_size
    index = _index_path(path)
    if index.exists():
        data = index.read_bytes()
        if len(data) % 16 == 8 and int.from_bytes(data[:8], "little") == size:
            return np.frombuffer(data, dtype=_ENTRY, offset=8)
    offsets, hashes, offset = [], [], 0
    with path.open("rb") as lines:
        for line in lines:
            offsets.append(offset)
            hashes.append(hash_id(str(orjson.loads(line)["id"])))
            offset += len(line)
    write_index(path, offsets, hashes)
    return _load_index(path)
