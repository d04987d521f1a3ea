"""Servers that die, freeze, refuse or come back: no prompt is lost or blamed."""

import asyncio
from collections import Counter

import pytest
from fake_sglang import NOT_A_ROUTERS, FakeServer, prompt_key, wait_until
from generation_support import (
    cancel,
    is_free,
    mark_id,
    open_resources,
    serve,
)

from serving.client import sglang as client
from serving.client.errors import ForeignIds, ServerMisconfigured
from tasks.generate import dispatch, retries


def test_busy_server_costs_no_attempt(make):
    """A full queue is nobody's fault: every prompt gets its answer as a first attempt."""
    dataset, server = make(), FakeServer(faults={"status_503": 0.5})
    dataset.run(server, max_attempts=1)
    dataset.check_complete(server)
    assert {row.attempt for row in dataset.rows} == {1}


@pytest.mark.parametrize("fault", ["status_503", "status_500", "half"])
def test_server_that_fails_everything_is_not_fed_the_dataset(make, monkeypatch, fault):
    """While nothing succeeds, no more prompts are taken up than twice the window."""
    monkeypatch.setattr(retries, "BACKOFF_FIRST_S", 10.0)
    dataset, server = make(prompts=300), FakeServer(faults={fault: 1.0})

    async def scenario():
        async with serve(dataset.renderer, server, short=8) as resources:
            run = asyncio.create_task(dataset.generate(resources))
            await wait_until(lambda: len(server.seen) >= 8)
            await asyncio.sleep(0.3)
            await cancel(run)

    asyncio.run(scenario())
    assert len({prompt_key(seen["input_ids"]) for seen in server.seen}) <= 16


@pytest.mark.usefixtures("ticking")
def test_server_that_is_busy_for_ever_is_an_outage(make):
    """A queue that stays full ends the run after the time-out, and no prompt is blamed."""
    dataset, server = make(), FakeServer(faults={"status_503": 1.0})
    with pytest.raises(dispatch.OutageError, match=r"outage_timeout_s 0\.3; the last failure was: .* 503 "):
        dataset.run(server, outage_timeout_s=0.3)
    assert not dataset.rejected


def test_a_router_whose_servers_are_away_pauses_the_run(make, caplog):
    """Also while its /readiness still says yes; the log names it, and no prompt is blamed."""
    dataset, server = make(prompts=30), FakeServer(missing=NOT_A_ROUTERS, faults={"away": 1.0})

    async def scenario():
        async with serve(dataset.renderer, server, short=8) as resources:
            run = asyncio.create_task(dataset.generate(resources, max_attempts=1))
            await wait_until(lambda: not resources.pool.is_up)
            assert "server set aside" in caplog.text
            assert "answered 503 (all are unavailable)" in caplog.text
            server.ready = False
            asked = server.paths["/readiness"]
            await wait_until(lambda: server.paths["/readiness"] > asked + 3)
            assert not resources.pool.is_up
            server.faults, server.ready = {}, True
            await run

    asyncio.run(scenario())
    dataset.check_complete(server)
    assert {row.attempt for row in dataset.rows} == {1}


@pytest.mark.usefixtures("ticking")
def test_one_failure_after_a_long_answer_is_no_outage(make):
    """Time spent on an answer that is on its way does not count as silence."""
    dataset, server = make(prompts=1), FakeServer(latency_s=0.5, script=["status_500"])
    dataset.run(server, outage_timeout_s=0.3)
    dataset.check_complete(server)


def test_server_that_restarts_in_mid_run_costs_nothing(make):
    """What was in flight is asked again without an attempt lost; nothing is rejected."""
    dataset, server = make(prompts=200), FakeServer(latency_s=0.01)

    async def scenario():
        async with serve(dataset.renderer, server, short=16) as resources:
            run = asyncio.create_task(dataset.generate(resources, max_attempts=1, report_every_s=0.05))
            for answers in (30, 90):
                await wait_until(lambda target=answers: len(server.seen) > target)
                await server.stop()
                await asyncio.sleep(0.3)
                assert not resources.pool.is_up
                assert resources.window.in_flight == 0
                assert any(status.is_paused for status in dataset.statuses)
                await server.start(server.port)
            result = await run
            assert is_free(resources)
            return result

    assert asyncio.run(scenario()).rows == 200
    dataset.check_complete(server)
    assert not dataset.rejected
    assert {row.attempt for row in dataset.rows} == {1}


