"""The task that writes the training data."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.core.export import ExportDataset, export_run
from tasks.core.export_report import ExportReport
from tasks.core.run_file import read_run_file
from tasks.core.stats import DatasetStats

logger = logging.getLogger(__name__)

EXPORT_FOLDER = "export"


@dataclass(frozen=True, slots=True)
class ExportRules:
    """What is exported and how; `partial` takes datasets that are below their budget too."""

    eval_fraction: float
    seed: int
    formats: Collection[str]
    partial: bool = False


@task(name="export-drafter-data", cache_policy=NO_CACHE, persist_result=False)
async def export_drafter_data(
    output_dir: Path, stats: Sequence[DatasetStats], rules: ExportRules
) -> ExportReport | None:
    """Export the datasets that are done; None when there is none."""
    return await asyncio.to_thread(export_datasets, output_dir, stats, rules)


def export_datasets(
    output_dir: Path, stats: Sequence[DatasetStats], rules: ExportRules
) -> ExportReport | None:
    """The same without Prefect."""
    done = [one for one in stats if one.rows and (rules.partial or one.status != "incomplete")]
    left_out = [one.name for one in stats if one not in done]
    if left_out:
        logger.warning(
            "not exported, for they are not complete: %s (export.partial takes them too)", ", ".join(left_out)
        )
    if not done:
        return None
    run = read_run_file(output_dir)
    report = export_run(
        datasets=[ExportDataset(one.name, output_dir / one.name, one.status) for one in done],
        out_dir=output_dir / EXPORT_FOLDER,
        eval_fraction=rules.eval_fraction,
        seed=rules.seed,
        formats=rules.formats,
        provenance={key: run[key] for key in ("fingerprint", "accepted_changes") if key in run},
    )
    logger.info("exported %d rows to %s", report.total.rows, report.out_dir)
    return report
