"""The sha256 of files, kept for as long as they do not change.

Knows what the filesystem says of a file; does not know what is in it. Invariant: a file that may have changed
is read again; a cache that is missing, damaged or cannot be written costs time and nothing else.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from tasks.records.files import write_bytes_atomically

CACHE = ".source-hashes.json"
_WORTH_BYTES = 1 << 26  # reading less takes a tenth of a second
_SETTLED_NS = (
    2_000_000_000  # a change within one tick of the filesystem's clock would not show; git waits too
)


class HashCache:
    """What the files of a run's sources and prompts hashed to; `folder` is where that is kept."""

    def __init__(self, folder: Path, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = folder / CACHE
        self._now_ns = now_ns
        self._known = self._read()
        self._new: dict[str, Any] = {}

    def hash_file(self, path: Path) -> str:
        """Hex sha256 of a file's content."""
        name, state = str(path.resolve()), file_signature(path)
        known = self._known.get(name)
        if isinstance(known, dict) and known.get("state") == state and _is_sha256(known.get("sha256")):
            return str(known["sha256"])
        settled = self._now_ns() - max(state[1:3]) > _SETTLED_NS
        sha256 = hash_file(path)
        if settled and state[0] >= _WORTH_BYTES and file_signature(path) == state:
            self._new[name] = {"state": state, "sha256": sha256}
        return sha256

    def save(self) -> None:
        """Keep what was found out, beside what others found out meanwhile."""
        if self._new and self._path.parent.is_dir():
            with contextlib.suppress(OSError):
                write_bytes_atomically(self._path, orjson.dumps({**self._read(), **self._new}))

    def _read(self) -> dict[str, Any]:
        try:
            found = orjson.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def file_signature(path: Path) -> list[int]:
    """Size, times and inode; the time of change (ctime) also tells a copy that keeps the other time."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def hash_file(path: Path) -> str:
    """Hex sha256 of a file's content, read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64
