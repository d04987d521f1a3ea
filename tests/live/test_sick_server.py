"""A real SGLang server that aborts, dies, loses its scheduler or freezes in mid-run."""

import re
import signal
import time

import pytest

pytestmark = [pytest.mark.live, pytest.mark.prefect]

PROMPTS = 60
TIMEOUT_S = 600


@pytest.fixture
def run(runner, own_server):  # the server first: it may have to be started again
    """A run with ten answers on disk."""
    runner.raw["server"]["stall_timeout_s"] = 5
    # Greedy: a small model that samples answers one prompt in 400 with its stop token, which is asked again.
    runner.raw["sampling"] = {"temperature": 0}
    runner.add_dataset("a", prompts=PROMPTS)
    process = runner.start("--max-tokens-per-dataset", "1000000")
    runner.wait_for_rows("a", 10, process)
    return process


def check_complete(runner, run):
    """The run ends by itself with one row for each prompt and nothing set aside."""
    assert run.wait(TIMEOUT_S) == 0, runner.log()
    rows = runner.rows("a")
    assert len(rows) == len({row["id"] for row in rows}) == PROMPTS
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    assert all(len(row["output_ids"]) == row["completion_tokens"] for row in rows)
    assert not (runner.output_dir / "a" / "rejected.jsonl").read_text()
    return rows


def wait_for_log(runner, run, pattern):
    deadline = time.monotonic() + TIMEOUT_S
    while not re.search(pattern, runner.log()):
        assert run.poll() is None, runner.log()
        assert time.monotonic() < deadline, runner.log()
        time.sleep(0.1)


def test_aborted_answers_are_asked_again(runner, own_server, run):
    """SGLang sends them as a 200 with partial text: none is kept, each prompt has a whole answer."""
    own_server.abort_all()
    rows = check_complete(runner, run)
    assert {row["attempt"] for row in rows} == {1, 2}


def test_server_killed_and_restarted_in_mid_run(runner, own_server, run):
    """What was in flight is asked again."""
    own_server.kill()
    wait_for_log(runner, run, "server set aside")
    own_server.start()
    rows = check_complete(runner, run)
    assert "is back after" in runner.log()
    assert {row["attempt"] for row in rows} == {1}


def test_server_that_loses_its_scheduler(runner, own_server, run):
    """The parent ends some seconds later; a new server goes on."""
    own_server.signal_scheduler(signal.SIGKILL)
    own_server.wait_dead()
    own_server.start()
    check_complete(runner, run)


def test_frozen_scheduler_is_noticed_and_waited_for(runner, own_server, run):
    """/ready says yes all the time; the run goes on when tokens come back."""
    own_server.signal_scheduler(signal.SIGSTOP)
    wait_for_log(runner, run, "it has done nothing for 5 s")
    own_server.signal_scheduler(signal.SIGCONT)
    rows = check_complete(runner, run)
    assert {row["attempt"] for row in rows} == {1}
