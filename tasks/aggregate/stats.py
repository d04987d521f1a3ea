"""What is counted of a dataset, how it is summed up, and when a dataset is done.

Does not know files or how numbers are shown. Invariant: a total is computed from the same counts as
its parts, quantiles included.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from tasks.records.dataset_plan import TOTAL
from tasks.records.length_quantiles import LengthQuantiles, length_quantiles

Status = Literal["complete", "exhausted", "incomplete"]
TIME_BUCKET_S = 10
PAUSE_S = 300.0  # without an answer for longer is a pause, and no part of the mean speed
Key = TypeVar("Key", str, int)


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without answers, in seconds since 1970."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Damage:
    """Whole lines of a log that cannot be read: how many, and the numbers of the first few, from 1."""

    lines: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStats:
    """One dataset, or the total of several.

    A second row of one (id, turn) is counted in `duplicates` and nowhere else, as in the export.
    `prompts` is None before they are prepared, `budget_tokens` None where nothing is generated.
    `prompts` counts the answers asked for, `answered` those with a row, `permanently_rejected` those that
    will not be asked again.
    `unreadable` counts whole lines that are no row; `not_token_exact` rows whose ids are missing or
    do not add up. `retries` is the sum of attempt - 1. `prepare` repeats the prepare report's counts.
    `reached_percent` is what `measure_reached` and `total_reached` say; `mean_tokens_per_s` is over the time
    in which answers came, pauses left out, and None where no row names its time.

    The last five are for plots and pages, and are not in stats.json: rows by completion_tokens, of them
    those that were cut, completion tokens by the time they were there (the second since 1970 at which each
    bucket of TIME_BUCKET_S begins), one rejected prompt or source row for each reason, and each log's damage.
    """

    name: str
    status: Status
    rows: int
    answered: int
    prompts: int | None
    prompt_tokens: int
    completion_tokens: int
    budget_tokens: int | None
    reached_percent: float
    finish_reasons: dict[str, int]
    lengths: LengthQuantiles | None
    empty: int
    not_token_exact: int
    duplicates: int
    unreadable: int
    rejected: dict[str, int]
    permanently_rejected: int
    prepare: dict[str, int]
    retries: int
    started_at: str | None
    first_finished_at: str | None
    last_finished_at: str | None
    mean_tokens_per_s: float | None
    max_samples: int | None = None
    length_counts: Mapping[int, int] = field(default_factory=dict, repr=False)
    cut_lengths: Mapping[int, int] = field(default_factory=dict, repr=False)
    tokens_by_time: Mapping[int, int] = field(default_factory=dict, repr=False)
    rejected_examples: Mapping[str, str] = field(default_factory=dict, repr=False)
    damaged: Mapping[str, Damage] = field(default_factory=dict, repr=False)


PLOT_FIELDS = ("length_counts", "cut_lengths", "tokens_by_time", "rejected_examples", "damaged")


def dataset_status(
    *,
    rows: int,
    completion_tokens: int,
    settled: int,
    prompts: int | None,
    budget_tokens: int | None,
    max_samples: int | None,
) -> Status:
    """Complete at the budget or the sample cap; exhausted when every prompt is settled before that.

    `settled` prompts have an answer or are rejected for good. Without a budget there is nothing to fall
    short of: all prompts settled is complete.
    """
    if budget_tokens is not None and completion_tokens >= budget_tokens:
        return "complete"
    if max_samples is not None and rows >= max_samples:
        return "complete"
    if prompts is None or settled < prompts:
        return "incomplete"
    return "complete" if budget_tokens is None else "exhausted"


def measure_reached(
    status: Status, *, completion_tokens: int, budget_tokens: int | None, answers: int, prompts: int | None
) -> float:
    """Percent of the budget, or of the prompts where there is none; 100 or more where it is complete.

    A dataset that its sample cap completed has reached all that was asked for, whatever its budget.
    """
    done, goal = (answers, prompts) if budget_tokens is None else (completion_tokens, budget_tokens)
    percent = 100.0 * done / goal if goal else 0.0
    return max(100.0, percent) if status == "complete" else percent


def total_reached(parts: Sequence[tuple[float, int | None]]) -> float:
    """Percent of the whole from each dataset's percent and budget; no dataset makes up for another.

    Datasets without a budget count only where none has one, each as much as another.
    """
    budgeted = [(percent, budget) for percent, budget in parts if budget]
    weighed = budgeted or [(percent, 1) for percent, _ in parts]
    whole = sum(weight for _, weight in weighed)
    return sum(min(100.0, percent) * weight for percent, weight in weighed) / whole if whole else 0.0


def total_stats(stats: Sequence[DatasetStats]) -> DatasetStats:
    """All datasets as one.

    Completion tokens, what is reached of the budget, and how fast, count only datasets that have a budget,
    where there is one: what others have was not made by the servers of this run.
    """
    budgeted = [s for s in stats if s.budget_tokens is not None]
    generated = budgeted or stats
    counts = _add(s.length_counts for s in stats)
    known_prompts = [s.prompts for s in stats if s.prompts is not None]
    return DatasetStats(
        name=TOTAL,
        status=_worst_status(s.status for s in stats),
        rows=sum(s.rows for s in stats),
        answered=sum(s.answered for s in stats),
        prompts=sum(known_prompts) if known_prompts else None,
        prompt_tokens=sum(s.prompt_tokens for s in stats),
        completion_tokens=sum(s.completion_tokens for s in generated),
        budget_tokens=sum(s.budget_tokens or 0 for s in budgeted) if budgeted else None,
        reached_percent=total_reached([(s.reached_percent, s.budget_tokens) for s in stats]),
        finish_reasons=_add(s.finish_reasons for s in stats),
        lengths=length_quantiles(counts),
        empty=sum(s.empty for s in stats),
        not_token_exact=sum(s.not_token_exact for s in stats),
        duplicates=sum(s.duplicates for s in stats),
        unreadable=sum(s.unreadable for s in stats),
        rejected=_add(s.rejected for s in stats),
        permanently_rejected=sum(s.permanently_rejected for s in stats),
        prepare=_add(s.prepare for s in stats),
        retries=sum(s.retries for s in stats),
        **span_fields(*_find_span(stats)),
        mean_tokens_per_s=mean_speed(*_find_ends(generated), _add(s.tokens_by_time for s in generated)),
        length_counts=counts,
        cut_lengths=_add(s.cut_lengths for s in stats),
        tokens_by_time=_add(s.tokens_by_time for s in stats),
        rejected_examples={reason: text for s in stats for reason, text in s.rejected_examples.items()},
    )


def span_fields(started: float | None, first: float | None, last: float | None) -> dict[str, Any]:
    """The time fields of DatasetStats from times in seconds since 1970, UTC."""
    return {
        "started_at": _iso(started),
        "first_finished_at": _iso(first),
        "last_finished_at": _iso(last),
    }


def mean_speed(started: float | None, last: float | None, tokens_by_time: Mapping[int, int]) -> float | None:
    """Tokens per second over the time in which answers came; None where no row names its time."""
    if started is None or last is None or last <= started:
        return None
    pauses = sum(gap.seconds for gap in find_gaps(tokens_by_time, longer_than_s=PAUSE_S))
    return sum(tokens_by_time.values()) / max(1.0, last - started - pauses)


def find_gaps(tokens: Iterable[int], *, longer_than_s: float) -> list[Gap]:
    """Times between two buckets of answers, the longest first."""
    least_s = longer_than_s + TIME_BUCKET_S
    pairs = itertools.pairwise(sorted(tokens))
    gaps = [Gap(a + TIME_BUCKET_S, b) for a, b in pairs if b - a > least_s]
    return sorted(gaps, key=lambda gap: -gap.seconds)


def parse_time(text: str) -> float:
    """ISO 8601 to seconds since 1970; UTC where the text names no zone."""
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _find_span(stats: Sequence[DatasetStats]) -> tuple[float | None, float | None, float | None]:
    """When the first answer began, when it was there, and when the last was."""
    started, first, last = (
        [parse_time(at) for s in stats if (at := getattr(s, name)) is not None]
        for name in ("started_at", "first_finished_at", "last_finished_at")
    )
    return min(started, default=None), min(first, default=None), max(last, default=None)


def _find_ends(stats: Sequence[DatasetStats]) -> tuple[float | None, float | None]:
    started, _, last = _find_span(stats)
    return started, last


def _worst_status(statuses: Iterable[Status]) -> Status:
    found = set(statuses)
    return "incomplete" if "incomplete" in found else "exhausted" if "exhausted" in found else "complete"


def _add(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    total: Counter[Key] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))
