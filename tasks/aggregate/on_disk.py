"""What the datasets of a run have on disk, for the plan of what is left.

Knows logs and checkpoints; asks no server. Invariant: nothing is written.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tasks.aggregate.stats_scan import scan_dataset
from tasks.aggregate.watch_run import RunWatch
from tasks.prepare.preparation import read_report
from tasks.records.dataset_plan import DatasetPlan
from tasks.records.response_log import RESPONSES
from tasks.warm_up.run_plan import OnDisk


async def count_from_logs(output_dir: Path, goals: Sequence[DatasetPlan]) -> dict[str, OnDisk]:
    """What each dataset has, read from its log: seconds a gigabyte, and nothing else is needed."""
    return {goal.name: await asyncio.to_thread(_count, output_dir, goal) for goal in goals}


async def count_from_checkpoints(output_dir: Path, goals: Sequence[DatasetPlan]) -> dict[str, OnDisk]:
    """The same from the checkpoints, at once; only a log without one is read."""
    progress = await RunWatch(output_dir, goals).look()
    found = {}
    for goal, one in zip(goals, progress.datasets, strict=True):
        found[goal.name] = OnDisk(one.rows, one.completion_tokens)
        if not one.rows:
            found[goal.name] = await asyncio.to_thread(_count, output_dir, goal)
    return found


def _count(output_dir: Path, goal: DatasetPlan) -> OnDisk:
    folder = output_dir / goal.name
    if not (folder / RESPONSES).exists():
        return OnDisk()
    report = read_report(folder)
    stats = scan_dataset(
        folder,
        name=goal.name,
        budget_tokens=goal.budget_tokens,
        max_samples=goal.max_samples,
        prompts=None if report is None else report.prompts,
    )
    return OnDisk(stats.rows, stats.completion_tokens)
