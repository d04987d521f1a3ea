"""An append-only file that somebody else writes, read once and from then on only where it has grown.

Knows whole lines and where reading stopped; does not know what a line means. Invariant: every whole line
that is in the file is given once, and a file that is no longer the one that was read is noticed.
"""

from collections.abc import Iterator
from pathlib import Path

from tasks.records.response_log import read_lines

_MARK_BYTES = 256


class LogTail:
    """Where reading a log has stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0  # the offset up to which whole lines were read
        self._inode: int | None = None
        self._mark = b""  # what the file had before `end`

    def is_continued(self) -> bool:
        """Whether the file is still the one that was read, with or without more at its end."""
        if self.end == 0:
            return True
        try:
            if self.path.stat().st_ino != self._inode:
                return False
            with self.path.open("rb") as file:
                file.seek(self.end - len(self._mark))
                return file.read(len(self._mark)) == self._mark
        except FileNotFoundError:
            return False

    def restart(self) -> None:
        """Read from the beginning again."""
        self.end, self._inode, self._mark = 0, None, b""

    def read(self) -> Iterator[bytes]:
        """The whole lines after those of the last time."""
        if self.end == 0:
            self._inode = self.path.stat().st_ino if self.path.exists() else None
        for end, line in read_lines(self.path, self.end):
            self.end, self._mark = end, line[-_MARK_BYTES:]
            yield line
