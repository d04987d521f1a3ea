"""Samples to Parquet, and the Parquet read back to check it.

Knows columns and row groups; does not know where samples come from. Invariant: the same samples in the
same order give the same bytes (with one version of pyarrow), and memory holds one row group a split.
"""

import contextlib
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.core.export_files import ExportError, ExportRow, FileEntry
from tasks.core.split import SPLITS, Split

TOKENS_PER_GROUP = 4_000_000
_ROWS_PER_GROUP = 100_000
# Long runs and few values. Ids stay plain: a dictionary saves 4% and costs half again the time.
_DICTIONARY_COLUMNS = ["loss_mask.list.element", "finish_reason", "dataset"]
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("n_tokens", pa.int32()),
        ("n_loss", pa.int32()),
        ("finish_reason", pa.string()),
        ("dataset", pa.string()),
        ("conversation_id", pa.string()),
        ("turn", pa.int32()),
        ("meta", pa.string()),
    ]
)


class ParquetSink:
    """`data/{split}-NNNNN.parquet`, row groups bounded by tokens."""

    def __init__(self, folder: Path, *, rows_per_file: int | None, tokens_per_group: int) -> None:
        (folder / "data").mkdir()
        self._folder = folder
        self._rows_per_file = rows_per_file
        self._tokens_per_group = tokens_per_group
        self._open: dict[Split, _ParquetFile] = {}
        self._files: list[FileEntry] = []

    def add(self, split: Split, row: ExportRow) -> None:
        """Write one row."""
        file = self._open.get(split)
        if file is not None and file.entry.rows == self._rows_per_file:
            self._close(split)
            file = None
        if file is None:
            number = sum(entry.split == split for entry in self._files)
            entry = FileEntry(f"data/{split}-{number:05d}.parquet", "parquet", split)
            file = self._open[split] = _ParquetFile(self._folder, entry, self._tokens_per_group)
        file.add(row)

    def finish(self) -> list[FileEntry]:
        """Close all files and describe them, train before eval."""
        for split in SPLITS:
            if split in self._open:
                self._close(split)
        return sorted(self._files, key=lambda entry: (SPLITS.index(entry.split), entry.path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            with contextlib.suppress(OSError):
                file.close()

    def _close(self, split: Split) -> None:
        file = self._open.pop(split)
        try:
            file.flush()
        finally:
            file.close()
        file.entry.seal(self._folder)
        self._files.append(file.entry)


def check_parquet(folder: Path, entry: FileEntry) -> None:
    """Read a finished file, a row group at a time, and compare it with what was written.

    Raises:
        ExportError: a mask or a length does not fit its row, or the file's sums are not the entry's.
    """
    found = FileEntry(entry.path, entry.format, entry.split, bytes=entry.bytes, sha256=entry.sha256)
    with pq.ParquetFile(folder / entry.path) as file:
        if file.schema_arrow != SCHEMA:
            raise ExportError(f"{entry.path}: its columns are {file.schema_arrow.names}")
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, ["input_ids", "loss_mask", "n_tokens", "n_loss"])
            _check_group(table.combine_chunks(), found)
    if found != entry:
        raise ExportError(f"{entry.path}: {entry} was written but {found} is read back")


class _ParquetFile:
    """One Parquet file that is being written."""

    def __init__(self, folder: Path, entry: FileEntry, tokens_per_group: int) -> None:
        self.entry = entry
        self._tokens_per_group = tokens_per_group
        self._pending: list[ExportRow] = []
        self._pending_tokens = 0
        self._file = (folder / entry.path).open("xb")
        self._writer = pq.ParquetWriter(
            self._file, SCHEMA, compression="zstd", use_dictionary=_DICTIONARY_COLUMNS
        )

    def add(self, row: ExportRow) -> None:
        full = self._pending_tokens + row.sample.n_tokens > self._tokens_per_group
        if full or len(self._pending) == _ROWS_PER_GROUP:
            self.flush()
        self._pending.append(row)
        self._pending_tokens += row.sample.n_tokens
        self.entry.count(row)

    def flush(self) -> None:
        if self._pending:
            self._writer.write_batch(_to_batch(self._pending), row_group_size=len(self._pending))
            self._pending.clear()
            self._pending_tokens = 0

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            self._file.close()


def _to_batch(rows: list[ExportRow]) -> Any:
    samples = [row.sample for row in rows]
    lengths = [sample.n_tokens for sample in samples]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns = {
        "id": [row.id for row in rows],
        "input_ids": _to_lists(offsets, np.concatenate([s.input_ids for s in samples])),
        "loss_mask": _to_lists(offsets, np.concatenate([s.loss_mask for s in samples])),
        "n_tokens": lengths,
        "n_loss": [sample.n_loss for sample in samples],
        "finish_reason": [sample.finish_reason for sample in samples],
        "dataset": [row.dataset for row in rows],
        "conversation_id": [row.conversation_id for row in rows],
        "turn": [sample.turn for sample in samples],
        "meta": [row.meta for row in rows],
    }
    return pa.record_batch(columns, schema=SCHEMA)


def _to_lists(offsets: np.ndarray, values: np.ndarray) -> Any:
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _check_group(table: Any, found: FileEntry) -> None:
    ids, masks = table["input_ids"].chunk(0), table["loss_mask"].chunk(0)
    n_tokens, n_loss = table["n_tokens"].to_numpy(), table["n_loss"].to_numpy()
    mask = masks.flatten().to_numpy()
    offsets = np.concatenate([[0], np.cumsum(n_tokens, dtype=np.int64)])
    ones = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    for lists, name in ((ids, "input_ids"), (masks, "loss_mask")):
        if not np.array_equal(lists.value_lengths().to_numpy(), n_tokens):
            raise ExportError(f"{found.path}: a row's {name} is not n_tokens long")
    if len(mask) and mask.max() > 1:
        raise ExportError(f"{found.path}: a loss_mask holds {mask.max()}")
    if not np.array_equal(ones[offsets[1:]] - ones[offsets[:-1]], n_loss):
        raise ExportError(f"{found.path}: a row's loss_mask does not sum to n_loss")
    found.rows += len(n_tokens)
    found.tokens += int(n_tokens.sum(dtype=np.int64))
    found.loss_tokens += int(n_loss.sum(dtype=np.int64))
    found.crc32 = zlib.crc32(np.ascontiguousarray(ids.flatten().to_numpy()).data, found.crc32)
