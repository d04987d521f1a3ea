"""Runs of deployments: each dataset a run of its own, retried by itself, whatever becomes of the others."""

import pytest
from prefect.exceptions import PrefectHTTPStatusError
from served_support import (
    PIPELINE,
    count_rows,
    read_children,
    read_run,
    retry,
    set_parameters,
    trigger,
    wait_for_child,
    wait_for_end,
)

from tasks.records.folder_lock import RUN_LOCK, hold_folder_lock

pytestmark = pytest.mark.prefect

PROMPTS = 30


@pytest.fixture
def parameters(runner, fake_server):
    """Of three datasets; the source of `b` is no JSON."""
    runner.raw["server"]["base_urls"] = [fake_server()]
    for name in "abc":
        runner.add_dataset(name, prompts=PROMPTS)
        runner.raw["datasets"][-1]["source"] = str(runner.folder / f"{name}.jsonl")
    spoil(runner)
    return runner.raw


def spoil(runner):
    (runner.folder / "b.jsonl").rename(runner.folder / "b.good")
    (runner.folder / "b.jsonl").write_text("this is no JSON\n")


def mend(runner):
    (runner.folder / "b.good").replace(runner.folder / "b.jsonl")


def is_whole(runner, name):
    """Every prompt has exactly one row."""
    ids = [row["id"] for row in runner.rows(name)]
    return len(ids) == len(set(ids)) == PROMPTS


@pytest.mark.failures
@pytest.mark.usefixtures("served")
def test_a_failed_dataset_is_retried_by_itself_and_then_its_parent(runner, parameters):
    """The others complete; the parent names the failed one; its own retry does no more than is left."""
    parent = trigger(PIPELINE, {"parameters": parameters})
    state = wait_for_end(parent)
    assert state.is_failed()
    assert "1 of 3 datasets failed" in state.message
    assert "generate-b ended Failed" in state.message
    assert is_whole(runner, "a")
    assert is_whole(runner, "c")
    children = read_children(parent)
    assert {name: run.state.name for name, run in children.items()} == {
        "generate-a": "Completed",
        "generate-b": "Failed",
        "generate-c": "Completed",
    }
    mend(runner)
    retry(children["generate-b"].id)
    assert wait_for_child(parent, "generate-b", tries=2).state.is_completed()
    assert is_whole(runner, "b")
    assert read_run(parent).state.is_failed()  # it has ended, and says so until it is retried
    set_parameters(parent, {"parameters": {**parameters, "datasets": parameters["datasets"][::-1]}})
    retry(parent)
    assert wait_for_end(parent, tries=2).is_completed()
    after = read_children(parent)
    assert {name: run.run_count for name, run in after.items()} == {
        "generate-a": 1,
        "generate-b": 2,
        "generate-c": 1,
    }
    assert (runner.output_dir / "export" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("served")
def test_ten_datasets_are_few_rows_for_prefect(runner, fake_server):
    """Whatever the number of prompts, and also when the run is tried again."""
    runner.raw["server"]["base_urls"] = [fake_server()]
    for name in "abcdefghij":
        runner.add_dataset(name, prompts=PROMPTS)
        runner.raw["datasets"][-1]["source"] = str(runner.folder / f"{name}.jsonl")
    run = trigger(PIPELINE, {"parameters": runner.raw})
    assert wait_for_end(run, timeout=900).is_completed()
    assert 11 < count_rows(run) <= 60
    retry(run)
    assert wait_for_end(run, tries=2).is_completed()
    assert count_rows(run) <= 60


@pytest.mark.usefixtures("served")
def test_a_scheduled_run_that_finds_another_at_work_is_skipped(runner, parameters):
    """It is no alarm: neither Failed nor a second writer. A run that a person starts is refused."""
    with hold_folder_lock(runner.output_dir, RUN_LOCK):
        scheduled = trigger(PIPELINE, {"parameters": parameters}, tags=["auto-scheduled"])
        started = trigger(PIPELINE, {"parameters": parameters})
        state = wait_for_end(scheduled)
        assert (state.name, state.is_cancelled()) == ("Skipped", True)
        assert "is being written by process" in state.message
        state = wait_for_end(started)
        assert state.is_failed()
        assert "is being written by process" in state.message
    assert not (runner.output_dir / "a").exists()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_tokens_per_dataset": 0}, "0 is less than the minimum of 1"),
        ({"max_tokens": 5}, "'max_tokens' was unexpected"),
        ({"budget_policy": "guess"}, "'guess' is not one of"),
        ({"server": {"base_urls": ["localhost:1"]}}, "'localhost:1' does not match"),
        ({"server": {"launch_flags": {"tp-size": [4]}}}, "[4] is not valid"),
        (
            {"datasets": [{"name": "export", "source": "a.jsonl", "adapter": "messages"}]},
            "'parameters.datasets[0].name'",
        ),
    ],
)
def test_a_bad_parameter_is_refused_before_there_is_a_run(parameters, changed, says):
    """The server checks the form's schema."""
    with pytest.raises(PrefectHTTPStatusError) as refused:
        trigger(PIPELINE, {"parameters": {**parameters, **changed}})
    assert says in refused.value.response.text


@pytest.mark.usefixtures("served")
def test_a_parameter_that_the_flow_does_not_have_is_refused_too(parameters):
    """Prefect's own schema would let it through, and the run's process would die of it."""
    with pytest.raises(PrefectHTTPStatusError) as refused:
        trigger(PIPELINE, {"parameters": parameters, "budget": 5})
    assert "'budget' was unexpected" in refused.value.response.text


@pytest.mark.usefixtures("served")
def test_what_the_schema_cannot_know_fails_at_once(parameters):
    """A dataset that no catalog has, named in the state's message."""
    run = trigger(PIPELINE, {"parameters": {**parameters, "datasets": ["B99_none"]}})
    assert "dataset 'B99_none' is not in the catalog" in wait_for_end(run).message
