"""Which texts share a run of words with evaluation sets.

Knows words and files of records; does not know responses. A text is contaminated when 13 words in a row,
lower-cased and split at everything that is no letter, digit or underscore, are in a record too: the overlap
of the GPT-3 paper (Brown et al. 2020, appendix C), which takes 13 for all but short sets. A
language that is written without spaces has few such words, and is hardly ever found. Invariant: equal runs
are always found; two that differ in one word are taken for equal once in four thousand million.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tasks.prepare.sources import MalformedRow, SourceError, iter_rows, resolve_source
from tasks.prepare.sources.hash_cache import hash_file
from tasks.prepare.sources.readers import KINDS, suffix_of

NGRAM_WORDS = 13
_WORD = re.compile(r"\w+")
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)
_NONE = np.empty(0, np.uint64)
_EXPECTED = f"expected a .txt file (a record a line), {KINDS}"


class EvalSetError(ValueError):
    """An evaluation set that cannot be read whole, or protects nothing; names the file and what to do."""


@dataclass(slots=True)
class EvalFile:
    """An evaluation set and what was found of it; `rows` counts contaminated rows by dataset.

    `too_short` counts records without 13 words in one text: nothing can be told of them.
    """

    name: str
    sha256: str
    records: int = 0
    too_short: int = 0
    ngrams: int = 0
    rows: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class EvalIndex:
    """The n-grams of evaluation sets: about 25 bytes each in memory, some 40 while it is built.

    `hashes` uint64 (n,) ascending, `owners` uint16 (n,): the file that each is of. `beginnings` bool (2**k,):
    whether one has these first k bits; it spares nearly all searches, which would take most of the time.
    """

    files: list[EvalFile]
    hashes: np.ndarray
    owners: np.ndarray
    beginnings: np.ndarray

    @classmethod
    def read(cls, paths: Sequence[Path], files: Sequence[EvalFile]) -> "EvalIndex":
        """Read the files that `describe_files` described.

        Raises:
            EvalSetError: a file is unreadable, or one of its records is, or none has 13 words in a row.
        """
        parts = [_read_ngrams(path, file) for path, file in zip(paths, files, strict=True)]
        owners = np.repeat(np.arange(len(parts), dtype=np.uint16), [len(part) for part in parts])
        hashes = np.concatenate([_NONE, *parts])
        order = np.argsort(hashes, kind="stable")
        beginnings = np.zeros(1 << max(1, (8 * len(hashes)).bit_length()), np.bool_)
        beginnings[_first_bits(hashes, len(beginnings))] = True
        return cls(list(files), hashes[order], owners[order], beginnings)

    def find(self, texts: Iterable[str]) -> list[EvalFile]:
        """The files that one of the texts shares an n-gram with; half a microsecond a word."""
        wanted = np.concatenate([_NONE, *map(hash_ngrams, texts)])
        likely = wanted[self.beginnings[_first_bits(wanted, len(self.beginnings))]]
        ends = [np.searchsorted(self.hashes, likely, side) for side in ("left", "right")]
        owners = {int(one) for start, end in zip(*ends, strict=True) for one in self.owners[start:end]}
        return [self.files[owner] for owner in sorted(owners)]

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {"ngram_words": NGRAM_WORDS, "files": [asdict(file) for file in self.files]}


def describe_files(paths: Sequence[Path]) -> list[EvalFile]:
    """The files by name and hash, not yet read.

    Raises:
        EvalSetError: one is not there, is a folder or of another kind, or cannot be read.
    """
    return [EvalFile(path.name, _hash(path)) for path in paths]


def hash_ngrams(text: str) -> np.ndarray:
    """A hash of each 13 words in a row, uint64 (words - 12,); none of a shorter text."""
    words = _WORD.findall(text.lower())
    if len(words) < NGRAM_WORDS:
        return _NONE
    codes = np.fromiter((zlib.crc32(word.encode()) for word in words), np.uint64, len(words))
    codes = (codes + _BASE) * _MIX
    codes ^= codes >> _HALF
    count = len(words) - NGRAM_WORDS + 1
    hashes = np.zeros(count, np.uint64)
    for n in range(NGRAM_WORDS):
        hashes = hashes * _BASE + codes[n : n + count]
    return hashes


def _first_bits(hashes: np.ndarray, size: int) -> np.ndarray:
    """Those that number the places of a table of so many, a power of two."""
    first: np.ndarray = hashes >> np.uint64(65 - size.bit_length())
    return first


def iter_texts(value: Any) -> Iterator[str]:
    """The texts of a JSON value, at any depth; names of fields are none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from iter_texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from iter_texts(one)


def _hash(path: Path) -> str:
    if path.is_dir():
        raise EvalSetError(
            f"decontaminate: {str(path)!r} is a folder; name a file in it, or each one of several"
        )
    if not path.is_file():
        raise EvalSetError(f"decontaminate: there is no file {str(path)!r}; correct the path or leave it out")
    if not _has_lines_of_text(path) and suffix_of(path.name) is None:
        raise EvalSetError(f"decontaminate: {str(path)!r} is a file of another kind; {_EXPECTED}")
    if not path.stat().st_size:  # at once: what else protects nothing is found by reading it, at the export
        raise EvalSetError(_explain_useless(path, EvalFile(path.name, "")))
    try:
        return hash_file(path)
    except OSError as exc:
        raise EvalSetError(f"decontaminate: {str(path)!r} cannot be read ({exc.strerror})") from exc


def _read_ngrams(path: Path, file: EvalFile) -> np.ndarray:
    """The file's n-grams, each once, in ascending order; counts its records."""
    parts = [_NONE]
    for record in _read_records(path):
        ngrams = np.concatenate([_NONE, *map(hash_ngrams, iter_texts(record))])
        file.records += 1
        file.too_short += not len(ngrams)
        parts.append(ngrams)
    hashes = np.unique(np.concatenate(parts))
    file.ngrams = len(hashes)
    if not file.ngrams:
        raise EvalSetError(_explain_useless(path, file))
    return hashes


def _explain_useless(path: Path, file: EvalFile) -> str:
    start = f"decontaminate: {str(path)!r} protects nothing:"
    if not file.records:
        return f"{start} it has 0 records; put the evaluation set there or leave it out"
    return (
        f"{start} of its records ({file.records}) none has {NGRAM_WORDS} words in a row in one text; take a "
        "file with longer texts or leave it out"
    )


def _has_lines_of_text(path: Path) -> bool:
    return path.suffix.lower() == ".txt"


def _read_records(path: Path) -> Iterator[Any]:
    """A .txt file's lines that are not blank; the records of what a dataset's source may be."""
    try:
        if _has_lines_of_text(path):
            with path.open(encoding="utf-8") as lines:
                yield from (line for line in lines if line.strip())
            return
        for row in iter_rows(resolve_source(str(path), base=Path.cwd())):
            if isinstance(row, MalformedRow):
                raise EvalSetError(
                    f"decontaminate: {path.parent / row.where} is no record ({row.detail}); mend the file, "
                    "for what it holds would stay in the data"
                )
            yield row.row
    except (OSError, UnicodeDecodeError) as exc:
        raise EvalSetError(f"decontaminate: {str(path)!r} cannot be read: {exc}") from exc
    except SourceError as exc:
        text = "plain text, a record a line, is read from a .txt file"
        raise EvalSetError(f"decontaminate: {str(path)!r} cannot be read: {exc}; {text}") from exc
