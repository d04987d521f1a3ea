"""Slots per lane are never oversold, and each is freed once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.generate.window import Window
from tasks.prepare.lane import Lane


def make_window(*, is_shared=False, **concurrency):
    lanes = {name: Lane(name, count, 100) for name, count in concurrency.items()}
    return Window(lanes, is_shared=is_shared)


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    moves=st.lists(st.tuples(st.sampled_from(["take", "free"]), st.sampled_from(["short", "long"]))),
)
def test_no_lane_is_oversold_and_none_goes_below_zero(sizes, moves):
    """Whatever is asked for, a lane has between none and all of its slots taken, and in_flight agrees."""
    window = make_window(short=sizes[0], long=sizes[1])
    limit, taken = {"short": sizes[0], "long": sizes[1]}, Counter()
    for move, lane in moves:
        step = 1 if move == "take" else -1
        if 0 <= taken[lane] + step <= limit[lane]:
            getattr(window, move)(lane)
            taken[lane] += step
        else:
            with pytest.raises(ValueError, match=f"lane '{lane}' has no"):
                getattr(window, move)(lane)
        assert window.in_flight == taken.total()
        assert all(window.has_room(name) == (taken[name] < limit[name]) for name in limit)


def test_a_full_lane_leaves_the_other_one_open():
    """Lanes do not share slots."""
    window = make_window(short=1, long=1)
    window.take("short")
    assert not window.has_room("short")
    assert window.has_room("long")


@pytest.mark.parametrize(("is_shared", "expected"), [(True, "bcabcacab"), (False, "abcabcabc")])
def test_listeners_are_told_in_turn_or_in_order(is_shared, expected):
    """Of a shared window, who took a slot lets the others go first next time; else the first comes first."""
    window, told = make_window(short=3, is_shared=is_shared), []
    listeners = {name: lambda name=name: told.append(name) for name in "abc"}
    for listener in listeners.values():
        window.subscribe(listener)
    for name in "aab":
        window.take("short", by=listeners[name])
        window.free("short")
    assert "".join(told) == expected


def test_a_listener_finds_the_slot_free():
    """Who is told may take the slot at once, before those after it are told."""
    window, seen = make_window(short=1), []

    def take_if_free():
        seen.append(window.has_room("short"))
        if seen[-1]:
            window.take("short")

    window.subscribe(take_if_free)
    window.subscribe(take_if_free)
    window.take("short")
    window.free("short")
    assert seen == [True, False]
    assert window.in_flight == 1


def test_a_listener_that_left_is_not_told():
    """Unsubscribing stops the calls, also when it happens inside one."""
    window, told = make_window(short=1), []

    def leave():
        told.append("leaver")
        stop()

    stop = window.subscribe(leave)
    window.subscribe(lambda: told.append("stayer"))
    for _ in range(2):
        window.take("short")
        window.free("short")
    assert told == ["leaver", "stayer", "stayer"]


def test_a_slot_is_free_although_a_listener_fails():
    """An error of a listener does not keep the slot."""
    window = make_window(short=1)
    window.subscribe(lambda: 1 / 0)
    window.take("short")
    with pytest.raises(ZeroDivisionError):
        window.free("short")
    assert window.has_room("short")


def test_a_wider_lane_has_room_at_once_and_tells_so():
    """Whoever waits for a slot is woken."""
    window, told = make_window(short=2, long=1), []
    window.subscribe(lambda: told.append(True))
    window.take("short")
    window.take("short")
    assert not window.has_room("short")
    window.resize(1.5)
    assert (window.has_room("short"), window.slots("short"), window.slots("long"), told) == (
        True,
        3,
        2,
        [True],
    )


def test_a_narrower_lane_empties_by_itself():
    """Slots that are taken stay taken; none is given until enough are free. One is always left."""
    window = make_window(short=4, long=1)
    for _ in range(4):
        window.take("short")
    window.resize(0.5)
    assert (window.in_flight, window.slots("short"), window.slots("long")) == (4, 2, 1)
    window.free("short")
    window.free("short")
    assert not window.has_room("short")
    window.free("short")
    assert window.has_room("short")
