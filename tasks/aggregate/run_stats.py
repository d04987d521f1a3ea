"""The statistics of a run's folder: what each dataset was meant to reach, and what is there of it.

Knows run.json, the prepare reports and the logs; does not know Prefect. Invariant: nothing is written, and
no lock is held.
"""

from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from tasks.aggregate.stats import DatasetStats
from tasks.aggregate.stats_scan import DatasetScan
from tasks.prepare.preparation import read_report
from tasks.records.dataset_plan import DatasetPlan
from tasks.records.run_file import RunFolderError, read_run_file, read_setting


def read_plans(output_dir: Path) -> list[DatasetPlan]:
    """What each dataset of a run was last meant to reach, those that have not begun included.

    Raises:
        RunFolderError: the folder is not one of a run, or its run.json is damaged.
    """
    return list_plans(output_dir, read_run_file(output_dir))


def list_plans(output_dir: Path, run: dict[str, Any]) -> list[DatasetPlan]:
    """The same of a run.json that was read.

    Raises:
        RunFolderError: as read_plans.
    """
    begun = run.get("details", {}).get("datasets", {})
    planned = run.get("details", {}).get("plans", {})  # by the last run, before any of them begins
    if not begun and not planned:
        raise RunFolderError(
            f"{str(output_dir)!r} is not the folder of a run: it has no run.json with datasets"
        )
    return [
        _read_plan(output_dir, run, "plans" if name in planned else "datasets", name)
        for name in sorted({*begun, *planned})
    ]


def _read_plan(output_dir: Path, run: dict[str, Any], part: str, name: str) -> DatasetPlan:
    where = ("details", part, name)
    is_generated = read_setting(output_dir, run, *where, "kind", kind=str | None) != "trajectory"
    return DatasetPlan(
        name,
        read_setting(output_dir, run, *where, "budget_tokens", kind=int if is_generated else NoneType),
        read_setting(output_dir, run, *where, "max_samples", kind=int | None),
    )


def collect_stats(output_dir: Path, plans: Sequence[DatasetPlan]) -> list[DatasetStats]:
    """Scan the logs of all datasets, in the order given."""
    return [_collect(output_dir / plan.name, plan) for plan in plans]


def _collect(folder: Path, plan: DatasetPlan) -> DatasetStats:
    scan = DatasetScan(folder)
    scan.read_new()
    return describe_dataset(scan, folder, plan)


def describe_dataset(scan: DatasetScan, folder: Path, plan: DatasetPlan) -> DatasetStats:
    """What was scanned of a dataset, with its plan and what became of its source."""
    report = read_report(folder)
    counts = None
    if report is not None:
        counts = {
            "rows_read": report.rows_read,
            "duplicates": report.duplicates,
            "rejected": sum(report.rejected.values()),
            "nulls_removed": report.nulls_removed,
        }
    return scan.to_stats(
        name=plan.name,
        budget_tokens=plan.budget_tokens,
        max_samples=plan.max_samples,
        prompts=report.prompts if report is not None else None,
        prepare=counts,
    )
