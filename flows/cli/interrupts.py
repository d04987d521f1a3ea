"""Run a coroutine so that Ctrl-C and SIGTERM cancel it, and it can save before it ends.

While a flow runs in the main thread, Prefect 3.9.1 raises out of a SIGTERM handler of its own, wherever the
event loop is at that moment, and the run then hangs. It leaves signals alone in any other thread, so the
loop has a thread of its own and the main thread only listens.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from serving.client.event_loop import find_loop_factory

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_until_interrupted(work: Coroutine[Any, Any, int], *, exit_code: int, last_words: str) -> int:
    """The coroutine's result, or `exit_code` when a signal cancelled it.

    A second signal prints `last_words` and ends the process at once. Call it from the main thread.
    """
    runner = _Runner(work)
    handle = runner.make_handler(exit_code, last_words)
    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        thread = threading.Thread(target=runner.run, name="flow")
        thread.start()
        thread.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if runner.error is not None:
        raise runner.error
    return exit_code if runner.result is None else runner.result


class _Runner:
    def __init__(self, work: Coroutine[Any, Any, int]) -> None:
        self._work = work
        self._interrupted = False
        self._task: asyncio.Task[int] | None = None
        self.result: int | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=find_loop_factory()) as runner:
                self.result = runner.run(self._main())
        except asyncio.CancelledError:
            pass
        except BaseException as exc:  # noqa: BLE001  raised again in the main thread
            self.error = exc

    async def _main(self) -> int:
        self._task = asyncio.ensure_future(self._work)
        if self._interrupted:  # before there was a task to cancel
            self._task.cancel()
        return await self._task

    def make_handler(self, exit_code: int, last_words: str) -> Callable[[int, FrameType | None], None]:
        def handle(_number: int, _frame: FrameType | None) -> None:
            if self._interrupted:
                os.write(sys.stderr.fileno(), f"{last_words}\n".encode())
                os._exit(exit_code)
            self._interrupted = True
            if self._task is not None:
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

        return handle
