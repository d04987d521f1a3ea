"""Whose turn it is to fill the window, in the order of the datasets.

Knows names and a bound; does not know what a turn is used for. A dataset gives its turn up when it leaves
slots empty, so that the next one fills them. Invariant: never more than `at_once` hold a turn.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class DispatchPermit:
    """A first-come-first-served semaphore whose queue can be watched."""

    shares_window = True  # its holders run in one process and take slots of one window

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


class ProcessDispatchPermit(DispatchPermit):
    """The same for datasets in processes of their own: as many lock files as there are turns.

    The kernel frees a lock when its holder dies, however it dies. Of those that wait the lowest `place` is
    next. Each process has a window of its own, so that a turn is worth handing on only at the drain.
    """

    shares_window = False

    def __init__(self, folder: Path, at_once: int, place: int = 0) -> None:
        super().__init__(1)
        self._turns = [folder / f"turn-{number}.lock" for number in range(at_once)]
        self._waiting = [folder / f"turn-wait-{number}.lock" for number in range(place + 1)]

    @contextlib.asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn; the given function hands it on early, at most once."""
        async with super().hold(name):
            held = contextlib.ExitStack()
            with contextlib.ExitStack() as waiting:
                *before, own = self._waiting
                shown = False
                while any(map(_is_taken, before)) or not any(_take(turn, held) for turn in self._turns):
                    if not shown and (shown := _take(own, waiting)):
                        logger.info("%s: waits for its turn", name)
                    await asyncio.sleep(LOOK_EVERY_S)
            with held:
                yield held.close


def _take(path: Path, held: contextlib.ExitStack) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return False
    held.callback(os.close, fd)
    return True


def _is_taken(path: Path) -> bool:
    if not path.exists():
        return False
    with contextlib.ExitStack() as held:
        return not _take(path, held)
