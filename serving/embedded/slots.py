"""Hand out the engine's slots, first come first served.

Knows which prompt each slot's KV cache holds; knows no model and no protocol.
Invariant: a slot is held by one request at a time, and a released slot goes to whoever has waited longest.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

# How often a waiting or running request looks whether it was aborted or its client is gone.
POLL_S = 0.2


@dataclass(slots=True)
class Slot:
    """One of llama.cpp's parallel sequences."""

    index: int
    cached_ids: list[int] = field(default_factory=list)
    """The ids whose KV entries the slot still holds; empty means that it must be treated as cold."""


@dataclass(slots=True)
class _Ticket:
    called: threading.Event = field(default_factory=threading.Event)
    slot: Slot | None = None


class SlotPool:
    """A first-come-first-served pool of slots, safe to use from any number of threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._free = [Slot(index) for index in range(count)]  # in the order of release, longest idle first
        self._queue: deque[_Ticket] = deque()

    @property
    def running(self) -> int:
        """How many slots are held."""
        return self.count - len(self._free)

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._queue)

    @contextlib.contextmanager
    def hold(self, prompt: Sequence[int], *, cancelled: Callable[[], bool]) -> Iterator[Slot | None]:
        """Wait for a slot and hold it; yields None when `cancelled` turned true first.

        Among free slots the one whose cache shares the longest prefix with the prompt is taken,
        and among equals the one that has been idle longest.
        """
        slot = self._acquire(prompt, cancelled)
        try:
            yield slot
        finally:
            if slot is not None:
                self._release(slot)

    def flush(self) -> bool:
        """Forget every cached prefix, unless a request runs or waits; return whether it was done."""
        with self._lock:
            if self.running or self._queue:
                return False
            for slot in self._free:
                slot.cached_ids = []
            return True

    def _acquire(self, prompt: Sequence[int], cancelled: Callable[[], bool]) -> Slot | None:
        if cancelled():
            return None
        with self._lock:
            if self._free and not self._queue:
                slot = max(self._free, key=lambda free: _shared_prefix(free.cached_ids, prompt))
                self._free.remove(slot)
                return slot
            ticket = _Ticket()
            self._queue.append(ticket)
        while not ticket.called.wait(POLL_S):
            if cancelled():
                self._give_up(ticket)
                return None
        return ticket.slot

    def _give_up(self, ticket: _Ticket) -> None:
        with self._lock:
            if ticket in self._queue:
                self._queue.remove(ticket)
                return
        if ticket.slot is not None:  # it was called in the same moment: pass the slot on
            self._release(ticket.slot)

    def _release(self, slot: Slot) -> None:
        with self._lock:
            if self._queue:
                ticket = self._queue.popleft()
                ticket.slot = slot
                ticket.called.set()
            else:
                self._free.append(slot)


def _shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
