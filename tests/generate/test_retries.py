"""Who waits is asked again when due; who may kill servers, a few at a time."""

import pytest

from tasks.generate.feed import Rendered
from tasks.generate.retries import BACKOFF_LAST_S, Attempt, RetryQueue
from tasks.records.rows import Prompt

SLOTS = 150
LATER_S = 10 * BACKOFF_LAST_S


def make_attempt(number, *, lane="short", **fields):
    return Attempt(Rendered(number, Prompt(str(number), []), [1], lane, 100), **fields)


def fill(*attempts):
    queue = RetryQueue(["short", "long"])
    for attempt in attempts:
        queue.push(attempt, now_s=0.0)
    return queue


def pop(queue, *, lane="short", now_s=LATER_S, in_flight=(), answers=0):
    return queue.pop_due(lane, now_s=now_s, slots=SLOTS, in_flight=in_flight, answers=answers)


def test_an_attempt_waits_for_its_time_and_is_given_once():
    """In its own lane; the number of tries is counted."""
    queue = fill(make_attempt(1))
    due_s = queue.find_due_s(after_s=-1.0)
    assert pop(queue, now_s=due_s - 1e-6) is None
    assert pop(queue, lane="long") is None
    assert (pop(queue, now_s=due_s).tries, pop(queue), queue.is_empty) == (1, None, True)


def test_the_longest_tried_wait_longest_but_not_for_ever():
    """Thousands of tries are no overflow."""
    queue = fill(*(make_attempt(n, tries=5000) for n in range(50)))
    assert 0.0 <= queue.find_due_s(after_s=-1.0) <= BACKOFF_LAST_S


@pytest.mark.parametrize(("deaths", "together"), [(1, 150), (2, 18), (3, 2), (4, 1)])
def test_each_death_lets_fewer_suspects_be_together(deaths, together):
    """An eighth of the window, a sixty-fourth, one; a single death is no suspicion."""
    queue, in_flight = fill(*(make_attempt(n, deaths=deaths) for n in range(SLOTS))), []
    while attempt := pop(queue, in_flight=in_flight, answers=1):
        in_flight.append(attempt)
    assert len(in_flight) == together


def test_a_suspect_waits_until_others_were_answered():
    """Unless nothing else is left to ask."""
    queue = fill(make_attempt(1, deaths=2, answers=7))
    assert pop(queue, in_flight=[make_attempt(2)], answers=7) is None
    assert pop(queue, in_flight=[make_attempt(2)], answers=8)
    assert pop(fill(make_attempt(1, deaths=4, answers=7)), answers=7)


def test_suspects_hold_up_no_other():
    """A plain retry passes them; new prompts are taken up until twice a window of suspects waits."""
    suspects = [make_attempt(n, deaths=2) for n in range(2 * SLOTS)]
    queue = fill(*suspects[:-1], make_attempt(999))
    assert pop(queue, in_flight=[make_attempt(0)]).rendered.position == 999
    assert not queue.is_full("short", slots=SLOTS)
    queue.push(suspects[-1], now_s=0.0)
    assert queue.is_full("short", slots=SLOTS)
    assert not queue.is_full("long", slots=SLOTS)
