"""Samples to JSON Lines, with the three keys that trainers take and no other: they pass others on.

Knows `jsonl/{split}.jsonl`; does not know where samples come from. Invariant: the same samples in the same
order give the same bytes.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson

from tasks.export.files import FileEntry, HashedFile, RowBatch
from tasks.export.split.assign import SPLITS, Split

_ZERO, _COMMA = b"0,"
_TOKENS_PER_WRITE = 1 << 16  # each write is a wait for the interpreter; a whole batch would be in no cache


class JsonlSink:
    """`jsonl/{split}.jsonl` with id, input_ids and loss_mask."""

    def __init__(self, folder: Path) -> None:
        (folder / "jsonl").mkdir()
        self._folder = folder
        self._open: dict[Split, HashedFile] = {}

    def write(self, batch: RowBatch) -> None:
        """Write the next rows."""
        if batch.split not in self._open:
            entry = FileEntry(f"jsonl/{batch.split}.jsonl", "jsonl", batch.split)
            self._open[batch.split] = HashedFile(self._folder, entry)
        file = self._open[batch.split]
        for first, last in _cut(batch.offsets):
            file.write(b"".join(_list_parts(batch, first, last)))
        file.entry.count(batch)

    def finish(self) -> list[FileEntry]:
        """Close all files and describe them, train before eval."""
        files = [self._open[split] for split in SPLITS if split in self._open]
        for file in files:
            file.finish()
        return [file.entry for file in files]

    def close(self) -> None:
        """Let go of the files."""
        for file in self._open.values():
            with contextlib.suppress(OSError):
                file.close()


def _cut(offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    """The rows that are written at once, [first, last): one, or as many as are small."""
    first, rows = 0, len(offsets) - 1
    while first < rows:
        fitting = int(np.searchsorted(offsets, offsets[first] + _TOKENS_PER_WRITE, "right")) - 1
        last = max(fitting, first + 1)
        yield first, last
        first = last


def _list_parts(batch: RowBatch, first: int, last: int) -> Iterator[bytes | memoryview]:
    """What the lines of these rows are made of, in order."""
    offsets = (batch.offsets[first : last + 1] - batch.offsets[first]).tolist()
    masks = _mask_text(batch.loss_mask[batch.offsets[first] : batch.offsets[last]])
    ids = batch.input_ids[batch.offsets[first] : batch.offsets[last]]
    for name, start, end in zip(batch.ids[first:last], offsets, offsets[1:], strict=False):
        yield b'{"id":'
        yield orjson.dumps(name)
        yield b',"input_ids":'
        yield orjson.dumps(ids[start:end], option=orjson.OPT_SERIALIZE_NUMPY)
        yield b',"loss_mask":['
        yield masks[2 * start : max(2 * end - 1, 2 * start)]
        yield b"]}\n"


def _mask_text(mask: np.ndarray) -> memoryview:
    """The ones and zeros, a comma after each; a quarter of the time that a general encoder takes."""
    text = np.full(2 * len(mask), _COMMA, np.uint8)
    np.add(mask, _ZERO, out=text[::2])
    return text.data
