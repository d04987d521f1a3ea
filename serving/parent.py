"""End this process when the one that started it dies, even by kill -9.

Knows Linux's prctl and the parent's process id; knows nothing of servers.
Invariant: `on_death` is called once, at most a second after the parent is gone, and never while it lives.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


def watch_parent(parent_pid: int, on_death: Callable[[], None]) -> None:
    """Call `on_death` once, from any thread, when the parent is gone; must be called from the main thread.

    Once, for a second SIGTERM makes Prefect's runner exit in the middle of its shutdown (3.9.1): the runs
    that it was cancelling would stay Running.

    Args:
        parent_pid: The process to follow. Given rather than asked for, because it may already have died.
        on_death: What ends this process.
    """
    called = threading.Lock()

    def call_once() -> None:
        if called.acquire(blocking=False):  # never released; a signal handler must not wait
            on_death()

    def check(*_: object) -> None:
        if os.getppid() != parent_pid:
            call_once()

    # Linux sends the signal when the *thread* that started us ends, so it is only a reason to look.
    signal.signal(signal.SIGUSR2, check)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)

    def poll() -> None:  # elsewhere, and where the main thread is inside a long C call
        while os.getppid() == parent_pid:
            time.sleep(_POLL_S)
        call_once()

    threading.Thread(target=poll, name="watch-parent", daemon=True).start()
