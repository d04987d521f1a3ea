"""A real SGLang server: one that runs already (SGLANG_URL), or a command that starts one (SGLANG_COMMAND).

    make test-live SGLANG_COMMAND="python -m sglang.launch_server --model-path MODEL --port {port}"

Tests that kill or freeze the server need the command; a URL is left alone.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time

import httpx
import psutil
import pytest
from run_support import Runner

from flows.prefect_server import QUIET, run_prefect_server

START_TIMEOUT_S = 600


class OwnServer:
    """An SGLang server that a test may kill and start again on the same port."""

    def __init__(self, command, log_file):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._argv = shlex.split(command.format(port=self.port))
        self._log_file = log_file
        self._process = None

    def start(self):
        """Start it and wait until it is ready."""
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            assert self._process.poll() is None, self._log_file.read_text()[-3000:]
            assert time.monotonic() < deadline, self._log_file.read_text()[-3000:]
            time.sleep(0.5)

    def kill(self):
        """Kill all its processes, as kill -9 does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def signal_scheduler(self, number):
        """Send a signal to the scheduler alone."""
        [scheduler] = [
            process
            for process in psutil.Process(self._process.pid).children(recursive=True)
            if "sglang::scheduler" in " ".join(process.cmdline())
        ]
        scheduler.send_signal(number)

    def wait_dead(self):
        """Wait until the parent has ended by itself."""
        self._process.wait(120)
        self.kill()

    def abort_all(self):
        """Abort every request."""
        httpx.post(f"{self.url}/abort_request", json={"rid": "", "abort_all": True}, trust_env=False)

    def _is_ready(self):
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready", trust_env=False).status_code == 200
        return False


@pytest.fixture(scope="session")
def _started(tmp_path_factory):
    command = os.environ.get("SGLANG_COMMAND")
    if not command:
        yield None
        return
    server = OwnServer(command, tmp_path_factory.mktemp("sglang") / "server.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def start_server(tmp_path):
    """Start a server by a command with a {port} in it; it ends with the test."""
    servers = []

    def start(command):
        servers.append(OwnServer(command, tmp_path / f"server-{len(servers)}.log"))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def own_server(_started):
    """A server that the test may mistreat; it is running when the test begins."""
    if _started is None:
        pytest.skip("kills or freezes the server: give SGLANG_COMMAND, not SGLANG_URL")
    if not _started._is_ready():
        _started.kill()
        _started.start()
    return _started


@pytest.fixture(scope="session")
def sglang_url(_started):
    """The URL of the server under test; a run without one fails rather than passing by doing nothing."""
    url = _started.url if _started else os.environ.get("SGLANG_URL")
    if not url:
        pytest.fail("neither SGLANG_URL nor SGLANG_COMMAND is set, see `make help`")
    assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200, f"{url} is not ready"
    return url


@pytest.fixture(scope="session")
def tokenizer_dir(sglang_url):
    """The tokenizer that the server says it uses; it must be on this machine."""
    return httpx.get(f"{sglang_url}/model_info", trust_env=False).json()["tokenizer_path"]


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory):
    """One Prefect server for the session."""
    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "PREFECT_HOME": str(home)}.items():
            patch.setenv(name, value)
        with run_prefect_server(home / "server.log") as url:
            yield f"{url}/api"


@pytest.fixture
def runner(tmp_path, prefect_url, tokenizer_dir, sglang_url):
    """Runs the command line against the real server."""
    runner = Runner(tmp_path, tokenizer_dir, env={**os.environ, "PREFECT_API_URL": prefect_url})
    runner.raw["target"]["model"] = None
    runner.raw["server"]["base_urls"] = [sglang_url]
    runner.raw["lanes"] = {
        "long_prompt_tokens": 600,
        "short": {"concurrency": 8, "max_new_tokens": 120},
        "long": {"concurrency": 2, "max_new_tokens": 120},
    }
    yield runner
    runner.end_all()
