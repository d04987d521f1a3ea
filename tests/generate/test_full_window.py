"""The window is full while there is work, and each slot is given back."""

import asyncio
from collections import Counter

import pytest
from fake_sglang import FakeServer, wait_until
from generation_support import (
    cancel,
    is_free,
    serve,
)

from tasks.generate import dispatch
from tasks.generate.adapt_window import adapt_window


def test_window_is_filled_and_never_more(make):
    """All slots of both lanes are used at once, and not one more."""
    dataset, server = make(prompts=120, long_every=3), FakeServer()

    async def scenario():
        async with serve(dataset.renderer, server, short=9, long=5) as resources:
            server.gate.clear()
            run = asyncio.create_task(dataset.generate(resources))
            await wait_until(lambda: server.in_flight == 14)
            lanes = Counter(len(seen["input_ids"]) >= 200 for seen in server.seen)
            assert lanes == {False: 9, True: 5}
            await asyncio.sleep(0.1)
            server.gate.set()
            await run
            assert is_free(resources)

    asyncio.run(scenario())
    assert server.most_in_flight == 14
    dataset.check_complete(server)


def test_window_stays_full_while_answers_come_and_go(make):
    """A freed slot is taken again at once: there is no batch and no barrier."""
    dataset, server = make(prompts=150), FakeServer(tokens_per_s=2000)
    seen = []

    async def scenario():
        async with serve(dataset.renderer, server, short=10) as resources:
            run = asyncio.create_task(dataset.generate(resources))
            await wait_until(lambda: server.in_flight == 10)
            while len(server.seen) < 150:
                seen.append(resources.window.in_flight)
                await asyncio.sleep(0.001)
            await run

    asyncio.run(scenario())
    assert sum(count == 10 for count in seen) > 0.7 * len(seen)
    assert server.most_in_flight == 10


@pytest.mark.parametrize("state", ["in flight", "retry waits for a slot", "no server"])
def test_waiting_takes_no_processor_time(make, monkeypatch, state):
    """While nothing can be done the dispatcher sleeps, whatever it is waiting for."""
    dataset, server = make(), FakeServer(script=["status_500"] if state.startswith("retry") else ())
    rounds = Counter()
    dispatching = dispatch.Dispatcher._dispatch

    def counted(self, group, now_s):
        rounds["all"] += 1
        dispatching(self, group, now_s)

    monkeypatch.setattr(dispatch.Dispatcher, "_dispatch", counted)

    async def scenario():
        async with serve(dataset.renderer, server, short=2) as resources:
            run = asyncio.create_task(dataset.generate(resources))
            await wait_until(lambda: server.seen)
            server.gate.clear()
            if state == "no server":
                await server.stop()
            await asyncio.sleep(0.1)
            before = rounds["all"]
            await asyncio.sleep(0.3)
            assert rounds["all"] - before < 20
            await cancel(run)

    asyncio.run(scenario())


@pytest.mark.parametrize(("mode", "most"), [("fixed", 8), ("auto", 32)])
def test_window_follows_the_servers_load_when_asked(make, mode, most):
    """A server with room is given up to four times the window, and nothing more."""
    dataset, server = make(prompts=150), FakeServer(latency_s=0.1)

    async def scenario():
        async with (
            serve(dataset.renderer, server, short=8) as resources,
            adapt_window(resources.window, resources.pool, mode, every_s=0.01),
        ):
            await dataset.generate(resources)

    asyncio.run(scenario())
    assert server.most_in_flight == most
    dataset.check_complete(server)
