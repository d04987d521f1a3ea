"""Whose turn it is to fill the window, in the order of the datasets.

Knows names and a bound; does not know what a turn is used for. A dataset gives its turn up when it leaves
slots empty, so that the next one fills them. Invariant: never more than `at_once` hold a turn.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Turn:
    """A first-come-first-served semaphore whose queue can be watched."""

    def __init__(self, at_once: int) -> None:
        self._semaphore = asyncio.Semaphore(at_once)
        self._queued: dict[str, asyncio.Event] = {}

    async def wait_queued(self, name: str) -> None:
        """Wait until `name` has asked for its turn: whoever asks from now on comes after it."""
        await self._event(name).wait()

    @contextlib.asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn; the given function hands it on early, at most once."""
        self._event(name).set()
        await self._semaphore.acquire()
        held = True

        def give_up() -> None:
            nonlocal held
            if held:
                held = False
                self._semaphore.release()

        try:
            yield give_up
        finally:
            give_up()

    def _event(self, name: str) -> asyncio.Event:
        return self._queued.setdefault(name, asyncio.Event())
