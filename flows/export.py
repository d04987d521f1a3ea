"""The training data of one run, written again by itself."""

import asyncio
from pathlib import Path
from typing import Annotated

from prefect import flow
from pydantic import Field

from flows.logs import show_our_logs
from flows.parameters import ExportFormat
from flows.run_folder import check_exported, read_export_rules
from tasks.aggregate.report import write_report
from tasks.aggregate.run_stats import read_plans
from tasks.aggregate.task import aggregate_stats
from tasks.export.report import ExportReport
from tasks.export.task import export_drafter_data
from tasks.records.run_file import check_run_folder


@flow(name="export-drafter-data", flow_run_name="export of {output_dir}", persist_result=False)
async def export_run_data(
    output_dir: str,
    eval_fraction: Annotated[float | None, Field(ge=0, lt=1)] = None,
    seed: int | None = None,
    formats: list[ExportFormat] | None = None,
    draft_vocab_size: Annotated[int | None, Field(ge=0)] = None,
    drop_duplicates: bool | None = None,
    decontaminate: list[str] | None = None,
    partial: bool = False,
) -> ExportReport:
    """Count what is on disk of a run, then write its training data again from that.

    Args:
        output_dir: The folder of a run; a relative one starts in the folder that the flow runs in.
        eval_fraction: Share of conversations held out for evaluation; empty is the run's own.
        seed: Of the train/eval split; empty is the run's own.
        formats: Of parquet, jsonl, arrow, vocab and conversations; empty is the run's own.
        draft_vocab_size: How many ids the draft model has, 0 for no vocabulary; empty is the run's own.
        drop_duplicates: Leave out rows with the ids and the mask of an earlier row; empty is the run's own.
        decontaminate: Files of evaluation sets to leave the rows of out; empty is the run's own.
        partial: Export datasets that have not reached their budget too.

    Raises:
        RunFolderError: the folder is not one of a run, or cannot be written to.
        ExportInputError: an evaluation set cannot be used, or the folder export is not ours to replace.
        ExportError: no dataset is complete, or another export is being written.
    """
    show_our_logs()
    folder = Path(output_dir)
    plans = read_plans(folder)
    check_run_folder(folder)
    rules = read_export_rules(
        folder,
        eval_fraction=eval_fraction,
        seed=seed,
        formats=formats,
        draft_vocab_size=draft_vocab_size,
        drop_duplicates=drop_duplicates,
        decontaminate=decontaminate,
        partial=partial,
    )
    stats = await aggregate_stats(folder, plans)
    report = check_exported(await export_drafter_data(folder, stats, rules), folder, stats)
    await asyncio.to_thread(write_report, folder, stats)
    return report
