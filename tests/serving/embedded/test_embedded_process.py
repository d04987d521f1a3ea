"""The embedded engine as a process: how it starts, how it stops, and that it never outlives its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from serving.embedded.__main__ import _cgroup_cpus, default_threads
from serving.embedded.errors import EmbeddedError
from serving.embedded.launcher import EmbeddedServer
from serving.launch.processes import environment_without_secrets

SMALL = {"slots": 1, "context_length": 256}

OWNER = """
import asyncio, sys
from pathlib import Path
from serving.embedded.launcher import EmbeddedServer

async def main():
    async with EmbeddedServer(slots=1, context_length=256, log_file=Path(sys.argv[1])) as server:
        print(server.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # no /proc at all: the signal has told
    return state != "Z"  # a container without an init process may leave a zombie: it is dead all the same


def wait_dead(pid: int, timeout_s: float) -> float:
    started = time.monotonic()
    while is_alive(pid):
        assert time.monotonic() - started < timeout_s, f"process {pid} is still there"
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.mark.embedded
def test_the_ready_file_leads_to_a_server(tmp_path, spawn, wait_ready):
    """A parent that asked for port 0 learns the URL, the pid and the tokenizer, and SIGTERM ends with 0."""
    process, ready_file = spawn("--slots=1", "--context-length=256", "--served-model-name=me")
    ready = wait_ready(process, ready_file)
    assert ready["pid"] == process.pid
    assert (Path(ready["tokenizer_dir"]) / "tokenizer.json").is_file()
    assert httpx.get(ready["url"] + "/model_info", trust_env=False).json()["served_model_name"] == "me"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.log", "ready.json"]
    started = time.monotonic()
    process.terminate()
    assert process.wait(30) == 0
    assert time.monotonic() - started < 5


@pytest.mark.embedded
def test_sigterm_answers_what_is_running_as_aborted(spawn, wait_ready, background):
    """A busy engine stops as fast as an idle one, and its clients get an abort instead of a dead line."""
    process, ready_file = spawn("--slots=1", "--context-length=512")
    url = wait_ready(process, ready_file)["url"]
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    with httpx.Client(trust_env=False, timeout=60) as client:
        call = background(lambda: client.post(url + "/generate", json=body))
        while not client.get(url + "/v1/loads").json()["loads"][0]["num_running_reqs"]:
            time.sleep(0.02)
        started = time.monotonic()
        process.terminate()
        assert process.wait(30) == 0
        assert time.monotonic() - started < 5
        assert call.result().json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host=0.0.0.0"], "--allow-remote"),
        (["--model=/no/such/model"], "does not exist"),
    ],
)
def test_what_cannot_be_served_ends_with_a_message(tmp_path, options, said, spawn):
    """A wrong option is one line in the log and exit status 1, with no ready file."""
    process, ready_file = spawn(*options)
    assert process.wait(60) == 1
    log = (tmp_path / "engine.log").read_text()
    assert said in log
    assert "Traceback" not in log
    assert not ready_file.exists()


@pytest.mark.embedded
def test_the_launcher_starts_and_stops(tmp_path):
    """Inside the block the engine answers, behind it the process is gone."""

    async def run() -> int:
        log_file = tmp_path / "logs" / "engine.log"
        async with EmbeddedServer(**SMALL, log_file=log_file, served_model_name="mine") as server:
            assert server.model_id == "mine"
            assert (server.tokenizer_dir / "tokenizer.json").is_file()
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
                assert (await client.get("/ready")).status_code == 200
            assert os.getsid(server.pid) == server.pid
            assert "serving mine" in log_file.read_text()
            pid = server.pid
        with pytest.raises(EmbeddedError, match="not started"):
            _ = server.url
        return pid

    pid = asyncio.run(run())
    assert not is_alive(pid)


