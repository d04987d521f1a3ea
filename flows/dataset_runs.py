"""Datasets as deployment runs of their own: started by the run of the whole, watched until they have ended.

Only a deployment run has a Retry of its own in the UI, and a process of its own (Prefect 3.9.1); a subflow
inside the parent's process has neither. Knows Prefect's runs and states; does not know what a dataset is made
of. Invariant: one run per dataset and parent run, however often the parent is tried.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterIdempotencyKey,
)
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run as this_run
from prefect.states import AwaitingRetry

from flows.parameters import DatasetSettings, RunParameters
from flows.patience import retry_while_prefect_down

logger = logging.getLogger(__name__)

DEPLOYMENT = "generate-dataset/dataset"
LOOK_EVERY_S = 5.0
_SAY_EVERY_S = 60.0


class DatasetRunFailedError(RuntimeError):
    """A dataset's own run did not end Completed; says how it ended."""


class NotDeployedError(RuntimeError):
    """The deployment that runs one dataset is not on this Prefect server."""


async def run_datasets(
    parameters: RunParameters, datasets: Sequence[DatasetSettings]
) -> dict[str, Exception]:
    """Run each dataset in a run of its own and wait for all; returns why each one failed that did.

    Where this run is tried again, it goes on with the runs it started before: those that are at work are
    waited for, those that have ended are set to run again. A run that a person retries meanwhile is waited
    for too, and one that crashes runs again as often as dataset_retries says.

    Raises:
        NotDeployedError: nothing here runs single datasets.
    """
    async with get_client() as client:
        runs = {}
        known = await _find_known(client, [dataset.name for dataset in datasets])
        for dataset in datasets:
            runs[dataset.name] = await _start(client, parameters, dataset, known.get(dataset.name))
        crashes = _Crashes(client, parameters.dataset_retries, parameters.dataset_retry_delay_s)
        ended = await _wait(client, runs, crashes)
    return {name: _explain(run) for name, run in ended.items() if not _is_completed(run)}


async def _find_known(client: PrefectClient, names: Iterable[str]) -> dict[str, FlowRun]:
    """The runs that an earlier try of this run started."""
    keys = {_key(name): name for name in names}
    wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=list(keys)))
    found = await retry_while_prefect_down(lambda: client.read_flow_runs(flow_run_filter=wanted))
    return {keys[run.idempotency_key]: run for run in found if run.idempotency_key in keys}


async def _start(
    client: PrefectClient, parameters: RunParameters, dataset: DatasetSettings, known: FlowRun | None
) -> UUID:
    if known is not None:
        if known.state is not None and known.state.is_final():
            logger.info("%s: its run %s (%s) runs again", dataset.name, known.name, known.state.name)
            await retry_while_prefect_down(
                lambda: client.set_flow_run_state(known.id, AwaitingRetry(), force=True)
            )
        return known.id
    given = _parameters_of(parameters, dataset)
    try:
        run = await retry_while_prefect_down(
            lambda: arun_deployment(
                DEPLOYMENT,
                parameters=given,
                flow_run_name=f"generate-{dataset.name}",
                idempotency_key=_key(dataset.name),
                timeout=0,
                as_subflow=True,
            )
        )
    except ObjectNotFound as exc:
        raise NotDeployedError(
            f"the deployment {DEPLOYMENT} is not on this Prefect server, and each dataset runs as a run of "
            "it; deploy it too (draftmill up, or prefect --no-prompt deploy --all)"
        ) from exc
    return run.id


def _parameters_of(parameters: RunParameters, dataset: DatasetSettings) -> dict[str, Any]:
    """What the flow of one dataset is started with; its process may have another working directory.

    All datasets of the run are named there, for their order.
    """
    own = parameters.model_copy(update={"output_dir": str(Path(parameters.output_dir).resolve())})
    return {"parameters": own.model_dump(mode="json"), "dataset": dataset.model_dump(mode="json")}


def _key(name: str) -> str:
    return f"{this_run.get_id()}:{name}"


async def _wait(client: PrefectClient, runs: Mapping[str, UUID], crashes: "_Crashes") -> dict[str, FlowRun]:
    """Look until every run has ended for good; a server that is away in between is waited for."""
    names = {run_id: name for name, run_id in runs.items()}
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=list(names)))
    before: dict[str, str] = {}
    waiting = _WaitingForSlots()
    while True:
        found = await retry_while_prefect_down(lambda: client.read_flow_runs(flow_run_filter=wanted))
        ended = {}
        for run in found:
            name, state = names[run.id], run.state
            if state is None:
                continue
            if state.is_final() and not await crashes.run_again(name, run):
                ended[name] = run
            if before.get(name) != state.name and (state.is_running() or state.is_final()):
                logger.info("%s: %s", name, state.name)
            before[name] = state.name or ""
        if len(ended) == len(runs):
            return ended
        waiting.look(before)
        await asyncio.sleep(LOOK_EVERY_S)


class _Crashes:
    """Lets runs whose process was killed run again, so often each.

    What fails inside of a run is tried again there; nothing in it can do that when it is gone as a whole.
    """

    def __init__(self, client: PrefectClient, retries: int, delay_s: float) -> None:
        self._client = client
        self._retries = retries
        self._delay_s = delay_s
        self._used: Counter[str] = Counter()

    async def run_again(self, name: str, run: FlowRun) -> bool:
        """Whether it will; it was set to."""
        if run.state is None or not run.state.is_crashed() or self._used[name] >= self._retries:
            return False
        self._used[name] += 1
        logger.warning(
            "%s: its process was killed (%s); it runs again in %g s, as retry %d of %d",
            name, run.state.message, self._delay_s, self._used[name], self._retries,
        )  # fmt: skip
        due = datetime.now(UTC) + timedelta(seconds=self._delay_s)
        await retry_while_prefect_down(
            lambda: self._client.set_flow_run_state(run.id, AwaitingRetry(scheduled_time=due), force=True)
        )
        return True


class _WaitingForSlots:
    """Says once in a while that nothing picks the runs up."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def look(self, states: Mapping[str, str]) -> None:
        late = [name for name, state in states.items() if state == "Late"]
        if not late or "Running" in states.values():
            self._last_s = time.monotonic()
        elif time.monotonic() - self._last_s >= _SAY_EVERY_S:
            self._last_s = time.monotonic()
            logger.warning(
                "nothing picks up the runs of %s; is there a worker of the pool `datasets` with a free slot?",
                ", ".join(late),
            )


def _is_completed(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_completed()


def _explain(run: FlowRun) -> Exception:
    state = run.state
    said = f": {state.message}" if state is not None and state.message else ""
    return DatasetRunFailedError(f"its run {run.name} ended {state.name if state else 'nowhere'}{said}")
