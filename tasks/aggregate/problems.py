"""What somebody who looks at a run should know is wrong: of the run, and of each dataset.

Knows statistics and words; does not know where they are shown. Invariant: nothing is named that needs no
look, and what is said of one dataset stands together. A sick server comes first: it costs money now, while
most of the rest can wait for the end of the run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasks.aggregate.dataset_problems import (
    FIRST_NOTE,
    SERVER,
    SLOW,
    STOPPED,
    Problem,
    count_missing,
    find_cut,
    find_dataset_problems,
)
from tasks.aggregate.pace import SILENT_S, Fall, Pace, find_idle, measure_pace
from tasks.aggregate.recent_answers import ServerActivity
from tasks.aggregate.server_problems import find_server_problems
from tasks.aggregate.stats import PAUSE_S, DatasetStats, Gap
from tasks.records.times import format_ago, format_duration, format_moment, format_time

_PAUSED_S = 900.0  # all pauses together
_SILENT_ALONE = 2
_FIRST_ANSWER_S = 1800.0  # a long prompt and a long answer take minutes
_TOLD_WHY = "its log (the terminal, or its page in the Prefect UI) says why"


@dataclass(frozen=True, slots=True)
class Problems:
    """What somebody has to see to, and what is only worth knowing; what stops a run first.

    `names` are the datasets that the first is about.
    """

    trouble: list[str]
    notes: list[str]
    names: tuple[str, ...] = ()


def find_problems(
    stats: Sequence[DatasetStats],
    *,
    now_s: float,
    idle_s: Sequence[float | None] | None = None,
    pace: Pace | None = None,
    ended: bool = False,
    servers: Sequence[ServerActivity] = (),
    begun_s: float | None = None,
) -> Problems:
    """A sentence for each; a dataset that is not done is none while the run goes on.

    Args:
        stats: of the datasets of a run.
        now_s: seconds since 1970.
        idle_s: how long each dataset has had no answer, where that is known better than from `now_s`.
        pace: of the datasets together, where it is known already.
        ended: nothing generates any more; otherwise a run is at work while answers come.
        servers: what those of this run did in the last minutes, where that is known.
        begun_s: when the run last began, where that is known.
    """
    idle_s = find_idle(stats, now_s=now_s) if idle_s is None else idle_s
    running = is_running(idle_s, ended=ended)
    found = [problem for one in stats for problem in find_dataset_problems(one, running=running)]
    pace = pace or measure_pace(stats)
    has_fallen = pace is not None and pace.fall is not None
    found += _find_stop(stats, idle_s, now_s=now_s, ended=ended, has_fallen=has_fallen)
    if running and any(one.status == "incomplete" for one in stats):
        found += [Problem(SERVER, text) for text in find_server_problems(servers)]
    if begun_s is not None and not ended:
        found += _find_late_start(stats, idle_s, lasted_s=now_s - begun_s)
    found += _find_events(stats, pace)
    found += [cut] if (cut := find_cut(stats)) else []
    trouble = _put_in_order([problem for problem in found if problem.rank < FIRST_NOTE])
    notes = _put_in_order([problem for problem in found if problem.rank >= FIRST_NOTE])
    return Problems(
        [problem.text for problem in trouble],
        [problem.text for problem in notes],
        tuple(dict.fromkeys(name for problem in trouble for name in problem.names)),
    )


def _put_in_order(problems: Sequence[Problem]) -> list[Problem]:
    """What stops a run, then what costs most; those of one dataset together, where its worst one stands."""
    worst: dict[tuple[str, ...], tuple[int, float]] = {}
    for one in problems:
        place = (one.rank, -one.cost)
        worst[one.names] = min(place, worst.get(one.names, place))

    def find_place(one: Problem) -> tuple[tuple[int, float], tuple[str, ...], int]:
        return worst[one.names] if one.names else (one.rank, -one.cost), one.names, one.rank

    return sorted(problems, key=find_place)


def split_problem(text: str) -> tuple[str, str]:
    """What is wrong, and all that is said of it besides."""
    ends = [at for mark in ("; ", ". ") if (at := text.find(mark)) > 0]
    return (text[: min(ends)], text[min(ends) :]) if ends else (text, "")


def is_running(idle_s: Sequence[float | None], *, ended: bool = False) -> bool:
    """Whether answers still come."""
    return not ended and any(idle is not None and idle < SILENT_S for idle in idle_s)


def _find_stop(
    stats: Sequence[DatasetStats],
    idle_s: Sequence[float | None],
    *,
    now_s: float,
    ended: bool,
    has_fallen: bool,
) -> Iterator[Problem]:
    """That the run stopped, or which of its datasets did while others go on: one sentence, or a few."""
    left = [one for one in stats if one.status == "incomplete"]
    known = [idle for idle in idle_s if idle is not None]
    if not left or not (known or ended):
        return
    if not is_running(idle_s, ended=ended):
        when = f" at {format_ago(now_s - min(known), now_s=now_s)}," if known else ","
        missing = f"{len(left)} of {len(stats)} datasets not done"
        what = f"the run {'ended' if ended else 'stopped'}{when} with {missing}; {_TOLD_WHY}"
        speed = "Its speed had fallen: look at that before you go on, then " if has_fallen else ""
        yield Problem(STOPPED, f"{what}. {speed or 'To go on, '}run the same command again")
        return
    silent = [
        (one, idle)
        for one, idle in zip(stats, idle_s, strict=True)
        if one.status == "incomplete" and not one.unreadable and idle is not None and idle >= SILENT_S
    ]
    advice = "look at the run's log: others go on, and the same command goes on with"
    if len(silent) > _SILENT_ALONE:
        least, names = format_duration(min(idle for _, idle in silent)), tuple(one.name for one, _ in silent)
        text = f"{len(silent)} datasets stopped {least} ago or more: {', '.join(names)}"
        yield Problem(STOPPED, f"{text}; {advice} them after this run", names)
        return
    for one, idle in silent:
        text = f"{one.name}: {_describe_silence(one, format_duration(idle))}"
        yield Problem(STOPPED, f"{text}; {advice} it after this run", (one.name,), float(count_missing(one)))


def _find_late_start(
    stats: Sequence[DatasetStats], idle_s: Sequence[float | None], *, lasted_s: float
) -> Iterator[Problem]:
    """That nothing has come at all; it may still prepare, and its log says so."""
    is_done = all(one.status != "incomplete" for one in stats)
    if is_done or lasted_s < _FIRST_ANSWER_S or any(idle is not None for idle in idle_s):
        return
    text = f"no answer yet, {format_duration(lasted_s)} after the run began"
    yield Problem(STOPPED, f"{text}; {_TOLD_WHY}. If it is not running, run the same command again")


def _describe_silence(stats: DatasetStats, lasted: str) -> str:
    if stats.budget_tokens is not None:
        return f"no answer for {lasted}"
    of_all = "" if stats.prompts is None else f" of {stats.prompts:,}"
    return f"converted {stats.rows:,}{of_all}, none for {lasted}"


def _find_events(stats: Sequence[DatasetStats], pace: Pace | None) -> Iterator[Problem]:
    """What became of the run's speed; when it is over, only for the record."""
    if pace is None:
        return
    is_over = all(one.status != "incomplete" for one in stats)
    if sum(pause.seconds for pause in pace.pauses) > _PAUSED_S:
        still = describe_pauses(pace.pauses)
        why = "the run was stopped, or its servers were away: their logs and the run's say which"
        yield Problem(FIRST_NOTE, still) if is_over else Problem(SLOW, f"{still}, then it went on; {why}")
    if pace.fall is not None and not is_over:
        yield Problem(SLOW, _describe_fall(pace.fall))


def _describe_fall(fall: Fall) -> str:
    before = f"{fall.before:,.0f} tokens/s (over {format_duration(fall.before_s)} of work)"
    after = f"{fall.after:,.0f} (over the {format_duration(fall.after_s)} since {format_moment(fall.at_s)})"
    advice = "look at the servers' logs, and at who else uses them"
    return f"the speed fell from {before} to {after}; {advice}"


def describe_pauses(pauses: Sequence[Gap]) -> str:
    """How often and how long nothing came, and when for the longest time; the longest comes first."""
    longest = pauses[0]
    span = f"{format_time(longest.start_s)} to {format_moment(longest.end_s)}"
    if len(pauses) == 1:
        return f"no answers for {format_duration(longest.seconds)} ({span})"
    whole = format_duration(sum(pause.seconds for pause in pauses))
    one = f"the longest {format_duration(longest.seconds)} ({span})"
    return f"no answers for more than {format_duration(PAUSE_S)}, {len(pauses)} times, {whole} in all, {one}"
