"""What is left of a run and how long that takes, in the words that the monitor and the report share.

Knows the progress of a run; does not know where its words are shown. Invariant: a time that is promised names
what it leaves out, and a time of work the speed that it rests on.
"""

from collections.abc import Sequence

from tasks.aggregate.pace import Pace
from tasks.aggregate.run_progress import DatasetProgress, RunProgress
from tasks.aggregate.stats_views import shorten
from tasks.records.times import format_duration, format_end

_FEW = 3  # names in a line


def describe_end(progress: RunProgress, *, now_s: float) -> str:
    """When all is done that goes on by itself."""
    if progress.eta_s is None:
        is_early = progress.pace is not None and progress.pace.is_too_early
        return "too early to tell when done" if is_early else "end not known yet"
    what = "the others done" if progress.stuck else "done"
    guess = ", a first guess" if progress.pace is not None and progress.pace.is_guess else ""
    return f"{what} {format_end(progress.eta_s, now_s=now_s)}{guess}"


def describe_needs(progress: RunProgress) -> str:
    """Which datasets have to be helped, after the end of the others if there is one; empty where none has."""
    if not progress.stuck:
        return ""
    then = "" if progress.eta_s is None else "then "
    return f"{then}{_name_few(progress.stuck)} need{'s' if len(progress.stuck) == 1 else ''} you"


def describe_left(progress: RunProgress) -> str:
    """The tokens that the end is reckoned from, those that wait for somebody, those that no prompt gives."""
    total, waits = progress.total, progress.stuck_tokens
    if not waits:
        return _describe_tokens(total.left_tokens, total)
    counted = [one for one in progress.datasets if one.name in progress.stuck and one.budget_tokens]
    of = _name_few([one.name for one in counted]) or "the others"
    return _describe_tokens(total.left_tokens - waits, total, f", and {shorten(int(waits))} of {of}")


def _describe_tokens(left_tokens: float, total: DatasetProgress, besides: str = "") -> str:
    short = ""
    if total.short_tokens:
        short = f" ({shorten(int(total.short_tokens))} of the budgets cannot be reached: out of prompts)"
    return f"{shorten(int(left_tokens))} tokens left{besides}{short}"


def _name_few(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return f"{', '.join(names[:_FEW])}{more}"


def describe_work(progress: RunProgress) -> str:
    """What is left, and how long that takes once it goes on, at which speed."""
    pace, left_tokens = progress.pace, progress.total.left_tokens
    left_s = None if pace is None else pace.measure_left(left_tokens)
    left = _describe_tokens(left_tokens, progress.total)
    if pace is None or left_s is None:
        return left
    work = f"{format_duration(left_s)} of work at {name_speed(pace)}"
    if pace.has_changed:
        mean_s = pace.measure_left_on_average(left_tokens)
        work += f", {format_duration(mean_s)} at the average {pace.mean_tokens_per_s:,.0f}"
    return f"{left}: {work}"


def name_speed(pace: Pace) -> str:
    """The speed, with what it is the mean of."""
    whose = "the last hour's" if pace.worked_s > pace.measured_s else "its"
    return f"{whose} {pace.tokens_per_s:,.0f} tokens/s"


def describe_mean(pace: Pace) -> str:
    """The speed of all of the work."""
    return f"{pace.mean_tokens_per_s:,.0f} tokens/s on average over {format_duration(pace.worked_s)} of work"
