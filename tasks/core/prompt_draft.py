"""The prompts of a dataset on disk until it is known which are kept, under which ids, in which order.

Knows lines, ids and hashes; does not know sources. The lines lie in parts, each a stretch of the dispatch
order, so that a draft larger than memory is read back part by part and not by a seek of the disk for each
line. Holds 30 bytes a line, and about three times that for a moment when they are put in order. Invariant:
kept is the first of each content, and the order of the lines decides neither ids nor the order.
"""

import array
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedWriter
from pathlib import Path
from typing import TypeVar

import numpy as np

from tasks.core.adapters import content_id
from tasks.core.prompt_file import hash_id, make_entries
from tasks.core.records import Prompt
from tasks.core.row_batches import RowBatch

_PART_BITS = 6
_BUFFER_BYTES = 1 << 17  # of each part
_MASK = (1 << 64) - 1

_Hash = TypeVar("_Hash", int, np.ndarray)


class PromptDraft:
    """Takes prompts in source order and gives the kept ones back in dispatch order.

    That is a seeded shuffle by a mix of seed and id. Call `settle` between the two.
    """

    def __init__(self, folder: Path, *, seed: int) -> None:
        self._folder = folder
        self._salt = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")
        self._open_files = ExitStack()
        self._parts: dict[int, BufferedWriter] = {}
        self._ends = [0] * (1 << _PART_BITS)
        self._offsets, self._sizes = array.array("Q"), array.array("I")
        self._ids, self._contents = array.array("Q"), array.array("Q")
        self._answers = array.array("H")
        self._order = np.empty(0, np.int64)
        self.duplicates = self.left_over = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def extend(self, batch: RowBatch) -> None:
        """Take the prompts of a batch; those of equal content are duplicates."""
        places = self._place(np.array(batch.id_hashes, np.uint64))
        for line, part in zip(batch.lines, _part_of(places).tolist(), strict=True):
            self._offsets.append(self._append(line, part))
        self._sizes.extend(map(len, batch.lines))
        self._ids.extend(batch.id_hashes)
        self._contents.extend(batch.contents)
        self._answers.extend(batch.answers)

    def settle(self, *, max_prompts: int | None = None) -> None:
        """Decide what is kept: conversations from the start of the order with so many answers at most."""
        _, kept = np.unique(np.frombuffer(self._contents, np.uint64), return_index=True)
        self._contents = array.array("Q")
        kept.sort()
        self._tell_apart(kept)
        self._order = kept[np.argsort(self._place(self._ids_of(kept)), kind="stable")]
        self.duplicates = len(self) - len(kept)
        if max_prompts is not None:
            answers = np.cumsum(self._answers_of(self._order), dtype=np.int64)
            self._order = self._order[: max(1, int(np.searchsorted(answers, max_prompts, side="right")))]
        self.left_over = len(kept) - len(self._order)

    @property
    def conversations(self) -> int:
        """How many prompts are kept."""
        return len(self._order)

    @property
    def answers(self) -> int:
        """How many answers they are to get."""
        return int(self._answers_of(self._order).sum(dtype=np.int64))

    def make_entries(self, *, own_history: bool) -> np.ndarray:
        """The index of the kept lines in dispatch order."""
        return make_entries(
            np.frombuffer(self._sizes, np.uint32)[self._order],
            self._ids_of(self._order),
            self._answers_of(self._order),
            np.full(len(self._order), own_history),
        )

    def read_lines(self) -> Iterator[bytes]:
        """The kept lines in dispatch order."""
        self._flush()
        parts = _part_of(self._place(self._ids_of(self._order))).astype(np.int64)
        ends = np.cumsum(np.bincount(parts, minlength=1 << _PART_BITS))
        del parts
        for part, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start < end:
                yield from self._read_part(part, self._order[start:end])

    def close(self) -> None:
        """Close the files; they are the caller's to remove."""
        self._open_files.close()

    def _read_part(self, part: int, rows: np.ndarray) -> Iterator[bytes]:
        descriptor = self._parts[part].fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        pread, sizes, offsets = os.pread, self._sizes, self._offsets
        for row in rows.tolist():
            yield pread(descriptor, sizes[row], offsets[row])

    def _tell_apart(self, kept: np.ndarray) -> None:
        """Rename prompts of a repeated id by their content, all but the one with the least hash of it."""
        repeated = kept[_find_repeated(self._ids_of(kept))]
        if not len(repeated):
            return
        self._flush()
        contents = np.array([int(content_id(self._read(row)), 16) for row in repeated.tolist()], np.uint64)
        ranks = np.array([hash_id(_to_hex(content)) for content in contents.tolist()], np.uint64)
        ids = self._ids_of(repeated)
        by_id = np.lexsort((ranks, ids))
        renamed = np.sort(by_id[1:][ids[by_id[1:]] == ids[by_id[:-1]]])
        for row, content in zip(repeated[renamed].tolist(), contents[renamed].tolist(), strict=True):
            prompt = self._read(row)
            self._replace(row, dataclasses.replace(prompt, id=f"{prompt.id}-{_to_hex(content)}"))

    def _replace(self, row: int, prompt: Prompt) -> None:
        line = prompt.to_line()
        self._ids[row] = hash_id(prompt.id)
        self._sizes[row] = len(line)
        self._offsets[row] = self._append(line, _part_of(self._place(self._ids[row])))

    def _read(self, row: int) -> Prompt:
        part = self._parts[_part_of(self._place(self._ids[row]))]
        return Prompt.from_line(os.pread(part.fileno(), self._sizes[row], self._offsets[row]))

    def _append(self, line: bytes, part: int) -> int:
        """Write a line to a part; returns its offset there."""
        if part not in self._parts:
            raw = (self._folder / f"{part:02}.jsonl").open("w+b", buffering=0)
            self._parts[part] = self._open_files.enter_context(BufferedWriter(raw, _BUFFER_BYTES))
        offset = self._ends[part]
        self._ends[part] += self._parts[part].write(line)
        return offset

    def _flush(self) -> None:
        for file in self._parts.values():
            file.flush()

    def _ids_of(self, rows: np.ndarray) -> np.ndarray:
        ids: np.ndarray = np.frombuffer(self._ids, np.uint64)[rows]
        return ids

    def _answers_of(self, rows: np.ndarray) -> np.ndarray:
        answers: np.ndarray = np.frombuffer(self._answers, np.uint16)[rows]
        return answers

    def _place(self, id_hash: _Hash) -> _Hash:
        """Where an id stands in the order: a mix of seed and id (splitmix64, Steele et al. 2014)."""
        mixed = id_hash ^ self._salt
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)


def _part_of(place: _Hash) -> _Hash:
    return place >> (64 - _PART_BITS)


def _find_repeated(ids: np.ndarray) -> np.ndarray:
    """Where an id is that is not the only one of its kind, ascending."""
    by_id = np.argsort(ids, kind="stable")
    is_same = ids[by_id[1:]] == ids[by_id[:-1]]
    found = np.zeros(len(ids), bool)
    found[by_id[1:]] |= is_same
    found[by_id[:-1]] |= is_same
    return np.flatnonzero(found)


def _to_hex(content: int) -> str:
    return f"{content:016x}"
