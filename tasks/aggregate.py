"""The task that counts what is on disk and shows it."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import acreate_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks.core.prepare import read_report
from tasks.core.stats import DatasetPlan, DatasetStats, total_stats
from tasks.core.stats_scan import scan_dataset
from tasks.core.stats_views import stats_rows, write_stats

logger = logging.getLogger(__name__)


@task(name="aggregate-stats", cache_policy=NO_CACHE, persist_result=False)
async def aggregate_stats(output_dir: Path, plans: Sequence[DatasetPlan]) -> list[DatasetStats]:
    """Count every dataset, write stats.json and stats.parquet, show the table as an artifact."""
    stats = await asyncio.to_thread(collect_stats, output_dir, plans)
    await asyncio.to_thread(write_stats, stats, output_dir)
    try:
        await acreate_table_artifact(stats_rows(stats), key="stats", description="What is on disk")
    except Exception as exc:  # noqa: BLE001  the files are written; the artifact only shows them
        logger.warning("the stats artifact could not be written: %s", exc)
    return stats


def collect_stats(output_dir: Path, plans: Sequence[DatasetPlan]) -> list[DatasetStats]:
    """Scan the logs of all datasets, in the order given."""
    return [_scan(output_dir / plan.name, plan) for plan in plans]


def _scan(folder: Path, plan: DatasetPlan) -> DatasetStats:
    report = read_report(folder)
    counts = None
    if report is not None:
        counts = {
            "rows_read": report.rows_read,
            "duplicates": report.duplicates,
            "rejected": sum(report.rejected.values()),
        }
    return scan_dataset(
        folder,
        name=plan.name,
        budget_tokens=plan.budget_tokens,
        max_samples=plan.max_samples,
        prompts=report.prompts if report is not None else None,
        prepare=counts,
    )


__all__ = ["DatasetPlan", "aggregate_stats", "collect_stats", "total_stats"]
