"""Several servers as one: the least loaded takes the next request, a dead one is set aside and comes back."""

import asyncio
import contextlib

import httpx
import pytest
from fake_sglang import FakeServer, wait_until

from serving.client.errors import (
    ConnectionBroken,
    NotReady,
    RequestTimedOut,
    ServerBusy,
    ServerFailed,
    ServerLost,
    ServerMisconfigured,
    ServerStalled,
    ServerUnreachable,
)
from serving.client.pool import FAILURES_TO_SET_ASIDE, ServerPool
from serving.client.protocol import GenerationRequest
from serving.client.sglang import SGLangClient

TIMEOUT_S = 60
LOAD = {"num_running_reqs": 1, "num_waiting_reqs": 0, "max_running_requests": 8, "token_usage": 0.1}


class Scripted:
    """A server behind a MockTransport whose /ready says what a test sets."""

    def __init__(self, name):
        self.url = f"http://{name}"
        self.answer = 200
        self.asked = 0
        self.slow, self.looks = asyncio.Event(), asyncio.Event()
        self.slow.set()
        self.looks.set()

    async def answer_page(self, request):
        """GET /ready, or a /v1/loads that always tells the same."""
        if request.url.path == "/v1/loads":
            await self.looks.wait()  # a frozen one does not even refuse
            return httpx.Response(200, json={"loads": [LOAD]})
        assert request.url.path in ("/ready", "/readiness")  # the second where the first is 404
        self.asked += 1
        await self.slow.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return httpx.Response(self.answer)

    def make_client(self):
        """A client of this server."""
        return SGLangClient(self.url, transport=httpx.MockTransport(self.answer_page))


def run(scenario, servers=2, **options):
    """Run `scenario(pool, *servers)` on a pool of scripted servers."""

    async def main():
        async with asyncio.timeout(TIMEOUT_S):
            scripted = [Scripted(f"s{i}") for i in range(servers)]
            pool = ServerPool([each.make_client() for each in scripted], **{"probe_every_s": 0.01, **options})
            try:
                return await scenario(pool, *scripted)
            finally:
                await pool.close()

    return asyncio.run(main())


def unreachable(client):
    return ServerUnreachable(f"{client.base_url}: refused", server=client.base_url)


async def fail(pool, error=None, after=None):
    """Lease a server and fail on it, after an event; returns what came out and the server's URL."""
    try:
        async with pool.lease() as client:
            url = client.base_url
            if after is not None:
                await after.wait()
            raise error or unreachable(client)  # noqa: TRY301  the lease has to see it
    except Exception as exc:  # noqa: BLE001  handed to the test
        return exc, url


async def lease_url(pool):
    async with pool.lease() as client:
        return client.base_url


def test_a_pool_without_servers_is_never_up():
    """Nor waited for, nor in an outage: it is for those who ask nothing."""

    async def main():
        pool = ServerPool([])
        await pool.wait_ready(timeout_s=TIMEOUT_S)
        assert (pool.is_up, pool.down_for_s, pool.clients) == (False, 0.0, [])
        await pool.close()

    asyncio.run(main())


def test_least_loaded_server_takes_the_next_request():
    """Requests spread evenly, and a freed server is used first."""

    async def scenario(pool, *_):
        async with contextlib.AsyncExitStack() as stack:
            taken = [(await stack.enter_async_context(pool.lease())).base_url for _ in range(6)]
            async with pool.lease() as first:
                pass
            assert await lease_url(pool) == first.base_url
        return taken

    taken = run(scenario, servers=3)
    assert sorted(taken) == ["http://s0", "http://s0", "http://s1", "http://s1", "http://s2", "http://s2"]


def test_unreachable_server_is_set_aside_and_the_others_go_on():
    """After one failure all requests go elsewhere, and listeners are told."""

    async def scenario(pool, first, *_):
        told = []
        pool.subscribe(lambda: told.append(pool.is_up))
        first.answer = httpx.ConnectError("refused")
        error, url = await fail(pool)
        assert type(error) is ServerUnreachable
        assert (url, told) == ("http://s0", [True])
        return {await lease_url(pool) for _ in range(5)}

    assert run(scenario) == {"http://s1"}


@pytest.mark.parametrize("answer", [503, 404, httpx.ReadTimeout("slow"), httpx.DecodingError("gzip")])
def test_server_comes_back_when_ready_answers_again(answer):
    """A server set aside is asked until it says 200; a bad page meanwhile is a no."""

    async def scenario(pool, server):
        server.answer = answer
        await fail(pool)
        assert not pool.is_up
        asked = server.asked
        await wait_until(lambda: server.asked > asked + 2)
        assert not pool.is_up
        server.answer = 200
        await wait_until(lambda: pool.is_up)
        return await lease_url(pool)

    assert run(scenario, servers=1) == "http://s0"


