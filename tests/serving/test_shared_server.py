"""One server for a folder: started once, used by all, stopped after the last of them."""

import asyncio
import contextlib
import json
import multiprocessing
import socket
import time

import pytest

from serving.shared_server import (
    OWNER,
    ServerElsewhereError,
    ServerGoneError,
    find_failure,
    give_up_server,
    share_server,
)


class Servers:
    """Counts what is started and stopped, and on which ports it was asked for."""

    def __init__(self):
        self.running = 0
        self.ports = []

    @contextlib.asynccontextmanager
    async def start(self, port):
        self.ports.append(port)
        self.running += 1
        try:
            yield f"http://127.0.0.1:{port or 4999}"
        finally:
            self.running -= 1


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  any condition
            await asyncio.sleep(0.01)


def start_user(folder, servers):
    """A user as a task; gives it and the event that ends it."""
    entered, ends = asyncio.Event(), asyncio.Event()

    async def use():
        async with share_server(folder, servers.start) as url:
            entered.set()
            await ends.wait()
        return url

    return asyncio.create_task(use()), entered, ends


@pytest.mark.parametrize("owner_ends", [None, ZeroDivisionError])
def test_the_first_one_starts_it_and_it_outlives_its_work_for_the_others(tmp_path, owner_ends):
    """Also where the first one fails: the others have nothing to do with that."""
    servers = Servers()

    async def own(ends):
        async with share_server(tmp_path, servers.start):
            await ends.wait()
            if owner_ends:
                raise owner_ends

    async def body():
        ends = asyncio.Event()
        owner = asyncio.create_task(own(ends))
        await until(lambda: servers.running)
        user, entered, user_ends = start_user(tmp_path, servers)
        await entered.wait()
        assert servers.ports == [0]
        ends.set()
        await asyncio.sleep(0.5)
        assert servers.running == 1
        user_ends.set()
        assert await user == "http://127.0.0.1:4999"
        [outcome] = await asyncio.gather(owner, return_exceptions=True)
        assert isinstance(outcome, owner_ends or type(None))
        assert servers.running == 0
        async with share_server(tmp_path, servers.start):
            assert servers.ports == [0, 0]

    asyncio.run(body())


def test_a_cancelled_owner_waits_for_nobody(tmp_path):
    """It has seconds to save and end."""
    servers = Servers()

    async def body():
        owner, entered, _ = start_user(tmp_path, servers)
        await entered.wait()
        user, user_entered, user_ends = start_user(tmp_path, servers)
        await user_entered.wait()
        owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)
        assert servers.running == 0
        user_ends.set()
        await user

    asyncio.run(body())


def own_until_killed(folder, port):
    """The owner of another process."""

    @contextlib.asynccontextmanager
    async def start(_port):
        yield f"http://127.0.0.1:{port}"

    async def own():
        async with share_server(folder, start):
            await asyncio.Event().wait()

    asyncio.run(own())


def test_after_a_killed_owner_the_next_one_takes_its_port(tmp_path):
    """Those who use that address find a server there again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    owner = multiprocessing.get_context("spawn").Process(target=own_until_killed, args=(tmp_path, port))
    owner.start()
    deadline = time.monotonic() + 120
    while not (tmp_path / OWNER).exists() or not (tmp_path / OWNER).read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    owner.kill()
    owner.join()
    servers = Servers()

    async def body():
        async with share_server(tmp_path, servers.start):
            assert servers.ports == [port]

    asyncio.run(body())


def test_a_server_of_another_machine_is_named(tmp_path):
    """Its address is good there only."""
    servers = Servers()

    async def body():
        async with share_server(tmp_path, servers.start):
            (tmp_path / OWNER).write_text(json.dumps({"host": "far-away", "url": "http://127.0.0.1:1"}))
            with pytest.raises(ServerElsewhereError, match="started on far-away"):
                async with share_server(tmp_path, servers.start):
                    pass

    asyncio.run(body())


def test_a_server_that_is_given_up_is_known_to_all_until_its_users_have_gone(tmp_path):
    """Those who use it are told, no new one waits for it, and the next one after them starts it again."""
    servers = Servers()

    async def body():
        owner, entered, ends = start_user(tmp_path, servers)
        await entered.wait()
        assert find_failure(tmp_path) is None
        give_up_server(tmp_path, "it died too often")
        assert find_failure(tmp_path) == "it died too often"
        with pytest.raises(ServerGoneError, match="it died too often"):
            async with share_server(tmp_path, servers.start):
                pytest.fail("nothing is there")
        ends.set()
        await owner
        assert find_failure(tmp_path) is None
        async with share_server(tmp_path, servers.start):
            assert len(servers.ports) == 2

    asyncio.run(body())
