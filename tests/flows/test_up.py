"""`draftmill up`: what it starts is started again when it dies, and ends with it, however it ends."""

import contextlib
import os
import shutil
import signal
import subprocess

import psutil
import pytest
import yaml
from prefect.client.orchestration import get_client
from run_support import DRAFTMILL
from served_support import ROOT, wait_until

pytestmark = pytest.mark.prefect

GROUPS = {"pipeline", "datasets"}


@pytest.fixture
def start(prefect_url, tmp_path):
    """Start it on the session's Prefect server."""
    started = []

    def start(*flags, cwd=None):
        with (tmp_path / "up.log").open("ab") as log:
            env = {**os.environ, "PREFECT_API_URL": prefect_url}
            argv = [*DRAFTMILL, "up", *flags]
            started.append(subprocess.Popen(argv, cwd=cwd, env=env, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def find_groups(process):
    """The processes that serve, by the group's name."""
    found = {}
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, or gone meanwhile
            if "deployments.serve" in (argv := child.cmdline()):
                found[argv[-3]] = child
    return found


def test_what_dies_is_started_again_and_all_end_together(start, tmp_path):
    """Kill -9 of a group brings a new one; Ctrl-C ends all, with exit 0 and the address printed before."""
    process = start()
    wait_until(lambda: set(find_groups(process)) == GROUPS)
    killed = find_groups(process)["datasets"]
    killed.kill()
    wait_until(lambda: find_groups(process).get("datasets") not in (None, killed))
    wait_until(lambda: set(find_groups(process)) == GROUPS)
    groups = find_groups(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 0
    assert not any(group.is_running() for group in groups.values())
    log = (tmp_path / "up.log").read_text()
    assert "watch, start and retry runs at http://127.0.0.1:" in log
    assert "what serves datasets has ended (status -9); starting it again" in log


def test_killed_itself_it_leaves_nothing_behind(start):
    """What it started notices."""
    process = start()
    wait_until(lambda: set(find_groups(process)) == GROUPS)
    groups = find_groups(process)
    process.kill()
    _, alive = psutil.wait_procs(groups.values(), timeout=300)
    assert not alive


@pytest.fixture
def prefect_file(tmp_path):
    """A prefect.yaml with a deployment in each group, beside a copy of the code that serves it."""
    shutil.copytree(ROOT / "deployments", tmp_path / "deployments")
    entries = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    ours = [{**entry, "name": f"{entry['name']}-edited"} for entry in entries]
    path = tmp_path / "prefect.yaml"
    path.write_text(yaml.safe_dump({"deployments": [ours[0], ours[2]]}))
    return path


def change_file(path, which, **changed):
    """Edit the entry of a deployment in prefect.yaml."""
    entries = yaml.safe_load(path.read_text())["deployments"]
    [entry] = [entry for entry in entries if entry["name"] == which]
    entry.update(changed)
    path.write_text(yaml.safe_dump({"deployments": entries}))


def read_deployments():
    """Both of the file, the pipeline's first."""
    names = ("generate-drafter-data/pipeline-edited", "generate-dataset/dataset-edited")
    with get_client(sync_client=True) as client:
        return [client.read_deployment_by_name(name) for name in names]


def edit(deployment, **fields):
    """What Edit in the UI does."""
    with get_client(sync_client=True) as client:
        client._client.patch(f"/deployments/{deployment.id}", json=fields).raise_for_status()


def wait_until_served(process, before=()):
    """Until both groups are there, others than before, and have registered what they serve."""
    wait_until(lambda: set(find_groups(process)) == GROUPS)
    wait_until(lambda: not {*find_groups(process).values()} & {*before})
    updated = [deployment.updated for deployment in read_deployments()]
    wait_until(lambda: all(now.updated > then for now, then in zip(read_deployments(), updated, strict=True)))


def stop(process):
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 0


def test_a_prefect_file_that_the_server_refuses_ends_it(start, tmp_path, prefect_file):
    """Exit 2, with the deployment and the value; nothing is served."""
    change_file(prefect_file, "dataset-edited", name="refused", parameters={"parameters": {"max_samples": 0}})
    assert start(cwd=tmp_path).wait(300) == 2
    log = (tmp_path / "up.log").read_text()
    assert "generate-dataset/refused" in log
    assert "0 is less than the minimum of 1" in log
    assert "watch, start and retry" not in log


def test_what_was_edited_on_the_server_survives_every_start(start, tmp_path, prefect_file):
    """A serving process killed, or `up` started again on a changed prefect.yaml; --reset takes the file's."""
    process = start(cwd=tmp_path)
    wait_until_served(process)
    pipeline, dataset = read_deployments()
    written = pipeline.parameters["parameters"]
    edited = {**written, "max_tokens_per_dataset": 5}
    edit(pipeline, parameters={"parameters": edited}, tags=["mine"])
    edit(dataset, tags=["mine"], description="edited")
    with get_client(sync_client=True) as client:
        client.update_deployment_schedule(pipeline.id, pipeline.schedules[0].id, active=True)

    def read_edits():
        pipeline, dataset = read_deployments()
        schedules = [schedule.active for schedule in pipeline.schedules]
        return pipeline.parameters["parameters"], pipeline.tags, schedules, dataset.tags, dataset.description

    as_edited = (edited, ["mine"], [True], ["mine"], "edited")
    assert read_edits() == as_edited
    killed = find_groups(process).values()
    for group in killed:
        group.kill()
    wait_until_served(process, killed)
    assert read_edits() == as_edited
    stop(process)
    changed = {"parameters": {**written, "output_dir": "data/other"}}
    change_file(prefect_file, "pipeline-edited", parameters=changed)
    process = start(cwd=tmp_path)
    wait_until_served(process)
    edited["output_dir"] = "data/other"
    assert read_edits() == as_edited
    stop(process)
    log = (tmp_path / "up.log").read_text()
    assert log.count("max_tokens_per_dataset = 5") == 1
    assert log.count('output_dir = "data/other" (was "data/run")') == 1
    process = start("--reset", cwd=tmp_path)
    wait_until_served(process)
    assert read_edits() == (changed["parameters"], [], [False], [], dataset.description)
    stop(process)
