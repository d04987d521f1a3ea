"""One dataset's generation, without Prefect: no prompt is lost or doubled, whatever happens.

A dispatcher's tick is made longer than any test here, so that a lost wake-up is a test that does not end.
"""

import asyncio
import contextlib
from collections import Counter

import pytest
from fake_sglang import FakeServer, prompt_key, wait_until
from generation_support import (
    CONTEXT_LENGTH,
    DictStore,
    make_dataset,
    make_renderer,
    mark_id,
    open_resources,
    serve,
)
from tiny_tokenizer import make_tokenizer

from serving.errors import ServerMisconfigured
from tasks import dispatch, feed
from tasks.core.append_file import AppendError
from tasks.core.dataset_lock import DatasetLockedError
from tasks.core.response_log import RESPONSES, ResponseLog
from tasks.generation import GenerationIncompleteError
from tasks.turn import Turn

FLAKY = {"status_500": 0.05, "reset": 0.02, "half": 0.01, "abort": 0.01, "empty": 0.01, "wrong_count": 0.01}
NEVER_S = 3600.0


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("target") / "tokenizer")


@pytest.fixture(scope="module")
def renderer(tokenizer_folder):
    return make_renderer(tokenizer_folder)


@pytest.fixture
def make(tmp_path, renderer):
    """Prepare datasets, by name and with the options of make_dataset."""
    return lambda name="d1", **options: make_dataset(tmp_path / name, renderer, **options)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Retries come quickly; nothing is found by waiting for the next tick."""
    monkeypatch.setattr(dispatch, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(dispatch, "_TICK_S", NEVER_S)


@pytest.fixture
def ticking(monkeypatch):
    """Outages are found by the tick."""
    monkeypatch.setattr(dispatch, "_TICK_S", 0.02)


async def cancel(task):
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def is_free(resources):
    """Whether every slot and every server is given back."""
    return resources.window.in_flight == 0 and all(m.in_flight == 0 for m in resources.pool._members)


# Every prompt


@pytest.mark.parametrize("prompts", [1, 3, 40, 200])
def test_every_prompt_gets_the_servers_own_answer_once(make, prompts):
    """All prompts are used, each row holds the ids that were sent and that came back."""
    dataset, server = make(prompts=prompts, long_every=7), FakeServer()
    result = dataset.run(server)
    dataset.check_complete(server)
    assert (result.outcome, result.rows, result.new_rows) == ("exhausted", prompts, prompts)
    assert result.completion_tokens == dataset.tokens
    assert "short" in result.to_line()


def test_prompts_are_asked_in_dispatch_order(make):
    """A budget uses a prefix of the shuffled prompts, never a sample of the quick ones."""
    dataset, server = make(prompts=60), FakeServer()
    dataset.run(server, max_samples=25)
    wanted = {prompt_key(dataset.renderer.render(prompt)) for prompt in dataset.prompts[:25]}
    assert {prompt_key(seen["input_ids"]) for seen in server.seen} == wanted


def test_request_carries_sampling_and_a_rid_of_its_own(make):
    """Sampling parameters go as they are; a seed is each prompt's own and the same on every attempt."""
    dataset, server = make(prompts=10), FakeServer(script=["status_500"] * 10)
    dataset.run(server, sampling_params={"top_p": 0.9, "top_k": -1}, seed=7)
    seeds = {prompt_key(seen["input_ids"]): seen["sampling_params"]["sampling_seed"] for seen in server.seen}
    assert len({seen["rid"] for seen in server.seen}) == len(server.seen) == 20
    assert len(set(seeds.values())) == 10
    for seen in server.seen:
        seed = seeds[prompt_key(seen["input_ids"])]
        expected = {"top_p": 0.9, "top_k": -1, "max_new_tokens": 200, "sampling_seed": seed}
        assert seen["sampling_params"] == expected


def test_two_lanes_have_their_own_limits(make):
    """Long prompts take the long lane with its limit; the rows say which lane and limit it was."""
    dataset, server = make(prompts=30, long_every=3), FakeServer()
    dataset.run(server)
    lanes = {(row.lane, row.extra["max_new_tokens"], row.prompt_tokens >= 200) for row in dataset.rows}
    assert lanes == {("short", 200, False), ("long", 300, True)}


def test_answer_limit_is_lowered_to_what_fits_the_context(make):
    """A limit that the server would shorten without a word is lowered here, and recorded."""
    dataset, server = make(prompts=5), FakeServer()
    dataset.run(server, short_limit=10_000)
    for row in dataset.rows:
        assert row.extra["max_new_tokens"] == CONTEXT_LENGTH - row.prompt_tokens - 1


