"""Responses with their ids as arrays: an id is never a Python object, which is half the work of a big export.

Knows JSON and where a row has ids; what a row must have is for records and masks to say. Invariant: a line
gives the samples that `Response.from_line` gives, or is read by that.
"""

from typing import Any

import numpy as np
import simdjson

from tasks.records.rows import SEQUENCES, Response

_IDS = ("input_ids", "output_ids")
_SPACE = 8  # bytes around a word that are looked at; where they are all space, it counts as listed
_BEFORE, _BEHIND = (b"[", b",", b""), (b",", b"]", b"")
_BOM = b"\xef\xbb\xbf"  # simdjson passes it over


class ResponseReader:
    """Reads one line after another; not to be shared by threads."""

    def __init__(self) -> None:
        self._parser = simdjson.Parser()

    def read(self, line: bytes) -> Response:
        """A row with int64 arrays as its ids; with lists where they are not whole numbers.

        Raises:
            RecordError: as Response.from_line.
        """
        row = self._parse(line)
        return Response.from_line(line) if row is None else Response.from_row(row)

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        """None for what only the other parser reads, or explains. No part of a document may outlive this."""
        if line.startswith(_BOM):
            return None
        try:
            return _to_row(self._parser.parse(line), line)
        except (ValueError, TypeError, RuntimeError, AttributeError):
            return None


def _to_row(document: Any, line: bytes) -> dict[str, Any]:
    names = list(document.keys())  # items() would make Python lists of all
    if len(set(names)) < len(names):
        raise ValueError("a name twice: the two parsers take another one of them")
    return {name: _to_value(name, document[name], line) for name in names}


def _to_value(name: str, value: Any, line: bytes) -> Any:
    if isinstance(value, simdjson.Array):
        if name in _IDS:
            return _to_ids(value, line)
        return [_to_row(value[n], line) for n in range(len(value))] if name == SEQUENCES else value.as_list()
    return value.as_dict() if isinstance(value, simdjson.Object) else value


def _to_ids(value: Any, line: bytes) -> np.ndarray:
    ids = np.frombuffer(value.as_buffer(of_type="i"), np.int64)
    if len(ids) != len(value) or (len(ids) and not isinstance(value[0], int)):
        raise ValueError("lists inside of it, which as_buffer lays end to end")
    if len(ids) and np.minimum.reduce(ids) <= 1 and (_lists(b"true", line) or _lists(b"false", line)):
        raise ValueError("perhaps a true or a false among them, which as_buffer gives as 1 and 0")
    return ids


def _lists(word: bytes, line: bytes) -> bool:
    """Whether a word stands somewhere as it would in a JSON list; in a text it hardly ever does."""
    at = line.find(word)
    while at >= 0:
        end = at + len(word)
        before, behind = line[max(0, at - _SPACE) : at].rstrip(), line[end : end + _SPACE].lstrip()
        if before[-1:] in _BEFORE and behind[:1] in _BEHIND:
            return True
        at = line.find(word, end)
    return False
