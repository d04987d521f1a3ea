"""A server that is started, watched, started again and stopped: with a stand-in that has no model."""

from __future__ import annotations

import asyncio
import copy
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from serving.client.errors import KvCacheTooSmall, PortTaken, ServerDown, StartFailed, StaysDown
from serving.launch.command import KeyFile
from serving.launch.guarded import GuardedProcess
from serving.launch.processes import open_log
from serving.launch.supervisor import SGLangServer

FAKE = Path(__file__).parents[2] / "support" / "fake_sglang.py"
TIMEOUT_S = 120

OWNER = """
import asyncio, sys
from pathlib import Path
from serving.launch.command import KeyFile
from serving.launch.supervisor import SGLangServer

async def main(url, log, *argv):
    key_file = KeyFile(Path(log).with_name("key.yaml"), "hunter2")
    async with SGLangServer(argv, base_url=url, log_file=Path(log), key_file=key_file) as server:
        print(server.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def wait_until(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.02)


class Stand:
    """A command for a stand-in server on a port of its own, and what was told about it."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.log_file = folder / "logs" / "server.log"
        self.events = []

    def argv(self, *options):
        return [sys.executable, str(FAKE), "--port", str(self.port), *options]

    def says(self, *lines):
        """The option that makes it print these lines first."""
        path = self.folder / "lines.txt"
        path.write_text("".join(line + "\n" for line in lines))
        return f"--log={path}"

    def family(self):
        """The process ids of its descendants, from the option --family."""
        path = self.folder / "family"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def server(self, *options, **settings):
        settings = {"stall_timeout_s": 0.5, "grace_s": 20.0, **settings}
        return SGLangServer(
            self.argv(*options),
            base_url=self.url,
            log_file=self.log_file,
            **{"on_event": self.events.append, **settings},
        )

    async def wait_ready(self, times):
        """Wait until the supervisor has seen it ready so often: it is the one to act next."""
        await wait_until(lambda: len([event for event in self.events if "is ready after" in event]) == times)

    def told(self, pattern):
        return any(re.search(pattern, event) for event in self.events)


