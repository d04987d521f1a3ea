"""What may break under a deployed run: its process, its runner, Prefect's server, a person who cancels.

With test_kill.py (kill -9 while checkpoints are written) and test_served_runs.py (retries) these are the
failures that must lose nothing: `make failures`.
"""

import json
import os
import time
from pathlib import Path

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from served_support import (
    DATASET,
    PIPELINE,
    WAIT_S,
    cancel,
    read_children,
    read_run,
    retry,
    serving,
    trigger,
    wait_for_child,
    wait_for_end,
    wait_until,
)

from flows.prefect_server import QUIET, run_prefect_server
from tasks.checkpoints import make_checkpoint_key
from tasks.records.run_file import read_run_file

pytestmark = [pytest.mark.prefect, pytest.mark.failures]

PROMPTS = 60
CHECKPOINT_S = 5.0


@pytest.fixture
def slow(runner, fake_server):
    """Parameters of one dataset whose answers take seconds."""
    runner.raw["server"]["base_urls"] = [fake_server(tokens_per_s=20)]
    add_dataset(runner, "a")
    return runner.raw


def add_dataset(runner, name):
    runner.add_dataset(name, prompts=PROMPTS)
    runner.raw["datasets"][-1]["source"] = str(runner.folder / f"{name}.jsonl")


def alone(parameters, number=0):
    """What the flow of one dataset is started with."""
    return {"parameters": parameters, "dataset": parameters["datasets"][number]}


def check_whole(runner, name):
    """Every prompt has exactly one row."""
    ids = [row["id"] for row in runner.rows(name)]
    assert len(ids) == len(set(ids)) == PROMPTS


def wait_for_rows(runner, name, count):
    wait_until(lambda: len(read_lines(runner, name)) >= count)


def read_lines(runner, name):
    path = runner.output_dir / name / "raw_responses.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


@pytest.mark.slow
@pytest.mark.usefixtures("served")
def test_a_cancelled_dataset_has_its_checkpoint_within_seconds(runner, slow):
    """Everything that was on disk is in it; a retry asks for the rest only."""
    run = trigger(DATASET, alone(slow))
    wait_for_rows(runner, "a", 10)
    cancelled_at = time.time()
    cancel(run)
    assert wait_for_end(run).is_cancelled()
    checkpoint = find_checkpoint(runner, "a")
    saved = json.loads(json.loads(checkpoint.read_bytes())["result"])
    log = runner.output_dir / "a" / "raw_responses.jsonl"
    assert saved["byte_offset"] == log.stat().st_size
    assert checkpoint.stat().st_mtime - cancelled_at < CHECKPOINT_S
    before = log.read_bytes()
    retry(run)
    assert wait_for_end(run, tries=2).is_completed()
    assert log.read_bytes().startswith(before)
    check_whole(runner, "a")


def find_checkpoint(runner, name):
    """The file in Prefect's result storage."""
    fingerprint = read_run_file(runner.output_dir)["fingerprint"]
    key = make_checkpoint_key(runner.output_dir, fingerprint=fingerprint, dataset=name)
    return Path(os.environ["PREFECT_RESULTS_LOCAL_STORAGE_PATH"]) / "checkpoints" / key


@pytest.mark.slow
@pytest.mark.usefixtures("served")
def test_a_dataset_is_retried_while_its_parent_runs(runner, slow):
    """The parent waits for the retry too, and ends Completed."""
    add_dataset(runner, "b")
    source = runner.folder / "b.jsonl"
    good = source.read_bytes()
    source.write_text("this is no JSON\n")
    parent = trigger(PIPELINE, {"parameters": slow})
    child = wait_for_child(parent, "generate-b")
    assert child.state.is_failed()
    assert read_run(parent).state.is_running()
    source.write_bytes(good)
    retry(child.id)
    assert wait_for_end(parent).is_completed()
    assert {run.state.name for run in read_children(parent).values()} == {"Completed"}
    check_whole(runner, "a")
    check_whole(runner, "b")


@pytest.mark.slow
@pytest.mark.usefixtures("served")
def test_a_killed_dataset_runs_again_by_itself(runner, slow):
    """Kill -9 of its process: as often as it may be retried; then its parent fails, and can be retried."""
    slow |= {"dataset_retries": 1, "dataset_retry_delay_s": 1}
    parent = trigger(PIPELINE, {"parameters": slow})
    for tries in (1, 2):
        wait_for_rows(runner, "a", 10 * tries)
        wait_until(lambda tries=tries: read_children(parent)["generate-a"].run_count == tries)
        find_writer(runner, "a").kill()
    assert wait_for_child(parent, "generate-a", tries=2).state.is_crashed()
    state = wait_for_end(parent)
    assert state.is_failed()
    assert "generate-a ended Crashed" in state.message
    retry(parent)
    assert wait_for_end(parent, tries=2).is_completed()
    assert read_children(parent)["generate-a"].run_count == 3
    check_whole(runner, "a")


@pytest.mark.slow
def test_a_killed_runner_leaves_its_runs_at_work(runner, slow, fake_server, prefect_url, tmp_path):
    """Kill -9 of what serves the datasets and reads their output: they go on, and their parent sees it."""
    slow["server"]["base_urls"] = [fake_server(tokens_per_s=6)]  # for many lines of log after the kill
    with serving(tmp_path, {**os.environ, "PREFECT_API_URL": prefect_url}) as processes:
        parent = trigger(PIPELINE, {"parameters": slow})
        wait_for_rows(runner, "a", 5)
        processes["datasets"].kill()
        assert wait_for_end(parent).is_completed()
    check_whole(runner, "a")


@pytest.mark.slow
def test_prefect_away_for_minutes_late_in_a_run_stops_nothing(runner, fake_server, tmp_path):
    """Its server is stopped 230 s into a run, past every lease of it, and comes back a minute later."""
    runner.raw["server"]["base_urls"] = [fake_server(tokens_per_s=0.7)]
    add_dataset(runner, "a")
    home = tmp_path / "home"
    env = {**os.environ, **QUIET, "PREFECT_HOME": str(home)}
    del env["PREFECT_API_URL"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(home))
        server = run_prefect_server(home / "server.log", ports=range(4350, 4400))
        url = server.__enter__()
        try:
            with (
                serving(tmp_path, {**env, "PREFECT_API_URL": f"{url}/api"}),
                temporary_settings({PREFECT_API_URL: f"{url}/api"}),
            ):
                parent = trigger(PIPELINE, {"parameters": runner.raw})
                wait_until(lambda: read_run(parent).state.is_running())
                time.sleep(230)
                rows = len(read_lines(runner, "a"))
                assert 0 < rows < PROMPTS
                server.__exit__(None, None, None)
                time.sleep(60)
                assert len(read_lines(runner, "a")) > rows  # nobody waits for it
                server = run_prefect_server(home / "server.log", ports=[int(url.rsplit(":", 1)[1])])
                assert server.__enter__() == url
                assert wait_for_end(parent, timeout=3 * WAIT_S).is_completed()
                assert read_run(parent).run_count == 1
        finally:
            server.__exit__(None, None, None)
    check_whole(runner, "a")


def find_writer(runner, name):
    """The process that holds a dataset's lock."""
    return psutil.Process(json.loads((runner.output_dir / name / "generate.lock").read_text())["pid"])
