"""What SGLang's log says about how far a start has come.

Knows the lines of SGLang 0.5.23 and how its progress bars overwrite themselves; judges no failure
(`known_failures`). Invariant: reading goes on where it ended, and never takes half a line for one.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections import deque
from pathlib import Path
from typing import BinaryIO

KEPT_LINES = 2000  # eight ranks that fail together write eight tracebacks
_CHUNK_BYTES = 1 << 20
_LONGEST_LINE = 1 << 16  # the line with all of a server's settings has 20,000 characters


class Stage(enum.IntEnum):
    """How far a start has come, in order; SERVING begins with its own warm-up."""

    STARTING = 0
    CONNECTING = 1
    LOADING = 2
    KV_CACHE = 3
    CAPTURING = 4
    SERVING = 5


class LogReader:
    """Follows a log that another process appends to.

    Attributes:
        last_lines: The last KEPT_LINES lines read, progress bars left out.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._path = path
        self._position = start
        self._rest = b""

    def read(self) -> list[str]:
        """The whole lines since the last call, at most a MiB of them: of a longer piece the end."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            return self._read_from(file)
        return []  # somebody has moved it away

    def _read_from(self, file: BinaryIO) -> list[str]:
        size = file.seek(0, 2)
        if size < self._position:  # somebody has emptied it
            self._position, self._rest = 0, b""
        if size - self._position > _CHUNK_BYTES:
            self._position, self._rest = size - _CHUNK_BYTES, b""
        file.seek(self._position)
        new = file.read(size - self._position)
        self._position += len(new)
        *pieces, self._rest = re.split(rb"[\r\n]", self._rest + new)
        self._rest = self._rest[-_LONGEST_LINE:]
        lines = [piece.decode(errors="replace") for piece in pieces if piece]
        self.last_lines.extend(line for line in lines if not _BAR.search(line))
        return lines

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines, and what has been written of the next one."""
        self.read()
        rest = self._rest.decode(errors="replace")
        return [*self.last_lines, *([rest] if rest else [])][-lines:]


class StartLog:
    """Follows one start by its log lines.

    Attributes:
        stage: How far it has come.
        kv_tokens: The tokens that the KV cache holds; None before that is known.
    """

    def __init__(self) -> None:
        self.stage = Stage.STARTING
        self.kv_tokens: int | None = None
        self._told_percent = 0

    def feed(self, line: str) -> str | None:
        """Take one line; what it tells a person, or None."""
        if _OTHER_RANK.search(line):
            return None
        if bar := _BAR.search(line):
            return self._read_bar(bar) if "oading" in bar["what"] else None
        for stage, pattern, told in _STEPS:
            if found := pattern.search(line):
                self.stage = max(self.stage, stage)
                return told.format(**found.groupdict()) if told else None
        if found := _KV_TOKENS.search(line):
            self.kv_tokens = int(found[1])
            return f"{self.kv_tokens:,} tokens fit in the KV cache"
        return None

    def _read_bar(self, bar: re.Match[str]) -> str | None:
        percent = int(bar["percent"])
        if self.stage > Stage.LOADING or percent < self._told_percent + 10:
            return None
        self._told_percent = percent - percent % 10
        return f"loading weights: {percent}% ({bar['done']} of {bar['total']} files)"


_OTHER_RANK = re.compile(r"^\[[^\]]*\b(?:TP|PP|DP|EP)0*[1-9]\d*\b[^\]]*\]")
_BAR = re.compile(r"(?P<what>.*?): +(?P<percent>\d+)%[^\[]*?(?P<done>\d+)/(?P<total>\d+) \[\d")
_KV_TOKENS = re.compile(r"\bmax_total_num_tokens=(\d+), ")
_STEPS: tuple[tuple[Stage, re.Pattern[str], str | None], ...] = (
    (Stage.CONNECTING, re.compile(r"Init parallel begin"), None),
    (Stage.STARTING, re.compile(r"Init parallel ends"), None),
    (Stage.LOADING, re.compile(r"Load weight begin\. avail mem=(?P<free>\S+ GB)"), "loading weights"),
    (
        Stage.KV_CACHE,
        re.compile(r"Load weight end\. elapsed=(?P<s>\S+) s,.*\bavail mem=(?P<free>\S+ GB)"),
        "weights loaded in {s} s, {free} left",
    ),
    (
        Stage.KV_CACHE,
        re.compile(r"KV Cache is allocated\. (?:dtype: (?P<dtype>\S+), )?.*?#tokens: (?P<tokens>\d+)"),
        "KV cache allocated: {tokens} tokens",
    ),
    (
        Stage.CAPTURING,
        re.compile(r"Capture (?P<what>\S+ \S+) .*?begin\."),
        "capturing CUDA graphs ({what})",
    ),
    (
        Stage.CAPTURING,
        re.compile(r"Capture (?P<what>\S+ \S+) .*?end\. .*?elapsed=(?P<s>\S+) s"),
        "CUDA graphs captured ({what}) in {s} s",
    ),
    (
        Stage.SERVING,
        re.compile(r"Uvicorn running on"),
        "warming up",
    ),
    (
        Stage.SERVING,
        re.compile(r"KV pool holds (?P<tokens>\d+) tokens, fewer than --context-length (?P<context>\d+)"),
        "warning: the KV cache holds {tokens} tokens, less than one request of the context length {context}",
    ),
)
