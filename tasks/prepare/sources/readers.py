"""One dataset file as rows.

Knows the file formats (JSON Lines and JSON arrays, plain, gzip or zstd; parquet); does not know where files
are. Invariant: every non-blank line or record comes out once, in order, as a row or as a malformed row
with its place; memory does not grow with the file, only with its longest row.
"""

import contextlib
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from tasks.prepare.sources.parquet import read_parquet
from tasks.prepare.sources.rows import (
    NOT_UTF8,
    MalformedRow,
    SourceError,
    SourceRow,
    parse_json,
    read_row,
    to_malformed,
    to_row,
)

SUPPORTED = (
    ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst",
    ".json", ".json.gz", ".json.zst", ".parquet",
)  # fmt: skip
KINDS = ".jsonl, .ndjson, .json (each also .gz or .zst) or .parquet"  # the same for a message

_BOM = b"\xef\xbb\xbf"
_SNIFF_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_MAX_RECORD_BYTES = 1 << 28  # a quote too many makes one record of the rest of a file
_OVER_LINES = (
    "it is one JSON object over several lines: one row per line is needed, or a JSON array in a .json file"
)
_WRONG_LINES = 5  # this many lines without any JSON at the start: not the format, rather than a bad line

# Up to the next bracket, or to the comma between two records, over strings and innermost brackets at once.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT = rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+"
_INNERMOST = rb"\{" + _FLAT + rb"\}|\[" + _FLAT + rb"\]"
_WITHIN_RECORD = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb"|" + _INNERMOST + rb")*+[\[\]{}]", re.DOTALL)
_BETWEEN_RECORDS = re.compile(
    rb'(?:[^"\[\]{},]++|' + _STRING + rb"|" + _INNERMOST + rb")*+[\[\]{},]", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file wherever it is: `name` tells its format, `place` tells people where it is."""

    name: str
    place: str
    open: Callable[[], BinaryIO]


@dataclass(slots=True)
class SeenRows:
    """What the rows of a file were so far: one that has malformed ones only is not what its name says."""

    any_good: bool = False
    first_bad: MalformedRow | None = None

    def watch(self, rows: Iterable[SourceRow | MalformedRow]) -> Iterator[SourceRow | MalformedRow]:
        """The same rows, seen."""
        for row in rows:
            if isinstance(row, SourceRow):
                self.any_good = True
            elif self.first_bad is None:
                self.first_bad = row
            yield row

    def add(self, later: "SeenRows") -> None:
        """Take what was seen of the rows that follow."""
        self.any_good = self.any_good or later.any_good
        self.first_bad = self.first_bad or later.first_bad

    def check(self, file: DataFile) -> None:
        """Call this after the last row.

        Raises:
            SourceError: there are rows and not one is good.
        """
        if (bad := self.first_bad) is not None and not self.any_good:
            what = _OVER_LINES if _begins_object(bad) else f"{bad.where}: {bad.detail}"
            raise SourceError(f"{file.place}: not one usable row; {what}")


def suffix_of(name: str) -> str | None:
    """The supported suffix that a file's name ends with."""
    return next((suffix for suffix in SUPPORTED if name.lower().endswith(suffix)), None)


def read_file(file: DataFile) -> Iterator[SourceRow | MalformedRow]:
    """Stream the rows of one file; blank lines are skipped.

    Raises:
        SourceError: the file is unreadable or damaged, is not what its name says, or is not empty and yet
            has not one good row.
    """
    seen = SeenRows()
    yield from seen.watch(_read_any(file))
    seen.check(file)


def read_lines(file: DataFile) -> Iterator[SourceRow | MalformedRow]:
    """The rows of a file that has one on each line.

    Raises:
        SourceError: the file is unreadable, or its first lines have no JSON at all.
    """
    # Bad lines before the first JSON: perhaps the file is no JSON at all, or one array over many lines.
    held: list[MalformedRow] = []
    seen_json = False
    for number, text in _iter_lines(file):
        where = f"{file.name}:{number}"
        try:
            value = parse_json(text)
        except ValueError as exc:
            bad = to_malformed(where, exc, text)
            if seen_json:
                yield bad
                continue
            held.append(bad)
            if len(held) == _WRONG_LINES or held[0].text_head.startswith("["):
                break
            continue
        yield from held
        held = []
        seen_json = True
        yield to_row(where, value, text)
    if held:
        raise SourceError(f"{file.place}: {_explain_no_lines(held)}")


def _explain_no_lines(held: Sequence[MalformedRow]) -> str:
    """What a file is that has no JSON in its first lines."""
    first, many = held[0], len(held) > 1
    start = f"(it starts {first.text_head!r})"
    if first.detail.startswith(NOT_UTF8) and ("UTF-16" in first.detail or first.text_head[:1] in "{["):
        return f"{first.detail} {start}"  # else it is no text at all: an image, say
    if many and _begins_object(first):
        return f"{_OVER_LINES} {start}"
    return (
        f"not JSON Lines: no JSON in its first {f'{len(held)} lines' if many else 'line'} {start}; "
        f"expected {KINDS}, and a JSON array only in a .json file"
    )


def _begins_object(line: MalformedRow) -> bool:
    """Whether a line opens a JSON object and leaves it to later ones to go on."""
    return line.text_head.startswith("{") and line.text_head[-1] in "{[,"


@contextlib.contextmanager
def open_stream(file: DataFile) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed.

    Raises:
        SourceError: it is unreadable or damaged, which is seen within the block, too.
    """
    suffix = Path(file.name).suffix.lower()
    try:
        with file.open() as raw:
            if suffix == ".zst":
                import pyarrow as pa  # slow to import, and most sources are plain

                with pa.CompressedInputStream(raw, "zstd") as plain, io.BufferedReader(plain) as stream:
                    yield cast("BinaryIO", stream)
            elif suffix == ".gz":
                with gzip.open(raw) as stream:
                    yield cast("BinaryIO", stream)
            else:
                yield raw
    except (OSError, EOFError, zlib.error) as exc:  # a cut or damaged gzip raises any of the three
        raise SourceError(f"{file.place}: cannot be read to its end ({exc})") from exc


def _read_any(file: DataFile) -> Iterator[SourceRow | MalformedRow]:
    suffix = suffix_of(file.name)
    if suffix is None:
        raise SourceError(f"{file.place}: unsupported file; expected {KINDS}")
    if suffix == ".parquet":
        return _read_parquet(file)
    if suffix.startswith(".json") and not suffix.startswith(".jsonl") and _starts_as_array(file):
        return _read_array(file)
    return read_lines(file)


def _starts_as_array(file: DataFile) -> bool:
    with open_stream(file) as stream:
        return stream.read(_SNIFF_BYTES).removeprefix(_BOM).lstrip().startswith(b"[")


def _iter_lines(file: DataFile) -> Iterator[tuple[int, bytes]]:
    with open_stream(file) as stream:
        for number, line in enumerate(stream, 1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if text and not text.isspace():  # to strip it is to copy it
                yield number, text


def _read_array(file: DataFile) -> Iterator[SourceRow | MalformedRow]:
    """Each record is parsed as a line would be, so that a bad one is one malformed row."""
    number = 0
    try:
        with open_stream(file) as stream:
            for text in _cut_records(stream):
                number += 1
                yield read_row(f"{file.name}:{number}", text)
    except _BrokenArrayError as exc:
        raise SourceError(
            f"{file.place}: the JSON array {exc} after record {number}; is the file whole?"
        ) from exc


class _BrokenArrayError(ValueError):
    """An array that does not end, or not where it should."""


def _cut_records(stream: BinaryIO) -> Iterator[bytes]:
    """The texts between the commas of a JSON array, found by brackets and strings alone."""
    buffer = stream.read(_SNIFF_BYTES)
    start = position = buffer.index(b"[") + 1
    depth = 1
    while depth:
        match = (_WITHIN_RECORD if depth > 1 else _BETWEEN_RECORDS).match(buffer, position)
        if match is None:
            buffer = buffer[start:] + _read_more(stream, at_least=len(buffer) - start)
            start, position = 0, position - start
            continue
        position = match.end()
        mark = buffer[position - 1 : position]
        if mark in b"[{":
            depth += 1
        elif mark in b"]}":
            depth -= 1
        if depth == 0 or mark == b",":  # which is looked for between records only
            text = buffer[start : position - 1].strip()
            if text or mark == b",":
                yield text
            start = position
    if buffer[position:].strip() or stream.read(_SNIFF_BYTES).strip():
        raise _BrokenArrayError("ends too early, with more text,")


def _read_more(stream: BinaryIO, *, at_least: int) -> bytes:
    """The next chunk, as long as the record so far: one of any length is searched a few times only."""
    if at_least > _MAX_RECORD_BYTES:
        raise _BrokenArrayError(f"has a record of over {_MAX_RECORD_BYTES >> 20} MiB")
    more = stream.read(max(_CHUNK_BYTES, at_least))
    if not more:
        raise _BrokenArrayError("breaks off")
    return more


def _read_parquet(file: DataFile) -> Iterator[SourceRow | MalformedRow]:
    with open_stream(file) as raw:
        yield from read_parquet(raw, name=file.name, place=file.place)
