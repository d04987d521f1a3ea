"""How far a run is, from what is in its folder, again and again.

Knows run.json, the prepare reports and the logs; does not know Prefect, checkpoints or who looks. Invariant:
it reads only, without locks, and after its first look only what was added to the logs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.core.problems import Problems, find_problems
from tasks.core.recent_answers import (
    WINDOW_S,
    RecentAnswers,
    ServerActivity,
    describe_servers,
    measure_speed,
)
from tasks.core.run_file import RUN_FILE
from tasks.core.run_progress import DatasetProgress, RunProgress, State, estimate_left_tokens, format_duration
from tasks.core.run_stats import describe_dataset, read_plans
from tasks.core.stats import PAUSE_S, DatasetPlan, DatasetStats, parse_time
from tasks.core.stats_scan import DatasetScan

SILENT_S = PAUSE_S  # without a row for so long, a dataset is taken to have stopped
CLOCKS_DIFFER_S = 60.0
_SILENT_ALONE = 2


@dataclass(frozen=True, slots=True)
class RunLook:
    """What there is to see of a run.

    `stats` are those of the datasets of `progress`, in its order; `idle_s` how long each has had no row,
    None where it has none at all.
    """

    at_s: float
    progress: RunProgress
    stats: tuple[DatasetStats, ...]
    idle_s: tuple[float | None, ...]
    servers: tuple[ServerActivity, ...]
    problems: Problems


class RunLogWatch:
    """Looks at the logs of a run again and again."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._datasets: dict[str, _DatasetLogWatch] = {}

    def look(self, at_s: float) -> RunLook | None:
        """How far each dataset is; None before there is a run.json.

        Args:
            at_s: seconds since 1970, by the clock of whoever looks.

        Raises:
            RunFolderError: run.json is damaged.
        """
        if not (self._output_dir / RUN_FILE).exists():
            self._datasets.clear()
            return None
        plans = read_plans(self._output_dir)
        self._datasets = {
            plan.name: self._datasets.get(plan.name) or _DatasetLogWatch(self._output_dir / plan.name)
            for plan in plans
        }
        looks = [self._datasets[plan.name].look(plan, at_s) for plan in plans]
        return RunLook(
            at_s=at_s,
            progress=RunProgress(tuple(one.progress for one in looks)),
            stats=tuple(one.stats for one in looks),
            idle_s=tuple(one.idle_s for one in looks),
            servers=tuple(self._describe_servers(looks)),
            problems=_find_problems(looks),
        )

    def _describe_servers(self, looks: Sequence["_DatasetLook"]) -> list[ServerActivity]:
        now_s = max((one.now_s for one in looks), default=0.0)
        return describe_servers([one.recent for one in self._datasets.values()], now_s=now_s)


@dataclass(frozen=True, slots=True)
class _DatasetLook:
    """`now_s` is the time by the clock that the rows were written by."""

    progress: DatasetProgress
    stats: DatasetStats
    idle_s: float | None
    now_s: float


class _DatasetLogWatch:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scan = DatasetScan(folder)
        self._looked = False
        self._clock_ahead_s = 0.0  # of whoever looks, against who writes

    @property
    def recent(self) -> RecentAnswers:
        """The answers of the last minutes."""
        return self._scan.recent

    def look(self, plan: DatasetPlan, at_s: float) -> _DatasetLook:
        """What the logs say now."""
        rows = self._scan.rows
        self._scan.read_new()
        grown, self._looked = self._looked and self._scan.rows > rows, True
        stats = describe_dataset(self._scan, self._folder, plan)
        if stats.last_finished_at is None:
            return _DatasetLook(describe_progress(stats, plan, None, 0.0), stats, None, at_s)
        age_s = at_s - parse_time(stats.last_finished_at)
        self._compare_clocks(age_s, grown=grown)
        now_s, idle_s = at_s - self._clock_ahead_s, age_s - self._clock_ahead_s
        speed = measure_speed(self.recent.since(now_s - WINDOW_S), now_s=now_s)
        return _DatasetLook(describe_progress(stats, plan, idle_s, speed), stats, idle_s, now_s)

    def _compare_clocks(self, age_s: float, *, grown: bool) -> None:
        """A row that was just written and is minutes old, or not born yet, is of another clock."""
        if grown:
            self._clock_ahead_s = age_s if age_s > CLOCKS_DIFFER_S else 0.0
        self._clock_ahead_s = min(self._clock_ahead_s, age_s)


def describe_progress(
    stats: DatasetStats, plan: DatasetPlan | None, idle_s: float | None, speed: float
) -> DatasetProgress:
    """Statistics as progress; without a plan there is no cap on the samples, without `idle_s` no row yet."""
    plan = plan or DatasetPlan(stats.name, stats.budget_tokens)
    state = _find_state(stats, idle_s)
    left_tokens = estimate_left_tokens(
        plan,
        stats.status,
        rows=stats.rows,
        tokens=stats.completion_tokens,
        settled=stats.answered + stats.permanently_rejected,
        prompts=stats.prompts,
    )
    return DatasetProgress(
        name=stats.name,
        state=state,
        rows=stats.rows,
        prompts=stats.prompts,
        completion_tokens=stats.completion_tokens,
        budget_tokens=stats.budget_tokens,
        reached_percent=stats.reached_percent,
        left_tokens=left_tokens,
        finish_reasons=stats.finish_reasons,
        rejected=stats.rejected,
        tokens_per_s=speed if state == "generating" else 0.0,
    )


def _find_state(stats: DatasetStats, idle_s: float | None) -> State:
    if stats.status != "incomplete":
        return stats.status
    if idle_s is None:
        return "waiting"
    return "generating" if idle_s < SILENT_S else "stopped"


def _find_problems(looks: Sequence[_DatasetLook]) -> Problems:
    """Those of the statistics, after the datasets that have stopped: one sentence each, or one for many."""
    found = find_problems([one.stats for one in looks], running=True)
    silent = [one for one in looks if one.progress.state == "stopped"]
    stopped = [f"{one.stats.name}: no row for {format_duration(one.idle_s)}" for one in silent]
    if len(silent) > _SILENT_ALONE:
        least = format_duration(min(one.idle_s or 0.0 for one in silent))
        names = ", ".join(one.stats.name for one in silent)
        stopped = [f"{len(silent)} datasets: no row for {least} or more: {names}"]
    return Problems([*stopped, *found.trouble], found.notes)
