"""Fixtures of the serving tests: one embedded engine for the whole session, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

START_TIMEOUT_S = 600


@dataclass(frozen=True)
class Engine:
    """A running embedded engine and the helpers that the tests share."""

    client: httpx.Client
    process: subprocess.Popen
    tokenizer_dir: Path
    url: str
    slots: int = 2
    context_length: int = 512

    def generate(self, input_ids: list[int], *, rid: str | None = None, **sampling_params):
        """POST one prompt."""
        body = {"input_ids": input_ids, "sampling_params": sampling_params, "rid": rid}
        return self.client.post("/generate", json=body)

    def load(self) -> dict:
        """Return the only rank of /v1/loads."""
        [rank] = self.client.get("/v1/loads").json()["loads"]
        return rank

    def wait_until(self, condition: Callable[[dict], bool], *, timeout_s: float = 60) -> float:
        """Poll /v1/loads; return the seconds it took."""
        started = time.monotonic()
        while not condition(self.load()):
            assert time.monotonic() - started < timeout_s, f"still {self.load()}"
            time.sleep(0.02)
        return time.monotonic() - started


class Background:
    """A call in a thread, with its result."""

    def __init__(self, call: Callable) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = ("ok", self._call())
        except Exception as exc:  # noqa: BLE001 - handed to the test
            self._outcome = ("error", exc)

    def result(self, timeout_s: float = 120):
        """Wait for the call; return its value or raise its error."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the call did not return"
        kind, value = self._outcome
        if kind == "error":
            raise value
        return value


def start_engine(folder: Path, *options: str) -> tuple[subprocess.Popen, Path]:
    """Start `python -m serving.embedded` with a ready file; its output goes to engine.log."""
    ready_file = folder / "ready.json"
    command = [sys.executable, "-m", "serving.embedded", "--port=0", f"--ready-file={ready_file}", *options]
    with (folder / "engine.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    return process, ready_file


def read_ready_file(process: subprocess.Popen, ready_file: Path) -> dict:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready_file.exists():
        log = ready_file.with_name("engine.log").read_text()
        assert process.poll() is None, f"the engine ended with {process.returncode}: {log}"
        assert time.monotonic() < deadline, f"the engine is not ready: {log}"
        time.sleep(0.05)
    return json.loads(ready_file.read_text())


@pytest.fixture(scope="session")
def background() -> type[Background]:
    """Run a call in a thread: `background(call).result()`."""
    return Background


@pytest.fixture
def spawn(tmp_path) -> Iterator[Callable]:
    """Start an engine in the test's folder: `spawn(*options)` gives its process and its ready file."""
    processes = []

    def start(*options: str) -> tuple[subprocess.Popen, Path]:
        process, ready_file = start_engine(tmp_path, *options)
        processes.append(process)
        return process, ready_file

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def wait_ready() -> Callable[[subprocess.Popen, Path], dict]:
    """Wait for an engine's ready file and return its content."""
    return read_ready_file


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    slots, context_length = 2, 512
    process, ready_file = start_engine(folder, f"--slots={slots}", f"--context-length={context_length}")
    try:
        ready = read_ready_file(process, ready_file)
        with httpx.Client(base_url=ready["url"], timeout=300, trust_env=False) as client:
            yield Engine(client, process, Path(ready["tokenizer_dir"]), ready["url"], slots, context_length)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def idle(engine: Engine) -> Iterator[Engine]:
    """The session's engine with nothing running, before and after."""
    engine.wait_until(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 0)
    yield engine
    engine.client.post("/abort_request", json={"abort_all": True})
    engine.wait_until(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 0)
