"""The rows of a parquet file as plain Python values.

Knows Arrow and its types; does not know where files are. Invariant: every row comes out once, in order, as a
row or as a malformed row with its number and column; memory does not grow with the file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tasks.prepare.sources.rows import MalformedRow, SourceError, SourceRow, describe_error

_BATCH_ROWS = 256

# What a value raises that cannot be converted: text that is no UTF-8, dates and zones that Python lacks, …
_CELL_ERRORS = (ValueError, ArithmeticError, LookupError, TypeError, NotImplementedError)


def read_parquet(raw: BinaryIO, *, name: str, place: str) -> Iterator[SourceRow | MalformedRow]:
    """Stream the rows of an open file; `name` and `place` are what rows and errors call it.

    Raises:
        SourceError: it is unreadable, damaged or no parquet.
    """
    import pyarrow as pa  # slow to import, and most sources are JSON Lines
    import pyarrow.parquet as pq

    number = 0
    try:
        # A buffer ahead holds all of the file that has been read, to the end: 10 GB of a 10 GB file.
        with pq.ParquetFile(raw, pre_buffer=False) as table:
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                for row in _convert(batch):
                    number += 1
                    where = f"{name}:{number}"
                    yield SourceRow(where, row) if isinstance(row, dict) else MalformedRow(where, row, "")
    except (pa.ArrowException, OSError, ValueError) as exc:
        why = f"not readable as parquet after {number} rows ({describe_error(exc)})"
        raise SourceError(f"{place}: {why}") from exc


def count_rows(path: Path) -> int:
    """How many rows a file says that it has.

    Raises:
        SourceError: it is unreadable, damaged or no parquet.
    """
    import pyarrow as pa  # as above
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise SourceError(f"{path}: not readable as parquet ({describe_error(exc)})") from exc


def _convert(batch: Any) -> list[dict[str, Any] | str]:
    """The rows of a batch; in place of one with a value that cannot be converted, what is wrong with it."""
    try:
        rows: list[dict[str, Any] | str] = batch.to_pylist()
    except _CELL_ERRORS:  # of some rows: all once more, each by itself
        return [_convert_row(batch, number) for number in range(batch.num_rows)]
    return rows


def _convert_row(batch: Any, number: int) -> dict[str, Any] | str:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[number].as_py()
        except _CELL_ERRORS as exc:
            return f"column {name!r} has a value that cannot be read ({describe_error(exc)})"
    return row
