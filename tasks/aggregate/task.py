"""The task that counts what is on disk and shows it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import LinkArtifact, TableArtifact
from prefect.cache_policies import NO_CACHE

from tasks.aggregate.report import write_report
from tasks.aggregate.run_stats import collect_stats
from tasks.aggregate.stats import DatasetStats, total_stats
from tasks.aggregate.stats_views import stats_rows, write_stats
from tasks.artifacts import create_artifact, run_artifact_key
from tasks.records.dataset_plan import DatasetPlan

_REPORTS = ("report.html", "stats.json")  # the best one first


@task(name="aggregate-stats", cache_policy=NO_CACHE, persist_result=False)
async def aggregate_stats(
    output_dir: Path, plans: Sequence[DatasetPlan], *, ended: bool = False
) -> list[DatasetStats]:
    """Count every dataset, write stats.json, stats.parquet and report.html, show the table as an artifact.

    `ended` says that nothing generates any more: the report then says so of what is not done.
    """
    stats = await asyncio.to_thread(collect_stats, output_dir, plans)
    await asyncio.to_thread(write_stats, stats, output_dir)
    await asyncio.to_thread(write_report, output_dir, stats, ended=ended)
    await _show(output_dir, stats)
    return stats


async def _show(output_dir: Path, stats: Sequence[DatasetStats]) -> None:
    report = await asyncio.to_thread(_find_report, output_dir)
    await create_artifact(
        TableArtifact(table=stats_rows(stats), key="stats", description=f"What is on disk in {report.parent}")
    )
    await create_artifact(
        LinkArtifact(
            link=report.as_uri(),
            link_text=str(report),  # to be copied: no browser follows a file:// link of the UI
            key=run_artifact_key(output_dir, "report"),
            description=f"The report of the run in {report.parent}",
        )
    )


def _find_report(output_dir: Path) -> Path:
    """What a person would open first."""
    folder = output_dir.resolve()
    return next((path for name in _REPORTS if (path := folder / name).exists()), folder / _REPORTS[-1])


__all__ = ["DatasetPlan", "aggregate_stats", "collect_stats", "total_stats"]
