"""Runs of served deployments on a real Prefect server, as a person has them through the UI."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterParentFlowRunId
from prefect.states import AwaitingRetry, Cancelling

ROOT = Path(__file__).parents[2]
PIPELINE = "generate-drafter-data/pipeline"
DATASET = "generate-dataset/dataset"
WAIT_S = 300


@contextlib.contextmanager
def serving(log_folder, env, *, groups=("pipeline", "datasets")):
    """The processes that `draftmill up` starts for the groups, on the Prefect server of `env`."""
    processes = {}
    for group in groups:
        argv = [sys.executable, "-m", "deployments.serve", group, "5", str(os.getpid())]
        with (log_folder / f"serve-{group}.log").open("ab") as log:
            processes[group] = subprocess.Popen(
                argv, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
            )
    try:
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(120)


def trigger(deployment, parameters, **options):
    """Start a run; returns its id."""
    with get_client(sync_client=True) as client:
        wait_until(lambda: _find_deployment(client, deployment) is not None)
        found = _find_deployment(client, deployment)
        return client.create_flow_run_from_deployment(found.id, parameters=parameters, **options).id


def retry(run_id: UUID):
    """What the Retry button of the UI does."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, AwaitingRetry(), force=True)


def cancel(run_id: UUID):
    """What Cancel in the UI does."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Cancelling())


def set_parameters(run_id: UUID, parameters):
    """Change a run before its next try."""
    with get_client(sync_client=True) as client:
        response = client._client.patch(f"/flow_runs/{run_id}", json={"parameters": parameters})
        response.raise_for_status()


def read_run(run_id: UUID):
    """The run as the server knows it."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run_id)


def read_children(run_id: UUID):
    """The runs of single datasets, by name."""
    wanted = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run_id]))
    with get_client(sync_client=True) as client:
        return {run.name: run for run in client.read_flow_runs(flow_run_filter=wanted)}


def count_rows(run_id: UUID):
    """Rows of flow and task runs that a run and the runs of its datasets have in Prefect's database."""
    runs = [run_id, *(run.id for run in read_children(run_id).values())]
    with get_client(sync_client=True) as client:
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=runs)))
    return len(runs) + len(tasks)


def wait_for_end(run_id: UUID, *, tries=1, timeout=WAIT_S):
    """Wait until its n-th try has ended; returns the final state."""
    wait_until(lambda: _has_ended(read_run(run_id), tries), timeout)
    return read_run(run_id).state


def wait_for_child(run_id: UUID, name, *, tries=1, timeout=WAIT_S):
    """Wait until a child's n-th try has ended; returns the child."""
    wait_until(lambda: _has_ended(read_children(run_id).get(name), tries), timeout)
    return read_children(run_id)[name]


def _has_ended(run, tries):
    return run is not None and run.state.is_final() and run.run_count >= tries


def _find_deployment(client, name):
    with contextlib.suppress(Exception):
        return client.read_deployment_by_name(name)
    return None


def wait_until(condition, timeout=WAIT_S):
    """Look twice a second."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.5)
