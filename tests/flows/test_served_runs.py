"""Runs of deployments: each dataset a run of its own, retried by itself, whatever becomes of the others."""

import pytest
from served_support import (
    PIPELINE,
    read_children,
    read_run,
    retry,
    set_parameters,
    trigger,
    wait_for_child,
    wait_for_end,
)

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
