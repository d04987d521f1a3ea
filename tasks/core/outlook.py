"""What is left of a run and how long that takes, in the words that the monitor and the report share.

Knows the progress of a run; does not know where its words are shown. Invariant: a time that is promised names
what it leaves out, and a time of work the speed that it rests on.
"""

from tasks.core.pace import Pace
from tasks.core.run_progress import RunProgress
from tasks.core.stats_views import shorten
from tasks.core.times import format_duration, format_end


def describe_end(progress: RunProgress, *, now_s: float) -> str:
    """When all is done that goes on by itself."""
    if progress.eta_s is None:
        is_early = progress.pace is not None and progress.pace.is_too_early
        return "too early to tell when done" if is_early else "end not known yet"
    what = "the rest" if progress.stuck else "done"
    guess = ", a first guess" if progress.pace is not None and progress.pace.is_guess else ""
    return f"{what} {format_end(progress.eta_s, now_s=now_s)}{guess}"


def describe_needs(progress: RunProgress) -> str:
    """Who has to be helped before it goes on; empty where nobody has."""
    if not progress.stuck:
        return ""
    return f"{', '.join(progress.stuck)} need{'s' if len(progress.stuck) == 1 else ''} you first"


def describe_left(progress: RunProgress) -> str:
    """The tokens that are left, and those of the budgets that are not because no prompt gives them."""
    total = progress.total
    short = ""
    if total.short_tokens:
        short = f" ({shorten(int(total.short_tokens))} of the budgets cannot be reached: out of prompts)"
    return f"{shorten(int(total.left_tokens))} tokens left{short}"


def describe_work(progress: RunProgress) -> str:
    """What is left, and how long that takes once it goes on, at which speed."""
    pace, left_tokens = progress.pace, progress.total.left_tokens
    left_s = None if pace is None else pace.measure_left(left_tokens)
    if pace is None or left_s is None:
        return describe_left(progress)
    work = f"{format_duration(left_s)} of work at {name_speed(pace)}"
    if pace.has_changed:
        mean_s = pace.measure_left_on_average(left_tokens)
        work += f", {format_duration(mean_s)} at the average {pace.mean_tokens_per_s:,.0f}"
    return f"{describe_left(progress)}: {work}"


def name_speed(pace: Pace) -> str:
    """The speed, with what it is the mean of."""
    whose = "the last hour's" if pace.worked_s > pace.measured_s else "its"
    return f"{whose} {pace.tokens_per_s:,.0f} tokens/s"


def describe_mean(pace: Pace) -> str:
    """The speed of all of the work."""
    return f"{pace.mean_tokens_per_s:,.0f} tokens/s on average over {format_duration(pace.worked_s)} of work"