def test_prompt_longer_than_the_context_is_never_sent(make, monkeypatch):
    """It is set aside with the reason; the others go on."""
    monkeypatch.setattr("generation_support.CONTEXT_LENGTH", 300)
    dataset, server = make(prompts=10, long_every=5), FakeServer()
    dataset.run(server)
    dataset.check_complete(server)
    assert Counter(row.reason for row in dataset.rejected) == {"prompt_too_long": 2}
    assert max(len(seen["input_ids"]) for seen in server.seen) < 300


def test_run_whose_last_prompts_cannot_be_sent_ends(make, monkeypatch):
    """With nothing in flight, the end of the prompts is noticed by itself."""
    monkeypatch.setattr("generation_support.CONTEXT_LENGTH", 300)
    monkeypatch.setattr(feed, "BATCH", 1)
    dataset, server = make(prompts=20, long_every=5), FakeServer()
    dataset.run(server)
    result = dataset.run(server, retry_rejected=True)
    assert (result.outcome, len(server.seen)) == ("exhausted", 16)
    assert [row.reason for row in dataset.rejected] == ["prompt_too_long"] * 8


def test_lane_far_behind_the_other_still_gets_its_prompts(make, monkeypatch):
    """Prompts read past because their lane had enough are all asked, once each."""
    for name, value in (("READY_PER_LANE", 4), ("BATCH", 2), ("PARKED_LIMIT", 8)):
        monkeypatch.setattr(feed, name, value)
    dataset, server = make(prompts=150, long_every=25), FakeServer()
    dataset.run(server, short=1, long=1)
    dataset.check_complete(server)
    assert len(server.seen) == 150


# Budget


@pytest.mark.parametrize("policy", ["drain", "forecast"])
@pytest.mark.parametrize("budget_tokens", [1, 500, 4000, 9000])
def test_budget_is_reached_and_then_nothing_is_sent(make, policy, budget_tokens):
    """A run ends at or above its budget while prompts remain, by no more than what was in flight."""
    dataset, server = make(prompts=300), FakeServer(latency_s=0.005)
    result = dataset.run(server, short=16, budget_tokens=budget_tokens, budget_policy=policy)
    dataset.check_rows(server)
    assert result.outcome == "complete"
    assert budget_tokens <= dataset.tokens == result.completion_tokens < budget_tokens + 16 * 200
    assert len(server.seen) == len(dataset.rows) < 300


@pytest.mark.parametrize("policy", ["drain", "forecast"])
def test_failed_attempts_do_not_hold_the_budget_back(make, policy):
    """What failed is no longer expected: a flaky server's run reaches its budget all the same."""
    dataset, server = make(prompts=300), FakeServer(latency_s=0.002, faults={"status_500": 0.3, "empty": 0.1})
    result = dataset.run(server, short=16, budget_tokens=5000, budget_policy=policy, max_attempts=20)
    dataset.check_rows(server)
    assert result.outcome == "complete"
    assert 5000 <= dataset.tokens == result.completion_tokens < 5000 + 16 * 200


def test_forecast_stops_closer_to_the_budget_than_draining(make):
    """Knowing what is in flight saves most of the overshoot of a full window."""
    over = {}
    for policy in ("drain", "forecast"):
        dataset, server = make(policy, prompts=400), FakeServer(tokens_per_s=400)
        dataset.run(server, short=48, budget_tokens=6000, budget_policy=policy)
        over[policy] = dataset.tokens - 6000
    assert over["forecast"] < over["drain"]


@pytest.mark.parametrize("policy", ["drain", "forecast"])
def test_tokens_of_earlier_runs_count_towards_the_budget(make, policy):
    """A larger budget on resume adds what is missing to it, not all of it again."""
    dataset, server = make(prompts=300), FakeServer(latency_s=0.002)
    for budget_tokens in (3000, 6000):
        dataset.run(server, short=8, budget_tokens=budget_tokens, budget_policy=policy)
        assert budget_tokens <= dataset.tokens < budget_tokens + 8 * 200
    dataset.check_rows(server)


def test_budget_that_is_reached_needs_no_server(make):
    """A second run with the same budget sends nothing and says so."""
    dataset, server = make(), FakeServer()
    dataset.run(server, budget_tokens=500)
    asked = len(server.seen)
    result = dataset.run(server, budget_tokens=500)
    assert (len(server.seen), result.new_rows) == (asked, 0)
    assert "nothing new was needed" in result.to_line()


