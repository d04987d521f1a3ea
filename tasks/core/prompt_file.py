"""prompts.jsonl and its index: prompts in dispatch order, found by position or by id.

Holds 16 bytes a prompt in memory, 32 once an id was looked for, never the prompts. The index file is
derived: it is built again from prompts.jsonl whenever it is damaged or not that file's.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from tasks.core.files import write_bytes_atomically
from tasks.core.records import Prompt, RecordError

_ENTRY = np.dtype([("offset", "<u8"), ("id_hash", "<u8")])
# Size and mtime_ns of prompts.jsonl, CRC-32 of the entries: a tenth of a hash's time at every resume.
_HEADER = struct.Struct("<QQQ")


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
        self._hashes = entries["id_hash"]

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
        hashes, order = self._by_hash
        at = int(np.searchsorted(hashes, wanted))
        if at < len(order) and hashes[at] == wanted:
            return int(order[at])
        return None

    def __iter__(self) -> Iterator[Prompt]:
        for position in range(len(self)):
            yield self.read(position)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @cached_property
    def _by_hash(self) -> tuple[np.ndarray, np.ndarray]:
        """Hashes in ascending order and their positions; a resume without new rows needs neither."""
        order = np.argsort(self._hashes, kind="stable")
        return self._hashes[order], order


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


def _make_header(path: Path, body: bytes | memoryview) -> bytes:
    stat = path.stat()
    return _HEADER.pack(stat.st_size, stat.st_mtime_ns, zlib.crc32(body))


def _load_index(path: Path) -> np.ndarray:
    try:
        data = np.fromfile(index_path(path), np.uint8)  # half the time of read_bytes
    except FileNotFoundError:
        return _scan(path)
    header, body = data[: _HEADER.size].tobytes(), data[_HEADER.size :]
    if header == _make_header(path, body.data):
        return body.view(_ENTRY)
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
