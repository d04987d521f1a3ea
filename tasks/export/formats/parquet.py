"""Samples to Parquet, and the Parquet read back to check it.

Knows columns and row groups; does not know where samples come from. Invariant: the same samples in the
same order give the same bytes (with one version of pyarrow); a file is read back before it counts.
"""

import contextlib
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.export.files import ExportError, FileEntry, HashedFile, RowBatch, WriterFile
from tasks.export.split.assign import SPLITS, Split

# Measured on ids as frequent as words are, in bytes and ns of CPU a token: plain 2.54 and 20, in a dictionary
# 2.03 and 28, with their bytes apart 2.12 and 12 (readers know that for integers since 2024).
_ENCODINGS = {"input_ids.list.element": "BYTE_STREAM_SPLIT"}
_CHECKED = ["input_ids", "loss_mask", "n_tokens", "n_loss"]
_READ_AT_ONCE = 2  # each is a row group in memory
_DICTIONARY_COLUMNS = ["finish_reason", "dataset"]
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
    """`data/{split}-NNNNN.parquet`, a row group for each batch; another file after `rows_per_file` rows."""

    def __init__(self, folder: Path, *, rows_per_file: int | None) -> None:
        (folder / "data").mkdir()
        self._folder = folder
        self._rows_per_file = rows_per_file
        self._open: dict[Split, WriterFile] = {}
        self._files: list[FileEntry] = []

    def write(self, batch: RowBatch) -> None:
        """Write the next rows."""
        if batch.split not in self._open:
            number = sum(entry.split == batch.split for entry in self._files)
            entry = FileEntry(f"data/{batch.split}-{number:05d}.parquet", "parquet", batch.split)
            self._open[batch.split] = WriterFile(self._folder, entry, _open_writer)
        file = self._open[batch.split]
        file.write(batch, _to_record_batch(batch), row_group_size=batch.n_rows)
        if file.entry.rows == self._rows_per_file:
            self._close(batch.split)

    def finish(self) -> list[FileEntry]:
        """Close all files, read them back and describe them, train before eval.

        Raises:
            ExportError: a file is not what was written.
        """
        for split in SPLITS:
            if split in self._open:
                self._close(split)
        return sorted(self._files, key=lambda entry: (SPLITS.index(entry.split or "eval"), entry.path))

    def close(self) -> None:
        """Let go of the files."""
        for file in self._open.values():
            with contextlib.suppress(OSError):
                file.close()

    def _close(self, split: Split) -> None:
        file = self._open.pop(split)
        file.finish()
        check_parquet(self._folder, file.entry)
        self._files.append(file.entry)


def check_parquet(folder: Path, entry: FileEntry) -> None:
    """Read a finished file, a row group at a time, and compare it with what was written.

    Raises:
        ExportError: a mask or a length does not fit its row, or the file's sums are not the entry's.
    """
    found = FileEntry(entry.path, entry.format, entry.split, bytes=entry.bytes, sha256=entry.sha256)
    path = folder / entry.path
    metadata = pq.read_metadata(path)
    schema = metadata.schema.to_arrow_schema()
    if schema != SCHEMA:
        raise ExportError(f"{entry.path}: its columns are {schema.names}")
    for table in _read_groups(path, metadata):
        _check_group(table, found)
    if found != entry:
        raise ExportError(f"{entry.path}: {entry} was written but {found} is read back")


def _read_groups(path: Path, metadata: Any) -> Iterator[Any]:
    """The row groups in order; the next ones are unpacked meanwhile, which is most of the work."""

    def read(group: int) -> Any:
        with pq.ParquetFile(path, metadata=metadata, pre_buffer=False) as file:  # which is for slow disks
            return file.read_row_group(group, _CHECKED, use_threads=False).combine_chunks()

    with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
        ahead = deque[Future[Any]]()
        for group in range(metadata.num_row_groups):
            ahead.append(threads.submit(read, group))
            if len(ahead) > _READ_AT_ONCE:
                yield ahead.popleft().result()
        for one in ahead:
            yield one.result()


def _open_writer(file: HashedFile) -> Any:
    return pq.ParquetWriter(
        file,
        SCHEMA,
        compression="zstd",
        use_dictionary=_DICTIONARY_COLUMNS,
        column_encoding=_ENCODINGS,
    )


def to_lists(offsets: np.ndarray, values: np.ndarray) -> Any:
    """A column of lists, without a copy."""
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _to_record_batch(batch: RowBatch) -> Any:
    columns = {
        "id": batch.ids,
        "input_ids": to_lists(batch.offsets, batch.input_ids),
        "loss_mask": to_lists(batch.offsets, batch.loss_mask),
        "n_tokens": np.diff(batch.offsets),
        "n_loss": batch.n_loss,
        "finish_reason": batch.finish_reasons,
        "dataset": batch.datasets,
        "conversation_id": batch.conversation_ids,
        "turn": batch.turns,
        "meta": batch.metas,
    }
    return pa.record_batch(columns, schema=SCHEMA)


def _check_group(table: Any, found: FileEntry) -> None:
    ids, masks = table["input_ids"].chunk(0), table["loss_mask"].chunk(0)
    n_tokens, n_loss = table["n_tokens"].to_numpy(), table["n_loss"].to_numpy()
    mask = masks.flatten().to_numpy()
    ends = np.cumsum(n_tokens, dtype=np.int64)
    for lists, name in ((ids, "input_ids"), (masks, "loss_mask")):
        if not np.array_equal(lists.value_lengths().to_numpy(), n_tokens):
            raise ExportError(f"{found.path}: a row's {name} is not n_tokens long")
    if len(mask) and mask.max() > 1:
        raise ExportError(f"{found.path}: a loss_mask holds {mask.max()}")
    if [np.count_nonzero(row) for row in np.split(mask, ends[:-1])] != n_loss.tolist():
        raise ExportError(f"{found.path}: a row's loss_mask does not sum to n_loss")
    found.rows += len(n_tokens)
    found.tokens += int(n_tokens.sum(dtype=np.int64))
    found.loss_tokens += int(n_loss.sum(dtype=np.int64))
    found.crc32 = zlib.crc32(np.ascontiguousarray(ids.flatten().to_numpy()).data, found.crc32)
