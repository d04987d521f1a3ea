"""Dataset files as rows: finds them, reads them, hashes them.

Knows the file formats (JSON Lines, gzip, JSON arrays, parquet); does not know what a row means,
which is for the adapters to say. Invariant: every non-blank line or record of a file comes out once,
in order, as a row or as a malformed row with its place; memory does not grow with the file, except
for a JSON array.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

SUPPORTED = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".parquet")

_BOM = b"\xef\xbb\xbf"
_HEAD_CHARS = 120
_PARQUET_BATCH_ROWS = 256
_SNIFF_BYTES = 4096
_WRONG_LINES = 5  # this many lines without any JSON at the start: not the format, rather than a bad line


class SourceError(ValueError):
    """A source can't be read at all; the message names the source or file and what was expected."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row as plain Python values; `where` is its file name and 1-based line or record."""

    where: str
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedRow:
    """A line or record that is not a JSON object; `text_head` is its beginning."""

    where: str
    detail: str
    text_head: str


def resolve_source(source: str, *, base: Path) -> list[Path]:
    """The files that a source names, sorted: one file, a folder (recursive) or a glob.

    Hidden files and folders are passed over in folders, unsupported files in folders and globs.

    Args:
        source: A path or glob, relative to `base` or absolute.
        base: The folder that a relative source starts from.

    Raises:
        SourceError: nothing was found, or nothing of a supported kind.
    """
    if not source.strip():
        raise SourceError(f"source {source!r} is empty; {_expected()}")
    path = base / Path(source).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = _list_files(path)
    else:
        found = _expand_glob(path)
    usable = [file for file in found if _suffix_of(file)]
    if usable:
        return usable
    if found:
        names = ", ".join(file.name for file in found[:3])
        raise SourceError(f"source {source!r}: {path} has no supported file (it has {names}); {_expected()}")
    raise SourceError(f"source {source!r}: no file found at {path}; {_expected()}")


def iter_rows(paths: Iterable[Path]) -> Iterator[SourceRow | MalformedRow]:
    """Stream the rows of the files, in the order given; blank lines are skipped.

    Raises:
        SourceError: a file is unreadable, starts with lines that are no JSON, or is not empty and
            yet has not one good row.
    """
    for path in paths:
        any_good = False
        first_bad: MalformedRow | None = None
        for item in _reader_for(path)(path):
            if isinstance(item, SourceRow):
                any_good = True
            elif first_bad is None:
                first_bad = item
            yield item
        if first_bad is not None and not any_good:
            raise SourceError(f"{path}: not one usable row; {first_bad.where}: {first_bad.detail}")


def hash_source(paths: Iterable[Path]) -> str:
    """Hex sha256 of the files' names and contents; their folders and order do not count."""
    digests = []
    for path in paths:
        with path.open("rb") as stream:
            digests.append((path.name, hashlib.file_digest(stream, "sha256").hexdigest()))
    return hashlib.sha256(orjson.dumps(sorted(digests))).hexdigest()


def _expected() -> str:
    return f"expected a file, folder or glob of {', '.join(SUPPORTED)}"


def _suffix_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((suffix for suffix in SUPPORTED if name.endswith(suffix)), None)


def _list_files(folder: Path) -> list[Path]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _expand_glob(path: Path) -> list[Path]:
    parts = path.parts
    magic = next((i for i, part in enumerate(parts) if any(char in part for char in "*?[")), None)
    if magic is None:
        return []
    root, pattern = Path(*parts[:magic]), str(Path(*parts[magic:]))
    files: set[Path] = set()
    for match in root.glob(pattern):
        files.update(_list_files(match) if match.is_dir() else [match])
    return sorted(files)


def _reader_for(path: Path) -> Callable[[Path], Iterator[SourceRow | MalformedRow]]:
    suffix = _suffix_of(path)
    if suffix is None:
        raise SourceError(f"{path}: unsupported file; {_expected()}")
    if suffix == ".parquet":
        return _read_parquet
    if suffix == ".json" and _starts_as_array(path):
        return _read_array
    return _read_lines


def _starts_as_array(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            head = stream.read(_SNIFF_BYTES)
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read ({exc})") from exc
    return head.removeprefix(_BOM).lstrip().startswith(b"[")


def _read_lines(path: Path) -> Iterator[SourceRow | MalformedRow]:
    # Bad lines before the first JSON: perhaps the file is no JSON at all, or one array over many lines.
    held: list[MalformedRow] = []
    seen_json = False
    for number, text in _iter_lines(path):
        where = f"{path.name}:{number}"
        try:
            value = _parse(text)
        except ValueError as exc:
            bad = MalformedRow(where=where, detail=f"not JSON: {exc}", text_head=_head(text))
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
        yield _to_row(where, value, text)
    if held:
        raise SourceError(
            f"{path}: not JSON Lines: no JSON in its first {len(held)} lines (it starts "
            f"{held[0].text_head!r}); {_expected()}, and a JSON array only in a .json file"
        )


def _iter_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opener(path, "rb") as stream:
            for number, line in enumerate(stream, 1):
                text = (line.removeprefix(_BOM) if number == 1 else line).strip()
                if text:
                    yield number, text
    except (OSError, EOFError, zlib.error) as exc:  # a cut or damaged gzip raises any of the three
        raise SourceError(f"{path}: cannot be read to its end ({exc})") from exc


def _read_array(path: Path) -> Iterator[SourceRow | MalformedRow]:
    try:
        values = _parse(path.read_bytes().removeprefix(_BOM))
    except (OSError, ValueError) as exc:
        raise SourceError(f"{path}: starts as a JSON array but is not one ({exc})") from exc
    for number, value in enumerate(values, 1):
        yield _to_row(f"{path.name}:{number}", value, orjson.dumps(value))


def _read_parquet(path: Path) -> Iterator[SourceRow | MalformedRow]:
    import pyarrow as pa  # slow to import, and most sources are JSON Lines
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield SourceRow(where=f"{path.name}:{number}", row=row)
    except (pa.ArrowException, OSError) as exc:
        raise SourceError(f"{path}: not readable as parquet after {number} rows ({exc})") from exc


def _parse(text: bytes) -> Any:
    """Parse strictly; the NaN and Infinity that Python's json writes come out as None."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if b"NaN" not in text and b"Infinity" not in text:
            raise
    try:
        return orjson.loads(orjson.dumps(json.loads(text)))
    except TypeError as exc:
        raise ValueError(str(exc)) from exc


def _to_row(where: str, value: Any, text: bytes) -> SourceRow | MalformedRow:
    if isinstance(value, dict):
        return SourceRow(where=where, row=value)
    detail = f"a JSON object was expected, not {type(value).__name__}"
    return MalformedRow(where=where, detail=detail, text_head=_head(text))


def _head(text: bytes) -> str:
    return text[: 4 * _HEAD_CHARS].decode("utf-8", errors="replace")[:_HEAD_CHARS]
