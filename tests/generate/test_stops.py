"""A run that is stopped, by a person or by a full disk, keeps what it has."""

import asyncio
import contextlib

import pytest
from fake_sglang import FakeServer, wait_until
from generation_support import (
    cancel,
    full_disk_after,
    is_free,
    serve,
)

from tasks.generate.dispatch_permit import DispatchPermit
from tasks.records.append_file import AppendError


@pytest.mark.parametrize("latency_s", [0.0, 0.003])
def test_full_disk_stops_the_run_and_keeps_what_is_whole(make, latency_s):
    """The error is the disk's own; slots are free, rows stay, and a resume completes them."""
    dataset, server = make(prompts=80), FakeServer(latency_s=latency_s)

    async def scenario():
        async with serve(dataset.renderer, server) as resources:
            with full_disk_after(dataset, 20), pytest.raises(AppendError, match="the disk is full"):
                await dataset.generate(resources)
            assert is_free(resources)

    asyncio.run(scenario())
    assert (len(dataset.rows), dataset.store.rows) == (20, 20)
    dataset.run(server)
    dataset.check_complete(server)


def test_cancelled_run_saves_its_checkpoint_and_resumes_from_it(make):
    """Ctrl-C loses nothing that was answered."""
    dataset, server = make(prompts=100), FakeServer(latency_s=0.01)

    async def scenario():
        async with serve(dataset.renderer, server) as resources:
            run = asyncio.create_task(dataset.generate(resources))
            await wait_until(lambda: len(server.seen) > 40)
            await cancel(run)
            assert run.cancelled()
            assert is_free(resources)

    asyncio.run(scenario())
    rows = len(dataset.rows)
    assert 0 < rows == dataset.store.rows
    result = dataset.run(server)
    assert f"resumes with {rows} responses" in result.resumed
    assert "0 rows read" in result.resumed
    dataset.check_complete(server)


def test_cancel_at_any_moment_leaves_slots_free_and_rows_whole(make):
    """A cancel that comes between two steps, just after a dispatch say, leaks no slot and loses no prompt."""
    dataset, server = make(prompts=200), FakeServer(faults={"status_500": 0.1})

    async def scenario():
        async with serve(dataset.renderer, server, short=4) as resources:
            for steps in range(0, 400, 7):
                run = asyncio.create_task(dataset.generate(resources))
                for _ in range(steps):
                    await asyncio.sleep(0)
                await wait_until(lambda run=run: run.done() or resources.window.in_flight)
                await cancel(run)
                assert is_free(resources)
            await dataset.generate(resources)

    asyncio.run(scenario())
    dataset.check_complete(server)


def test_turn_goes_round_whatever_its_holder_does():
    """A holder that fails gives its turn up, and one that gave it up does not give it twice."""

    async def scenario():
        turn = DispatchPermit(1)
        for give_up_early in (False, True, True):
            with contextlib.suppress(OSError):
                async with turn.hold("d1") as give_up:
                    if give_up_early:
                        give_up()
                    raise OSError("ours")
        async with turn.hold("d2"):
            waiting = asyncio.create_task(turn.hold("d3").__aenter__())
            await turn.wait_queued("d3")
            await asyncio.sleep(0.01)
            assert not waiting.done()
            await cancel(waiting)

    asyncio.run(scenario())


def test_cancel_while_waiting_for_a_turn_changes_nothing(make):
    """A dataset that has not begun can be cancelled, and the turn still goes round."""
    first, second, third = (make(name, prompts=20) for name in ("d1", "d2", "d3"))
    server = FakeServer()

    async def scenario():
        async with serve(first.renderer, server, short=2) as resources:
            server.gate.clear()
            runs = [asyncio.create_task(each.generate(resources)) for each in (first, second, third)]
            await wait_until(lambda: server.in_flight == 2)
            await cancel(runs[1])
            server.gate.set()
            await asyncio.gather(runs[0], runs[2])

    asyncio.run(scenario())
    first.check_complete(server)
    third.check_complete(server)
    assert not second.rows
