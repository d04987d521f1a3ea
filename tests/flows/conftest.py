"""One Prefect server, one tokenizer and one fake SGLang for all flow tests of a session."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_RESULTS_LOCAL_STORAGE_PATH,
    temporary_settings,
)
from run_support import Runner
from served_support import serving
from tiny_tokenizer import make_tokenizer

from flows.prefect_server import QUIET, run_prefect_server


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory):
    """The API URL of a real Prefect server with a home of its own; also for this process."""
    home = tmp_path_factory.mktemp("prefect")
    env = {**QUIET, "PREFECT_HOME": str(home), "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        with run_prefect_server(home / "server.log") as url:
            patch.setenv("PREFECT_API_URL", f"{url}/api")
            storage = env["PREFECT_RESULTS_LOCAL_STORAGE_PATH"]
            ours = {PREFECT_API_URL: f"{url}/api", PREFECT_RESULTS_LOCAL_STORAGE_PATH: storage}
            with temporary_settings(ours):  # this process has read its settings already
                yield f"{url}/api"


@pytest.fixture(scope="session")
def served(prefect_url, tmp_path_factory):
    """Both groups of prefect.yaml, served on the session's Prefect server; a log for each in the folder."""
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, {**os.environ, "PREFECT_API_URL": prefect_url}):
        yield folder


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A tiny real tokenizer."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def fake_server(tmp_path):
    """Start fake servers as processes: `fake_server(**options)` gives a base URL."""
    processes = []

    def start(*, port=0, **options):
        ready = tmp_path / f"fake-{len(processes)}.json"
        script = Path(__file__).parents[1] / "support" / "fake_sglang.py"
        argv = [sys.executable, str(script), "--port", str(port), "--ready-file", str(ready)]
        for name, value in options.items():
            argv += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
        processes.append(subprocess.Popen(argv))
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert processes[-1].poll() is None, "the fake server ended"
            assert time.monotonic() < deadline, "the fake server did not start"
            time.sleep(0.05)
        return json.loads(ready.read_text())["url"]

    yield start
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture
def runner(tmp_path, prefect_url, tokenizer_dir):
    """Writes parameters and prompts into a folder and runs the command line on them."""
    runner = Runner(tmp_path, tokenizer_dir, env={**os.environ, "PREFECT_API_URL": prefect_url})
    yield runner
    runner.end_all()
