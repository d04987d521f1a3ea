"""Times are said so that nobody has to reckon."""

import pytest

from tasks.records.times import format_ago, format_duration, format_end

NOW_S = 1_800_000_000.0  # Jan 15 08:00 UTC


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "?"), (0.0, "0 s"), (89.4, "89 s"), (90.0, "2 min"), (5_340.0, "89 min")),
        *((5_400.0, "1 h 30 min"), (7_200.0, "2 h"), (11_520.0, "3 h 12 min"), (86_400.0, "24 h")),
        *((172_790.0, "2 d"), (176_400.0, "2 d 1 h"), (10_000_000.0, "115 d 18 h")),
    ],
)
def test_durations_are_for_people(seconds, text):
    """Seconds, minutes, hours or days, whichever says it best."""
    assert format_duration(seconds) == text
    assert text.startswith(format_duration(seconds, units=1))


@pytest.mark.parametrize(
    ("left_s", "text"),
    [
        (11_520.0, "in 3 h 12 min (about Jan 15 11:12 UTC)"),
        (7 * 86_400.0, "in 7 d (about Jan 22 08:00 UTC)"),
    ],
)
def test_an_end_has_its_time_of_day(left_s, text):
    """With the date and the zone."""
    assert format_end(left_s, now_s=NOW_S) == text


@pytest.mark.parametrize(
    ("ago_s", "text"),
    [
        (9_120.0, "Jan 15 05:28 UTC, 2 h 32 min ago"),
        (40_000.0, "Jan 14 20:53 UTC, 11 h 7 min ago"),
        (-5.0, "Jan 15 08:00 UTC, 0 s ago"),
    ],
)
def test_what_was_has_its_time_of_day(ago_s, text):
    """And its date, also where that is today's."""
    assert format_ago(NOW_S - ago_s, now_s=NOW_S) == text
