"""Sources: where the rows of a dataset come from.

Knows files and the Hub; does not know what a row means, which is for the adapters to say. Invariant: every
row comes out once, in order, as a row or as a malformed row with its place; memory does not grow with the
source. Imports records only.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tasks.prepare.sources.files import find_changed, find_files, hash_files, to_data_files
from tasks.prepare.sources.hash_cache import file_signature
from tasks.prepare.sources.hub import (
    HubDataset,
    find_dataset,
    hash_dataset,
    is_hub_source,
    read_dataset,
    spell_hub_source,
)
from tasks.prepare.sources.readers import SUPPORTED, read_file
from tasks.prepare.sources.rows import MalformedRow, SourceError, SourceRow, describe_error, read_exactly

__all__ = [
    "SUPPORTED",
    "HubDataset",
    "MalformedRow",
    "Source",
    "SourceError",
    "SourceRow",
    "describe_error",
    "hash_source",
    "is_hub_source",
    "iter_rows",
    "make_absolute",
    "name_empty",
    "read_exactly",
    "resolve_source",
    "spell_hub_source",
    "watch_source",
]

Source = Sequence[Path] | HubDataset
"""What a source names, found: its files, or one commit of a dataset on the Hub."""


def make_absolute(source: str, *, base: Path) -> str:
    """The same source, whatever folder it is resolved from later."""
    return source if is_hub_source(source) else str(base.resolve() / Path(source).expanduser())


def resolve_source(source: str, *, base: Path) -> Source:
    """What a source names: one file, a folder (recursive), a glob or a dataset on the Hub.

    Args:
        source: A path or glob, relative to `base` or absolute, or hub:ORG/NAME.
        base: The folder that a relative source starts from.

    Raises:
        SourceError: nothing was found, or nothing of a supported kind.
    """
    return find_dataset(source) if is_hub_source(source) else find_files(source, base=base)


def iter_rows(source: Source) -> Iterator[SourceRow | MalformedRow]:
    """Stream the rows of the files, in the order given, or of the dataset; blank lines are skipped.

    Raises:
        SourceError: a file is unreadable or damaged, is not what its name says, or is not empty and yet
            has not one good row; the dataset cannot be read to its end.
    """
    if isinstance(source, HubDataset):
        yield from read_dataset(source)
        return
    for file in to_data_files(source):
        yield from read_file(file)


def watch_source(source: Source) -> Callable[[], None]:
    """Look at the files; what is returned looks again, and raises SourceError where one has changed."""
    paths = [] if isinstance(source, HubDataset) else source
    looks = [file_signature(path) for path in paths]

    def check() -> None:
        if changed := find_changed(paths, looks):
            names = ", ".join(map(str, changed[:3]))
            raise SourceError(
                f"{names}: changed while it was read; nothing was prepared: run the same command again when "
                "nothing writes to it"
            )

    return check


def name_empty(source: Source) -> str:
    """How a source without a single row is called in a message, by the files that have nothing in them."""
    if isinstance(source, HubDataset):
        return "the split has no rows"
    empty = [str(path) for path in source if not path.stat().st_size]
    return f"{', '.join(empty[:3])} is empty" if len(empty) == len(source) else "its files have no rows"


def hash_source(source: Source, *, cache_folder: Path | None = None) -> str:
    """Hex sha256 of what a source holds: the files' names and contents, or the dataset's commit and split.

    Args:
        source: What `resolve_source` found.
        cache_folder: Where large files' hashes are kept, so that they are read once.

    Raises:
        SourceError: a file cannot be read.
    """
    if isinstance(source, HubDataset):
        return hash_dataset(source)
    return hash_files(source, cache_folder=cache_folder)
