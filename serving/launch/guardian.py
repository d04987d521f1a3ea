"""Start a server and outlive the one who asked for it, by the moment that it takes to kill the server.

Knows process groups and Linux's subreaper; knows nothing of servers. `guarded` runs it as
`python -m serving.launch.guardian OWNER` and writes one JSON line `{"argv", "env", "remove", "hide"}` to it,
then `term` for SIGTERM to the parent of the server; when the input ends, SIGKILL to all. It answers `pid N`,
then `status N` when nothing is left. Invariants: when it ends by itself, no process that the server started
is alive, on Linux not even one that left its group, and the files to remove with it are gone; what is to be
hidden is never written.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from serving.launch.processes import kill_group
from serving.launch.redaction import REDACTED
from serving.parent import watch_parent

_PR_SET_CHILD_SUBREAPER = 36
_COPY_S = 5.0


class _Server:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._unwanted = threading.Event()
        self._copying: threading.Thread | None = None

    def start(self, argv: list[str], env: dict[str, str], hide: list[str]) -> None:
        """Start it; its output is ours, or goes through us where something in it is to be hidden."""
        output = subprocess.PIPE if hide else sys.stderr
        self._process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if self._process.stdout is not None:
            source, secrets = self._process.stdout.fileno(), [text.encode() for text in hide]
            self._copying = threading.Thread(target=_copy_hidden, args=(source, secrets), daemon=True)
            self._copying.start()
        print("pid", self._process.pid, flush=True)  # noqa: T201 - the protocol
        if self._unwanted.is_set():
            self.kill()

    def run(self) -> int:
        """Wait for the server's parent to end, then end all that is left of it; returns the status."""
        assert self._process is not None  # noqa: S101 - narrows the type
        status = self._process.wait()
        kill_group(self._process.pid)
        _end_descendants()
        if self._copying is not None:
            self._copying.join(_COPY_S)  # the pipe has no writer any more
        return status

    def kill(self) -> None:
        self._unwanted.set()
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)

    def obey(self) -> None:
        """Follow the owner's words; their end is the last one."""
        for line in sys.stdin:
            if line.strip() == "term" and self._process is not None:
                self._process.terminate()
        self.kill()


def _copy_hidden(source: int, secrets: list[bytes]) -> None:
    """Write what comes, as it comes, without the secrets; one that is not whole yet is held back."""
    held = b""
    while data := os.read(source, 1 << 16):
        text = held + data
        for secret in secrets:
            text = text.replace(secret, REDACTED.encode())
        cut = len(text) - _count_begun(text, secrets)
        held = text[cut:]
        _write_all(text[:cut])
    _write_all(held)


def _count_begun(text: bytes, secrets: list[bytes]) -> int:
    """How many bytes at the end may be the beginning of a secret."""
    longest = min(max(map(len, secrets)) - 1, len(text))
    ends = (text[-size:] for size in range(longest, 0, -1))
    return next((len(end) for end in ends if any(secret.startswith(end) for secret in secrets)), 0)


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(sys.stderr.fileno(), data) :]


def _end_descendants() -> None:
    """Kill and reap every process that has been handed to us, and those that they leave to us."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Our direct children; where there is no /proc, none."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = stat.read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def _remove(files: list[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def main() -> int:
    """Guard one server; returns 0 when it is gone, 1 when it cannot be started."""
    # A service manager's SIGTERM goes to every process at once; ours has to be the last one to end. Handlers,
    # not SIG_IGN: the server would inherit that.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = _Server()
    watch_parent(int(sys.argv[1]), server.kill)
    order = sys.stdin.readline()
    if not order:
        return 1
    settings = json.loads(order)
    files = [Path(file) for file in settings.pop("remove")]
    try:
        server.start(**settings)
    except OSError as exc:
        _remove(files)
        print("failed", exc, flush=True)  # noqa: T201 - the protocol
        return 1
    threading.Thread(target=server.obey, daemon=True).start()
    status = server.run()
    _remove(files)  # before we say so: the owner may write them again for the next start
    with contextlib.suppress(BrokenPipeError):
        print("status", status, flush=True)  # noqa: T201 - the protocol
    return 0


if __name__ == "__main__":
    done = main()
    os._exit(done)  # a thread may be reading the input, and a normal exit would wait for its lock
