"""prompts.jsonl and its index: prompts in dispatch order, found by position or by id and turn.

A line is a conversation; it has a position for each answer that it is to get, one after the other. Holds 20
bytes a position in memory, 36 once an id was looked for, never the prompts. The index file is derived: it
is built again from prompts.jsonl whenever it is damaged or not that file's.
"""

import array
import hashlib
import struct
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from tasks.records.files import replace_atomically
from tasks.records.rows import Prompt, RecordError

_ENTRY = np.dtype([("offset", "<u8"), ("id_hash", "<u8"), ("turn", "<u2"), ("follows", "<u2")])
_FORMAT = 2
# Format, size and mtime_ns of prompts.jsonl, CRC-32 of the entries: a tenth of a hash's time at every resume.
_HEADER = struct.Struct("<QQQQ")


def hash_id(prompt_id: str) -> int:
    """64 bits of BLAKE2b: the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "little")


def _hash_turn(id_hash: int, turn: int) -> int:
    """The same for a later answer of that conversation."""
    return hash_id(f"{id_hash} {turn}") if turn else id_hash


class PromptFile:
    """Read-only view of one prepared dataset.

    `follows` is uint8 (positions,): 1 where the answer at the position before has to be there first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        entries = _load_index(path)
        self._file = path.open("rb")
        self._offsets = entries["offset"]
        self._hashes = entries["id_hash"]
        self._turns = entries["turn"]
        self.follows: np.ndarray = entries["follows"].astype(np.uint8)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, position: int) -> Prompt:
        """The prompt at a position of the dispatch order."""
        self._file.seek(int(self._offsets[position]))
        return Prompt.from_line(self._file.readline()).at_turn(int(self._turns[position]))

    def find(self, prompt_id: str, turn: int = 0) -> int | None:
        """The position of an id and turn, or None when this dataset does not have it.

        Preparation gives every prompt an id whose hash is unique in its file, so the hash decides.
        """
        wanted = np.uint64(_hash_turn(hash_id(prompt_id), turn))
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


class IndexBuilder:
    """Collects the lines of a prompts.jsonl one by one."""

    def __init__(self) -> None:
        self._sizes, self._hashes = array.array("Q"), array.array("Q")
        self._answers, self._own_history = array.array("H"), array.array("B")

    def add(self, line: bytes, *, id_hash: int, answers: int = 1, own_history: bool = False) -> None:
        """Take the next line, which says so much."""
        self._sizes.append(len(line))
        self._hashes.append(id_hash)
        self._answers.append(answers)
        self._own_history.append(own_history)

    def write(self, path: Path) -> np.ndarray:
        """Write the index beside its prompts.jsonl, after it; returns its entries."""
        columns = (self._sizes, self._hashes, self._answers, self._own_history)
        return write_entries(path, make_entries(*(np.array(column) for column in columns)))


def make_entries(
    sizes: np.ndarray, id_hashes: np.ndarray, answers: np.ndarray, own_history: np.ndarray
) -> np.ndarray:
    """The index of lines in their order, each of so many bytes; 20 bytes an answer."""
    entries = np.zeros(int(answers.sum(dtype=np.int64)), dtype=_ENTRY)
    starts = np.cumsum(sizes, dtype=np.uint64)
    starts -= sizes  # in place here and below: a copy is as large as all the ids
    entries["offset"] = np.repeat(starts, answers)
    del starts
    firsts = np.cumsum(answers, dtype=np.int64)
    firsts -= answers
    entries["id_hash"][firsts] = id_hashes
    several = np.flatnonzero(answers > 1)
    if not len(several):
        return entries
    for line, first in zip(several.tolist(), firsts[several].tolist(), strict=True):
        id_hash, count = int(id_hashes[line]), int(answers[line])
        entries["id_hash"][first + 1 : first + count] = [_hash_turn(id_hash, n) for n in range(1, count)]
    turns = np.arange(len(entries))
    turns -= np.repeat(firsts, answers)
    entries["turn"] = turns
    entries["follows"] = np.repeat(own_history, answers) & (turns > 0)
    return entries


def write_entries(path: Path, entries: np.ndarray) -> np.ndarray:
    """Write an index beside its prompts.jsonl, after it; returns it."""
    body = entries.view(np.uint8).data  # no copy: of many prompts it is what memory goes into
    with replace_atomically(index_path(path)) as file:
        file.write(_make_header(path, body))
        file.write(body)
    return entries


def index_path(path: Path) -> Path:
    """Where the index of a prompts.jsonl lies."""
    return path.with_suffix(".index")


def _make_header(path: Path, body: bytes | memoryview) -> bytes:
    stat = path.stat()
    return _HEADER.pack(_FORMAT, stat.st_size, stat.st_mtime_ns, zlib.crc32(body))


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
    index, offset = IndexBuilder(), 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                prompt = Prompt.from_line(line)
            except RecordError as exc:
                raise RecordError(
                    f"{path}: the line at byte {offset} is damaged ({exc}); remove this file and run the "
                    "same command again: it is prepared again from its source"
                ) from exc
            index.add(
                line, id_hash=hash_id(prompt.id), answers=prompt.answers, own_history=prompt.own_history
            )
            offset += len(line)
    return index.write(path)
