"""The rows of a parquet file as plain Python values.

Knows Arrow and its types; does not know where files are. Invariant: every row comes out once, in order, as a
row or as a malformed row with its number and column; memory does not grow with the file.

All structs of a column have the same fields: writers pad each with nulls for those that it had not, so that a
tool's schema has the parameters of every other tool. Null fields of structs are therefore removed. One that
was meant goes too: nothing tells it from padding, which is far more likely. Nulls of columns and of lists
stay, and so do those of turns: a content without a value says something, and adapters take them for missing.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tasks.prepare.sources.rows import MalformedRow, SourceError, SourceRow, describe_error

_BATCH_ROWS = 256
_SPEAKER_FIELDS = frozenset({"role", "from"})

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
            padded = _find_padded(table.schema_arrow)
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                for row in _convert(batch):
                    number += 1
                    where = f"{name}:{number}"
                    if isinstance(row, str):
                        yield MalformedRow(where, row, text_head="")
                    else:
                        yield SourceRow(where, row, b"", _remove_padding(row, padded) if padded else 0)
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


def _find_padded(schema: Any) -> list[tuple[str, bool]]:
    """The columns with structs whose null fields are removed, each with whether it is a list of turns."""
    found = []
    for column in schema:
        turn = _find_turn(column.type)
        kinds = [column.type] if turn is None else [field.type for field in turn]
        if any(map(_has_struct, kinds)):
            found.append((column.name, turn is not None))
    return found


def _find_turn(kind: Any) -> Any:
    """The struct that the items of a list are, where it says who speaks; else None."""
    item = getattr(kind, "value_type", None)  # of a list of any kind
    if item is not None and _is_struct(item) and _SPEAKER_FIELDS.intersection(field.name for field in item):
        return item
    return None


def _has_struct(kind: Any) -> bool:
    item = getattr(kind, "value_type", None)
    return _is_struct(kind) or (item is not None and _has_struct(item))


def _is_struct(kind: Any) -> bool:
    from pyarrow.types import is_struct  # as above

    return bool(is_struct(kind))


def _remove_padding(row: dict[str, Any], padded: list[tuple[str, bool]]) -> int:
    """Remove the null fields of its structs; returns how many they were."""
    removed = 0
    for column, is_turns in padded:
        if not is_turns:
            removed += _remove_nulls([row[column]])
            continue
        for turn in row[column] or ():
            removed += _remove_nulls((turn or {}).values())
    return removed


def _remove_nulls(values: Iterable[Any]) -> int:
    """Remove those of the structs among the values, and of what is in them."""
    removed = 0
    for value in values:
        if isinstance(value, dict):
            nulls = [name for name, field in value.items() if field is None]
            for name in nulls:
                del value[name]
            removed += len(nulls) + _remove_nulls(value.values())
        elif isinstance(value, list):
            removed += _remove_nulls(value)
    return removed
