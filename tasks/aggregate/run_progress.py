"""How far a run is: each dataset and the whole, from their checkpoints.

Knows what one checkpoint says and what has changed since the earlier ones; does not know where they are
kept, nor the logs behind them. Invariant: only tokens between two checkpoints that were both saved while
somebody watched count as speed, so that what a resumed dataset had on disk does not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from tasks.aggregate.pace import Pace
from tasks.aggregate.stats import Status, dataset_status, measure_reached, parse_time, total_reached
from tasks.aggregate.stats_views import describe_status, format_counts, format_percent
from tasks.prepare.preparation import PrepareReport
from tasks.records.dataset_plan import TOTAL, DatasetPlan
from tasks.records.progress import CheckpointMismatchError, Progress
from tasks.records.times import format_duration

SPEED_WINDOW_S = 60.0
FRESH_S = 15.0  # three checkpoints: one that is not older belongs to a dataset that is being generated
SILENT_S = 60.0

QUIET_S = 60.0  # a newer answer is not worth a word

State = Literal["waiting", "generating", "stopped", "damaged", "complete", "exhausted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetProgress:
    """One dataset, or the total of several, as of its last checkpoint.

    `prompts` is None before they are prepared. `rejected` counts the lines of rejected.jsonl by reason.
    `left_tokens` is what is still expected: up to the budget, or less where the prompts or the sample cap
    end first, and `short_tokens` what the prompts do not suffice for. `tokens_per_s` is that of the last
    minutes, 0 where it is not known yet or nothing moves; `pace` that of the last hour, where the logs were
    read.
    """

    name: str
    state: State
    rows: int
    prompts: int | None
    completion_tokens: int
    budget_tokens: int | None
    reached_percent: float
    left_tokens: float
    finish_reasons: dict[str, int]
    rejected: dict[str, int]
    tokens_per_s: float
    pace: Pace | None = None
    short_tokens: float = 0.0

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to do."""
        return self.state in ("complete", "exhausted")

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end if its speed stays."""
        return self.measure_left(self.left_tokens)

    def measure_left(self, left_tokens: float) -> float | None:
        """Seconds that tokens take at the last hour's speed; None when nothing moves or it is too early."""
        if self.is_done:
            return 0.0
        if left_tokens <= 0 or self.tokens_per_s <= 0:
            return None
        return left_tokens / self.tokens_per_s if self.pace is None else self.pace.measure_left(left_tokens)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """All datasets of a run, in its order; `pace` is that of all together, where the logs were read."""

    datasets: tuple[DatasetProgress, ...]
    pace: Pace | None = None

    @property
    def _budgeted(self) -> list[tuple[DatasetProgress, int]]:
        return [(one, one.budget_tokens) for one in self.datasets if one.budget_tokens is not None]

    @property
    def _counted(self) -> Sequence[DatasetProgress]:
        return [one for one, _ in self._budgeted] or self.datasets

    @property
    def total(self) -> DatasetProgress:
        """All datasets as one: generating while one of them is, done when all are.

        Tokens and their speed are those that count against a budget, where there is one.
        """
        prompts = [one.prompts for one in self.datasets if one.prompts is not None]
        counted = self._counted
        return DatasetProgress(
            name=TOTAL,
            state=_total_state([one.state for one in self.datasets]),
            rows=sum(one.rows for one in self.datasets),
            prompts=sum(prompts) if prompts else None,
            completion_tokens=sum(one.completion_tokens for one in counted),
            budget_tokens=sum(budget for _, budget in self._budgeted) if self._budgeted else None,
            reached_percent=total_reached(
                [(one.reached_percent, one.budget_tokens) for one in self.datasets]
            ),
            left_tokens=sum(one.left_tokens for one in counted),
            finish_reasons=_add(one.finish_reasons for one in self.datasets),
            rejected=_add(one.rejected for one in self.datasets),
            tokens_per_s=sum(one.tokens_per_s for one in counted),
            pace=self.pace,
            short_tokens=sum(one.short_tokens for one in counted),
        )

    @property
    def stuck(self) -> tuple[str, ...]:
        """The datasets that do not go on by themselves; where nothing does, those that no run takes on."""
        is_moving = any(one.state == "generating" or one.tokens_per_s > 0 for one in self.datasets)
        stuck = ("damaged", "stopped") if is_moving else ("damaged",)
        return tuple(one.name for one in self.datasets if one.state in stuck)

    @property
    def stuck_tokens(self) -> float:
        """What is left of those that do not go on by themselves."""
        stuck = self.stuck
        return sum(one.left_tokens for one in self._counted if one.name in stuck)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end of all that goes on by itself."""
        total = self.total
        return total.measure_left(total.left_tokens - self.stuck_tokens)

    def measure_end(self, one: DatasetProgress) -> float | None:
        """Seconds to the end of one of its datasets.

        None ends later than the whole: its share of the window grows as the others end.
        """
        own_s, whole_s = one.eta_s, self.eta_s
        return own_s if own_s is None or whole_s is None else min(own_s, whole_s)

    def find_earlier_end(self, one: DatasetProgress) -> float | None:
        """Seconds to the end of one of its datasets at its own pace, where that is before the whole's.

        Else nothing is known of it but the whole's end, which its own speed would contradict.
        """
        end_s, whole_s = self.measure_end(one), self.eta_s
        return None if one.is_done or (end_s is not None and end_s == whole_s) else end_s

    def describe_done(self) -> str:
        """How many datasets are done, and how many more ended for want of prompts."""
        done = sum(one.state == "complete" for one in self.datasets)
        out = sum(one.state == "exhausted" for one in self.datasets)
        text = f"{done} of {len(self.datasets)} datasets done"
        return f"{text}, {out} out of prompts" if out else text

    def describe_reached(self) -> str:
        """The tokens of all budgets, and how many datasets are done."""
        total = self.total
        of_budget = "" if total.budget_tokens is None else f" of {total.budget_tokens:,}"
        return f"{total.completion_tokens:,}{of_budget} tokens, {self.describe_done()}"

    def to_line(self) -> str:
        """One line for a progress bar."""
        total = self.total
        if total.is_done:
            return self.describe_reached()
        if total.state == "stopped":
            return f"{self.describe_reached()}, stopped"
        speed = total.tokens_per_s if self.pace is None else self.pace.tokens_per_s
        what = "the others done" if self.stuck else "done"
        end = "end not known yet" if self.eta_s is None else f"{what} in {format_duration(self.eta_s)}"
        return f"{self.describe_reached()}, {speed:,.0f} tokens/s, {end}"

    def to_rows(self) -> list[dict[str, str]]:
        """A line per dataset and one for the total, as text: the rows of a Prefect table artifact."""
        rows = [_to_row(one, self.find_earlier_end(one)) for one in self.datasets]
        return [*rows, _to_row(self.total, self.eta_s)]


class DatasetWatch:
    """Looks at one dataset again and again; keeps the checkpoints of the last minute."""

    def __init__(self, plan: DatasetPlan) -> None:
        self.plan = plan
        self._looked = False
        self._before: str | None = None  # when the checkpoint was saved that the first look found
        self._latest: _Reading | None = None
        self._recent: list[_Reading] = []
        self._changed_at_s: float | None = None

    def look(
        self,
        checkpoint: Mapping[str, Any] | None,
        report: PrepareReport | None,
        *,
        at_s: float,
        ended: bool = False,
    ) -> DatasetProgress:
        """What a checkpoint says, in the light of the earlier ones.

        Args:
            checkpoint: what `Progress.to_checkpoint` wrote; None where there is none, or none could be had:
                what is known stays then.
            report: of the dataset's preparation; a checkpoint of other prompts does not count.
            at_s: seconds since 1970, by the clock of whoever looks.
            ended: nothing generates any more; a dataset that is not done has stopped.
        """
        if report is None or (self._latest is not None and self._latest.prompts_key != report.key):
            self._latest = None
        if report is not None and checkpoint is not None:
            self._latest = self._read(checkpoint, report) or self._latest
        self._note(at_s)
        return self._describe(report, at_s, ended=ended)

    def _read(self, checkpoint: Mapping[str, Any], report: PrepareReport) -> "_Reading | None":
        known = self._latest
        if known is not None and known.sha256 == checkpoint.get("sha256"):
            return known  # at a million prompts it takes 25 ms to read one
        try:
            return _Reading.of(checkpoint, report)
        except (CheckpointMismatchError, KeyError, TypeError, ValueError):
            return None

    def _note(self, at_s: float) -> None:
        latest = self._latest
        if not self._looked:
            self._looked, self._before = True, latest.saved_at if latest else None
            return
        if latest is None or latest.saved_at == self._before:
            return
        last = self._recent[-1] if self._recent else None
        if latest is last:
            return
        self._changed_at_s = at_s
        if last is not None and latest.saved_at_s < last.saved_at_s:
            self._recent.clear()  # another machine's clock
        elif last is not None and latest.saved_at_s == last.saved_at_s:
            self._recent.pop()
        oldest_s = latest.saved_at_s - SPEED_WINDOW_S
        self._recent = [one for one in self._recent if one.saved_at_s >= oldest_s]
        self._recent.append(latest)

    def _describe(self, report: PrepareReport | None, at_s: float, *, ended: bool) -> DatasetProgress:
        plan, prompts = self.plan, None if report is None else report.prompts
        latest = self._latest or _NOTHING
        status = dataset_status(
            rows=latest.rows,
            completion_tokens=latest.completion_tokens,
            settled=latest.settled,
            prompts=prompts,
            budget_tokens=plan.budget_tokens,
            max_samples=plan.max_samples,
        )
        state = self._state(at_s, ended=ended) if status == "incomplete" else status
        return DatasetProgress(
            name=plan.name,
            state=state,
            rows=latest.rows,
            prompts=prompts,
            completion_tokens=latest.completion_tokens,
            budget_tokens=plan.budget_tokens,
            reached_percent=measure_reached(
                status,
                completion_tokens=latest.completion_tokens,
                budget_tokens=plan.budget_tokens,
                answers=latest.rows,
                prompts=prompts,
            ),
            left_tokens=estimate_left_tokens(
                plan,
                status,
                rows=latest.rows,
                tokens=latest.completion_tokens,
                settled=latest.settled,
                prompts=prompts,
            ),
            finish_reasons=latest.finish_reasons,
            rejected=latest.rejected,
            tokens_per_s=self._speed() if state == "generating" else 0.0,
        )

    def _state(self, at_s: float, *, ended: bool) -> State:
        if ended:
            return "stopped"
        if self._changed_at_s is not None:
            return "generating" if at_s - self._changed_at_s < SILENT_S else "stopped"
        is_fresh = self._latest is not None and abs(at_s - self._latest.saved_at_s) < FRESH_S
        return "generating" if is_fresh else "waiting"

    def _speed(self) -> float:
        """Tokens per second over the last minute of checkpoints, which tell whole seconds."""
        if len(self._recent) < 2:
            return 0.0
        first, last = self._recent[0], self._recent[-1]
        tokens = last.completion_tokens - first.completion_tokens
        return max(0.0, tokens / (last.saved_at_s - first.saved_at_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The figures of a checkpoint that belongs to the dataset's prompts; `settled` ones need no answer."""

    sha256: str
    prompts_key: str
    saved_at: str
    saved_at_s: float
    rows: int
    completion_tokens: int
    settled: int
    finish_reasons: dict[str, int]
    rejected: dict[str, int]

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], report: PrepareReport) -> "_Reading":
        progress = Progress.from_checkpoint(checkpoint, prompts_key=report.key, prompts=report.prompts)
        return cls(
            sha256=checkpoint["sha256"],
            prompts_key=report.key,
            saved_at=checkpoint["updated_at"],
            saved_at_s=parse_time(checkpoint["updated_at"]),
            rows=progress.rows,
            completion_tokens=progress.completion_tokens,
            settled=report.prompts - progress.open_prompts,
            finish_reasons=dict(sorted(progress.finish_reasons.items())),
            rejected=dict(sorted(progress.rejected.items())),
        )