@pytest.mark.usefixtures("ticking")
def test_server_that_is_gone_for_good_is_an_outage(make):
    """The run ends after outage_timeout_s, keeps its rows, and a resume finishes them."""
    dataset, server = make(prompts=100), FakeServer(latency_s=0.01)

    async def scenario():
        async with serve(dataset.renderer, server) as resources:
            run = asyncio.create_task(dataset.generate(resources, outage_timeout_s=0.3))
            await wait_until(lambda: len(server.seen) > 40)
            await server.stop()
            with pytest.raises(dispatch.OutageError, match="everything generated is kept"):
                await run
            assert is_free(resources)

    asyncio.run(scenario())
    kept = len(dataset.rows)
    assert 0 < kept < 100
    assert (dataset.store.rows, dataset.rejected) == (kept, [])
    assert dataset.run(server).rows == 100
    dataset.check_complete(server)


def test_dead_server_among_two_is_passed_over(make):
    """Its requests go to the other one without costing an attempt."""
    dataset, good = make(prompts=60), FakeServer(latency_s=0.002)

    async def scenario():
        dead = FakeServer()
        dead_url, good_url = await dead.start(), await good.start()
        await dead.stop()
        async with open_resources(dataset.renderer, dead_url, good_url) as resources:
            await dataset.generate(resources, max_attempts=1)
        await good.stop()
        return good_url

    url = asyncio.run(scenario())
    dataset.check_complete(good)
    assert {row.server for row in dataset.rows} == {url}


def test_two_servers_share_the_work(make):
    """Both take about half, and each row names its server."""
    dataset, servers = make(prompts=80), [FakeServer(latency_s=0.01), FakeServer(latency_s=0.01)]
    dataset.run(*servers, short=10)
    dataset.check_complete(servers[0])
    assert min(Counter(row.server for row in dataset.rows).values()) > 20
    assert [server.most_in_flight for server in servers] == [5, 5]


def test_wrong_key_stops_the_run(make):
    """No prompt is rejected and none asked needlessly when every one of them would fail."""
    dataset, server = make(), FakeServer(api_key="right")
    with pytest.raises(ServerMisconfigured, match="401"):
        dataset.run(server, api_key="wrong")
    assert (dataset.rows, dataset.rejected) == ([], [])
    assert server.paths["/generate"] <= 12


def test_answers_of_another_model_stop_the_run_and_blame_no_prompt(make):
    """The first id that the target does not have is enough; the right server answers all that is left."""
    dataset, server = make(prompts=60), FakeServer(script=[None] * 10 + ["foreign_id"] * 50)
    with pytest.raises(ForeignIds, match=r"the id 1024, but the target has 1,024 ids"):
        dataset.run(server, short=4)
    assert 7 <= len(dataset.rows) <= 10
    assert not dataset.rejected
    assert len(server.seen) <= 14
    good = FakeServer()
    dataset.run(good)
    dataset.check_rows(good)
    assert (len(dataset.rows), dataset.rejected) == (60, [])


def test_frozen_server_gets_its_requests_again_when_it_works(make, monkeypatch):
    """It takes requests and does nothing: they are called back without an attempt lost, and asked again."""
    monkeypatch.setattr(client, "CONTROL_TIMEOUT_S", 0.1)
    dataset, server = make(prompts=60), FakeServer(latency_s=0.01)

    async def scenario():
        async with serve(dataset.renderer, server, short=8, stall_timeout_s=0.2) as resources:
            run = asyncio.create_task(dataset.generate(resources, max_attempts=1))
            await wait_until(lambda: len(server.answered) > 20)
            server.gate.clear()
            await wait_until(lambda: not resources.pool.is_up)
            await wait_until(lambda: resources.window.in_flight == 0)
            asked = server.paths["/ready"]
            await wait_until(lambda: server.paths["/ready"] > asked + 3)
            assert not resources.pool.is_up  # /ready says yes: only a token is proof
            server.gate.set()
            await run
            assert is_free(resources)

    asyncio.run(scenario())
    dataset.check_complete(server)
    assert not dataset.rejected
    assert {row.attempt for row in dataset.rows} == {1}


