"""Which files a source names, and the hash of what is in them.

Knows folders, globs and contents; does not know formats. Invariant: the same files under other folders or in
another order have the same hash.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson

from tasks.prepare.sources.hash_cache import HashCache, file_signature, hash_file
from tasks.prepare.sources.readers import KINDS, DataFile, suffix_of
from tasks.prepare.sources.rows import SourceError

_EXPECTED = f"expected a file, folder or glob of {KINDS}"
_BUFFER_BYTES = 1 << 18  # the default, 8 KiB, is a call of the system for every other row


def find_files(source: str, *, base: Path) -> list[Path]:
    """The files that a source names, sorted: one file, a folder (recursive) or a glob.

    Hidden files and folders are passed over in folders, unsupported files in folders and globs.

    Args:
        source: A path or glob, relative to `base` or absolute.
        base: The folder that a relative source starts from.

    Raises:
        SourceError: nothing was found, or nothing of a supported kind.
    """
    if not source.strip():
        raise SourceError(f"source {source!r} is empty; {_EXPECTED}")
    path = base / Path(source).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = _list_files(path)
    else:
        found = _expand_glob(path)
    usable = [file for file in found if suffix_of(file.name)]
    if usable:
        return usable
    if found:
        names = ", ".join(file.name for file in found[:3])
        raise SourceError(f"source {source!r}: {path} has no supported file (it has {names}); {_EXPECTED}")
    raise SourceError(f"source {source!r}: no file found at {path}; {_EXPECTED}")


def to_data_files(paths: Sequence[Path]) -> list[DataFile]:
    """Files on this machine, to be read, each named by its path below the folder that they have in common."""
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return [to_data_file(path, name=str(path.relative_to(root))) for path in paths]


def to_data_file(path: Path, *, name: str) -> DataFile:
    """A file on this machine, to be read, under a name."""
    return DataFile(name, str(path), lambda: path.open("rb", buffering=_BUFFER_BYTES))


def hash_files(paths: Sequence[Path], *, cache_folder: Path | None = None) -> str:
    """Hex sha256 of the files' names and contents; their folders and order do not count.

    Args:
        paths: The files.
        cache_folder: Where large files' hashes are kept, so that they are read once.

    Raises:
        SourceError: one cannot be read.
    """
    if cache_folder is None:
        digests = [(path.name, _hash(path, hash_file)) for path in paths]
    else:
        cache = HashCache(cache_folder)
        digests = [(path.name, _hash(path, cache.hash_file)) for path in paths]
        cache.save()
    return hashlib.sha256(orjson.dumps(sorted(digests))).hexdigest()


def find_changed(paths: Sequence[Path], looks: Sequence[list[int]]) -> list[Path]:
    """The files that are not what they were at an earlier `file_signature`."""
    looked = zip(paths, looks, strict=True)
    return [path for path, look in looked if not path.exists() or file_signature(path) != look]


def _hash(path: Path, hash_file: Callable[[Path], str]) -> str:
    try:
        return hash_file(path)
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read to its end ({exc})") from exc


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
