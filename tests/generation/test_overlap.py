"""One dataset's tail overlaps the next one's start."""

import asyncio

import pytest
from fake_sglang import FakeServer, wait_until
from generation_support import (
    full_disk_after,
    is_free,
    serve,
)

from tasks.core.append_file import AppendError


@pytest.mark.parametrize(("prompts", "cap"), [(30, 6), (6, None)])
def test_next_dataset_fills_the_window_while_the_first_drains(make, prompts, cap):
    """With one turn, the second starts when the first begins to drain, and all slots stay in use."""
    first, second, server = make("d1", prompts=prompts), make("d2", prompts=60), FakeServer()

    async def scenario():
        async with serve(first.renderer, server, short=10) as resources:
            server.gate.clear()
            runs = [
                asyncio.create_task(each.generate(resources, max_samples=n))
                for each, n in ((first, cap), (second, None))
            ]
            await wait_until(lambda: server.in_flight == 10)
            assert [each.statuses[-1].rows for each in (first, second)] == [0, 0]
            server.gate.set()
            results = await asyncio.gather(*runs)
            assert is_free(resources)
            return results

    assert [result.rows for result in asyncio.run(scenario())] == [6, 60]
    assert server.most_in_flight == 10
    second.check_complete(server)


def test_second_dataset_waits_while_the_first_can_fill_the_window(make):
    """A turn is kept until the drain."""
    first, second, server = make("d1", prompts=60), make("d2", prompts=20), FakeServer()

    async def scenario():
        async with serve(first.renderer, server, short=10) as resources:
            server.gate.clear()
            runs = [asyncio.create_task(each.generate(resources)) for each in (first, second)]
            await wait_until(lambda: server.in_flight == 10)
            await asyncio.sleep(0.1)
            started = len(second.statuses)
            server.gate.set()
            await asyncio.gather(*runs)
            return started

    assert asyncio.run(scenario()) == 0
    first.check_complete(server)
    second.check_complete(server)


def test_datasets_at_once_share_the_slots(make):
    """Two datasets with a turn each never exceed the window, and neither starves."""
    datasets, server = [make(f"d{i}", prompts=80) for i in range(3)], FakeServer(latency_s=0.003)
    finished = []

    async def scenario():
        async def one(dataset):
            await dataset.generate(resources)
            finished.append([len(each.rows) for each in datasets])

        async with serve(datasets[0].renderer, server, short=6, at_once=3) as resources:
            await asyncio.gather(*map(one, datasets))
            assert is_free(resources)

    asyncio.run(scenario())
    assert server.most_in_flight == 6
    assert min(finished[0]) > 40
    for dataset in datasets:
        dataset.check_complete(server)


def test_failed_dataset_hands_its_turn_and_its_slots_on(make):
    """When one dataset's disk is full, the next one has the whole window."""
    first, second, server = make("d1"), make("d2"), FakeServer(latency_s=0.01)

    async def scenario():
        async with serve(first.renderer, server, short=5) as resources:
            with full_disk_after(first, 7):
                results = await asyncio.gather(
                    first.generate(resources), second.generate(resources), return_exceptions=True
                )
            assert is_free(resources)
            return results

    error, result = asyncio.run(scenario())
    assert isinstance(error, AppendError)
    assert result.rows == 40
    assert server.most_in_flight == 5