def test_listeners_are_told_of_both_ways_until_they_leave():
    """Down and up each call once; a listener that left hears nothing."""

    async def scenario(pool, server):
        told, left = [], []
        pool.subscribe(lambda: told.append(pool.is_up))
        pool.subscribe(lambda: left.append(1))()
        server.answer = 503
        await fail(pool)
        server.answer = 200
        await wait_until(lambda: pool.is_up)
        return told, left

    assert run(scenario, servers=1) == ([False, True], [])


def test_lease_without_a_server_up_is_unreachable():
    """No server up is the same failure as one that cannot be reached."""

    async def scenario(pool, server):
        server.answer = 503
        await fail(pool)
        with pytest.raises(ServerUnreachable, match="no server is up"):
            await lease_url(pool)

    run(scenario, servers=1)


def test_broken_connection_to_a_server_that_answers_is_only_that():
    """The server stays, and the failure says that this connection broke."""

    async def scenario(pool, server):
        error, _ = await fail(pool)
        assert type(error) is ConnectionBroken
        assert error.server == "http://s0"
        assert pool.is_up
        return server.asked

    assert run(scenario, servers=1) == 1


@pytest.mark.parametrize("answer", [200, 503])
def test_150_simultaneous_breaks_ask_once(answer):
    """All requests that break together share one question, and all get its answer."""

    async def scenario(pool, server):
        server.answer = answer
        server.slow.clear()
        failing = [asyncio.create_task(fail(pool)) for _ in range(150)]
        await wait_until(lambda: server.asked)
        server.slow.set()
        kinds = {type(error) for error, _ in await asyncio.gather(*failing)}
        return server.asked, kinds

    asked, kinds = run(scenario, servers=1, probe_every_s=1000)
    assert (asked, kinds) == (1, {ConnectionBroken if answer == 200 else ServerUnreachable})


def test_150_connections_broken_at_once_ask_a_real_server_once():
    """Over sockets, a server that drops everything and goes on is asked once and stays."""

    async def scenario():
        server = FakeServer()
        url = await server.start()
        pool = ServerPool([SGLangClient(url, vocab_size=1024)])
        server.gate.clear()

        async def ask(number):
            async with pool.lease() as client:
                await client.generate(GenerationRequest(f"r-{number}", [5], {}))

        asking = [asyncio.create_task(ask(number)) for number in range(150)]
        await wait_until(lambda: server.in_flight == 150)
        server.break_connections()
        results = await asyncio.gather(*asking, return_exceptions=True)
        await pool.close()
        await server.stop()
        return {type(result) for result in results}, server.paths["/ready"]

    kinds, asked = asyncio.run(scenario())
    assert kinds == {ConnectionBroken}
    assert asked == 1


def test_one_cancelled_waiter_does_not_cancel_the_question():
    """The answer to a shared question reaches those who still wait for it."""

    async def scenario(pool, server):
        server.slow.clear()
        first, second = [asyncio.create_task(fail(pool)) for _ in range(2)]
        await wait_until(lambda: server.asked)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        server.slow.set()
        error, _ = await second
        return type(error), server.asked

    assert run(scenario, servers=1) == (ConnectionBroken, 1)


@pytest.mark.parametrize(
    "error",
    [
        ServerBusy("full", server="s", status=503),
        ServerFailed("oops", server="s", status=500),
        RequestTimedOut("slow", server="s"),
        ServerMisconfigured("key"),
        ValueError("ours"),
        ServerUnreachable("gone", server="s"),
        asyncio.CancelledError(),
    ],
)
def test_lease_is_returned_whatever_happens(error):
    """After every way out of the block the servers are as free as before."""

    async def scenario(pool, *_):
        for _ in range(5):
            with contextlib.suppress(asyncio.CancelledError):
                await fail(pool, error)
        return await lease_url(pool)

    assert run(scenario) == "http://s0"


@pytest.mark.parametrize(
    "error", [ServerBusy("full", server="s", status=503), RequestTimedOut("t", server="s")]
)
def test_only_an_unreachable_server_is_set_aside(error):
    """A busy or slow server is not asked whether it is ready, and stays."""

    async def scenario(pool, server):
        raised, _ = await fail(pool, error)
        assert raised is error
        return pool.is_up, server.asked

    assert run(scenario, servers=1) == (True, 0)


def test_lease_is_returned_while_the_server_is_being_asked():
    """A request cancelled during the question frees its server too."""

    async def scenario(pool, first, _):
        first.slow.clear()
        failing = asyncio.create_task(fail(pool))
        await wait_until(lambda: first.asked)
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)
        return await lease_url(pool)

    assert run(scenario) == "http://s0"