@pytest.mark.embedded
def test_an_error_in_the_block_stops_the_engine(tmp_path):
    """The engine does not outlive an exception, and the exception comes through."""
    pids = []

    async def run() -> None:
        async with EmbeddedServer(**SMALL, log_file=tmp_path / "log") as server:
            pids.append(server.pid)
            raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        asyncio.run(run())
    assert not is_alive(pids[0])


@pytest.mark.embedded
def test_a_frozen_engine_is_killed(tmp_path, monkeypatch):
    """An engine that does not react to SIGTERM is killed after the grace period."""
    monkeypatch.setattr("serving.embedded.launcher._GRACE_S", 1.0)

    async def run() -> int:
        async with EmbeddedServer(**SMALL, log_file=tmp_path / "log") as server:
            os.kill(server.pid, signal.SIGSTOP)
            return server.pid

    assert not is_alive(asyncio.run(run()))


def test_an_engine_that_dies_shows_its_log(tmp_path):
    """The error carries the end of this start's log, not of an earlier one."""
    log_file = tmp_path / "engine.log"
    log_file.write_text("an old line\n")

    async def run() -> None:
        async with EmbeddedServer(model="/no/such/model", log_file=log_file):
            pytest.fail("it cannot start")

    with pytest.raises(EmbeddedError, match=r"(?s)status 1 .*'/no/such/model' does not exist") as caught:
        asyncio.run(run())
    assert "an old line" not in str(caught.value)
    assert log_file.read_text().startswith("an old line\n")


def test_an_engine_that_is_not_ready_in_time_is_stopped(tmp_path):
    """The start has a limit, and what was started is stopped when it is passed."""
    server = EmbeddedServer(**SMALL, log_file=tmp_path / "log", start_timeout_s=0.05)

    async def run() -> None:
        async with server:
            pytest.fail("nothing starts that fast")

    with pytest.raises(EmbeddedError, match=r"not ready in 0\.05 s"):
        asyncio.run(run())
    assert not is_alive(server.pid)


def test_cancelling_the_start_stops_the_engine(tmp_path):
    """A cancelled start leaves no process."""
    server = EmbeddedServer(**SMALL, log_file=tmp_path / "log")

    async def run() -> None:
        task = asyncio.create_task(server.__aenter__())
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not is_alive(server.pid)


@pytest.mark.embedded
def test_an_engine_ends_when_its_owner_is_killed(tmp_path):
    """A kill -9 of the process that owns the engine leaves no orphan."""
    log_file = tmp_path / "engine.log"
    command = [sys.executable, "-c", OWNER, str(log_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            pid = int(owner.stdout.readline())
            assert is_alive(pid)
        finally:
            owner.kill()
    assert wait_dead(pid, timeout_s=15) < 5
    assert "the parent process is gone" in log_file.read_text()


def test_an_engine_whose_owner_is_already_dead_ends_by_itself(spawn):
    """An owner that dies before the engine looks for it is noticed too."""
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    process, ready_file = spawn(f"--exit-with-parent={ended.pid}", "--model=demo")
    assert process.wait(30) == 0
    assert not ready_file.exists()


def test_the_engine_gets_no_secrets(monkeypatch):
    """Keys and tokens of the environment are not handed on, the rest is."""
    for name in ("PREFECT_API_KEY", "HF_TOKEN", "DB_PASSWORD", "aws_secret"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")
    environment = environment_without_secrets()
    assert "hidden" not in environment.values()
    assert environment["PIP_INDEX_URL"] == "https://example.org/simple"
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(("text", "cpus"), [("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1)])
def test_a_containers_quota_limits_the_threads(tmp_path, text, cpus):
    """A container with a CPU quota is not given as many threads as the host has CPUs."""
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert _cgroup_cpus(tmp_path / "cpu.max") == cpus
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _cgroup_cpus(tmp_path / "cpu.max") > 1000
    assert _cgroup_cpus(tmp_path / "none") > 1000
    assert 1 <= default_threads() <= 8
