"""A process group that ends with us, from the owner's side.

Knows the words of `guardian`; does not know what the process is or whether it is well. Invariant:
after `wait`, `stop` or `kill` nothing of the group is alive, and should this process be killed, nothing is
within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from serving.launch.processes import kill_group
from serving.launch.redaction import spell_secrets

logger = logging.getLogger(__name__)

_DEATH_S = 60.0


class GuardedProcess:
    """A running command; made by `start`.

    Attributes:
        pid: The process id of the command, its process group and its session.
    """

    def __init__(self, guardian: asyncio.subprocess.Process, pid: int) -> None:
        self.pid = pid
        self._guardian = guardian
        self._ending = asyncio.create_task(self._follow())

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: int,
        remove: Sequence[Path] = (),
        hide: Collection[str] = (),
    ) -> GuardedProcess:
        """Start a command in a session of its own, with all its output in the log.

        Args:
            argv: The command.
            env: Its whole environment.
            log: A descriptor to write to; the caller closes it.
            remove: Files that go with it, also when it cannot be started and when we are killed.
            hide: Secrets that its output may hold and the log must not.

        Raises:
            OSError: it cannot be started.
        """
        guardian = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "serving.launch.guardian", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        assert guardian.stdin is not None  # noqa: S101 - narrows the type
        assert guardian.stdout is not None  # noqa: S101 - narrows the type
        try:
            # On its input, for others can read a command line, and this one may hold a key.
            files = [str(file.absolute()) for file in remove]
            order = json.dumps(
                {"argv": list(argv), "env": dict(env), "remove": files, "hide": spell_secrets(hide)}
            )
            with contextlib.suppress(ConnectionError):
                guardian.stdin.write(order.encode() + b"\n")
                await guardian.stdin.drain()
            word, _, text = (await guardian.stdout.readline()).decode().strip().partition(" ")
        except BaseException:
            guardian.stdin.close()  # it kills what it may have started, and ends
            await guardian.wait()
            raise
        if word != "pid":
            guardian.stdin.close()
            await guardian.wait()
            raise OSError(text or "its guardian has ended; see the log")
        return cls(guardian, int(text))

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the group is left."""
        return self._ending.done()

    async def wait(self) -> int | None:
        """Wait until nothing is left; the status as subprocess gives it, None when nobody knows it."""
        return await asyncio.shield(self._ending)

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM to the command, a grace period, SIGKILL to the group; also when cancelled meanwhile."""
        if self.has_ended:
            return
        try:
            self._say(b"term\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.wait()
        finally:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL to the group; gives up waiting for what hangs in a driver, which no signal ends."""
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()
        try:
            async with asyncio.timeout(_DEATH_S):
                await self.wait()
        except TimeoutError:
            logger.warning("process group %d was killed and is not gone after %g s", self.pid, _DEATH_S)

    def _say(self, word: bytes) -> None:
        if self._guardian.stdin is not None and not self._guardian.stdin.is_closing():
            self._guardian.stdin.write(word)

    async def _follow(self) -> int | None:
        assert self._guardian.stdout is not None  # noqa: S101 - narrows the type
        word, _, text = (await self._guardian.stdout.readline()).decode().strip().partition(" ")
        status = int(text) if word == "status" else None
        if status is None:  # the guardian was killed
            kill_group(self.pid)
        await self._guardian.wait()
        return status