def test_down_time_runs_while_no_server_is_up():
    """It starts when the last server goes, and is 0 while one is up."""
    now_s = 100.0

    async def scenario(pool, first, second):
        nonlocal now_s
        first.answer = second.answer = 503
        await fail(pool)
        now_s = 110.0
        assert pool.down_for_s == 0
        await fail(pool)
        now_s = 125.0
        assert pool.down_for_s == 15
        second.answer = 200
        await wait_until(lambda: pool.is_up)
        return pool.down_for_s

    assert run(scenario, clock=lambda: now_s) == 0


def test_second_failure_does_not_restart_the_down_time():
    """Requests that fail late on a server set aside before change nothing."""
    now_s = 0.0

    async def scenario(pool, server):
        nonlocal now_s
        server.answer = 503
        late = asyncio.Event()
        failing = asyncio.create_task(fail(pool, after=late))
        await asyncio.sleep(0)
        await fail(pool)
        now_s = 30.0
        late.set()
        await failing
        return pool.down_for_s

    assert run(scenario, servers=1, clock=lambda: now_s) == 30


def test_wait_ready_returns_when_every_server_is_ready():
    """Each server that is not yet ready is told to the caller by its URL."""

    async def scenario(pool, _, second):
        second.answer = 503
        said = []

        def hear(why):
            said.append(why)
            second.answer = 200

        await pool.wait_ready(timeout_s=60, on_wait=hear)
        return said

    [why] = run(scenario)
    assert "http://s1" in why


@pytest.mark.parametrize("answer", [503, httpx.ConnectError("refused")])
def test_wait_ready_gives_up_and_names_the_url(answer):
    """A server that never comes is named, with the last reason and what to do."""

    async def scenario(pool, _, second):
        second.answer = answer
        with pytest.raises(NotReady, match=r"0\.05 s: http://s1.*base_urls"):
            await pool.wait_ready(timeout_s=0.05)

    run(scenario)


def test_close_ends_every_probe_and_question():
    """Nothing is left running and no connection open."""

    async def scenario(pool, server, _):
        server.answer = 503
        await fail(pool)
        server.slow.clear()
        failing = asyncio.create_task(fail(pool))
        await asyncio.sleep(0)
        await pool.close()
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)
        return len(asyncio.all_tasks())

    assert run(scenario, probe_every_s=1000) == 1


def failed(client_url="s"):
    return ServerFailed("boom", server=client_url, status=500)


def test_server_that_only_fails_is_set_aside_and_tried_again():
    """Quick failures would draw most requests; after ten in a row it pauses, longer each time."""

    async def scenario(pool, server):
        pauses = []
        for _ in range(2):
            for _ in range(FAILURES_TO_SET_ASIDE):
                assert pool.is_up
                await fail(pool, failed())
            assert not pool.is_up
            started = asyncio.get_running_loop().time()
            await wait_until(lambda: pool.is_up)
            pauses.append(asyncio.get_running_loop().time() - started)
        return pauses, server.asked

    (first, second), asked = run(scenario, servers=1, probe_every_s=0.05)
    assert first >= 0.05
    assert second >= 0.1
    assert asked == 2


def test_a_good_answer_ends_the_count_of_failures():
    """Nine failures, a good answer and nine failures set no server aside."""

    async def scenario(pool, _):
        for _ in range(3):
            for _ in range(FAILURES_TO_SET_ASIDE - 1):
                await fail(pool, failed())
            await lease_url(pool)
        return pool.is_up

    assert run(scenario, servers=1)


def test_a_stall_calls_back_what_waits_and_leaves_what_has_ended():
    """A request that failed, and whose server is still being asked, is no longer with the server."""

    async def scenario(pool, server):
        server.slow.clear()
        failing = asyncio.create_task(fail(pool, ServerUnreachable("reset", server="x", was_sent=True)))
        waiting = asyncio.create_task(fail(pool, after=asyncio.Event()))
        error, _ = await waiting
        assert isinstance(error, ServerStalled)
        server.slow.set()
        error, _ = await failing
        assert isinstance(error, ServerLost | ConnectionBroken)
        [member] = pool._members
        assert not member.watch.done()
        assert (member.up, member.in_flight, member.leases) == (False, 0, set())

    run(scenario, servers=1, stall_timeout_s=0.05)


def test_the_first_look_is_taken_before_anything_can_freeze():
    """A server that answers nothing any more from its first request on is judged by what it told then."""

    async def scenario(pool, server):
        async def freeze():
            await asyncio.sleep(0.05)
            server.looks.clear()

        freezing = asyncio.create_task(freeze())
        error, _ = await fail(pool, after=asyncio.Event())
        await freezing
        assert isinstance(error, ServerStalled)

    run(scenario, servers=1, stall_timeout_s=1.0)


def test_a_stall_is_told_to_whoever_can_start_the_server_again():
    """Once, with the server's URL."""
    told = []

    async def scenario(pool, server):
        error, _ = await fail(pool, after=asyncio.Event())
        assert isinstance(error, ServerStalled)
        assert told == [server.url]

    run(scenario, servers=1, stall_timeout_s=0.05, on_stall=told.append)