@pytest.mark.parametrize("faults", [{}, {"status_500": 0.3, "empty": 0.1}])
@pytest.mark.parametrize("cap", [1, 7, 39])
def test_max_samples_is_met_exactly(make, cap, faults):
    """No answer more than asked for is paid for, whatever fails on the way."""
    dataset, server = make(), FakeServer(latency_s=0.002, faults=faults)
    result = dataset.run(server, max_samples=cap, max_attempts=50, max_empty_answers=50)
    assert (result.outcome, len(dataset.rows)) == ("complete", cap)
    assert sum(server.answered.values()) == cap


def test_prompts_that_run_out_are_an_outcome_of_their_own(make):
    """Exhausted says how many tokens are short, and is not an error."""
    dataset, server = make(prompts=10), FakeServer()
    result = dataset.run(server, budget_tokens=100_000)
    assert result.outcome == "exhausted"
    assert f"{100_000 - dataset.tokens:,} tokens short" in result.to_line()


# The window


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


# Resume


def test_resume_generates_nothing_twice(make):
    """Three runs that each do a part answer every prompt once in all."""
    dataset, server = make(prompts=60, long_every=6), FakeServer()
    results = [dataset.run(server, max_samples=cap) for cap in (10, 31, None)]
    dataset.check_complete(server)
    assert [result.new_rows for result in results] == [10, 21, 29]
    assert set(server.answered.values()) == {1}
    assert "from the checkpoint, 0 rows read" in results[1].resumed


def test_resume_without_a_checkpoint_counts_the_rows(make):
    """The log is the truth: a lost checkpoint costs a scan and nothing else."""
    dataset, server = make(), FakeServer()
    dataset.run(server, max_samples=15)
    dataset.store = DictStore()
    result = dataset.run(server)
    dataset.check_complete(server)
    assert "by counting every row, 15 rows read" in result.resumed
    assert set(server.answered.values()) == {1}


def test_resume_with_an_old_checkpoint_reads_the_tail(make):
    """Rows after the checkpoint are found in the log."""
    dataset, server = make(), FakeServer()
    dataset.run(server, max_samples=10)
    old = dataset.store.text
    dataset.run(server, max_samples=25)
    dataset.store.text = old
    result = dataset.run(server)
    assert "15 rows read" in result.resumed
    dataset.check_complete(server)
    assert set(server.answered.values()) == {1}


@pytest.mark.parametrize("checkpoint", ["{}", '{"format": 1}', '{"lengths": [1]}', '{"lengths": 3}'])
def test_checkpoint_that_is_none_is_not_trusted(make, checkpoint):
    """Whatever object the store returns, the run goes on from the log."""
    dataset, server = make(), FakeServer()
    dataset.run(server, max_samples=10)
    dataset.store.text = checkpoint
    dataset.run(server)
    dataset.check_complete(server)
    assert set(server.answered.values()) == {1}


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_torn_last_line_is_repaired_and_asked_again(make, cut):
    """What a power cut left of the last row is removed, and its prompt is asked again."""
    dataset, server = make(), FakeServer()
    dataset.run(server, max_samples=10)
    path = dataset.folder / RESPONSES
    path.write_bytes(path.read_bytes()[:-cut])
    result = dataset.run(server)
    dataset.check_complete(server)
    assert "torn last line" in result.resumed
    assert sum(server.answered.values()) == 41


class BrokenStore(DictStore):
    """A store that always raises."""

    async def load(self):
        """Fail."""
        raise OSError("no store")

    async def save(self, _):
        """Fail."""
        self.saves += 1
        raise OSError("no store")


class HangingStore(DictStore):
    """A store that never answers."""

    async def load(self):
        """Hang."""
        await asyncio.Event().wait()

    async def save(self, _):
        """Hang."""
        self.saves += 1
        await asyncio.Event().wait()


@pytest.mark.parametrize("store", [BrokenStore, HangingStore])
def test_checkpoint_store_that_fails_never_stops_generation(make, store, monkeypatch):
    """Neither loading nor saving has to succeed, or to answer at all."""
    monkeypatch.setattr("tasks.generation.CHECKPOINT_TIMEOUT_S", 0.1)
    dataset, server = make(store=store()), FakeServer(latency_s=0.02)
    dataset.run(server, max_samples=15, checkpoint_every_s=0.02)
    dataset.run(server, checkpoint_every_s=0.02)
    dataset.check_complete(server)
    assert dataset.store.saves >= 2


