"""A file of whole lines that only grows: the base of every log here.

Knows torn tails, short writes and full disks; does not know what a line means. Invariant: after
`open` and after every `append`, the file ends with a newline or is empty.
"""

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from tasks.records.files import sync_folder

_TAIL_CHUNK = 1 << 20


class AppendError(OSError):
    """A line could not be written; the file was cut back to its last whole line."""


class AppendFile:
    """Append lines unbuffered, so that a line that `append` returned survives a kill -9 of this process.

    A machine that loses power keeps what `sync` has covered.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self.size, self.cut_bytes = self._repair()
            if not self.size:
                sync_folder(path.parent)  # a new file's name must survive a power loss as well
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, line: bytes) -> int:
        """Write one or more whole lines; returns the file's size after them.

        Raises:
            AppendError: the disk is full or failed; names the path and the bytes needed.
        """
        if not line.endswith(b"\n"):
            raise ValueError(f"{self.path}: a line must end with a newline")
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, memoryview(line)[written:])
            self.size += len(line)
        except BaseException as exc:
            self._cut_back()
            if not isinstance(exc, OSError):
                raise  # Ctrl-C between two parts of a line
            what = "the disk is full" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else exc.strerror
            raise AppendError(
                exc.errno,
                f"{what}: {len(line)} bytes could not be appended; nothing written before is lost. "
                "Free some space and run the same command again",
                str(self.path),
            ) from exc
        return self.size

    def sync(self) -> None:
        """Make what was appended survive a power loss (fsync; blocks for milliseconds)."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; further appends fail."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cut_back(self) -> None:
        """Remove the part of a line that was written; a file that refuses even that takes no more lines."""
        try:
            os.ftruncate(self._fd, self.size)
        except OSError:
            self.close()

    def _repair(self) -> tuple[int, int]:
        """Cut a last line without newline; returns the size kept and the bytes cut."""
        size = os.fstat(self._fd).st_size
        end = size
        while end > 0:
            start = max(0, end - _TAIL_CHUNK)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)
        return end, size - end
