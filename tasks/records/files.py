"""Files that are replaced whole or not at all.

Knows temp files, fsync and rename; does not know what the bytes mean. Invariant: at every moment,
a crash of the machine included, a reader finds the old file or the new one, never a part of one.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

_BUFFER_BYTES = 1 << 18  # the default, 8 KiB, is a call of the system for every other prompt


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write; it takes the place of `path` when the block ends well.

    The folder must exist. When the block raises, `path` is untouched and the temp file is gone. A
    symlink at `path` is replaced itself, never followed.
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    # "x" never follows a link that somebody left there, and mkstemp's mode 0600 would hide the
    # result from the other users of a shared filesystem.
    with name_in_errors(path), temp.open("xb", buffering=_BUFFER_BYTES) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temp.replace(path)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


@contextlib.contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Give the errors of writes a file name: "No space left on device" does not say where."""
    try:
        yield
    except OSError as exc:
        if exc.errno is None or exc.filename is not None:
            raise
        raise OSError(exc.errno, exc.strerror, str(path)) from exc


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content."""
    with replace_atomically(path) as file:
        file.write(data)


def write_json_atomically(path: Path, obj: Any) -> None:
    """Replace a file's content with `dump_json(obj)`."""
    write_bytes_atomically(path, dump_json(obj))


def dump_json(obj: Any) -> bytes:
    """JSON for people and for diffs: two spaces, sorted keys, a newline at the end."""
    return orjson.dumps(obj, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def remove_stale_temps(folder: Path) -> None:
    """Remove what a killed `replace_atomically` left in a folder that only we write to."""
    for temp in folder.glob(".*.tmp"):
        temp.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power loss (fsync)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
