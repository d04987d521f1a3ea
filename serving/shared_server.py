"""One server for all who work in a folder: who comes first starts it, the others use it meanwhile.

Knows two lock files and an address; does not know what kind of server it is. The kernel frees a lock when
its holder dies, however it dies. Invariant: a server that was started here is stopped when its last user has
gone, unless whoever started it is cancelled.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from serving.client.errors import ServingError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
_MAX_BYTES = 1 << 16
OWNER, USERS = "server.lock", "server-users.lock"


class ServerGoneError(ServingError):
    """The folder's server was given up by whoever started it, and nobody starts it again."""


class ServerElsewhereError(ServingError):
    """The folder's server runs on another machine, at an address of that machine only."""


@contextlib.asynccontextmanager
async def share_server(
    folder: Path, start: Callable[[int], AbstractAsyncContextManager[str]]
) -> AsyncIterator[str]:
    """The base URL of the folder's server, which lives as long as the block.

    Args:
        folder: where the lock files lie; it exists.
        start: starts a server on a port, 0 for any, and gives its base URL; called only where none is there.
            The port is that of a server that was killed: those who used it find the new one by itself.

    Raises:
        ServerElsewhereError: another machine holds it.
        ServerGoneError: it was given up, and its users have not all ended yet.
    """
    with contextlib.ExitStack() as held:
        owner, users = (_open(folder / name, held) for name in (OWNER, USERS))
        while not _lock(owner, fcntl.LOCK_EX):
            if _lock(users, fcntl.LOCK_SH):  # else it is being stopped
                if (there := _read(owner)) is not None:
                    there.check_host(folder)
                    there.check_alive()
                    yield there.url
                    return
                fcntl.flock(users, fcntl.LOCK_UN)
            await asyncio.sleep(LOOK_EVERY_S)
        killed = _read(owner)
        os.ftruncate(owner, 0)
        async with start(killed.free_port() if killed else 0) as url:
            _write(owner, _Address(socket.gethostname(), url))
            try:
                yield url
            except Exception:  # of our own work only; a cancelled owner waits for nobody
                await _wait_unused(users)
                os.ftruncate(owner, 0)
                raise
            await _wait_unused(users)
            os.ftruncate(owner, 0)


def give_up_server(folder: Path, why: str) -> None:
    """Tell all who use the folder's server that it will not come back."""
    with contextlib.ExitStack() as held:
        owner = _open(folder / OWNER, held)
        if (there := _read(owner)) is not None:
            _write(owner, replace(there, failure=why))


def find_failure(folder: Path) -> str | None:
    """Why the folder's server was given up; None while it is served or started."""
    with contextlib.ExitStack() as held:
        there = _read(_open(folder / OWNER, held))
    return None if there is None else there.failure


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    url: str
    failure: str | None = None

    def check_alive(self) -> None:
        if self.failure is not None:
            raise ServerGoneError(f"{self.failure}; it is started again when its users have ended")

    def check_host(self, folder: Path) -> None:
        if self.host != socket.gethostname():
            raise ServerElsewhereError(
                f"the server of {folder} was started on {self.host} and answers there only; run its datasets "
                "there too, or start a server yourself and use server.mode connect"
            )

    def free_port(self) -> int:
        """Its port where nobody has it now, else 0."""
        port = urlsplit(self.url).port or 0
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return 0
        return port


def _read(owner: int) -> _Address | None:
    """The address in the owner's file; None while a server is being started, or where none was killed."""
    content = os.pread(owner, _MAX_BYTES, 0)
    try:
        return _Address(**json.loads(content)) if content else None
    except ValueError:  # it is being written
        return None


def _write(owner: int, address: _Address) -> None:
    content = json.dumps(asdict(address)).encode()
    os.pwrite(owner, content, 0)
    os.ftruncate(owner, len(content))


async def _wait_unused(users: int) -> None:
    """Hold the lock of the users, which keeps new ones away, once the last of them has gone."""
    said = False
    while not _lock(users, fcntl.LOCK_EX):
        if not said:
            said = True
            logger.info("others still use the server; it is stopped when they have ended")
        await asyncio.sleep(LOOK_EVERY_S)


def _open(path: Path, held: contextlib.ExitStack) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    held.callback(os.close, fd)
    return fd


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
