"""A dataset's raw_responses.jsonl and rejected.jsonl: the truth about progress.

Knows how rows reach the disk and how progress is read back from them; does not know servers or
budgets. Invariant: a row is counted only after it is on disk, and what is on disk is counted once.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tasks.records.append_file import AppendFile
from tasks.records.progress import CheckpointMismatchError, Progress
from tasks.records.prompt_file import PromptFile
from tasks.records.rows import RecordError, Rejected, Response

RESPONSES = "raw_responses.jsonl"
REJECTED = "rejected.jsonl"
_SCAN_REPORT_ROWS = 20_000

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What was found on disk when a log was opened: for the log line that says how a run resumed."""

    from_checkpoint: bool
    scanned_rows: int
    cut_bytes: int
    note: str = ""


class ResponseLog:
    """The single writer of one dataset's two logs; hold the dataset's lock while it is open."""

    def __init__(self, folder: Path, prompts: PromptFile) -> None:
        self.folder = folder
        self.prompts = prompts
        self._responses = AppendFile(folder / RESPONSES)
        try:
            self._rejected = AppendFile(folder / REJECTED)
        except BaseException:
            self._responses.close()
            raise
        self.progress = Progress.empty(len(prompts))

    def resume(
        self,
        checkpoint: Mapping[str, Any] | None,
        *,
        prompts_key: str,
        on_response: Callable[[Response], None] | None = None,
        on_scan: Callable[[int], None] | None = None,
    ) -> ResumePoint:
        """Take the progress from a checkpoint and the rows after it, or from all rows.

        Args:
            checkpoint: what `Progress.to_checkpoint` wrote, or None.
            prompts_key: names the prompt file that the checkpoint must belong to.
            on_response: sees each row that is scanned.
            on_scan: told the number of rows read, every 20,000 rows.

        Raises:
            RecordError: a whole line in the middle of a log is not a row; names file and offset.
        """
        note, from_checkpoint = "", False
        if checkpoint is not None:
            try:
                self.progress = self._trust(checkpoint, prompts_key)
                from_checkpoint = True
            except CheckpointMismatchError as exc:
                note = f"{exc}; all rows are counted again"
        scanned = 0
        for end, line in read_lines(self._responses.path, self.progress.byte_offset):
            response = parse_line(Response.from_line, line, self._responses.path, end)
            position = self.prompts.find(response.id, response.turn)
            self.progress.add_response(response, position=position, byte_offset=end)
            if on_response is not None:
                on_response(response)
            scanned += 1
            if on_scan is not None and scanned % _SCAN_REPORT_ROWS == 0:
                on_scan(scanned)
        for end, line in read_lines(self._rejected.path, self.progress.rejected_offset):
            rejected = parse_line(Rejected.from_line, line, self._rejected.path, end)
            position = self.prompts.find(rejected.id, rejected.turn)
            self.progress.add_rejected(rejected, position=position, byte_offset=end)
        cut = self._responses.cut_bytes + self._rejected.cut_bytes
        return ResumePoint(from_checkpoint, scanned, cut, note)

    def append(self, response: Response, *, position: int) -> None:
        """Put a row on disk, then count it.

        Raises:
            AppendError: the disk is full or failed; nothing was counted.
        """
        if self.progress.done[position]:
            raise ValueError(f"prompt {response.id!r} has a response already; a second one is refused")
        end = self._responses.append(response.to_line())
        self.progress.add_response(response, position=position, byte_offset=end)

    def reject(self, rejected: Rejected, *, position: int) -> None:
        """Put a rejected prompt on disk, then count it."""
        end = self._rejected.append(rejected.to_line())
        self.progress.add_rejected(rejected, position=position, byte_offset=end)

    def sync(self) -> None:
        """Force both logs to the disk (fsync); safe to call from a worker thread while rows are appended."""
        self._responses.sync()
        self._rejected.sync()

    def close(self) -> None:
        """Close both logs."""
        self._responses.close()
        self._rejected.close()

    def _trust(self, checkpoint: Mapping[str, Any], prompts_key: str) -> Progress:
        progress = Progress.from_checkpoint(checkpoint, prompts_key=prompts_key, prompts=len(self.prompts))
        for log, offset in (
            (self._responses, progress.byte_offset),
            (self._rejected, progress.rejected_offset),
        ):
            if offset > log.size:
                raise CheckpointMismatchError(
                    f"{log.path.name} has {log.size} bytes, the checkpoint counted {offset}"
                )
            if offset and _byte_before(log.path, offset) != b"\n":
                raise CheckpointMismatchError(f"{log.path.name} has no line end at byte {offset}")
        return progress


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a log after a byte offset, each with the offset of its end.

    A last line without a newline (another process is writing it) is not given.
    """
    if not path.exists():
        return
    with path.open("rb", buffering=1 << 20) as lines:
        lines.seek(offset)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield offset, line


def parse_line(read: Callable[[bytes], _Record], line: bytes, path: Path, end: int) -> _Record:
    """Read one line of a log.

    Raises:
        RecordError: it is damaged; names the file, the byte where the line ends, and what to do.
    """
    try:
        return read(line)
    except RecordError as exc:
        raise RecordError(
            f"{path}: the line ending at byte {end} is damaged ({exc}); "
            "remove that line (its prompt is then asked again) and run the same command again"
        ) from exc


def _byte_before(path: Path, offset: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, 1, offset - 1)
    finally:
        os.close(fd)
