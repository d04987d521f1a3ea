"""A Prefect server for one run, when none is configured: with its UI, on loopback, gone with the run.

Prefect's own temporary server has no UI, a start-up limit of 20 s that a busy machine exceeds, dies of the
Ctrl-C that is meant for the run, and outlives a kill -9 of it (Prefect 3.9.1). This one does none of that.
Run as `python -m flows.prefect_server SOCKET PARENT_PID`, with the descriptor of a listening socket.
"""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from serving.embedded.parent import watch_parent

FIRST_PORT = 4200
START_TIMEOUT_S = 300.0
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


def is_configured() -> bool:
    """Whether Prefect knows a server: PREFECT_API_URL, or a profile that names one.

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
            "server that comes and goes with the run"
        )
    return bool(url)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or out of range
        return False


@contextlib.contextmanager
def run_prefect_server(log_file: Path) -> Iterator[str]:
    """Start a server in its own session; yields the UI's address; stops it at the end.

    Raises:
        PrefectServerError: it ended or did not answer in time.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with _hold_start_lock():
        process, url = _start(log_file)
        try:
            _wait_healthy(process, url, log_file)
        except BaseException:
            _stop(process)
            raise
    try:
        yield url
    finally:
        _stop(process)


@contextlib.contextmanager
def _hold_start_lock() -> Iterator[None]:
    """One server starts at a time: two that both make the tables of a new PREFECT_HOME fail (3.9.1)."""
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    home.mkdir(parents=True, exist_ok=True)
    with (home / "draftmill-start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start(log_file: Path) -> tuple[subprocess.Popen[bytes], str]:
    with _listen() as listener, log_file.open("ab") as log:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.prefect_server", str(listener.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **QUIET, "PREFECT_API_URL": f"{url}/api", "PREFECT_UI_API_URL": f"{url}/api"},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    return process, url


def _listen() -> socket.socket:
    """Listen on 4200, Prefect's own port, or the next free one.

    The server is given the socket, not the port: two runs that start together would else choose the same
    one, and the second would live on the first one's server without knowing.
    """
    for port in range(FIRST_PORT, FIRST_PORT + 100):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(128)
        except OSError:
            listener.close()
        else:
            return listener
    raise PrefectServerError(f"no free port from {FIRST_PORT} to {FIRST_PORT + 99}")


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log_file: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/api/health").status_code == httpx.codes.OK:
                    return
            time.sleep(0.2)
    tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-10:])
    raise PrefectServerError(
        f"the Prefect server did not start at {url} (status {process.poll()}); {log_file} ends with:\n{tail}"
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
