"""The embedded engine's slots: order, hand-over and cancellation; no model is loaded."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from serving.embedded.slots import SlotPool


def never() -> bool:
    return False


def is_over(doomed: bool, deadline: float) -> bool:
    return doomed and time.monotonic() > deadline


def hold_in_thread(pool: SlotPool, name: str, order: list[str], *, cancelled=never) -> threading.Thread:
    """Queue up for a slot, and note when it comes."""
    waiting = pool.waiting

    def run() -> None:
        with pool.hold([1], cancelled=cancelled) as slot:
            order.append(name if slot is not None else f"{name} gave up")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while pool.waiting == waiting and thread.is_alive():
        time.sleep(0.001)
    return thread


def test_slots_go_to_who_waited_longest():
    """Waiting requests get their slot in the order in which they came."""
    pool, order = SlotPool(1), []
    with pool.hold([1], cancelled=never):
        threads = [hold_in_thread(pool, str(index), order) for index in range(5)]
        assert (pool.running, pool.waiting) == (1, 5)
    for thread in threads:
        thread.join(10)
    assert order == ["0", "1", "2", "3", "4"]
    assert (pool.running, pool.waiting) == (0, 0)


def test_a_waiting_request_can_give_up():
    """A request that is cancelled while it waits leaves the queue, and the next one is served."""
    pool, order, stop = SlotPool(1), [], threading.Event()
    with pool.hold([1], cancelled=never):
        first = hold_in_thread(pool, "first", order, cancelled=stop.is_set)
        second = hold_in_thread(pool, "second", order)
        stop.set()
        first.join(10)
        assert order == ["first gave up"]
    second.join(10)
    assert order == ["first gave up", "second"]
    assert pool.running == 0


def test_a_cancelled_request_takes_no_free_slot():
    """A request whose client is already gone gets nothing."""
    with SlotPool(1).hold([1], cancelled=lambda: True) as slot:
        assert slot is None


def test_an_error_gives_the_slot_back():
    """The slot comes back when its holder fails."""
    pool = SlotPool(1)
    with pytest.raises(RuntimeError), pool.hold([1], cancelled=never):
        raise RuntimeError
    assert pool.running == 0


def test_the_slot_with_the_longest_shared_prefix_is_taken():
    """A prompt goes to the slot whose cache knows most of it."""
    pool = SlotPool(3)
    with pool.hold([], cancelled=never) as a, pool.hold([], cancelled=never) as b:
        a.cached_ids, b.cached_ids = [1, 2, 9], [1, 2, 3]
    with pool.hold([1, 2, 3, 4], cancelled=never) as slot:
        assert slot is b


def test_flushing_waits_for_nobody():
    """A flush forgets every prefix, and is refused while a request runs."""
    pool = SlotPool(1)
    with pool.hold([], cancelled=never) as slot:
        slot.cached_ids = [1, 2]
        assert not pool.flush()
    assert slot.cached_ids == [1, 2]
    assert pool.flush()
    assert slot.cached_ids == []


def test_no_slot_is_lost_or_shared_under_contention():
    """Many threads that hold, give up and fail leave every slot free, and never share one."""
    pool, held, clashes = SlotPool(3), set(), []

    def run(number: int) -> None:
        for turn in range(20):
            doomed = (number + turn) % 3 == 0
            deadline = time.monotonic() + 0.001
            with pool.hold([number], cancelled=partial(is_over, doomed, deadline)) as slot:
                if slot is None:
                    continue
                if slot.index in held:
                    clashes.append(slot.index)
                held.add(slot.index)
                time.sleep(0.0005)
                held.discard(slot.index)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not clashes
    assert (pool.running, pool.waiting) == (0, 0)
