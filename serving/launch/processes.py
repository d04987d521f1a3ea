"""What every process that we start shares: its environment, its log, how a group of processes is stopped.

Knows signals, files and environment variables; does not know what the processes are for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)$", re.IGNORECASE)
_SHORTEST_SECRET = 6
_TAIL_LINES = 20
_TAIL_BYTES = 1 << 18


def is_secret_name(name: str) -> bool:
    """Whether an environment variable's name says that it holds a secret."""
    return bool(_SECRET_NAME.search(name))


def environment_without_secrets() -> dict[str, str]:
    """Our environment without what looks like a secret: a child gets those that it needs by name."""
    return {name: value for name, value in os.environ.items() if not is_secret_name(name)}


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """The values of an environment that are secrets by their name; a short one would be found everywhere."""
    return {
        value
        for name, value in environment.items()
        if is_secret_name(name) and len(value) >= _SHORTEST_SECRET
    }


def open_log(path: Path, *, mode: int = 0o644) -> tuple[int, int]:
    """Open a log to append to, with its folder; returns its descriptor and where the new lines begin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    return log, os.fstat(log).st_size


def read_tail(path: Path, start: int, *, lines: int = _TAIL_LINES) -> list[str]:
    """The last lines that were written behind `start`."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-lines:]


def describe_tail(path: Path, start: int) -> str:
    """The last lines that were written behind `start`, ready to be put behind a message."""
    return "\n".join([f"; the end of {path}:", *read_tail(path, start)])


async def stop_group(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    """SIGTERM to the leader of a group, a grace period, SIGKILL to the group; so too when cancelled."""
    try:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
    finally:
        if process.returncode is None:
            kill_group(process.pid)
    await process.wait()


def kill_group(leader: int) -> None:
    """SIGKILL to every process of a group; none is left is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
