"""The lines of a draft on disk: written by several, each into parts of its own, read back from all of them.

Knows files of lines and the dispatch order, which is a mix of seed and id; does not know what is kept. The
parts are stretches of that order, so that a draft larger than memory is read back part by part and not by a
seek of the disk for each line. Invariant: a line's place, size and part find it, whoever wrote it.
"""

import array
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from tasks.prepare.row_batches import RowBatch

_PART_BITS = 6
PARTS = 1 << _PART_BITS
_BUFFER_BYTES = 1 << 17  # of each part
_WRITER_SHIFT = 56  # of a place: the writer is above, the offset in its file of that part below
_OFFSET_MASK = (1 << _WRITER_SHIFT) - 1
_MASK = (1 << 64) - 1

_Hash = TypeVar("_Hash", int, np.ndarray)


@dataclass(slots=True)
class LineTable:
    """What is held of lines: where each is, its size, hashes of its id and content, its number of answers."""

    places: "array.array[int]" = field(default_factory=lambda: array.array("Q"))
    sizes: "array.array[int]" = field(default_factory=lambda: array.array("I"))
    ids: "array.array[int]" = field(default_factory=lambda: array.array("Q"))
    contents: "array.array[int]" = field(default_factory=lambda: array.array("Q"))
    answers: "array.array[int]" = field(default_factory=lambda: array.array("H"))

    def __len__(self) -> int:
        return len(self.places)

    def extend(self, other: "LineTable") -> None:
        """Take the lines that come after."""
        self.places.extend(other.places)
        self.sizes.extend(other.sizes)
        self.ids.extend(other.ids)
        self.contents.extend(other.contents)
        self.answers.extend(other.answers)


@dataclass(frozen=True, slots=True)
class DispatchOrder:
    """A seeded shuffle: where each id stands, from 0 to 2^64, by itself."""

    salt: int

    @classmethod
    def of_seed(cls, seed: int) -> Self:
        """The order of that seed."""
        return cls(int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little"))

    def rank(self, id_hash: _Hash) -> _Hash:
        """A mix of seed and id (splitmix64, Steele et al. 2014)."""
        mixed = id_hash ^ self.salt
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def part(self, id_hash: _Hash) -> _Hash:
        """Which part a line of that id belongs to."""
        return self.rank(id_hash) >> (64 - _PART_BITS)


class DraftWriter:
    """One of those who write lines; `number` is its own among them."""

    def __init__(self, folder: Path, order: DispatchOrder, *, number: int = 0) -> None:
        self._folder = folder / str(number)
        self._folder.mkdir()
        self._order = order
        self._number = number
        self._open_files = ExitStack()
        self._parts: list[BufferedWriter[FileIO] | None] = [None] * PARTS
        self._ends = [number << _WRITER_SHIFT] * PARTS

    def write(self, batch: RowBatch, table: LineTable) -> None:
        """Write the lines of a batch and add them to a table."""
        parts = self._order.part(np.array(batch.id_hashes, np.uint64))
        table.places.extend(map(self.append, batch.lines, parts.tolist()))
        table.sizes.extend(map(len, batch.lines))
        table.ids.extend(batch.id_hashes)
        table.contents.extend(batch.contents)
        table.answers.extend(batch.answers)

    def append(self, line: bytes, part: int) -> int:
        """Write a line to a part; returns its place there."""
        file = self._parts[part] or self._open(part)
        place = self._ends[part]
        self._ends[part] = place + file.write(line)
        return place

    def flush(self) -> None:
        """Let readers find what was written."""
        for file in self._parts:
            if file is not None:
                file.flush()

    def close(self) -> None:
        """Close the files; they are the caller's to remove."""
        self._open_files.close()

    def _open(self, part: int) -> "BufferedWriter[FileIO]":
        # "x": a worker whose parent was killed may be at work for a moment in a draft that was begun again.
        raw = (self._folder / _name(part)).open("xb", buffering=0)
        file = self._parts[part] = self._open_files.enter_context(BufferedWriter(raw, _BUFFER_BYTES))
        return file


class DraftReader:
    """Reads lines of every writer, well where those of one part follow one another.

    With `read_ahead` whole parts are what is going to be read.
    """

    def __init__(self, folder: Path, *, read_ahead: bool = True) -> None:
        self._folder = folder
        self._read_ahead = read_ahead
        self._open_files = ExitStack()
        self._part = -1
        self._files: dict[int, int] = {}

    def read_lines(self, part: int, places: Sequence[int], sizes: Sequence[int]) -> Iterator[bytes]:
        """Lines of a part, in the order given."""
        if part != self._part:
            self._open(part)
        files, pread = self._files, os.pread
        for place, size in zip(places, sizes, strict=True):
            yield pread(files[place >> _WRITER_SHIFT], size, place & _OFFSET_MASK)

    def close(self) -> None:
        """Close the files."""
        self._open_files.close()
        self._files, self._part = {}, -1

    def _open(self, part: int) -> None:
        self.close()
        for path in self._folder.glob(f"*/{_name(part)}"):
            file = self._open_files.enter_context(path.open("rb", buffering=0))
            self._files[int(path.parent.name)] = file.fileno()
            if self._read_ahead:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        self._part = part


def _name(part: int) -> str:
    return f"{part:02}.jsonl"
