"""Every turn of a conversation is answered: in order on the target's own answers, or on the row's."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from fake_sglang import FakeServer, answer_text
from generation_support import cancel, make_conversations, mark_id, serve

from tasks.generate.chains import NO_HISTORY
from tasks.records.response_log import REJECTED, ResponseLog

GENERATE = Path(__file__).parents[1] / "support" / "generate_once.py"
TURNS = 3
LIMIT = 2000  # no answer is cut


@pytest.fixture
def make_chats(tmp_path, renderer):
    """Prepare conversations with the options of make_conversations."""
    return lambda shape="each", **options: make_conversations(
        tmp_path / "d1", renderer, shape=shape, **options
    )


def check_own_history(dataset):
    """Each row's prompt shows the questions so far with the answers that this run's rows hold, in order."""
    rows = {(row.id, row.turn): row for row in dataset.rows}
    assert len(rows) == len(dataset.rows)
    placed = {(row.id, row.turn): place for place, row in enumerate(dataset.rows)}
    for prompt in dataset.prompts:
        row = rows.get((prompt.id, prompt.turn))
        if row is None:
            continue
        before = [rows[prompt.id, turn] for turn in range(prompt.turn)]
        history = [answer_text(answer.output_ids) for answer in before]
        assert row.input_ids == dataset.renderer.render(prompt.with_history(history))
        assert "old answer" not in dataset.renderer._tokenizer.decode(row.input_ids)
        assert [placed[prompt.id, turn] for turn in range(prompt.turn + 1)] == sorted(
            placed[prompt.id, turn] for turn in range(prompt.turn + 1)
        )


def test_each_turn_is_answered_on_the_answers_before_it(make_chats):
    """A three-turn conversation makes three rows, each with the run's own answers in its history."""
    dataset, server = make_chats(system="be kind"), FakeServer()
    result = dataset.run(server, short_limit=LIMIT, long_limit=LIMIT)
    check_own_history(dataset)
    assert Counter(row.turn for row in dataset.rows) == {0: 12, 1: 12, 2: 12}
    assert (result.prompts, result.rows, result.outcome) == (36, 36, "exhausted")


def test_independent_turns_are_answered_on_the_rows_history(make_chats):
    """Every turn is asked on what the row has before it, in any order."""
    dataset, server = make_chats("independent"), FakeServer()
    dataset.run(server, short_limit=LIMIT, long_limit=LIMIT)
    prompts = {(prompt.id, prompt.turn): prompt for prompt in dataset.prompts}
    assert {(row.id, row.turn) for row in dataset.rows} == set(prompts)
    for row in dataset.rows:
        assert row.input_ids == dataset.renderer.render(prompts[row.id, row.turn])


@pytest.mark.parametrize("cap", [1, 7, 20, 35])
@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_resume_goes_on_between_turns(make_chats, cap, with_checkpoint):
    """Wherever it stopped, the next turn is asked on the answers that are on disk."""
    dataset, server = make_chats(), FakeServer()
    dataset.run(server, max_samples=cap, short_limit=LIMIT, long_limit=LIMIT)
    assert len(dataset.rows) == cap
    if not with_checkpoint:
        dataset.store.text = None
    result = dataset.run(server, short_limit=LIMIT, long_limit=LIMIT)
    check_own_history(dataset)
    assert (result.rows, result.new_rows) == (36, 36 - cap)
    assert set(server.answered.values()) == {1}


def test_a_cancelled_run_goes_on_between_turns(make_chats):
    """What was in flight is asked again, on the same history."""
    dataset, server = make_chats(), FakeServer(latency_s=0.01)

    async def stop_in_the_middle():
        async with serve(dataset.renderer, server, short_limit=LIMIT, long_limit=LIMIT) as resources:
            running = asyncio.create_task(dataset.generate(resources))
            while len(dataset.rows) < 15:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await cancel(running)

    asyncio.run(stop_in_the_middle())
    assert 15 <= len(dataset.rows) < 36
    dataset.run(server, short_limit=LIMIT, long_limit=LIMIT)
    check_own_history(dataset)
    assert len(dataset.rows) == 36