def test_frozen_server_among_two_is_passed_over(make):
    """The other one answers what it was asked."""
    dataset, frozen, good = make(prompts=40), FakeServer(), FakeServer(latency_s=0.01)

    async def scenario():
        async with serve(dataset.renderer, frozen, good, stall_timeout_s=0.2) as resources:
            frozen.gate.clear()
            await dataset.generate(resources, max_attempts=1)

    asyncio.run(scenario())
    dataset.check_complete(good)
    assert {row.server for row in dataset.rows} == {f"http://127.0.0.1:{good.port}"}


def test_request_that_a_server_forgot_is_asked_again(make):
    """The server is idle, and one prompt still waits for its answer."""
    dataset, server = make(prompts=20), FakeServer(script=["hang", "hang"])
    dataset.run(server, stall_timeout_s=0.2, max_attempts=1)
    dataset.check_complete(server)
    assert not dataset.rejected


@pytest.mark.parametrize("shows_load", [True, False])
def test_slow_server_is_not_taken_for_a_frozen_one(make, shows_load):
    """While it works, or when it cannot say, its answers are waited for."""
    dataset, server = make(prompts=10), FakeServer(latency_s=1.0)
    server.shows_load = shows_load
    dataset.run(server, stall_timeout_s=0.1)
    dataset.check_complete(server)
    assert (len(server.seen), server.paths["/ready"]) == (10, 0)


def test_prompt_that_kills_the_server_is_set_aside(make, tokenizer_folder):
    """It is found among all that were there when the server died; the others are answered."""
    dataset = make(prompts=150, marked_every=150)
    server = FakeServer(latency_s=0.02, killer=mark_id(tokenizer_folder))
    dataset.run(server, short=32)
    dataset.check_complete(server)
    [rejected] = dataset.rejected
    assert (rejected.reason, rejected.permanent, server.deaths) == ("kills_the_server", True, 5)
    assert "5 times a server died" in rejected.detail
    assert len(dataset.rows) == 149


def test_two_prompts_that_kill_the_server_are_both_found(make, tokenizer_folder):
    """Though each takes the other one down with it."""
    dataset = make(prompts=60, marked_every=30)
    server = FakeServer(latency_s=0.02, killer=mark_id(tokenizer_folder), down_s=0.05)
    dataset.run(server, short=16)
    dataset.check_complete(server)
    assert [row.reason for row in dataset.rejected] == ["kills_the_server"] * 2
    assert server.deaths <= 10


def test_only_prompts_left_are_suspects(make, tokenizer_folder):
    """With nothing else to fill the window they are asked all the same."""
    dataset = make(prompts=4, marked_every=4)
    server = FakeServer(latency_s=0.02, killer=mark_id(tokenizer_folder), down_s=0.05)
    dataset.run(server, short=8)
    dataset.check_complete(server)
    assert len(dataset.rows) == 3


def test_server_that_dies_of_itself_blames_no_prompt(make):
    """Several deaths in a row, and no prompt was there at all of them."""
    dataset, server = make(prompts=300), FakeServer(latency_s=0.02)

    async def scenario():
        async with serve(dataset.renderer, server, short=16) as resources:
            run = asyncio.create_task(dataset.generate(resources, max_attempts=1))
            for deaths in range(8):
                await wait_until(lambda target=30 * deaths: len(server.answered) > target)
                server.break_connections()
                server._server.close()
                await wait_until(lambda: not resources.pool.is_up)
                await server.start(server.port)
            await run

    asyncio.run(scenario())
    dataset.check_complete(server)
    assert not dataset.rejected
