"""The files of an export: what a format has to do, and the JSONL one.

Knows samples, sums and hashes; does not know where samples come from or how they are split. Invariant:
the same samples in the same order give the same bytes.
"""

import contextlib
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

import orjson

from tasks.core.masks import Sample
from tasks.core.split import SPLITS, Split

_BUFFER_BYTES = 1 << 20


class ExportError(RuntimeError):
    """An export that cannot be made or does not check; what was there before is untouched."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportRow:
    """A sample with what is exported beside it; `id` is unique in its dataset, `meta` is JSON text."""

    id: str
    sample: Sample
    dataset: str
    conversation_id: str
    meta: str


@dataclass(slots=True)
class FileEntry:
    """A finished file; `path` is relative to the export, `crc32` is over all input_ids as int32."""

    path: str
    format: str
    split: Split
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    crc32: int = 0
    bytes: int = 0
    sha256: str = ""

    def count(self, row: ExportRow) -> None:
        """Add a row to the sums."""
        self.rows += 1
        self.tokens += row.sample.n_tokens
        self.loss_tokens += row.sample.n_loss
        self.crc32 = zlib.crc32(row.sample.input_ids.data, self.crc32)

    def seal(self, folder: Path) -> None:
        """Take size and hash from the file as it is on disk."""
        with (folder / self.path).open("rb") as file:
            self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self.bytes = file.tell()


class Sink(Protocol):
    """One format of the export. As a context manager it lets go of its files when the block raises."""

    def add(self, split: Split, row: ExportRow) -> None:
        """Write one row."""

    def finish(self) -> list[FileEntry]:
        """Close all files and describe them, in a fixed order."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class JsonlSink:
    """`jsonl/{split}.jsonl` with id, input_ids and loss_mask only: trainers pass other keys on."""

    def __init__(self, folder: Path) -> None:
        (folder / "jsonl").mkdir()
        self._folder = folder
        self._open: dict[Split, tuple[FileEntry, BinaryIO]] = {}

    def add(self, split: Split, row: ExportRow) -> None:
        """Write one row."""
        if split not in self._open:
            entry = FileEntry(f"jsonl/{split}.jsonl", "jsonl", split)
            self._open[split] = entry, (self._folder / entry.path).open("xb", buffering=_BUFFER_BYTES)
        entry, file = self._open[split]
        line = {"id": row.id, "input_ids": row.sample.input_ids, "loss_mask": row.sample.loss_mask}
        file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        entry.count(row)

    def finish(self) -> list[FileEntry]:
        """Close all files and describe them, train before eval."""
        entries = []
        for split in SPLITS:
            if split in self._open:
                entry, file = self._open.pop(split)
                file.close()
                entry.seal(self._folder)
                entries.append(entry)
        return entries

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, file in self._open.values():
            with contextlib.suppress(OSError):
                file.close()
