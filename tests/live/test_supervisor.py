"""A real SGLang server under the supervisor: what a stand-in cannot prove. Needs SGLANG_COMMAND."""

import asyncio
import os
import re
import shlex
import signal
import socket
import time

import psutil
import pytest

from serving.client.errors import StartFailed
from serving.client.protocol import GenerationRequest
from serving.client.sglang import SGLangClient
from serving.launch.supervisor import SGLangServer

pytestmark = pytest.mark.live

TIMEOUT_S = 600
STALL_TIMEOUT_S = 10
KEY = "sk-secret-key"


class Stand:
    """The command on a free port, and what was told about it, with its time."""

    def __init__(self, command, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = folder / "server.log"
        self.argv = shlex.split(command.format(port=port))
        self.began_s = time.monotonic()
        self.events = []

    def server(self, *options, api_key=None):
        return SGLangServer(
            [*self.argv, *options],
            base_url=self.url,
            log_file=self.log_file,
            api_key=api_key,
            stall_timeout_s=STALL_TIMEOUT_S,
            on_event=self.tell,
        )

    def tell(self, line):
        self.events.append((time.monotonic() - self.began_s, line))
        print(f"{self.events[-1][0]:6.1f} s  {line}")  # noqa: T201 - shown with -s

    def times_told(self, pattern):
        return len([line for _, line in self.events if re.search(pattern, line)])

    async def wait_until(self, condition):
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - any condition
                await asyncio.sleep(0.1)

    async def mistreat(self, hurt):
        """Hurt a server that works on a request; it must be there again and answer."""
        request = GenerationRequest("a", [5, 6], {"max_new_tokens": 8, "ignore_eos": True})
        long = GenerationRequest("b", [5, 6], {"max_new_tokens": 2000, "ignore_eos": True})
        async with self.server() as server, SGLangClient(self.url) as client:
            family = psutil.Process(server.pid).children(recursive=True)
            pid = server.pid
            asked = asyncio.create_task(client.generate(long))
            while not (await client.load()).running:  # noqa: ASYNC110 - only it can tell
                await asyncio.sleep(0.05)
            self.tell("hurt")
            hurt(psutil.Process(pid), scheduler_of(pid))
            await self.wait_until(lambda: self.times_told("is ready after") == 2)
            asked.cancel()
            assert server.pid != pid
            assert not [one for one in family if one.is_running()]
            assert len((await client.generate(request)).output_ids) == 8
            family = psutil.Process(server.pid).children(recursive=True)
        assert not [one for one in family if one.is_running()]


def scheduler_of(pid):
    [scheduler] = [
        process
        for process in psutil.Process(pid).children(recursive=True)
        if "sglang::scheduler" in " ".join(process.cmdline())
    ]
    return scheduler


@pytest.fixture
def stand(tmp_path):
    command = os.environ.get("SGLANG_COMMAND")
    if not command:
        pytest.skip("starts servers of its own: give SGLANG_COMMAND, not SGLANG_URL")
    return Stand(command, tmp_path)


def test_start_progress_and_stop(stand):
    """Each step of the start is told; SIGTERM ends all of it well before it would be killed."""

    async def run():
        async with stand.server("--api-key", KEY, api_key=KEY) as server:
            family = psutil.Process(server.pid).children(recursive=True)
            stopping_s = time.monotonic()
        return family, time.monotonic() - stopping_s

    family, took_s = asyncio.run(run())
    for pattern in (
        "^loading weights$",
        "^weights loaded in",
        "^KV cache allocated: ",
        "fit in the KV cache$",
    ):
        assert stand.times_told(pattern), (pattern, stand.events)
    assert not stand.times_told(KEY)
    assert not [one for one in family if one.is_running()]
    assert took_s < 30
    stand.tell(f"stopped in {took_s:.1f} s")


def test_its_scheduler_is_killed(stand):
    """The parent ends by itself some seconds later; the explanation names the process."""
    asyncio.run(stand.mistreat(lambda parent, scheduler: scheduler.kill()))
    assert stand.times_told(r"its process scheduler\S* was killed from outside")


def test_its_parent_is_killed(stand):
    """The scheduler does not outlive it."""
    asyncio.run(stand.mistreat(lambda parent, scheduler: parent.kill()))
    assert stand.times_told("died by SIGKILL")


def test_its_scheduler_freezes(stand):
    """/ready and /v1/loads go on answering; that no counter moves and no token comes is what proves it."""
    asyncio.run(stand.mistreat(lambda parent, scheduler: scheduler.send_signal(signal.SIGSTOP)))
    assert stand.times_told("it has done nothing for")


def test_an_unknown_flag_is_explained(stand):
    """Out of 30,000 characters of usage."""

    async def run():
        async with stand.server("--no-such-flag"):
            pytest.fail("it cannot start")

    with pytest.raises(
        StartFailed, match=r"refuses its command line \(unrecognized arguments: --no-such-flag\)"
    ):
        asyncio.run(run())
