"""The whole run: warm up, generate every dataset, aggregate, export."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import State

from flows.catalog import complete_parameters, list_datasets
from flows.dataset import generate_dataset
from flows.logs import show_our_logs
from flows.opening import open_run, to_export_rules, to_plan
from flows.parameters import DatasetSettings, RunParameters
from tasks.aggregate import aggregate_stats
from tasks.core.export_report import ExportReport
from tasks.core.folder_lock import RUN_LOCK, hold_folder_lock
from tasks.core.run_file import check_run_folder
from tasks.core.stats import DatasetStats
from tasks.export import export_drafter_data
from tasks.generation import GenerationResult
from tasks.session import get_session


class DatasetsFailedError(RuntimeError):
    """Some datasets did not reach their budget; the others are done, counted and exported.

    `failed` maps each dataset's name to why.
    """

    def __init__(self, failed: dict[str, Exception], report: "RunReport") -> None:
        self.failed = failed
        self.report = report
        reasons = "\n".join(f"  {name}: {why}" for name, why in failed.items())
        super().__init__(
            f"{len(failed)} of {len(failed) + len(report.results)} datasets failed:\n{reasons}\n"
            "Retry this run, or run the same command again: what is done is not done again."
        )


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run leaves behind."""

    output_dir: Path
    results: list[GenerationResult]
    stats: list[DatasetStats]
    export: ExportReport | None


@flow(name="generate-drafter-data", flow_run_name="{parameters.output_dir}", persist_result=False)
async def generate_drafter_data(parameters: RunParameters) -> RunReport:
    """Turn prompt datasets into token-exact training data for a drafter, under token budgets."""
    show_our_logs()
    parameters = complete_parameters(parameters)
    datasets = list_datasets(parameters)
    check_run_folder(Path(parameters.output_dir))
    with hold_folder_lock(Path(parameters.output_dir), RUN_LOCK):
        return await _generate_and_export(parameters, datasets)


async def _generate_and_export(parameters: RunParameters, datasets: list[DatasetSettings]) -> RunReport:
    async with open_run(parameters):
        results, failed = await _generate_all(parameters, datasets)
    try:
        report = await _aggregate_and_export(parameters, datasets, results)
    except Exception as exc:
        if failed:  # the first failure is the one to know: a full disk fails all that comes after
            nothing = RunReport(Path(parameters.output_dir), results, [], None)
            raise DatasetsFailedError(failed, nothing) from exc
        raise
    if failed:
        raise DatasetsFailedError(failed, report)
    return report


async def _aggregate_and_export(
    parameters: RunParameters, datasets: list[DatasetSettings], results: list[GenerationResult]
) -> RunReport:
    output_dir = Path(parameters.output_dir)
    stats = await aggregate_stats(output_dir, [to_plan(parameters, dataset) for dataset in datasets])
    export = await export_drafter_data(output_dir, stats, to_export_rules(parameters))
    return RunReport(output_dir, results, stats, export)


async def _generate_all(
    parameters: RunParameters, datasets: list[DatasetSettings]
) -> tuple[list[GenerationResult], dict[str, Exception]]:
    """Start the datasets in order, each when the one before waits for its turn; note those that fail."""
    turn = get_session().resources.turn
    running: list[asyncio.Task[GenerationResult | Exception]] = []
    async with asyncio.TaskGroup() as group:
        for dataset in datasets:
            subflow = group.create_task(_generate_one(parameters, dataset))
            running.append(subflow)
            queued = group.create_task(turn.wait_queued(dataset.name))
            await asyncio.wait((subflow, queued), return_when=asyncio.FIRST_COMPLETED)
            queued.cancel()
    outcomes = [subflow.result() for subflow in running]
    results = [outcome for outcome in outcomes if isinstance(outcome, GenerationResult)]
    failed = {
        dataset.name: outcome
        for dataset, outcome in zip(datasets, outcomes, strict=True)
        if isinstance(outcome, Exception)
    }
    return results, failed


async def _generate_one(parameters: RunParameters, dataset: DatasetSettings) -> GenerationResult | Exception:
    """The dataset's result, or why it failed."""
    state: State[GenerationResult] = await generate_dataset(parameters, dataset, return_state=True)
    outcome = await state.aresult(raise_on_failure=False)
    return outcome if isinstance(outcome, GenerationResult | Exception) else RuntimeError(str(outcome))
