"""Processes of our own that work for this one: calls go in, their values come out.

Knows processes and pipes; does not know what is called. A worker is started as a program of its own and not
by multiprocessing: that imports the caller's main module again, or forks its threads, and we may run inside
of anything. Invariant: no worker outlives its parent, however that ends, for its input then ends; none's
death is missed.
"""

import fcntl
import gc
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, BinaryIO, cast

MIN_BYTES = 64 << 20
"""Of input: with less, starting a worker takes longer than what it saves."""

_PIPE_BYTES = 1 << 20


class WorkerDiedError(RuntimeError):
    """A worker ended before its work."""


def count_workers(n_bytes: int, *, most: int) -> int:
    """How many are worth their start for so much input: at most one a core, none where there is but one."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, most) if cores > 1 and n_bytes >= MIN_BYTES else 0


class Worker:
    """A process, until `running` ends. It calls what it is sent, one after the other, with a state it keeps.

    Hold back what would fill a pipe: a worker that waits for us to take a value takes no call.
    """

    def __init__(self, running: ExitStack, make_state: Callable[..., Any], *args: Any) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import work; work()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            process_group=0,  # Ctrl-C is for us: a worker ends when we do
        )
        self._process = process
        running.callback(self._stop)
        self._input, self._output = cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)
        with suppress(OSError):  # the system bounds it; large values take a twentieth longer by a small pipe
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.send(make_state, *args)

    def send(self, call: Callable[..., Any], *args: Any) -> None:
        """Have it call `call(state, *args)`; the call is a module's, and all of it can be pickled."""
        try:
            pickle.dump((call, args), self._input, protocol=5)
            self._input.flush()
        except BrokenPipeError as exc:
            raise self._find_death() from exc

    def receive(self) -> Any:
        """The value of the first call that was sent and not yet answered.

        Raises:
            WorkerDiedError: the worker was killed.
            Exception: as the call did, with the worker's traceback as a note.
        """
        try:
            value = pickle.load(self._output)  # noqa: S301 - our own process wrote it
        except (EOFError, pickle.UnpicklingError) as exc:
            raise self._find_death() from exc
        if isinstance(value, Exception):
            raise value
        return value

    def _stop(self) -> None:
        self._process.kill()  # it holds nothing that could be lost
        with suppress(BrokenPipeError):
            self._input.close()
        self._output.close()
        self._process.wait()

    def _find_death(self) -> WorkerDiedError:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return WorkerDiedError(
            f"a process that reads rows {how}, perhaps for want of memory; nothing was changed: run the same "
            "command again"
        )


def work() -> None:
    """Do what is sent until nothing comes any more, which is also how the parent's death looks."""
    calls, values = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # then nobody is left to be told
    gc.set_threshold(1 << 16)  # what is made is soon freed: looking for cycles after 700 took 3% of the time
    with suppress(EOFError):
        make_state, args = pickle.load(calls)  # noqa: S301 - the parent wrote it
        state = make_state(*args)
        while True:
            call, args = pickle.load(calls)  # noqa: S301 - as above
            pickle.dump(_try(call, state, *args), values, protocol=5)
            values.flush()


def _try(call: Callable[..., Any], *args: Any) -> Any:
    """The value or, to be raised by the parent, the error: of a full disk, say, or of a source."""
    try:
        return call(*args)
    except Exception as exc:  # noqa: BLE001 - it is raised, where it can be handled
        exc.add_note("".join(traceback.format_exception(exc)))
        return exc
