"""How fast a run goes is said of the last hour of its work, and pauses are no work."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.aggregate.pace import GUESS_S, TOO_EARLY_S, WINDOW_S, find_idle, measure_pace
from tasks.aggregate.stats import PAUSE_S, TIME_BUCKET_S, mean_speed, span_fields

START_S = 1_800_000_000
HOUR = 3600


def dataset(*stretches, budget=10**9, start_s=START_S):
    """Of stretches (from, to, tokens a second), in seconds after START_S; what a pace reads of statistics."""
    tokens = {
        START_S + at: speed * TIME_BUCKET_S
        for begin, end, speed in stretches
        for at in range(begin, end, TIME_BUCKET_S)
    }
    last_s = START_S + stretches[-1][1] if stretches else None
    times = span_fields(start_s if stretches else None, None, last_s)
    return SimpleNamespace(budget_tokens=budget, tokens_by_time=tokens, status="incomplete", **times)


def test_the_speed_is_that_of_the_last_hour_and_what_is_left_takes_its_time():
    """Not that of the whole, which is said besides."""
    pace = measure_pace([dataset((0, 3 * HOUR, 2000), (3 * HOUR, 4 * HOUR, 1500))])
    assert (pace.tokens_per_s, pace.mean_tokens_per_s) == (1500, 1875)
    assert pace.measure_left(3_000_000) == 2000
    assert (pace.measured_s, pace.is_guess, pace.fall) == (WINDOW_S, False, None)


def test_an_hour_of_work_reaches_over_a_night():
    """The half hour before a pause and the half hour after it."""
    night = 12 * HOUR
    halves = ((HOUR // 2, HOUR, 100), (night, night + HOUR // 2, 300))
    pace = measure_pace([dataset((0, HOUR // 2, 5000), *halves)])
    assert pace.tokens_per_s == 200
    assert pace.worked_s == 1.5 * HOUR
    assert [gap.seconds for gap in pace.pauses] == [11 * HOUR]


@pytest.mark.parametrize(
    ("worked_s", "left_s", "is_guess"),
    [(TOO_EARLY_S - 10, None, True), (TOO_EARLY_S, 10, True), (GUESS_S, 10, False)],
)
def test_a_run_that_has_just_begun_does_not_tell_its_end(worked_s, left_s, is_guess):
    """Nothing at first, then a guess."""
    pace = measure_pace([dataset((0, int(worked_s), 100))])
    assert (pace.measure_left(1000), pace.is_guess, pace.tokens_per_s) == (left_s, is_guess, 100)


def test_only_what_has_a_budget_counts():
    """Finished conversations are tokenized in no time; alone they count."""
    free = dataset((0, 600, 90_000), budget=None)
    assert measure_pace([free, dataset((0, 600, 100))]).tokens_per_s == 100
    assert measure_pace([free]).tokens_per_s == 90_000
    assert measure_pace([]) is measure_pace([dataset()]) is None


@pytest.mark.parametrize(
    ("stretches", "fall"),
    [
        ([(0, 2 * HOUR, 3000), (2 * HOUR, 4 * HOUR, 900)], (2 * HOUR, 3000, 900)),
        ([(0, 3 * HOUR, 3000), (3 * HOUR, 4 * HOUR - 600, 300)], (3 * HOUR, 3000, 300)),
        ([(0, 5 * HOUR, 3000), (20 * HOUR, 22 * HOUR, 900)], (20 * HOUR, 3000, 900)),
        ([(0, 2 * HOUR, 1000), (2 * HOUR, 4 * HOUR, 3000)], None),
        ([(0, 4 * HOUR, 3000), (4 * HOUR, 5 * HOUR, 1600)], None),
        ([(0, HOUR, 3000), (HOUR, HOUR + 500, 0)], None),
    ],
)
def test_a_speed_that_fell_to_less_than_half_is_dated(stretches, fall):
    """From the speeds before and after it; a rise, a small fall and a short run are none."""
    found = measure_pace([dataset(*stretches)]).fall
    assert (found is None) is (fall is None)
    if fall is not None:
        at_s, before, after = fall
        assert found.at_s - START_S == pytest.approx(at_s, abs=180)
        assert (found.before, found.after) == (
            pytest.approx(before, rel=0.05),
            pytest.approx(after, rel=0.05),
        )


buckets = st.dictionaries(
    st.integers(0, 50_000).map(lambda number: START_S + number * TIME_BUCKET_S),
    st.integers(0, 10**6),
    min_size=1,
    max_size=60,
)


@given(buckets, st.floats(0, 3000))
def test_a_pace_agrees_with_the_mean_speed(tokens, latency_s):
    """Whatever the pauses: the mean is the one of the statistics, and no speed is below zero."""
    start_s, last_s = min(tokens) - latency_s, max(tokens) + TIME_BUCKET_S
    one = SimpleNamespace(budget_tokens=1, tokens_by_time=tokens, **span_fields(start_s, None, last_s))
    pace = measure_pace([one])
    assert pace.mean_tokens_per_s == pytest.approx(mean_speed(start_s, last_s, tokens), rel=1e-3)
    assert 0 <= pace.tokens_per_s <= sum(tokens.values()) / min(pace.worked_s, WINDOW_S) + 1e-6
    assert all(gap.seconds > PAUSE_S for gap in pace.pauses)
    assert pace.fall is None or pace.fall.before > pace.fall.after


def test_how_long_there_was_no_answer():
    """Of each dataset, by a clock that may be behind."""
    idle = find_idle([dataset((0, 600, 1)), dataset()], now_s=START_S + 700)
    assert idle == [100, None]
    assert find_idle([dataset((0, 600, 1))], now_s=START_S) == [0]
