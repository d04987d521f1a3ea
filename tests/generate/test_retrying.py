"""What is asked again, how often, and what is rejected with which reason."""

import asyncio
import contextlib

import pytest
from fake_sglang import FakeServer
from generation_support import (
    DictStore,
    mark_id,
    serve,
)

from serving.client.errors import ServerMisconfigured
from tasks.generate import retries
from tasks.generate.generation import GenerationIncompleteError, NothingAnsweredError

FLAKY = {"status_500": 0.05, "reset": 0.02, "half": 0.01, "abort": 0.01, "empty": 0.01, "wrong_count": 0.01}


def test_refused_prompts_are_set_aside_for_good(make, tokenizer_folder):
    """A 400 is asked once, recorded with its reason, and not asked again by a resume."""
    dataset = make(marked_every=8)
    server = FakeServer(poison=mark_id(tokenizer_folder))
    result = dataset.run(server)
    dataset.check_complete(server)
    assert result.outcome == "exhausted"
    kinds = {(row.reason, row.status, row.permanent, row.attempts, row.stage) for row in dataset.rejected}
    assert kinds == {("http_400", 400, True, 1, "generate")}
    dataset.run(server)
    assert (len(dataset.rejected), len(server.seen)) == (5, 40)


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_refused_prompts_are_asked_again_on_request(make, tokenizer_folder, with_checkpoint):
    """With retry_rejected a server that changed its mind answers them."""
    dataset = make(marked_every=8)
    dataset.run(FakeServer(poison=mark_id(tokenizer_folder)))
    if not with_checkpoint:
        dataset.store = DictStore()
    server = FakeServer()
    dataset.run(server, retry_rejected=True)
    assert (len(server.seen), len(dataset.rows)) == (5, 40)
    dataset.check_rows(server)


def test_a_server_that_refuses_everything_stops_the_run(make):
    """Not the prompts are wrong then: most of them stay open, and the message says what to do."""
    dataset, server = make(prompts=400), FakeServer(script=["status_400"] * 400)
    with pytest.raises(ServerMisconfigured, match=r"were all refused.*--retry-rejected"):
        dataset.run(server, short=8)
    assert len(dataset.rejected) < 60
    dataset.run(FakeServer(), retry_rejected=True)
    assert len(dataset.rows) == 400


def test_an_outage_from_before_counts_from_the_start(make):
    """A dataset that starts on a dead server gets its whole time-out, not what another one left of it."""
    dataset, server = make(prompts=3), FakeServer()

    async def scenario():
        async with serve(dataset.renderer, server) as resources:
            resources.pool._members[0].up = False
            resources.pool._members[0].down_since_s = float("-inf")
            running = asyncio.create_task(dataset.generate(resources, outage_timeout_s=100))
            await asyncio.sleep(1.5)
            assert not running.done()
            resources.pool._members[0].up = True
            resources.pool._notify()
            return await running

    assert asyncio.run(scenario()).rows == 3


def test_failed_attempts_are_retried_and_counted(make):
    """A row says which attempt it was."""
    dataset, server = make(prompts=1), FakeServer(script=["status_500", "half", "abort"])
    dataset.run(server)
    assert dataset.rows[0].attempt == 4
    dataset.check_complete(server)


@pytest.mark.parametrize(
    ("fault", "reason", "status"),
    [
        ("status_500", "server_failed", 500),
        ("half", "bad_reply", 200),
        ("wrong_count", "bad_reply", 200),
        ("abort", "aborted", 200),
        ("reset", "connection_broken", None),
        ("torn", "connection_broken", None),
    ],
)
def test_prompt_whose_attempts_run_out_is_left_for_a_resume(make, fault, reason, status):
    """It is rejected as transient with the true reason, the run fails, and a resume asks it again."""
    dataset, server = make(prompts=12), FakeServer(faults={fault: 1.0})
    with pytest.raises(GenerationIncompleteError, match="12 prompts are left"):
        dataset.run(server, max_attempts=3)
    assert {(r.reason, r.status, r.permanent, r.attempts) for r in dataset.rejected} == {
        (reason, status, False, 3)
    }
    assert (len(dataset.rejected), len(server.seen)) == (12, 36)
    good = FakeServer()
    dataset.run(good)
    dataset.check_rows(good)
    assert len(dataset.rows) == 12


def test_retry_that_falls_due_at_any_moment_is_seen(make, monkeypatch):
    """A retry due between a look at the queue and the sleep after it is not slept over."""
    monkeypatch.setattr(retries, "BACKOFF_FIRST_S", 1e-4)
    monkeypatch.setattr(retries, "BACKOFF_LAST_S", 1e-4)
    dataset, server = make(prompts=1), FakeServer(script=["status_503"] * 400)
    dataset.run(server)
    dataset.check_complete(server)


def test_request_that_times_out_is_retried(make):
    """A server that keeps one request for itself does not keep its prompt."""
    dataset, server = make(prompts=5), FakeServer(script=["hang"])
    dataset.run(server, request_timeout_s=0.3)
    dataset.check_complete(server)
    assert sorted(row.attempt for row in dataset.rows) == [1, 1, 1, 1, 2]


def test_empty_answers_are_asked_three_times(make):
    """Nothing but the stop token is not an answer; after three it is the prompt's fate, of all no success."""
    dataset, server = make(prompts=6), FakeServer(faults={"empty": 1.0})
    with pytest.raises(NothingAnsweredError, match=r"none of its 6 prompts gave a row \(empty_answer 6;"):
        dataset.run(server)
    assert {(r.reason, r.permanent, r.attempts) for r in dataset.rejected} == {("empty_answer", True, 3)}
    assert len(server.seen) == 18
    dataset.check_complete(server)


def test_empty_answer_followed_by_a_good_one_is_a_row(make):
    """Two empty answers cost two attempts."""
    dataset, server = make(prompts=1), FakeServer(script=["empty", "empty"])
    dataset.run(server)
    assert dataset.rows[0].attempt == 3
    dataset.check_complete(server)


@pytest.mark.parametrize("on_length", ["keep", "reject"])
def test_answer_cut_by_length_is_kept_or_set_aside_as_asked(make, on_length):
    """Kept answers are labelled; rejected, they are named and not asked again."""
    dataset, server = make(), FakeServer()
    dataset.run(server, short_limit=40, on_length=on_length)
    dataset.check_complete(server)
    cut = [row for row in dataset.rows if row.finish_reason == "length"]
    reasons = {row.reason for row in dataset.rejected}
    assert (bool(cut), reasons) == ((True, set()) if on_length == "keep" else (False, {"cut_by_length"}))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_flaky_server_loses_and_doubles_nothing(make, seed):
    """With a tenth of all answers bad in six ways, each prompt has one true row or one true reason."""
    dataset = make(prompts=300, long_every=10)
    server = FakeServer(latency_s=0.002, faults=FLAKY, seed=seed)
    with contextlib.suppress(GenerationIncompleteError):
        dataset.run(server, short=30, long=6, max_attempts=3)
    dataset.check_complete(server)
    assert len(dataset.rows) > 280
    reasons = {row.reason for row in dataset.rejected}
    assert reasons <= {"server_failed", "connection_broken", "bad_reply", "aborted", "empty_answer"}
    assert set(server.answered.values()) == {1}
