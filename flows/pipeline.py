"""The whole run: warm up, generate every dataset, aggregate, export."""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import deployment as this_deployment
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelled

from flows.catalog import complete_parameters, list_datasets
from flows.dataset import generate_dataset
from flows.dataset_runs import run_datasets
from flows.finished import find_finished
from flows.logs import show_our_logs
from flows.opening import open_run, to_export_rules, to_plan
from flows.parameters import DatasetSettings, RunParameters
from flows.patience import wait_until_prefect_acknowledges
from flows.refusals import all_need_change
from flows.servers import open_server
from flows.show_run import show_run
from tasks.aggregate.report import write_report
from tasks.aggregate.stats import DatasetStats
from tasks.aggregate.task import aggregate_stats
from tasks.export.report import ExportReport
from tasks.export.task import export_drafter_data
from tasks.generate.generation import GenerationResult
from tasks.generate.session import get_session
from tasks.records.dataset_plan import DatasetPlan
from tasks.records.folder_lock import RUN_LOCK, FolderLockedError, hold_folder_lock
from tasks.records.run_file import check_run_folder

_ADVICE = {
    True: "Change that, then run the same command again: what is done is not done again.",
    False: "Retry this run, or run the same command again: what is done is not done again.",
}


class IncompleteError(RuntimeError):
    """A dataset below its budget with prompts left, although nothing said that it failed."""


class DatasetsFailedError(RuntimeError):
    """Some datasets did not reach their budget; the others are done, counted and exported.

    `failed` maps each dataset's name to why.
    """

    def __init__(self, failed: dict[str, Exception], report: "RunReport", *, datasets: int) -> None:
        self.failed = failed
        self.report = report
        reasons = "\n".join(f"  {name}: {why}" for name, why in failed.items())
        advice = _ADVICE[all_need_change(failed.values())]
        super().__init__(f"{len(failed)} of {datasets} datasets failed:\n{reasons}\n{advice}")


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run leaves behind."""

    output_dir: Path
    results: list[GenerationResult]
    stats: list[DatasetStats]
    export: ExportReport | None


@flow(name="generate-drafter-data", flow_run_name="{parameters.output_dir}", persist_result=False)
async def generate_drafter_data(parameters: RunParameters) -> RunReport | State[RunReport]:
    """Turn prompt datasets into token-exact training data for a drafter, under token budgets."""
    show_our_logs()
    parameters = complete_parameters(parameters)
    datasets = list_datasets(parameters)
    check_run_folder(Path(parameters.output_dir))
    async with wait_until_prefect_acknowledges():
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(hold_folder_lock(Path(parameters.output_dir), RUN_LOCK))
            except FolderLockedError as exc:
                if "auto-scheduled" in this_run.get_tags():  # last night's run is still at it: no alarm
                    return Cancelled(name="Skipped", message=str(exc))
                raise
            return await _generate_and_export(parameters, datasets)


async def _generate_and_export(parameters: RunParameters, datasets: list[DatasetSettings]) -> RunReport:
    plans = [to_plan(parameters, dataset) for dataset in datasets]
    finished = await find_finished(parameters, datasets)
    left = [dataset for dataset in datasets if dataset.name not in finished]
    async with show_run(Path(parameters.output_dir), plans):
        new, failed = await _generate(parameters, left) if left else ({}, {})
    done = {**finished, **new}
    results = [done[dataset.name] for dataset in datasets if dataset.name in done]
    try:
        report = await _aggregate_and_export(parameters, plans, results)
    except Exception as exc:
        if failed:  # the first failure is the one to know: a full disk fails all that comes after
            nothing = RunReport(Path(parameters.output_dir), results, [], None)
            raise DatasetsFailedError(failed, nothing, datasets=len(datasets)) from exc
        raise
    for one in report.stats:
        if one.status == "incomplete" and one.name not in failed:  # whatever its run says of itself
            failed[one.name] = IncompleteError(f"only {one.completion_tokens:,} tokens are on disk")
    if failed:
        raise DatasetsFailedError(failed, report, datasets=len(datasets))
    return report


async def _generate(
    parameters: RunParameters, datasets: list[DatasetSettings]
) -> tuple[dict[str, GenerationResult], dict[str, Exception]]:
    """In runs of their own where this one is a deployment's, else here; the results, and why others failed.

    The results of runs elsewhere stay there: what they came to is on disk.
    """
    if this_deployment.get_id() is None:
        async with open_run(parameters):
            return await _generate_here(parameters, datasets)
    async with open_server(parameters):  # which the datasets' runs find
        async with open_run(parameters):
            pass  # a run that cannot succeed is refused before ten others are started
        return {}, await run_datasets(parameters, datasets)


async def _aggregate_and_export(
    parameters: RunParameters, plans: list[DatasetPlan], results: list[GenerationResult]
) -> RunReport:
    output_dir = Path(parameters.output_dir)
    stats = await aggregate_stats(output_dir, plans, ended=True)
    export = await export_drafter_data(output_dir, stats, to_export_rules(parameters))
    await asyncio.to_thread(write_report, output_dir, stats, ended=True)  # again, with the export's counts
    return RunReport(output_dir, results, stats, export)


async def _generate_here(
    parameters: RunParameters, datasets: list[DatasetSettings]
) -> tuple[dict[str, GenerationResult], dict[str, Exception]]:
    """Start the datasets in order, each when the one before waits for its turn; note those that fail."""
    turn = get_session().resources.turn
    running: dict[str, asyncio.Task[GenerationResult | Exception]] = {}
    async with asyncio.TaskGroup() as group:
        for dataset in datasets:
            subflow = group.create_task(_generate_one(parameters, dataset))
            running[dataset.name] = subflow
            if dataset.kind == "trajectory":
                continue  # it asks nothing of the servers, which must not wait for it
            queued = group.create_task(turn.wait_queued(dataset.name))
            await asyncio.wait((subflow, queued), return_when=asyncio.FIRST_COMPLETED)
            queued.cancel()
    outcomes = {name: subflow.result() for name, subflow in running.items()}
    results = {name: one for name, one in outcomes.items() if isinstance(one, GenerationResult)}
    failed = {name: one for name, one in outcomes.items() if isinstance(one, Exception)}
    return results, failed


async def _generate_one(parameters: RunParameters, dataset: DatasetSettings) -> GenerationResult | Exception:
    """The dataset's result, or why it failed."""
    state: State[GenerationResult] = await generate_dataset(parameters, dataset, return_state=True)
    outcome = await state.aresult(raise_on_failure=False)
    return outcome if isinstance(outcome, GenerationResult | Exception) else RuntimeError(str(outcome))
