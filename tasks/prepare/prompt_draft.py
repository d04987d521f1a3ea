"""The prompts of a dataset on disk until it is known which are kept, under which ids, in which order.

Knows lines, ids and hashes; does not know sources. Holds 30 bytes a line, and about three times that for a
moment when they are put in order. Invariant: kept is the first of each content, and the order of the lines
decides neither ids nor the order.
"""

import array
import dataclasses
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tasks.prepare.adapters import content_id
from tasks.prepare.draft_lines import PARTS, DispatchOrder, DraftReader, DraftWriter, LineTable
from tasks.prepare.row_batches import RowBatch
from tasks.records.prompt_file import hash_id, make_entries
from tasks.records.rows import Prompt

_MAX_LINES = 4096


@dataclass(frozen=True, slots=True)
class KeptLines:
    """Some kept lines that follow one another, of one part: their places and sizes, uint64 and uint32."""

    part: int
    places: np.ndarray
    sizes: np.ndarray

    def read(self, reader: DraftReader) -> Iterator[bytes]:
        """The lines."""
        return reader.read_lines(self.part, self.places.tolist(), self.sizes.tolist())


class PromptDraft:
    """Takes prompts in source order and gives the kept ones back in dispatch order.

    That is a seeded shuffle by a mix of seed and id. Call `settle` between the two.
    """

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.folder = folder
        self.order = DispatchOrder.of_seed(seed)
        self._writer = DraftWriter(folder, self.order)
        self._lines = LineTable()
        self._kept = np.empty(0, np.int64)
        self.duplicates = self.left_over = self.nulls_removed = 0

    def __len__(self) -> int:
        return len(self._lines)

    def extend(self, batch: RowBatch) -> None:
        """Take the prompts of a batch; those of equal content are duplicates."""
        self._writer.write(batch, self._lines)
        self.nulls_removed += batch.nulls_removed

    def add(self, lines: LineTable) -> None:
        """Take prompts whose lines another writer wrote."""
        self._lines.extend(lines)

    def settle(self, *, max_prompts: int | None = None) -> None:
        """Decide what is kept: conversations from the start of the order with so many answers at most."""
        _, kept = np.unique(np.frombuffer(self._lines.contents, np.uint64), return_index=True)
        self._lines.contents = array.array("Q")
        kept.sort()
        self._writer.flush()
        self._make_ids_unique(kept)
        self._writer.flush()
        self._kept = kept[np.argsort(self.order.rank(self._ids_of(kept)), kind="stable")]
        self.duplicates = len(self) - len(kept)
        if max_prompts is not None:
            answers = np.cumsum(self._answers_of(self._kept), dtype=np.int64)
            self._kept = self._kept[: max(1, int(np.searchsorted(answers, max_prompts, side="right")))]
        self.left_over = len(kept) - len(self._kept)

    @property
    def conversations(self) -> int:
        """How many prompts are kept."""
        return len(self._kept)

    @property
    def answers(self) -> int:
        """How many answers they are to get."""
        return int(self._answers_of(self._kept).sum(dtype=np.int64))

    def make_entries(self, *, own_history: bool) -> np.ndarray:
        """The index of the kept lines in dispatch order."""
        return make_entries(
            self._sizes_of(self._kept),
            self._ids_of(self._kept),
            self._answers_of(self._kept),
            np.full(len(self._kept), own_history),
        )

    def iter_kept(self) -> Iterator[KeptLines]:
        """The kept lines in dispatch order."""
        parts = self.order.part(self._ids_of(self._kept)).astype(np.int64)
        ends = np.cumsum(np.bincount(parts, minlength=PARTS)).tolist()
        del parts
        places = np.frombuffer(self._lines.places, np.uint64)
        for part, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            for first in range(start, end, _MAX_LINES):
                rows = self._kept[first : min(end, first + _MAX_LINES)]
                yield KeptLines(part, places[rows], self._sizes_of(rows))

    def read_lines(self) -> Iterator[bytes]:
        """The same, read here."""
        with closing(DraftReader(self.folder)) as reader:
            for kept in self.iter_kept():
                yield from kept.read(reader)

    def close(self) -> None:
        """Close the files; they are the caller's to remove."""
        self._writer.close()

    def _make_ids_unique(self, kept: np.ndarray) -> None:
        """Rename prompts of a repeated id by their content, all but the one with the least hash of it."""
        repeated = kept[_find_repeated(self._ids_of(kept))]
        if not len(repeated):
            return
        # All of one part after the other: each is opened once.
        repeated = repeated[np.argsort(self.order.part(self._ids_of(repeated)), kind="stable")]
        with closing(DraftReader(self.folder, read_ahead=False)) as reader:
            read = partial(self._read, reader)
            contents = np.array([int(content_id(read(row)), 16) for row in repeated.tolist()], np.uint64)
            ranks = np.array([hash_id(_to_hex(content)) for content in contents.tolist()], np.uint64)
            ids = self._ids_of(repeated)
            by_id = np.lexsort((ranks, ids))
            renamed = np.sort(by_id[1:][ids[by_id[1:]] == ids[by_id[:-1]]])
            for row, content in zip(repeated[renamed].tolist(), contents[renamed].tolist(), strict=True):
                prompt = read(row)
                self._replace(row, dataclasses.replace(prompt, id=f"{prompt.id}-{_to_hex(content)}"))

    def _replace(self, row: int, prompt: Prompt) -> None:
        line, lines = prompt.to_line(), self._lines
        lines.ids[row] = hash_id(prompt.id)
        lines.sizes[row] = len(line)
        lines.places[row] = self._writer.append(line, self.order.part(lines.ids[row]))

    def _read(self, reader: DraftReader, row: int) -> Prompt:
        lines = self._lines
        [line] = reader.read_lines(
            self.order.part(lines.ids[row]), lines.places[row : row + 1], lines.sizes[row : row + 1]
        )
        return Prompt.from_line(line)

    def _ids_of(self, rows: np.ndarray) -> np.ndarray:
        ids: np.ndarray = np.frombuffer(self._lines.ids, np.uint64)[rows]
        return ids

    def _sizes_of(self, rows: np.ndarray) -> np.ndarray:
        sizes: np.ndarray = np.frombuffer(self._lines.sizes, np.uint32)[rows]
        return sizes

    def _answers_of(self, rows: np.ndarray) -> np.ndarray:
        answers: np.ndarray = np.frombuffer(self._lines.answers, np.uint16)[rows]
        return answers


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
