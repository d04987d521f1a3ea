"""One row of a source, and the strict JSON that rows are made of.

Knows JSON and its common deviations; does not know files. Invariant: every text comes out as a row or as a
malformed row with its place, never as nothing.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from tasks.records import exact_json

NOT_UTF8 = "not UTF-8 text"
_HEAD_CHARS = 120


class SourceError(ValueError):
    """A source can't be read at all; the message names the source or file and what was expected."""


class SourceRow(NamedTuple):  # a frozen dataclass takes twice as long to make, and there is one of each row
    """One row as plain Python values; `where` is its file and 1-based line or record.

    `text` is the JSON that it was parsed from. An integer past 64 bits is a float in `row`, as looking for
    one takes 5 to 10% of preparing a row; `read_exactly` has all its digits. `nulls_removed` counts fields of
    structs that had no value (parquet.py).
    """

    where: str
    row: dict[str, Any]
    text: bytes = b""
    nulls_removed: int = 0


class MalformedRow(NamedTuple):
    """A line or record that is not a JSON object; `text_head` is its beginning."""

    where: str
    detail: str
    text_head: str


def read_row(where: str, text: bytes) -> SourceRow | MalformedRow:
    """The row that a JSON text holds, malformed if it holds none; space around it does not count."""
    try:
        return to_row(where, parse_json(text), text)
    except ValueError as exc:
        return to_malformed(where, exc, text)


def read_exactly(row: SourceRow) -> dict[str, Any]:
    """The row with every digit of its integers.

    Raises:
        RecursionError: it is nested too deep for that.
    """
    try:
        exact: dict[str, Any] = parse_json(row.text, loads=exact_json.loads) if row.text else row.row
    except ValueError as exc:  # it has been read before, by what has another limit
        raise RecursionError(str(exc)) from exc
    return exact


def parse_json(text: bytes, *, loads: Callable[[bytes], Any] = orjson.loads) -> Any:
    """Parse strictly; the NaN and Infinity that Python's json writes come out as None.

    Raises:
        ValueError: the text is no JSON, or has a number that is too large.
    """
    try:
        return loads(text)
    except orjson.JSONDecodeError:
        text = text.strip()  # in messages, places count from where the JSON begins
        if b"NaN" not in text and b"Infinity" not in text:
            return loads(text)
    try:
        return exact_json.loads(exact_json.dumps(json.loads(text, parse_float=exact_json.parse_float)))
    except (TypeError, RecursionError) as exc:
        raise ValueError(str(exc)) from exc


def to_row(where: str, value: Any, text: bytes) -> SourceRow | MalformedRow:
    """The row that a JSON value is; `text` is what it was parsed from."""
    if isinstance(value, dict):
        return SourceRow(where, value, text)
    detail = f"a JSON object was expected, not {type(value).__name__}"
    return MalformedRow(where=where, detail=detail, text_head=_head(text))


def to_malformed(where: str, exc: ValueError, text: bytes) -> MalformedRow:
    """What stands for a text that `parse_json` refused."""
    return MalformedRow(where=where, detail=_find_bad_byte(text) or f"not JSON: {exc}", text_head=_head(text))


def describe_error(exc: Exception) -> str:
    """An error of others in one line: its type and what it says."""
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text[:300]}"


def _find_bad_byte(text: bytes) -> str | None:
    """What a JSON parser does not say well: text of another encoding, mostly Latin-1 or UTF-16."""
    try:
        text.decode()
    except UnicodeDecodeError as exc:
        likely = "UTF-16" if text[:2] in (b"\xff\xfe", b"\xfe\xff") else "ISO-8859-1"
        return (
            f"{NOT_UTF8} (byte 0x{text[exc.start]:02x} at place {exc.start + 1}); save the file as UTF-8, "
            f"for example with iconv -f {likely} -t UTF-8"
        )
    return None


def _head(text: bytes) -> str:
    return text.strip()[: 4 * _HEAD_CHARS].decode("utf-8", errors="replace")[:_HEAD_CHARS]
