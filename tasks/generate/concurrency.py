"""How wide the window should be, from what the servers say of themselves.

Pure: knows figures, not servers or clocks. Starts from the numbers the user gave and moves by small steps,
one look at a time: wider while the window is full and the servers are not, narrower when they queue or run
out of KV memory (SGLang then takes back requests that it had begun: work done twice).
"""

from dataclasses import dataclass

GROWTH = 1.1
SHRINK = 0.85
MIN_SCALE, MAX_SCALE = 0.25, 4.0  # of the concurrency that was asked for
ROOMY_USAGE, TIGHT_USAGE = 0.8, 0.95  # share of KV tokens in use
LOOKS_TO_SHRINK = 3  # with a queue: one look may just see a burst arrive
LOOKS_TO_REST = 6  # after shrinking, before it grows again


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the servers, summed over them; `token_usage` is the fullest one's.

    `is_full` says that a lane has no slot left; `in_flight` are the requests of all lanes.
    """

    is_full: bool
    in_flight: int
    waiting: int
    max_running: int
    token_usage: float


class ConcurrencyControl:
    """Keeps the scale of the window, MIN_SCALE to MAX_SCALE times what the user asked for."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._queued = 0
        self._resting = 0

    def update(self, look: Look) -> str | None:
        """Take a look into account; when that changes the scale, says why."""
        self._queued = self._queued + 1 if look.waiting else 0
        if look.token_usage >= TIGHT_USAGE:
            return self._shrink(f"{look.token_usage:.0%} of the KV tokens are in use")
        if self._queued >= LOOKS_TO_SHRINK:
            return self._shrink(f"{look.waiting} requests wait on the servers")
        if self._resting:
            self._resting -= 1
        elif self._has_room(look):
            return self._set(
                min(MAX_SCALE, self.scale * GROWTH), "the window is full and the servers are not"
            )
        return None

    def _has_room(self, look: Look) -> bool:
        may_run = look.in_flight * GROWTH <= look.max_running
        return look.is_full and may_run and not look.waiting and look.token_usage < ROOMY_USAGE

    def _shrink(self, why: str) -> str | None:
        self._queued, self._resting = 0, LOOKS_TO_REST
        return self._set(max(MIN_SCALE, self.scale * SHRINK), why)

    def _set(self, scale: float, why: str) -> str | None:
        if scale == self.scale:
            return None
        self.scale = scale
        return why