_NOTHING = _Reading(
    sha256="", prompts_key="", saved_at="", saved_at_s=0.0, rows=0, completion_tokens=0, settled=0,
    finish_reasons={}, rejected={},
)  # fmt: skip


def estimate_left_tokens(
    plan: DatasetPlan, status: Status, *, rows: int, tokens: int, settled: int, prompts: int | None
) -> float:
    """What a dataset is still expected to take: up to its budget, or less where answers end first."""
    if status != "incomplete":
        return 0.0
    left = inf if plan.budget_tokens is None else float(max(0, plan.budget_tokens - tokens))
    if rows and prompts is not None:
        answers = prompts - settled
        if plan.max_samples is not None:
            answers = min(answers, plan.max_samples - rows)
        left = min(left, answers * tokens / rows)
    return 0.0 if left == inf else left  # conversations of unknown length


def describe_state(one: DatasetProgress, idle_s: float | None) -> str:
    """In words, with how long there has been no answer where that is worth one."""
    word = describe_status(one.state)
    if one.state == "generating" and one.budget_tokens is None and one.name != TOTAL:
        word = "converting"
    if one.state not in ("generating", "stopped") or idle_s is None or idle_s < QUIET_S:
        return word
    return f"{'stopped' if one.state == 'stopped' else 'quiet'} {format_duration(idle_s, units=1)}"


def _total_state(states: Sequence[State]) -> State:
    order: tuple[State, ...] = ("generating", "waiting", "stopped", "damaged", "exhausted")
    return next((state for state in order if state in states), "complete")


def _add(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def _to_row(one: DatasetProgress, eta_s: float | None) -> dict[str, str]:
    return {
        "dataset": one.name,
        "state": describe_state(one, None),
        "reached": format_percent(one.reached_percent),
        "completion tokens": f"{one.completion_tokens:,}",
        "budget": "" if one.budget_tokens is None else f"{one.budget_tokens:,}",
        "tokens/s (1 min)": f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else "",
        "done in": "" if one.is_done or eta_s is None else format_duration(eta_s),
        "answers": f"{one.rows:,}",
        "prompts": "" if one.prompts is None else f"{one.prompts:,}",
        "finish reasons": format_counts(one.finish_reasons),
        "not used": format_counts(one.rejected),
    }
