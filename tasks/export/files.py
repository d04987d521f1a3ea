"""The files of an export: batches of rows, what a format has to do with them, and sums and hashes.

Knows samples and bytes; does not know where samples come from, how they are split, or any format.
Invariant: the same rows in the same order give the same batches, and memory holds one batch a split.
"""

import contextlib
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tasks.export.split.assign import SPLITS, Split
from tasks.tokens.masks import Sample

TOKENS_PER_GROUP = (
    1_000_000  # it stays in the cache from one sink to the next: a sixth less CPU than 4 million
)
_ROWS_PER_GROUP = 100_000
_BUFFER_BYTES = 1 << 20


class ExportError(RuntimeError):
    """An export that cannot be made or does not check; what was there before is untouched."""


class ExportInputError(ExportError):
    """What it is to be made of is not there, or not what it should be: something has to be changed first."""


Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """The words of a generation, the answer at the end; `is_one_row`: no other row has a part of it."""

    id: str
    messages: Messages
    is_one_row: bool


@dataclass(frozen=True, slots=True, eq=False)
class ExportRow:
    """A sample with what is exported beside it; `id` is unique in its dataset, `meta` is JSON text.

    `split_key` decides its split. `conversation` is there where it is asked for and known, once a generation.
    """

    id: str
    sample: Sample
    dataset: str
    conversation_id: str
    meta: str
    split_key: int
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """Rows of one split as columns, their ids and masks end to end.

    Row n is `input_ids[offsets[n] : offsets[n + 1]]`. `input_ids` int32 and `loss_mask` uint8 are
    (n_tokens,), `offsets` int32 is (rows + 1,); the lists have of each row what ExportRow and Sample tell.
    """

    split: Split
    input_ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    n_loss: list[int]
    ids: list[str]
    turns: list[int]
    finish_reasons: list[str]
    datasets: list[str]
    conversation_ids: list[str]
    metas: list[str]
    conversations: list[Conversation | None]

    @classmethod
    def from_rows(cls, split: Split, rows: Sequence[ExportRow]) -> "RowBatch":
        """Lay rows end to end."""
        samples = [row.sample for row in rows]
        return cls(
            split=split,
            input_ids=np.concatenate([sample.input_ids for sample in samples]),
            loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
            offsets=np.cumsum([0, *[sample.n_tokens for sample in samples]]).astype(np.int32),
            n_loss=[sample.n_loss for sample in samples],
            ids=[row.id for row in rows],
            turns=[sample.turn for sample in samples],
            finish_reasons=[sample.finish_reason for sample in samples],
            datasets=[row.dataset for row in rows],
            conversation_ids=[row.conversation_id for row in rows],
            metas=[row.meta for row in rows],
            conversations=[row.conversation for row in rows],
        )

    @property
    def n_rows(self) -> int:
        """How many rows it has."""
        return len(self.ids)

    def slice(self, row: int) -> slice:
        """Where a row's ids and mask are."""
        return slice(self.offsets[row], self.offsets[row + 1])


@dataclass(slots=True)
class FileEntry:
    """A finished file; `path` is relative to the export, `crc32` is over all input_ids as int32.

    A file without rows has no split.
    """

    path: str
    format: str
    split: Split | None = None
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    crc32: int = 0
    bytes: int = 0
    sha256: str = ""

    def count(self, batch: RowBatch) -> None:
        """Add rows to the sums."""
        self.rows += batch.n_rows
        self.tokens += len(batch.input_ids)
        self.loss_tokens += sum(batch.n_loss)
        self.crc32 = zlib.crc32(batch.input_ids.data, self.crc32)


class Sink(Protocol):
    """One format of the export. Closing lets go of its files without a word, whatever has happened."""

    def write(self, batch: RowBatch) -> None:
        """Write the next rows."""

    def finish(self) -> list[FileEntry]:
        """Finish all files and describe them, in a fixed order."""

    def close(self) -> None:
        """Let go of the files."""


class HashedFile(io.RawIOBase):
    """A new file, hashed as it is written: what would be read back is gigabytes. Closing fills its entry."""

    def __init__(self, folder: Path, entry: FileEntry) -> None:
        super().__init__()
        self.entry = entry
        self._hash = hashlib.sha256()
        self._file = (folder / entry.path).open("xb", buffering=_BUFFER_BYTES)

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """How many bytes were written; Parquet's footer has places in the file."""
        return self.entry.bytes

    def write(self, data: Any, /) -> int:
        """Write all of it."""
        size = memoryview(data).nbytes
        with self._named_errors():
            self._file.write(data)
        self._hash.update(data)
        self.entry.bytes += size
        return size

    def close(self) -> None:
        """Close it, once."""
        if not self.closed:
            try:
                with self._named_errors():
                    self._file.close()
                self.entry.sha256 = self._hash.hexdigest()
            finally:
                super().close()

    def finish(self) -> None:
        """Close a file that is whole; it is on the disk then, and nobody has to wait for all at the end."""
        try:
            with self._named_errors():
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self.close()

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """A full disk names no file by itself."""
        try:
            yield
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, self._file.name) from exc


class WriterFile:
    """A file that a writer of pyarrow's fills; `open_writer` takes the file."""

    def __init__(self, folder: Path, entry: FileEntry, open_writer: Callable[[HashedFile], Any]) -> None:
        self.entry = entry
        self._file = HashedFile(folder, entry)
        self._writer = open_writer(self._file)

    def write(self, batch: RowBatch, record_batch: Any, **options: Any) -> None:
        """Write the rows of a batch, as the format has them."""
        self._writer.write_batch(record_batch, **options)
        self.entry.count(batch)

    def finish(self) -> None:
        """Write the file's end and close it; it is on the disk then."""
        try:
            self._writer.close()
        except BaseException:
            self._file.close()
            raise
        self._file.finish()

    def close(self) -> None:
        """Let go of it."""
        try:
            self._writer.close()
        finally:
            self._file.close()


def write_file(folder: Path, entry: FileEntry, data: bytes) -> FileEntry:
    """A small file whole."""
    with HashedFile(folder, entry) as file:
        file.write(data)
    return entry


@dataclass(slots=True)
class Batcher:
    """Collects rows into batches bounded by tokens, and cut where a file of rows_per_file rows ends."""

    tokens_per_group: int
    rows_per_file: int | None
    _pending: dict[Split, list[ExportRow]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    _tokens: dict[Split, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    _rows: dict[Split, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))

    def add(self, split: Split, row: ExportRow) -> Iterator[RowBatch]:
        """Take a row; gives what is full."""
        if self._tokens[split] + row.sample.n_tokens > self.tokens_per_group:
            yield from self._take(split)
        self._pending[split].append(row)
        self._tokens[split] += row.sample.n_tokens
        self._rows[split] += 1
        ends_file = self.rows_per_file is not None and self._rows[split] % self.rows_per_file == 0
        if ends_file or len(self._pending[split]) == _ROWS_PER_GROUP:
            yield from self._take(split)

    def flush(self) -> Iterator[RowBatch]:
        """What is left, train before eval."""
        for split in SPLITS:
            yield from self._take(split)

    def _take(self, split: Split) -> Iterator[RowBatch]:
        rows, self._pending[split], self._tokens[split] = self._pending[split], [], 0
        if rows:
            yield RowBatch.from_rows(split, rows)
