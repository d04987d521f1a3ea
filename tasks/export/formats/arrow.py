"""Samples to folders that `datasets.load_from_disk` opens, made by pyarrow alone.

Knows Arrow streams and the two JSON files beside them, as `datasets` 5.2 writes them; does not know where
samples come from. Invariant: the same samples in the same order give the same bytes, the fingerprint too.
"""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.export.files import FileEntry, HashedFile, RowBatch, WriterFile, write_file
from tasks.export.formats.parquet import to_lists
from tasks.export.split.assign import SPLITS, Split
from tasks.records.files import dump_json

TOKENS_PER_SHARD = 100_000_000  # of 5 bytes each: the 500 MB that `datasets` takes too
SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("seq_len", pa.int64())]
)


class ArrowSink:
    """`arrow/{split}/data-NNNNN-of-NNNNN.arrow`; another shard before one would pass `tokens_per_shard`."""

    def __init__(self, folder: Path, *, tokens_per_shard: int = TOKENS_PER_SHARD) -> None:
        (folder / "arrow").mkdir()
        self._folder = folder
        self._tokens_per_shard = tokens_per_shard
        self._open: dict[Split, WriterFile] = {}
        self._files: dict[Split, list[FileEntry]] = {split: [] for split in SPLITS}

    def write(self, batch: RowBatch) -> None:
        """Write the next rows."""
        shard = self._open.get(batch.split)
        if shard is not None and shard.entry.tokens + len(batch.input_ids) > self._tokens_per_shard:
            self._close(batch.split)
            shard = None
        if shard is None:
            shard = self._open[batch.split] = self._start(batch.split)
        shard.write(batch, _to_record_batch(batch))

    def finish(self) -> list[FileEntry]:
        """Close all files, name them by their number, and describe them, train before eval."""
        for split in list(self._open):
            self._close(split)
        return [entry for split in SPLITS if self._files[split] for entry in self._seal(split)]

    def close(self) -> None:
        """Let go of the files."""
        for shard in self._open.values():
            with contextlib.suppress(OSError):
                shard.close()

    def _start(self, split: Split) -> WriterFile:
        (self._folder / "arrow" / split).mkdir(exist_ok=True)
        number = len(self._files[split])
        entry = FileEntry(f"arrow/{split}/data-{number:05d}.arrow", "arrow", split)
        return WriterFile(self._folder, entry, _open_writer)

    def _close(self, split: Split) -> None:
        shard = self._open.pop(split)
        shard.finish()
        self._files[split].append(shard.entry)

    def _seal(self, split: Split) -> list[FileEntry]:
        """Name the shards by how many there are, and write what makes a data set of them."""
        shards = self._files[split]
        for number, entry in enumerate(shards):
            path = f"arrow/{split}/data-{number:05d}-of-{len(shards):05d}.arrow"
            (self._folder / entry.path).rename(self._folder / path)
            entry.path = path
        beside = {"dataset_info.json": _INFO, "state.json": _describe_state(shards)}
        return shards + [
            write_file(self._folder, FileEntry(f"arrow/{split}/{name}", "arrow", split), dump_json(content))
            for name, content in beside.items()
        ]


def _open_writer(file: HashedFile) -> Any:
    return pa.ipc.new_stream(file, SCHEMA)


def _to_record_batch(batch: RowBatch) -> Any:
    columns = [
        to_lists(batch.offsets, batch.input_ids),
        to_lists(batch.offsets, batch.loss_mask),
        pa.array(np.diff(batch.offsets).astype(np.int64)),
    ]
    return pa.record_batch(columns, schema=SCHEMA)


def _list_of(dtype: str) -> dict[str, Any]:
    # "Sequence" is what versions before 4 know; later ones read it as their "List".
    return {"_type": "Sequence", "feature": {"_type": "Value", "dtype": dtype}}


_INFO = {
    "citation": "",
    "description": "",
    "features": {
        "input_ids": _list_of("int32"),
        "loss_mask": _list_of("uint8"),
        "seq_len": {"_type": "Value", "dtype": "int64"},
    },
    "homepage": "",
    "license": "",
}


def _describe_state(shards: list[FileEntry]) -> dict[str, Any]:
    """The fingerprint names what is in the shards; `datasets` itself makes it of the time."""
    content = "".join(entry.sha256 for entry in shards)
    return {
        "_data_files": [{"filename": Path(entry.path).name} for entry in shards],
        "_fingerprint": hashlib.sha256(content.encode()).hexdigest()[:16],
        "_format_columns": SCHEMA.names,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
