"""Whether a server has stopped working while it looks alive.

Knows /v1/loads and one token as a proof of life (docs/adr/0007); ends nothing. Invariant: a stall is only
told when no token came out and no counter of work moved while one was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib

from serving.client.errors import ServingError
from serving.client.pool import STALL_TIMEOUT_S, WATCH_EVERY_S
from serving.client.protocol import ServerLoad
from serving.client.sglang import SGLangClient

__all__ = ["STALL_TIMEOUT_S", "StallWatch"]


class StallWatch:
    """Watches one server.

    It is suspected when its counters have stood still for `timeout_s` with requests in flight, when /v1/loads
    has not answered for as long, or when somebody reports it. One that has no /v1/loads is only suspected
    when it is reported.
    """

    def __init__(self, client: SGLangClient, *, timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._every_s = min(WATCH_EVERY_S, timeout_s / 5)
        self._report: str | None = None
        self._reported = asyncio.Event()

    def report(self, why: str) -> None:
        """Suspect the server now."""
        self._report = why
        self._reported.set()

    async def wait(self) -> str:
        """Wait until a stall is proven; returns what proves it. What was reported before the call is void."""
        self._reported.clear()
        clock = asyncio.get_running_loop().time
        seen, moved_s = None, clock()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._reported.wait()
            is_known, load = await self._look()
            if is_known and (load is None or load.running + load.waiting == 0 or load.work != seen):
                seen, moved_s = load and load.work, clock()
            still_s = clock() - moved_s
            if not self._reported.is_set() and still_s < self._timeout_s:
                continue
            why = self._report if self._reported.is_set() else _describe(still_s, is_known=is_known)
            self._reported.clear()
            if await self._is_dead():
                return f"{why}, and no token came out when one was asked for"
            seen, moved_s = None, clock()

    async def _is_dead(self) -> bool:
        _, before = await self._look()
        if await self._client.is_making_progress():
            return False
        _, after = await self._look()
        # A server with a long queue lets the question wait: its counters go on.
        return before is None or after is None or before.work == after.work

    async def _look(self) -> tuple[bool, ServerLoad | None]:
        """Whether the page answered, and what it said; None from a server that has no such page."""
        try:
            async with asyncio.timeout(self._every_s):
                return True, await self._client.load()
        except (ServingError, TimeoutError):
            return False, None


def _describe(still_s: float, *, is_known: bool) -> str:
    if is_known:
        return f"it has done nothing for {still_s:.0f} s with requests in flight"
    return f"it has not answered /v1/loads for {still_s:.0f} s"