def test_checkpoints_are_saved_while_it_runs_and_at_the_end(make):
    """The last checkpoint covers every row."""
    dataset, server = make(), FakeServer(latency_s=0.02)
    dataset.run(server, checkpoint_every_s=0.01)
    assert dataset.store.saves > 2
    assert dataset.store.rows == 40


def test_status_is_reported_while_it_runs(make):
    """Reports grow from nothing to everything, and make lines."""
    dataset, server = make(), FakeServer(latency_s=0.02)
    dataset.run(server, report_every_s=0.01, budget_tokens=2000)
    rows = [status.rows for status in dataset.statuses]
    assert rows[0] == 0
    assert rows == sorted(rows)
    assert rows[-1] == len(dataset.rows)
    assert all(status.to_line() for status in dataset.statuses)


def test_second_generation_of_the_same_folder_is_refused(make):
    """One writer at a time; the first one is not disturbed."""
    dataset, server = make(), FakeServer()

    async def scenario():
        async with serve(dataset.renderer, server, at_once=2) as resources:
            server.gate.clear()
            first = asyncio.create_task(dataset.generate(resources))
            await wait_until(lambda: server.in_flight)
            with pytest.raises(DatasetLockedError):
                await dataset.generate(resources)
            server.gate.set()
            await first

    asyncio.run(scenario())
    dataset.check_complete(server)


# Rejections and retries


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
        ("foreign_id", "bad_reply", 200),
        ("abort", "aborted", 200),
        ("reset", "connection_broken", None),
        ("torn", "connection_broken", None),
    ],
)
def test_prompt_whose_attempts_run_out_is_left_for_a_resume(make, fault, reason, status):
    """It is set aside as transient with the true reason, the run fails, and a resume asks it again."""
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
    monkeypatch.setattr(dispatch, "BACKOFF_FIRST_S", 1e-4)
    monkeypatch.setattr(dispatch, "BACKOFF_LAST_S", 1e-4)
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
    """Nothing but the stop token is not an answer; after three it is the prompt's fate."""
    dataset, server = make(prompts=6), FakeServer(faults={"empty": 1.0})
    result = dataset.run(server)
    assert {(r.reason, r.permanent, r.attempts) for r in dataset.rejected} == {("empty_answer", True, 3)}
    assert (result.outcome, len(server.seen)) == ("exhausted", 18)
    dataset.check_complete(server)


def test_empty_answer_followed_by_a_good_one_is_a_row(make):
    """Two empty answers cost two attempts."""
    dataset, server = make(prompts=1), FakeServer(script=["empty", "empty"])
    dataset.run(server)
    assert dataset.rows[0].attempt == 3
    dataset.check_complete(server)


@pytest.mark.parametrize("on_length", ["keep", "reject"])
def test_answer_cut_by_length_is_kept_or_set_aside_as_asked(make, on_length):
    """Kept answers are labelled; set aside, they are named and not asked again."""
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


# Servers that go


def test_busy_server_costs_no_attempt(make):
    """A full queue is nobody's fault: every prompt gets its answer as a first attempt."""
    dataset, server = make(), FakeServer(faults={"status_503": 0.5})
    dataset.run(server, max_attempts=1)
    dataset.check_complete(server)
    assert {row.attempt for row in dataset.rows} == {1}


@pytest.mark.parametrize("fault", ["status_503", "status_500", "half"])
def test_server_that_fails_everything_is_not_fed_the_dataset(make, monkeypatch, fault):
    """While nothing succeeds, no more prompts are taken up than twice the window."""
    monkeypatch.setattr(dispatch, "BACKOFF_FIRST_S", 10.0)
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
    with pytest.raises(dispatch.OutageError, match=r"outage_timeout_s 0\.3"):
        dataset.run(server, outage_timeout_s=0.3)
    assert not dataset.rejected


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
            run = asyncio.create_task(dataset.generate(resources, max_attempts=1))
            for answers in (30, 90):
                await wait_until(lambda target=answers: len(server.seen) > target)
                await server.stop()
                await asyncio.sleep(0.3)
                assert not resources.pool.is_up
                assert resources.window.in_flight == 0
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


# Overlap


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


# Stops


@contextlib.contextmanager
def full_disk_after(dataset, rows):
    """Make the response log of one dataset fail after some rows, as a full disk would."""
    append = ResponseLog.append

    def limited(self, response, *, position):
        if self.folder == dataset.folder and self.progress.rows >= rows:
            raise AppendError(28, "the disk is full", str(self.folder / RESPONSES))
        append(self, response, position=position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResponseLog, "append", limited)
        yield


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
        turn = Turn(1)
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
