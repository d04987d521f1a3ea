"""Sources: where the rows of a dataset come from.

Knows files; does not know what a row means, which is for the adapters to say. Invariant: every row comes out
once, in order, as a row or as a malformed row with its place; memory does not grow with the source.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tasks.core.sources.files import find_files, hash_files
from tasks.core.sources.readers import SUPPORTED, read_file
from tasks.core.sources.rows import MalformedRow, SourceError, SourceRow

__all__ = [
    "SUPPORTED",
    "MalformedRow",
    "SourceError",
    "SourceRow",
    "hash_source",
    "iter_rows",
    "resolve_source",
]


def resolve_source(source: str, *, base: Path) -> list[Path]:
    """The files that a source names, sorted: one file, a folder (recursive) or a glob.

    Args:
        source: A path or glob, relative to `base` or absolute.
        base: The folder that a relative source starts from.

    Raises:
        SourceError: nothing was found, or nothing of a supported kind.
    """
    return find_files(source, base=base)


def iter_rows(paths: Iterable[Path]) -> Iterator[SourceRow | MalformedRow]:
    """Stream the rows of the files, in the order given; blank lines are skipped.

    Raises:
        SourceError: a file is unreadable or damaged, is not what its name says, or is not empty and yet
            has not one good row.
    """
    for path in paths:
        yield from read_file(path)


def hash_source(paths: Iterable[Path]) -> str:
    """Hex sha256 of the files' names and contents; their folders and order do not count."""
    return hash_files(paths)
