"""A Prefect server of our own, where none is configured: with its UI, on loopback, gone with who started it.

Prefect's own temporary server has no UI, a start-up limit of 20 s that a busy machine exceeds, dies of the
Ctrl-C that is meant for the run, and outlives a kill -9 of it (Prefect 3.9.1). This one does none of that,
and is started again when it dies: the socket stays open meanwhile, so that a call waits instead of failing.
Run as `python -m flows.prefect_server SOCKET PARENT_PID`, with the descriptor of a listening socket.
"""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from serving.parent import watch_parent

logger = logging.getLogger(__name__)

UI_PORT = 4200  # Prefect's own; of a server that stays
RUN_PORTS = range(UI_PORT + 1, UI_PORT + 100)  # of those that end with their run
START_TIMEOUT_S = 300.0
_AGAIN_AFTER_S = 5.0
_LOOK_EVERY_S = 1.0
_GRACE_S = 10.0

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_V2_ENABLED": "false",  # the V2 UI calls out to the internet
    "PREFECT_CLI_PROMPT": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # it advises to install PyTorch
}


class PrefectServerError(RuntimeError):
    """The Prefect server did not start; the message ends with the log's last lines."""


class PrefectUrlError(ValueError):
    """What is configured as Prefect's server is no URL."""


def find_api_url() -> str | None:
    """The Prefect server that is configured: PREFECT_API_URL, or a profile that names one; None when none is.

    Raises:
        PrefectUrlError: it is none that could be asked.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        from prefect.settings import get_current_settings

        url = get_current_settings().api.url
    if url and not _is_http(url):
        raise PrefectUrlError(
            f"PREFECT_API_URL is {url!r}; give it the form http://127.0.0.1:4200/api, or unset it to use a "
            "server that is started for you"
        )
    return url or None


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or out of range
        return False


@contextlib.contextmanager
def run_prefect_server(log_file: Path, *, ports: Sequence[int] = RUN_PORTS) -> Iterator[str]:
    """Start a server in its own session on the first free port; yields the UI's address; stops it at the end.

    Raises:
        PrefectServerError: it ended or did not answer in time, or no port is free.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(_listen(ports)) as listener, _Server(listener, log_file) as server:
        yield server.url


def is_prefect(url: str) -> bool:
    """Whether a Prefect server answers at the address of a UI."""
    try:
        return httpx.get(f"{url}/api/health", trust_env=False).json() is True
    except (httpx.HTTPError, ValueError):
        return False


class _Server:
    """The process, and a thread that starts it again when it dies."""

    def __init__(self, listener: socket.socket, log_file: Path) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._listener = listener
        self._log_file = log_file
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="prefect-server", daemon=True)

    def __enter__(self) -> "_Server":
        self._start()
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._keeper.join()
        _stop(self._process)

    def _keep(self) -> None:
        while not self._stopping.wait(_LOOK_EVERY_S):
            if self._process.poll() is None:
                continue
            logger.warning(
                "Prefect's server has ended (status %s); starting it again", self._process.returncode
            )
            try:
                self._start()
            except (PrefectServerError, OSError) as exc:
                logger.warning("%s", exc)
                self._stopping.wait(_AGAIN_AFTER_S)

    def _start(self) -> None:
        with _hold_start_lock():
            self._process = self._spawn()
            try:
                self._wait_healthy()
            except BaseException:
                _stop(self._process)
                raise

    def _spawn(self) -> subprocess.Popen[bytes]:
        socket_fd, api = self._listener.fileno(), f"{self.url}/api"
        with self._log_file.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.prefect_server", str(socket_fd), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **QUIET, "PREFECT_API_URL": api, "PREFECT_UI_API_URL": api},
                pass_fds=[socket_fd],
                start_new_session=True,
            )

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and not self._stopping.is_set():
            if self._process.poll() is not None:
                break
            if is_prefect(self.url):
                return
            time.sleep(0.2)
        tail = "\n".join(self._log_file.read_text(errors="replace").splitlines()[-10:])
        raise PrefectServerError(
            f"the Prefect server did not start at {self.url} (status {self._process.poll()}); "
            f"{self._log_file} ends with:\n{tail}"
        )


@contextlib.contextmanager
def _hold_start_lock() -> Iterator[None]:
    """One server starts at a time: two that both make the tables of a new PREFECT_HOME fail (3.9.1)."""
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    home.mkdir(parents=True, exist_ok=True)
    with (home / "draftmill-start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _listen(ports: Sequence[int]) -> socket.socket:
    """Listen on the first free port.

    The server is given the socket, not the port: two runs that start together would else choose the same
    one, and the second would live on the first one's server without knowing.
    """
    for port in ports:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(128)
        except OSError:
            listener.close()
        else:
            return listener
    raise PrefectServerError(
        f"port {ports[0]} is in use by another program"
        if len(ports) == 1
        else f"no free port from {ports[0]} to {ports[-1]}"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _serve(listener: socket.socket, parent_pid: int) -> None:
    import uvicorn
    from prefect.server.api.server import create_app

    watch_parent(parent_pid, lambda: os.kill(os.getpid(), signal.SIGTERM))
    uvicorn.Server(uvicorn.Config(create_app(), log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
