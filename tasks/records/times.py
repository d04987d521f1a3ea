"""Moments and durations as people say them.

Knows seconds; does not know what they are of. Invariant: a moment is one of UTC with its date, and says so
but on an axis.
"""

from datetime import UTC, datetime


def format_duration(seconds: float | None, *, units: int = 2) -> str:
    """A duration for people, in one unit or two; "?" when there is none."""
    if seconds is None:
        return "?"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    large, small, names = *divmod(minutes, 60), ("h", "min")
    if large >= 48:
        large, small, names = *divmod(round(minutes / 60), 24), ("d", "h")
    return f"{large} {names[0]} {small} {names[1]}" if small and units > 1 else f"{large} {names[0]}"


def format_end(left_s: float, *, now_s: float) -> str:
    """When something is done: in how long, and at what time."""
    return f"in {format_duration(left_s)} (about {format_moment(now_s + left_s)})"


def format_ago(at_s: float, *, now_s: float) -> str:
    """When something was, and how long ago that is."""
    return f"{format_moment(at_s)}, {format_duration(max(0.0, now_s - at_s))} ago"


def format_moment(at_s: float) -> str:
    """A moment in a sentence: date, time and zone, the same way everywhere."""
    return f"{format_time(at_s)} UTC"


def format_time(at_s: float, *, with_date: bool = True, seconds: bool = False) -> str:
    """A moment of UTC, for an axis or a span; the zone is said beside it."""
    shown = "%H:%M:%S" if seconds else "%H:%M"
    return datetime.fromtimestamp(at_s, UTC).strftime(f"%b %d {shown}" if with_date else shown)
