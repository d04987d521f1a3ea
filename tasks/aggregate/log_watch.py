"""How far a run is, from what is in its folder, again and again.

Knows run.json, the prepare reports and the logs; does not know Prefect, checkpoints or who looks. Invariant:
it reads only, without locks, and after its first look only what was added to the logs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.aggregate.dataset_problems import estimate_unreachable
from tasks.aggregate.pace import SILENT_S, measure_pace
from tasks.aggregate.problems import Problems, find_problems
from tasks.aggregate.recent_answers import (
    WINDOW_S,
    RecentAnswers,
    ServerActivity,
    describe_servers,
    measure_speed,
)
from tasks.aggregate.run_progress import (
    DatasetProgress,
    RunProgress,
    State,
    estimate_left_tokens,
)
from tasks.aggregate.run_stats import describe_dataset, list_plans
from tasks.aggregate.stats import DatasetStats, parse_time
from tasks.aggregate.stats_scan import DatasetScan
from tasks.records.dataset_plan import DatasetPlan
from tasks.records.run_file import RUN_FILE, read_run_file

CLOCKS_DIFFER_S = 60.0


@dataclass(frozen=True, slots=True)
class RunLook:
    """What there is to see of a run.

    `stats` are those of the datasets of `progress`, in its order; `idle_s` how long each has had no answer,
    None where it has none at all.
    """

    at_s: float
    progress: RunProgress
    stats: tuple[DatasetStats, ...]
    idle_s: tuple[float | None, ...]
    servers: tuple[ServerActivity, ...]
    problems: Problems
    model: str = ""


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
        run = read_run_file(self._output_dir)
        plans = list_plans(self._output_dir, run)
        self._datasets = {
            plan.name: self._datasets.get(plan.name) or _DatasetLogWatch(self._output_dir / plan.name)
            for plan in plans
        }
        looks = [self._datasets[plan.name].look(plan, at_s) for plan in plans]
        return to_run_look(
            looks,
            self._describe_servers(looks, run),
            at_s=at_s,
            model=find_model(run),
            begun_s=find_begin(run),
        )

    def _describe_servers(
        self, looks: Sequence["DatasetLook"], run: Mapping[str, Any]
    ) -> list[ServerActivity]:
        """Those that run.json names, if it names any that answered: an earlier run had others."""
        now_s = max((one.now_s for one in looks), default=0.0)
        found = describe_servers([one.recent for one in self._datasets.values()], now_s=now_s)
        known = run.get("details", {}).get("servers") or {}
        return [one for one in found if one.server in known] or found


@dataclass(frozen=True, slots=True)
class DatasetLook:
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

    def look(self, plan: DatasetPlan, at_s: float) -> DatasetLook:
        """What the logs say now."""
        rows = self._scan.rows
        self._scan.read_new()
        grown, self._looked = self._looked and self._scan.rows > rows, True
        stats = describe_dataset(self._scan, self._folder, plan)
        if stats.last_finished_at is None:
            return DatasetLook(describe_progress(stats), stats, None, at_s)
        age_s = at_s - parse_time(stats.last_finished_at)
        self._compare_clocks(age_s, grown=grown)
        now_s, idle_s = at_s - self._clock_ahead_s, age_s - self._clock_ahead_s
        speed = measure_speed(self.recent.since(now_s - WINDOW_S), now_s=now_s)
        return DatasetLook(describe_progress(stats, idle_s, speed), stats, idle_s, now_s)

    def _compare_clocks(self, age_s: float, *, grown: bool) -> None:
        """A row that was just written and is minutes old, or not born yet, is of another clock."""
        if grown:
            self._clock_ahead_s = age_s if age_s > CLOCKS_DIFFER_S else 0.0
        self._clock_ahead_s = min(self._clock_ahead_s, age_s)


def find_model(run: Mapping[str, Any]) -> str:
    """The model's name in run.json: of a folder, its last part."""
    model = str(run.get("fingerprint", {}).get("model") or "")
    return model if model.count("/") < 2 else Path(model).name


def find_begin(run: Mapping[str, Any]) -> float | None:
    """When the run was last begun or gone on with, by its run.json; seconds since 1970."""
    try:
        return parse_time(str(run.get("updated_at") or run.get("created_at") or ""))
    except (ValueError, OverflowError):
        return None


def to_run_look(
    looks: Sequence[DatasetLook],
    servers: Sequence[ServerActivity],
    *,
    at_s: float,
    model: str = "",
    ended: bool = False,
    begun_s: float | None = None,
) -> RunLook:
    """The datasets together; with `ended`, none is generated any more. The run last began at `begun_s`."""
    stats, idle_s = [one.stats for one in looks], [one.idle_s for one in looks]
    pace = measure_pace(stats)
    now_s = max((one.now_s for one in looks), default=at_s)
    return RunLook(
        at_s=at_s,
        progress=RunProgress(tuple(one.progress for one in looks), pace),
        stats=tuple(stats),
        idle_s=tuple(idle_s),
        servers=tuple(servers),
        problems=find_problems(
            stats, now_s=now_s, idle_s=idle_s, pace=pace, ended=ended, servers=servers, begun_s=begun_s
        ),
        model=model,
    )


def describe_progress(
    stats: DatasetStats, idle_s: float | None = None, speed: float = 0.0, *, ended: bool = False
) -> DatasetProgress:
    """Statistics as progress; without `idle_s` there is no answer yet, or it does not matter when.

    With `ended`, nothing is generated any more.
    """
    state = _find_state(stats, idle_s)
    if ended and state == "generating":
        state = "damaged" if stats.unreadable else "stopped"
    left_tokens = estimate_left_tokens(
        DatasetPlan(stats.name, stats.budget_tokens, stats.max_samples),
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
        tokens_per_s=0.0 if state == "stopped" else speed,  # what has just ended was part of the speed
        pace=measure_pace([stats]) if state == "generating" else None,
        short_tokens=estimate_unreachable(stats),
    )


def _find_state(stats: DatasetStats, idle_s: float | None) -> State:
    if stats.status != "incomplete":
        return stats.status
    if idle_s is None:
        return "damaged" if stats.unreadable else "waiting"
    return "generating" if idle_s < SILENT_S else "damaged" if stats.unreadable else "stopped"
