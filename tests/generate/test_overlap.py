"""One dataset's tail overlaps the next one's start."""

import asyncio

import pytest
from fake_sglang import FakeServer, prompt_key, wait_until
from generation_support import (
    full_disk_after,
    is_free,
    serve,
)

from tasks.records.append_file import AppendError


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


def test_second_dataset_gets_only_what_the_first_leaves(make):
    """It starts, for the first has no long prompts, but sends no short one while the first has some."""
    first, second = make("d1", prompts=60), make("d2", prompts=20, marked_every=1)
    server = FakeServer(latency_s=0.02)
    firsts = {prompt_key(first.renderer.render(prompt)) for prompt in first.prompts}

    async def scenario():
        async with serve(first.renderer, server, short=10) as resources:
            await asyncio.gather(first.generate(resources), second.generate(resources))

    asyncio.run(scenario())
    first.check_complete(server)
    second.check_complete(server)
    asked = [prompt_key(request["input_ids"]) for request in server.seen]
    assert set(asked[:60]) == firsts


def test_lane_that_the_first_leaves_empty_is_filled_by_the_second(make):
    """Long prompts of a later dataset run beside the short ones of an earlier one, from the start."""
    first, second = make("d1", prompts=60), make("d2", prompts=12, long_every=1)
    server = FakeServer()

    async def scenario():
        async with serve(first.renderer, server, short=8, long=4) as resources:
            server.gate.clear()
            runs = [asyncio.create_task(each.generate(resources)) for each in (first, second)]
            await wait_until(lambda: server.in_flight == 12)
            server.gate.set()
            await asyncio.gather(*runs)

    asyncio.run(scenario())
    first.check_complete(server)
    second.check_complete(server)


def test_datasets_at_once_share_a_lane_evenly(make):
    """With two turns neither waits for the other."""
    datasets = [make("d1", prompts=40), make("d2", prompts=40, marked_every=1)]
    server = FakeServer(latency_s=0.02)

    async def scenario():
        async with serve(datasets[0].renderer, server, short=8, at_once=2) as resources:
            await asyncio.gather(*(each.generate(resources) for each in datasets))

    asyncio.run(scenario())
    marked = {prompt_key(datasets[1].renderer.render(prompt)) for prompt in datasets[1].prompts}
    halfway = [prompt_key(request["input_ids"]) in marked for request in server.seen[:40]]
    assert 12 <= sum(halfway) <= 28


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