def test_a_killed_run_goes_on_between_turns(make_chats, tmp_path, tokenizer_folder):
    """After kill -9 at any moment every turn has one row, on the history of the rows before it."""
    dataset, rng = make_chats(conversations=40), random.Random(5)
    command = [sys.executable, str(GENERATE), str(dataset.folder), "--url"]
    options = ["--tokenizer", str(tokenizer_folder), "--store", str(tmp_path / "store.json"), "--window", "6"]

    async def scenario():
        server = FakeServer(latency_s=0.03, mean_tokens=20)
        url = await server.start()
        try:
            for _ in range(4):
                rows = len(dataset.rows)
                process = await asyncio.to_thread(
                    subprocess.Popen, [*command, url, *options], stdout=subprocess.DEVNULL
                )
                deadline = time.monotonic() + 60
                while len(dataset.rows) < rows + rng.randrange(3, 20) and process.poll() is None:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(process.wait)
            process = await asyncio.create_subprocess_exec(*command, url, *options, env=os.environ)
            assert await process.wait() == 0
        finally:
            await server.stop()

    asyncio.run(scenario())
    check_own_history(dataset)
    settled = {(row.id, row.turn) for row in dataset.rows} | {(r.id, r.turn) for r in dataset.rejected}
    assert settled == {(prompt.id, prompt.turn) for prompt in dataset.prompts}
    assert {rejected.reason for rejected in dataset.rejected} <= {NO_HISTORY}


def test_a_cut_answer_ends_its_conversation(make_chats):
    """It is kept and labelled, but no turn is asked on half an answer."""
    dataset, server = make_chats(), FakeServer(mean_tokens=40)
    result = dataset.run(server, short_limit=40, long_limit=40)
    check_own_history(dataset)
    cut = {row.id: row.turn for row in dataset.rows if row.finish_reason == "length"}
    after = {(rejected.id, rejected.turn) for rejected in dataset.rejected}
    assert cut
    assert after
    assert after == {(name, later) for name, turn in cut.items() for later in range(turn + 1, TURNS)}
    assert {(r.reason, r.permanent) for r in dataset.rejected} == {(NO_HISTORY, True)}
    assert result.rows + len(after) == result.prompts


def test_a_turn_that_is_set_aside_ends_its_conversation(make_chats, tokenizer_folder):
    """The turns after it are rejected too, each with the reason; the conversations beside it go on."""
    dataset, server = make_chats(mark="@"), FakeServer(poison=mark_id(tokenizer_folder))
    dataset.run(server, short_limit=LIMIT, long_limit=LIMIT)
    check_own_history(dataset)
    reasons = {(rejected.id, rejected.turn): rejected.reason for rejected in dataset.rejected}
    poisoned = [f"d1-c{number}" for number in range(2, 12, 3)]
    expected = {(name, 1): "http_400" for name in poisoned} | {(name, 2): NO_HISTORY for name in poisoned}
    assert reasons == expected
    assert Counter(row.turn for row in dataset.rows) == {0: 12, 1: 8, 2: 8}


def test_what_a_crash_kept_from_being_set_aside_is_set_aside_at_resume(
    make_chats, tokenizer_folder, monkeypatch
):
    """A conversation whose middle turn is out for good never keeps its dataset unfinished."""
    dataset, server = make_chats(mark="@"), FakeServer(poison=mark_id(tokenizer_folder))
    reject = ResponseLog.reject

    def crash_after_the_first(self, rejected, *, position):
        if rejected.reason != NO_HISTORY:
            reject(self, rejected, position=position)

    with monkeypatch.context() as patch:
        patch.setattr(ResponseLog, "reject", crash_after_the_first)
        with pytest.raises(Exception, match="prompts are left"):
            dataset.run(server, short_limit=LIMIT, long_limit=LIMIT)
    result = dataset.run(server, short_limit=LIMIT, long_limit=LIMIT)
    assert (result.outcome, result.new_rows) == ("exhausted", 0)
    assert Counter(rejected.reason for rejected in dataset.rejected) == {"http_400": 4, NO_HISTORY: 4}


def test_retry_rejected_opens_a_conversation_again(make_chats, tokenizer_folder):
    """Once the turn that failed has an answer, the ones after it are asked on it."""
    dataset, poison = make_chats(mark="@"), mark_id(tokenizer_folder)
    dataset.run(FakeServer(poison=poison), short_limit=LIMIT, long_limit=LIMIT)
    result = dataset.run(FakeServer(), short_limit=LIMIT, long_limit=LIMIT, retry_rejected=True)
    check_own_history(dataset)
    assert (result.rows, result.new_rows) == (36, 8)
    assert (dataset.folder / REJECTED).exists()
