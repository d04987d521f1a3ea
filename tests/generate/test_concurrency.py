"""The window grows while there is room on the servers and shrinks before they choke."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tasks.generate.concurrency import (
    LOOKS_TO_REST,
    LOOKS_TO_SHRINK,
    MAX_SCALE,
    MIN_SCALE,
    ConcurrencyControl,
    Look,
)

ROOMY = Look(is_full=True, in_flight=100, waiting=0, max_running=1000, token_usage=0.3)
QUEUED = replace(ROOMY, waiting=5)
TIGHT = replace(ROOMY, token_usage=0.97)
LOOKS = st.builds(
    Look, st.booleans(), st.integers(0, 500), st.integers(0, 50), st.integers(0, 1000), st.floats(0, 1)
)


def after(*looks):
    """The scale after some looks."""
    control = ConcurrencyControl()
    for look in looks:
        control.update(look)
    return control.scale


def test_full_window_on_a_roomy_server_grows_to_the_limit_and_no_further():
    """By small steps; each says why, and none is told when nothing changes."""
    control = ConcurrencyControl()
    assert "the window is full" in control.update(ROOMY)
    assert 1.0 < control.scale < 1.2
    for _ in range(100):
        control.update(ROOMY)
    assert control.scale == MAX_SCALE
    assert control.update(ROOMY) is None


def test_window_that_is_not_full_stays():
    """Nothing shows that more would help."""
    assert after(*[replace(ROOMY, is_full=False)] * 50) == 1.0


def test_server_at_its_own_limit_is_given_no_more():
    """More than max_running_requests would only queue."""
    assert after(*[replace(ROOMY, in_flight=95, max_running=100)] * 50) == 1.0


def test_half_full_memory_is_enough_to_stay():
    """Between roomy and tight nothing is changed."""
    assert after(*[replace(ROOMY, token_usage=0.9)] * 50) == 1.0


def test_one_queue_is_a_burst_and_a_standing_one_is_too_much():
    """Only a queue that is there again and again narrows the window."""
    assert after(*[QUEUED, ROOMY] * 10) > 1.0
    assert after(*[QUEUED] * (LOOKS_TO_SHRINK - 1)) == 1.0
    assert after(*[QUEUED] * LOOKS_TO_SHRINK) < 1.0
    assert after(*[QUEUED] * 200) == MIN_SCALE


def test_tight_memory_narrows_the_window_at_once():
    """And it rests before it grows again."""
    assert after(TIGHT) < 1.0
    assert after(TIGHT, *[ROOMY] * LOOKS_TO_REST) == after(TIGHT)
    assert after(TIGHT, *[ROOMY] * (LOOKS_TO_REST + 1)) > after(TIGHT)


@given(st.lists(LOOKS, max_size=60))
def test_scale_stays_within_its_bounds_and_changes_are_told(looks):
    """Whatever servers say."""
    control = ConcurrencyControl()
    for look in looks:
        before = control.scale
        why = control.update(look)
        assert (why is not None) == (control.scale != before)
        assert MIN_SCALE <= control.scale <= MAX_SCALE
