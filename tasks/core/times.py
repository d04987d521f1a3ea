"""Moments and durations as people say them.

Knows seconds and zones; does not know what they are of. Invariant: a moment names its zone, but on an axis.
"""

from datetime import UTC, datetime, tzinfo

_WEEKDAY_IS_CLEAR_S = 6 * 86_400


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


def format_end(left_s: float, *, now_s: float, zone: tzinfo | None = UTC) -> str:
    """When something is done: in how long, and at what time of a zone (None is this machine's)."""
    at = datetime.fromtimestamp(now_s + left_s, UTC).astimezone(zone)
    day = "%a" if left_s < _WEEKDAY_IS_CLEAR_S else "%a %b %d"
    return f"in {format_duration(left_s)} (about {at:{day} %H:%M %Z})"


def format_past(at_s: float, *, now_s: float, zone: tzinfo | None = UTC) -> str:
    """When something was: the time of day, and the date where that is not today's."""
    at, now = (datetime.fromtimestamp(s, UTC).astimezone(zone) for s in (at_s, now_s))
    return f"{at:%H:%M %Z}" if at.date() == now.date() else f"{at:%b %d %H:%M %Z}"


def format_ago(at_s: float, *, now_s: float, zone: tzinfo | None = UTC) -> str:
    """When something was, and how long ago that is."""
    ago = format_duration(max(0.0, now_s - at_s))
    return f"{format_past(at_s, now_s=now_s, zone=zone)}, {ago} ago"


def format_time(at_s: float, *, with_date: bool = True, seconds: bool = False) -> str:
    """A moment of UTC, for an axis or a span; the zone is said beside it."""
    shown = "%H:%M:%S" if seconds else "%H:%M"
    return datetime.fromtimestamp(at_s, UTC).strftime(f"%b %d {shown}" if with_date else shown)
