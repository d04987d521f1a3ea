"""The speed before a run: measured with the window full, and never in the way."""

import asyncio
import time

import pytest
from fake_sglang import FakeServer
from generation_support import serve

from serving.client.errors import ForeignIds
from tasks.warm_up.measure import measure_speed


def _measure(renderer, server, *, seconds, prepare=lambda _: None):
    async def scenario():
        async with serve(renderer, server) as resources:
            prepare(server)
            return await measure_speed(resources.pool, [5, 6], concurrency=8, seconds=seconds, room=100)

    return asyncio.run(scenario())


def test_the_window_is_full_while_it_is_measured(renderer):
    """As many requests at once as the lanes will have, answers no longer than there is room."""
    server = FakeServer(tokens_per_s=2000, mean_tokens=500)
    assert _measure(renderer, server, seconds=30) > 0
    assert server.most_in_flight == 8
    lengths = [request["sampling_params"]["max_new_tokens"] for request in server.seen]
    assert max(lengths) == 100


def test_a_server_that_does_not_answer_holds_nobody_up(renderer):
    """There is no speed then, and the run goes on."""
    started = time.monotonic()
    assert _measure(renderer, FakeServer(), seconds=0.3, prepare=lambda one: one.gate.clear()) is None
    assert time.monotonic() - started < 60


def test_a_server_that_fails_is_no_failure_of_the_run(renderer, caplog):
    """It is said; generation will say more."""
    assert _measure(renderer, FakeServer(faults={"status_500": 1.0}), seconds=30) is None
    assert "could not be measured" in caplog.text


def test_answers_of_another_model_are_no_matter_of_speed(renderer):
    """A check that sees them must not say that the run can start."""
    with pytest.raises(ForeignIds, match="the id 1024"):
        _measure(renderer, FakeServer(faults={"foreign_id": 1.0}), seconds=30)
