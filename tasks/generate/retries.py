"""Prompts that wait to be asked again, and which of them may be asked now.

Knows attempts and due times; does not know servers, budgets or the log. Whoever waits here holds no slot.

A server that dies takes a window of prompts with it, one of which may be why. They are asked again at once,
but those that were there at several deaths only when others were answered since, and only a few at a time:
an eighth of the window, a sixty-fourth, one. Others fill the rest. So a prompt that kills is found in five
deaths, and the innocent ones, which come back meanwhile, are not.
"""

import heapq
import itertools
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from tasks.generate.feed import Rendered

BACKOFF_FIRST_S = 0.5
BACKOFF_LAST_S = 60.0
_BACKOFF_DOUBLINGS = 10  # enough to reach BACKOFF_LAST_S; thousands of tries would overflow a float
_SUSPECTS_SHIFT = 3  # each further death lets an eighth as many suspects be in flight together


@dataclass(frozen=True, slots=True)
class Attempt:
    """A prompt with what became of it so far.

    `attempt` counts what it is to blame for, `tries` all sendings. `deaths` are of servers that it was with,
    the last one when so many `answers` were in.
    """

    rendered: Rendered
    attempt: int = 1
    empty_answers: int = 0
    tries: int = 0
    deaths: int = 0
    answers: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether it was with a server at more than one death."""
        return self.deaths > 1


class RetryQueue:
    """Attempts by lane and due time; suspects apart, so that they hold up no other."""

    def __init__(self, lanes: Iterable[str]) -> None:
        names = tuple(lanes)
        self._ties = itertools.count()
        self._plain: dict[str, list[tuple[float, int, Attempt]]] = {name: [] for name in names}
        self._suspects: dict[str, list[tuple[float, int, Attempt]]] = {name: [] for name in names}

    @property
    def is_empty(self) -> bool:
        """Nothing waits, due or not."""
        return not any(self._heaps)

    def push(self, attempt: Attempt, *, now_s: float) -> None:
        """Queue an attempt, with full jitter (Brooker, AWS 2015)."""
        ceiling = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2.0 ** min(attempt.tries, _BACKOFF_DOUBLINGS))
        due_s = now_s + random.uniform(0.0, ceiling)  # noqa: S311  jitter, not a secret
        heaps = self._suspects if attempt.is_suspect else self._plain
        again = replace(attempt, tries=attempt.tries + 1)
        heapq.heappush(heaps[attempt.rendered.lane], (due_s, next(self._ties), again))

    def pop_due(
        self, lane: str, *, now_s: float, slots: int, in_flight: Collection[Attempt], answers: int
    ) -> Attempt | None:
        """The next attempt of a lane that may be asked now, or None.

        `slots` is how many requests of the lane may be in flight, `in_flight` what is with the servers now,
        `answers` how many good ones came so far.
        """
        plain, suspects = self._plain[lane], self._suspects[lane]
        if plain and plain[0][0] <= now_s:
            return heapq.heappop(plain)[2]
        if suspects and suspects[0][0] <= now_s and _may_join(suspects[0][2], slots, in_flight, answers):
            return heapq.heappop(suspects)[2]
        return None

    def is_full(self, lane: str, *, slots: int) -> bool:
        """Whether so many wait that new prompts should not be taken up."""
        return max(len(self._plain[lane]), len(self._suspects[lane]) // 2) >= slots

    def find_due_s(self, *, after_s: float) -> float | None:
        """When the next one falls due that was not due by `after_s`; None when there is none."""
        return min((heap[0][0] for heap in self._heaps if heap and heap[0][0] > after_s), default=None)

    @property
    def _heaps(self) -> list[list[tuple[float, int, Attempt]]]:
        return [*self._plain.values(), *self._suspects.values()]


def _may_join(suspect: Attempt, slots: int, in_flight: Collection[Attempt], answers: int) -> bool:
    """Whether the server has shown that it works, and few that are as suspect are in flight."""
    if not in_flight:
        return True
    alike = sum(one.deaths >= suspect.deaths for one in in_flight if one.is_suspect)
    return answers > suspect.answers and alike < max(1, slots >> _SUSPECTS_SHIFT * (suspect.deaths - 1))
