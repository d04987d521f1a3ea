"""How fast a run goes, how long the rest takes, when its speed fell and when it stood still.

Knows the tokens of each stretch of time; does not know files or where it is shown. Invariant: time is time of
work, pauses left out, so that a night in between makes no run slow.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.aggregate.stats import PAUSE_S, TIME_BUCKET_S, DatasetStats, Gap, find_gaps, parse_time

SILENT_S = PAUSE_S  # without an answer for so long, a dataset is taken to have stopped
WINDOW_S = 3600.0  # of work: answers of some minutes, and datasets of other lengths, level out in it
TOO_EARLY_S, GUESS_S = 120.0, 600.0  # of work; before them a speed says nothing, or little
_DIFFERENT = 0.1  # of the mean speed from the last hour's; less is no news
_FALLEN, _EDGE_S, _STEP_S, _STEPS = 0.5, 300.0, 60.0, 300


@dataclass(frozen=True, slots=True)
class Fall:
    """A speed that fell to less than half: when, in seconds since 1970, and the means around that.

    `before_s` and `after_s` say how much work each is the mean of.
    """

    at_s: float
    before: float
    before_s: float
    after: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """`tokens_per_s` is over the last hour of work, or all of it where `worked_s` is less."""

    worked_s: float
    tokens_per_s: float
    mean_tokens_per_s: float
    fall: Fall | None
    pauses: Sequence[Gap]  # the longest first

    @property
    def measured_s(self) -> float:
        """The time of work that `tokens_per_s` is of."""
        return min(WINDOW_S, self.worked_s)

    @property
    def is_too_early(self) -> bool:
        """Whether nothing can be said of the end."""
        return self.worked_s < TOO_EARLY_S

    @property
    def is_guess(self) -> bool:
        """Whether what is said of the end is a first guess."""
        return self.worked_s < GUESS_S

    @property
    def has_changed(self) -> bool:
        """Whether the last hour's speed is another than the mean."""
        return abs(self.mean_tokens_per_s - self.tokens_per_s) > _DIFFERENT * self.mean_tokens_per_s

    def measure_left(self, left_tokens: float) -> float | None:
        """Seconds of work that tokens will take; None where nothing can be said."""
        return self._measure_left(left_tokens, self.tokens_per_s)

    def measure_left_on_average(self, left_tokens: float) -> float | None:
        """The same at the mean speed."""
        return self._measure_left(left_tokens, self.mean_tokens_per_s)

    def _measure_left(self, left_tokens: float, speed: float) -> float | None:
        return None if self.is_too_early or left_tokens <= 0 or speed <= 0 else left_tokens / speed


def select_generated(stats: Sequence[DatasetStats]) -> Sequence[DatasetStats]:
    """Those with a budget, where there is one: what others have was not made by the servers of this run."""
    return [one for one in stats if one.budget_tokens is not None] or stats


def measure_pace(stats: Sequence[DatasetStats]) -> Pace | None:
    """That of the datasets with a budget together; None where no answer names its time."""
    timeline = _read_timeline(select_generated(stats))
    if timeline is None:
        return None
    worked_s = timeline.end_s
    return Pace(
        worked_s=worked_s,
        tokens_per_s=timeline.measure(max(0.0, worked_s - WINDOW_S), worked_s),
        mean_tokens_per_s=timeline.measure(0.0, worked_s),
        fall=_find_fall(timeline),
        pauses=timeline.pauses,
    )


def find_idle(stats: Sequence[DatasetStats], *, now_s: float) -> list[float | None]:
    """How long each dataset has had no answer; None where none names its time."""
    lasts = [one.last_finished_at for one in stats]
    return [None if last is None else max(0.0, now_s - parse_time(last)) for last in lasts]


class _Timeline:
    """Tokens over the time of work, which begins with the first request."""

    def __init__(self, start_s: float, last_s: float, tokens: dict[int, int]) -> None:
        self.pauses = find_gaps(tokens, longer_than_s=PAUSE_S)
        self._times = sorted(tokens)
        ends = np.array(self._times, float) + TIME_BUCKET_S - min(start_s, self._times[0])
        for pause in self.pauses:
            ends[bisect_left(self._times, pause.end_s) :] -= pause.seconds
        paused_s = sum(pause.seconds for pause in self.pauses)
        self.end_s = max(1.0, last_s - min(start_s, self._times[0]) - paused_s)
        self._ends = np.minimum(ends, self.end_s)
        self._upto = np.concatenate([[0], np.cumsum([tokens[at] for at in self._times])])

    def count(self, at_s: float) -> float:
        """Tokens that were there at a time of work; those of no time are not counted."""
        return float(self._upto[np.searchsorted(self._ends, at_s, side="right")])

    def measure(self, from_s: float, to_s: float) -> float:
        """Tokens a second between two times of work; those of the very beginning belong to the first."""
        return (self.count(to_s) - (self.count(from_s) if from_s else 0.0)) / max(1.0, to_s - from_s)

    def find_clock(self, at_s: float) -> float:
        """The time since 1970 of the first tokens after a time of work."""
        after = int(np.searchsorted(self._ends, at_s, side="right"))
        return float(self._times[min(after, len(self._times) - 1)])


def _read_timeline(stats: Sequence[DatasetStats]) -> _Timeline | None:
    starts = [parse_time(one.started_at) for one in stats if one.started_at is not None]
    lasts = [parse_time(one.last_finished_at) for one in stats if one.last_finished_at is not None]
    tokens: Counter[int] = Counter()
    for one in stats:
        tokens.update(one.tokens_by_time)
    return _Timeline(min(starts), max(lasts), tokens) if starts and lasts and tokens else None


def _find_fall(timeline: _Timeline) -> Fall | None:
    """Where the last hour of work was less than half as fast as the hour before it, or as all of the work."""
    end_s = timeline.end_s
    begin_s, hour_s = max(0.0, end_s - 2 * WINDOW_S), end_s - WINDOW_S
    if hour_s < GUESS_S:
        return None
    last = timeline.measure(hour_s, end_s)
    if last < _FALLEN * timeline.measure(begin_s, hour_s):
        return _split(timeline, begin_s)
    return _split(timeline, 0.0) if last < _FALLEN * timeline.measure(0.0, end_s) else None


def _split(timeline: _Timeline, begin_s: float) -> Fall:
    """The moment before which the speed was one, and after it another and lower, with the least error."""
    end_s = timeline.end_s
    best, found = 0.0, (begin_s, 0.0, 0.0)
    step_s = max(_STEP_S, (end_s - begin_s) / _STEPS)
    for at_s in np.append(np.arange(begin_s + _EDGE_S, end_s - _EDGE_S, step_s), end_s - WINDOW_S):
        before, after = timeline.measure(begin_s, at_s), timeline.measure(at_s, end_s)
        gain = (at_s - begin_s) * (end_s - at_s) * (before - after) ** 2
        if before > after and gain > best:
            best, found = gain, (at_s, before, after)
    at_s, before, after = found
    return Fall(timeline.find_clock(at_s), before, at_s - begin_s, after, end_s - at_s)