@pytest.fixture
def stand(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.launch.supervisor._FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("serving.launch.server_process._POLL_S", 0.05)
    monkeypatch.setattr("serving.client.sglang.CONTROL_TIMEOUT_S", 5.0)
    return Stand(tmp_path)


def is_ready(url):
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_it_runs_inside_the_block_only(stand):
    """In a session of its own, with its log in a file that others cannot read, for it may hold the key."""

    async def run():
        async with stand.server() as server:
            assert is_ready(stand.url)
            assert os.getsid(server.pid) == server.pid != os.getsid(0)
            assert os.readlink(f"/proc/{server.pid}/fd/0") == os.devnull  # noqa: PTH115 - a Path blocks too
            return server, server.pid

    server, pid = asyncio.run(run())
    assert not is_alive(pid)
    assert server.pid is None
    assert stand.log_file.stat().st_mode & 0o077 == 0
    assert stand.told(rf"at {stand.url} is ready after \d+ s")


def test_its_progress_is_told_from_its_log(stand):
    """Only from what this start writes: an earlier one's lines are left alone."""
    stand.log_file.parent.mkdir()
    stand.log_file.write_text("[t] Load weight begin. avail mem=99.00 GB\n")

    async def run():
        async with stand.server(stand.says("[t] max_total_num_tokens=4578, chunked_prefill_size=8192")):
            pass

    asyncio.run(run())
    assert stand.events[0] == "4,578 tokens fit in the KV cache"
    assert not stand.told("loading weights")


def test_it_is_started_again_after_its_death(stand):
    """By whatever killed it; what happened and what is done about it is told in one line."""

    async def run():
        async with stand.server() as server:
            os.kill(first := server.pid, signal.SIGKILL)
            await stand.wait_ready(2)
            assert is_ready(stand.url)
            assert server.pid != first
            assert server.failure is None

    asyncio.run(run())
    assert stand.told(
        r"died by SIGKILL: it was killed from outside.*; starting it again in .* \(restart 1 of 3\)$"
    )


def test_it_stays_down_when_its_restarts_are_used_up(stand):
    """The reason is told, is there to wait for, and is put to an error that leaves the block."""

    async def run():
        async with stand.server(restarts=1) as server:
            for times in (1, 2):
                await stand.wait_ready(times)
                os.kill(server.pid, signal.SIGKILL)
            failure = await server.wait_failed()
            assert failure is server.failure
            raise KeyError("ours")

    with pytest.raises(KeyError, match="ours") as caught:
        asyncio.run(run())
    [note] = caught.value.__notes__
    assert "it stays down, for its 1 restarts are used up" in note
    assert stand.events[-1] == note.splitlines()[0]


def test_health_refills_the_restarts(stand, monkeypatch):
    """A death a day is no reason to stay down."""
    monkeypatch.setattr("serving.launch.supervisor.REFILL_AFTER_S", 0.0)

    async def run():
        async with stand.server(restarts=1) as server:
            for times in (2, 3, 4):
                os.kill(server.pid, signal.SIGKILL)
                await stand.wait_ready(times)

    asyncio.run(run())
    assert len([event for event in stand.events if "(restart 1 of 1)" in event]) == 3


def test_a_restart_that_fails_is_tried_again(stand):
    """Its port may be free again by then; each try costs one of the restarts."""

    async def run():
        async with stand.server(restarts=2) as server:
            os.kill(server.pid, signal.SIGKILL)
            await wait_until(lambda: server.pid is None)
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                thief.bind(("127.0.0.1", stand.port))
                thief.listen()
                failure = await server.wait_failed()
            assert isinstance(failure, StaysDown)
            assert failure.failure == "port_taken"

    asyncio.run(run())


def test_a_frozen_server_is_killed_and_started_again(stand):
    """Its counters stand still with requests in flight and no token comes out, while /ready says yes."""

    async def run():
        ask = {"rid": "a", "input_ids": [5], "sampling_params": {}}
        async with stand.server("--latency-s=0.5"), httpx.AsyncClient(trust_env=False, timeout=60) as client:
            asked = asyncio.create_task(client.post(f"{stand.url}/generate", json=ask))
            while '"num_running_reqs": 0' in (await client.get(f"{stand.url}/v1/loads")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await client.post(f"{stand.url}/freeze")
            await stand.wait_ready(2)
            await asyncio.wait([asked])
            assert (await client.post(f"{stand.url}/generate", json=ask)).status_code == 200

    asyncio.run(run())
    assert stand.told(
        "was killed, for it has done nothing for .*, and no token came out when one was asked for"
    )


def test_a_stopped_server_is_killed_and_started_again(stand, monkeypatch):
    """SIGSTOP of everything: no page answers, and SIGTERM would do nothing."""
    monkeypatch.setattr("serving.client.sglang.CONTROL_TIMEOUT_S", 0.5)

    async def run():
        async with stand.server() as server:
            os.killpg(server.pid, signal.SIGSTOP)
            await stand.wait_ready(2)

    asyncio.run(run())
    assert stand.told("was killed, for it has not answered /v1/loads for")


def test_a_reported_stall_is_believed_when_no_token_comes(stand):
    """A server that forgot one request and answers others goes on."""

    async def run():
        async with stand.server(stall_timeout_s=600) as server, httpx.AsyncClient(trust_env=False) as client:
            first = server.pid
            server.report_stalled()
            await asyncio.sleep(1)
            assert server.pid == first
            await client.post(f"{stand.url}/freeze")
            server.report_stalled("nothing came back")
            await stand.wait_ready(2)

    asyncio.run(run())
    assert stand.told("was killed, for nothing came back, and no token came out")


def test_nothing_of_it_is_left(stand):
    """Neither children that ignore SIGTERM nor one that left the group outlive the block."""

    async def run():
        options = ("--ignore-sigterm", f"--family={stand.folder / 'family'}")
        async with stand.server(*options, grace_s=0.2) as server:
            await wait_until(lambda: len(stand.family()) == 3)
            assert all(map(is_alive, stand.family()))
            return server.pid

    pid = asyncio.run(run())
    assert not any(map(is_alive, [pid, *stand.family()]))


def test_nothing_is_left_of_one_that_died(stand):
    """The parent's death takes its descendants along before another one is started."""

    async def run():
        async with stand.server(f"--family={stand.folder / 'family'}", restarts=0) as server:
            await wait_until(lambda: len(stand.family()) == 3)
            os.kill(server.pid, signal.SIGKILL)
            await server.wait_failed()
            assert not any(map(is_alive, stand.family()))

    asyncio.run(run())


def test_nothing_is_left_when_the_owner_is_killed(stand):
    """A kill -9 of the process that owns the server leaves no process of it, nor the file with its key."""
    key_file = stand.log_file.with_name("key.yaml")
    argv = stand.argv("--ignore-sigterm", f"--family={stand.folder / 'family'}")
    command = [sys.executable, "-c", OWNER, stand.url, str(stand.log_file), *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            pid = int(owner.stdout.readline())
            deadline = time.monotonic() + TIMEOUT_S
            while len(stand.family()) < 3 and time.monotonic() < deadline:
                time.sleep(0.02)
            family = [pid, *stand.family()]
            assert len(family) == 4
            assert all(map(is_alive, family))
            assert key_file.exists()
        finally:
            owner.kill()
    while any(map(is_alive, family)) or key_file.exists():
        assert time.monotonic() < deadline, family
        time.sleep(0.02)


def test_the_keys_file_is_there_for_each_start_and_gone_with_the_server(stand):
    """In the pause before a restart too: a kill -9 then would leave it behind."""
    key_file = KeyFile(stand.folder / "key.yaml", "hunter2")
    seen = []

    def note(event):
        stand.events.append(event)
        seen.append((event, key_file.path.exists()))

    async def run():
        async with stand.server(key_file=key_file, on_event=note) as server:
            os.kill(server.pid, signal.SIGKILL)
            await stand.wait_ready(2)

    asyncio.run(run())
    there = [(("starting it again" in event), exists) for event, exists in seen]
    assert there == [(False, True), (True, False), (False, True)]
    assert not key_file.path.exists()

    async def fail():
        async with SGLangServer(["/no/such"], base_url=stand.url, log_file=stand.log_file, key_file=key_file):
            pytest.fail("it cannot start")

    with pytest.raises(StartFailed):
        asyncio.run(fail())
    assert not key_file.path.exists()


def test_nothing_is_left_when_the_guardian_is_killed(stand):
    """Should the guardian be the victim, the owner does its work."""

    async def run():
        log, _ = open_log(stand.log_file)
        process = await GuardedProcess.start(stand.argv(), env=dict(os.environ), log=log)
        os.close(log)
        process._guardian.kill()
        assert await process.wait() is None
        return process.pid

    pid = asyncio.run(run())
    deadline = time.monotonic() + TIMEOUT_S
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_taken_port_is_found_before_the_start(stand):
    """With the process that has it; nothing is started."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", stand.port))
        other.listen()

        async def run():
            async with stand.server():
                pytest.fail("it cannot start")

        with pytest.raises(PortTaken, match=rf"port {stand.port} is taken by process {os.getpid()} \("):
            asyncio.run(run())
    assert not stand.log_file.exists()


def test_a_start_that_fails_is_explained(stand):
    """One line says why and what to do, the line that tells it and the log follow. It is not tried again."""
    line = "sglang serve: error: argument --kv-cache-dtype: invalid choice: 'fp8' (choose from 'auto')"

    async def run():
        async with stand.server(stand.says("before", line, "after"), "--die-with=2"):
            pytest.fail("it cannot start")

    with pytest.raises(StartFailed) as caught:
        asyncio.run(run())
    headline, *rest = str(caught.value).splitlines()
    assert "ended with status 2 before it was ready: SGLang refuses its command line" in headline
    assert rest == [f"Its log is {stand.log_file}:", line]
    assert caught.value.failure == "bad_argument"
    assert caught.value.requires_user_action
    assert copy.copy(
        caught.value
    ).requires_user_action  # as by pickle: a flow's failure may go to another process
    assert stand.events == []


def test_a_start_that_fails_for_an_unknown_reason_shows_the_end_of_the_log(stand):
    """It may pass by itself, for all that is known."""
    lines = [f"line {number}" for number in range(30)]

    async def run():
        async with stand.server(stand.says(*lines), "--die-with=1"):
            pytest.fail("it cannot start")

    with pytest.raises(StartFailed) as caught:
        asyncio.run(run())
    assert str(caught.value).splitlines()[1:] == [f"The end of {stand.log_file}:", *lines[10:]]
    assert not caught.value.requires_user_action


def test_a_server_that_is_not_ready_in_time_is_stopped(stand):
    """How far it came says what it waits for."""

    async def run():
        options = (stand.says("[t TP0] Init parallel begin."), "--die-with=1", "--die-after-s=600")
        async with stand.server(*options, ready_timeout_s=3):
            pytest.fail("it is never ready")

    with pytest.raises(StartFailed, match=r"was not ready in 3 s: its ranks wait for one another \(NCCL\)"):
        asyncio.run(run())


def test_a_small_kv_cache_is_refused(stand):
    """GPUs that stand idle for a night are worse than a server that does not start."""

    async def run():
        async with stand.server(min_kv_tokens=100_001):
            pytest.fail("it has 100,000 tokens")

    with pytest.raises(KvCacheTooSmall, match="holds 100,000 tokens, at least 100,001 were expected"):
        asyncio.run(run())


def test_no_such_program(stand):
    """A wrong path is one line."""

    async def run():
        async with SGLangServer(["/no/such/python"], base_url=stand.url, log_file=stand.log_file):
            pytest.fail("it cannot start")

    with pytest.raises(
        ServerDown, match=r"cannot be started: .*No such file or directory: '/no/such/python'"
    ):
        asyncio.run(run())


def test_cancelling_the_start_leaves_nothing(stand):
    """A cancelled start is a stopped server."""

    async def run():
        server = stand.server("--die-with=1", "--die-after-s=600")
        task = asyncio.create_task(server.__aenter__())
        await wait_until(lambda: server.pid)
        pid = server.pid
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pid

    assert not is_alive(asyncio.run(run()))


def test_a_server_that_refuses_our_key_is_not_watched(stand):
    """All its answers would be 401, which is no life and no death."""

    async def run():
        async with stand.server("--api-key=sk-secret-key"):
            pytest.fail("it cannot be asked")

    with pytest.raises(StartFailed, match="give the server's key as api_key") as caught:
        asyncio.run(run())
    assert caught.value.failure == "wrong_key"


def test_errors_hold_no_secrets(stand):
    """SGLang writes its settings, key and all, into the log whose end is shown."""

    async def run():
        options = (stand.says("server_args={'api_key': 'sk-secret-key'}"), "--die-with=1")
        async with stand.server(*options, "--api-key", "sk-secret-key"):
            pytest.fail("it cannot start")

    with pytest.raises(StartFailed, match="'api_key': '<redacted>'") as caught:
        asyncio.run(run())
    assert "sk-secret-key" not in str(caught.value)


def test_the_server_gets_the_hubs_token_and_no_other(stand, monkeypatch):
    """It downloads the model; the other keys of the environment are none of its business."""
    monkeypatch.setenv("HF_TOKEN", "hf_for_the_model")
    monkeypatch.setenv("DRAFTMILL_API_KEY", "not-for-it")

    async def run():
        async with stand.server(env={"NCCL_P2P_DISABLE": "1"}) as server:
            return await asyncio.to_thread(Path(f"/proc/{server.pid}/environ").read_text)

    environment = asyncio.run(run()).split("\0")
    assert {"HF_TOKEN=hf_for_the_model", "NCCL_P2P_DISABLE=1"} < set(environment)
    assert "not-for-it" not in "".join(environment)
