"""The sliding window: how many requests may be in flight in each lane, over all datasets of a run.

Knows counts only. Shared by the datasets that generate at the same time, so that the slots which one
dataset's tail frees are taken by the next one and the server is as full as ever. Invariant: no slot is taken
beyond those a lane has (a lane that was made smaller empties by itself), and each is freed once.
"""

from collections import deque
from collections.abc import Callable, Mapping

from tasks.prepare.lane import Lane

Listener = Callable[[], None]


class Window:
    """Slots per lane; listeners are told when one is freed, in the order in which they came.

    So an earlier dataset takes what it can use, and a later one the rest. Of a window that `is_shared` the
    listener that waited longest is told first: all get their share.
    """

    def __init__(self, lanes: Mapping[str, Lane], *, is_shared: bool = False) -> None:
        self.lanes = dict(lanes)
        self._slots = {name: lane.concurrency for name, lane in self.lanes.items()}
        self._taken = dict.fromkeys(self.lanes, 0)
        self._is_shared = is_shared
        self._listeners: deque[Listener] = deque()

    def has_room(self, lane: str) -> bool:
        """Whether a slot is free."""
        return self._taken[lane] < self._slots[lane]

    def slots(self, lane: str) -> int:
        """How many requests of a lane may be in flight now."""
        return self._slots[lane]

    def resize(self, scale: float) -> None:
        """Give each lane that multiple of its own concurrency, one slot at least."""
        self._slots = {name: max(1, round(lane.concurrency * scale)) for name, lane in self.lanes.items()}
        self._notify()

    def take(self, lane: str, *, by: Listener | None = None) -> None:
        """Take a free slot; of a shared window, the listener that took it is told of the next ones last.

        Raises:
            ValueError: none is free.
        """
        if not self.has_room(lane):
            raise ValueError(f"lane {lane!r} has no free slot")
        self._taken[lane] += 1
        if self._is_shared and by is not None and len(self._listeners) > 1:
            self._listeners.remove(by)
            self._listeners.append(by)

    def free(self, lane: str) -> None:
        """Give a slot back."""
        if self._taken[lane] == 0:
            raise ValueError(f"lane {lane!r} has no slot taken")
        self._taken[lane] -= 1
        self._notify()

    @property
    def in_flight(self) -> int:
        """Slots taken in all lanes."""
        return sum(self._taken.values())

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` when a slot is freed; returns how to stop that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()
