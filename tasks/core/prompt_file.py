"""prompts.jsonl and its index: prompts in dispatch order, found by position or by id.

Holds 32 bytes a prompt in memory, never the prompts. The index file is derived: it is built again
from prompts.jsonl whenever it is damaged or not that file's.
"""

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tasks.core.files import write_bytes_atomically
from tasks.core.records import Prompt, RecordError

_ENTRY = np.dtype([("offset", "<u8"), ("id_hash", "<u8")])
_HEADER = struct.Struct("<QQ8s")  # size and mtime_ns of prompts.jsonl, digest of the entries


def hash_id(prompt_id: str) -> int:
    """64 bits of BLAKE2b: the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "little")


class PromptFile:
    """Read-only view of one prepared dataset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        entries = _load_index(path)
        self._file = path.open("rb")
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


def write_index(path: Path, offsets: list[int], id_hashes: list[int]) -> np.ndarray:
    """Write the index beside a prompts.jsonl, after it; returns its entries."""
    entries = np.empty(len(offsets), dtype=_ENTRY)
    entries["offset"] = offsets
    entries["id_hash"] = id_hashes
    body = entries.tobytes()
    write_bytes_atomically(index_path(path), _make_header(path, body) + body)
    return entries


def index_path(path: Path) -> Path:
    """Where the index of a prompts.jsonl lies."""
    return path.with_suffix(".index")


def _make_header(path: Path, body: bytes) -> bytes:
    stat = path.stat()
    return _HEADER.pack(stat.st_size, stat.st_mtime_ns, hashlib.blake2b(body, digest_size=8).digest())


def _load_index(path: Path) -> np.ndarray:
    try:
        data = index_path(path).read_bytes()
    except FileNotFoundError:
        data = b""
    body = data[_HEADER.size :]
    if data == _make_header(path, body) + body:
        return np.frombuffer(body, dtype=_ENTRY)
    return _scan(path)


def _scan(path: Path) -> np.ndarray:
    """Find every line of a prompts.jsonl and write its index."""
    offsets, hashes, offset = [], [], 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                prompt = Prompt.from_line(line)
            except RecordError as exc:
                raise RecordError(
                    f"{path}: the line at byte {offset} is damaged ({exc}); remove this file and run the "
                    "same command again: it is prepared again from its source"
                ) from exc
            offsets.append(offset)
            hashes.append(hash_id(prompt.id))
            offset += len(line)
    return write_index(path, offsets, hashes)
