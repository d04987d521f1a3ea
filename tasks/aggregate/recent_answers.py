"""The answers of the last minutes: how fast they come, and from which servers.

Knows when answers began and ended by the clock of whoever wrote them; does not know files. Invariant:
memory holds what ended within WINDOW_S of the newest answer, however long a run is.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WINDOW_S = 300.0  # an answer of 10,000 tokens takes minutes: less would be noise


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; times are seconds since 1970."""

    started_s: float
    finished_s: float
    tokens: int
    server: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerActivity:
    """What one server did in the last minutes."""

    server: str
    answers: int
    tokens_per_s: float
    last_answer_age_s: float


class RecentAnswers:
    """The answers that ended within WINDOW_S of the newest, and when each server's newest ended."""

    def __init__(self) -> None:
        self.last_s: dict[str, float] = {}
        self._answers: deque[Answer] = deque()
        self._newest_s = float("-inf")

    def add(self, answer: Answer) -> None:
        """Take one more; they come nearly in the order in which they ended."""
        known_s = self.last_s.get(answer.server, answer.finished_s)
        self.last_s[answer.server] = max(known_s, answer.finished_s)
        self._newest_s = max(self._newest_s, answer.finished_s)
        self._answers.append(answer)
        while self._answers[0].finished_s < self._newest_s - WINDOW_S:
            self._answers.popleft()

    def since(self, oldest_s: float) -> list[Answer]:
        """Those that ended at or after a time."""
        return [one for one in self._answers if one.finished_s >= oldest_s]


def measure_speed(answers: Iterable[Answer], *, now_s: float) -> float:
    """Tokens per second up to now, of the answers that ended within WINDOW_S.

    Where the first of them began later than that, the time before it does not count.
    """
    recent = [one for one in answers if one.finished_s >= now_s - WINDOW_S]
    if not recent:
        return 0.0
    since_s = max(now_s - WINDOW_S, min(one.started_s for one in recent))
    return sum(one.tokens for one in recent) / max(1.0, now_s - since_s)


def describe_servers(recents: Sequence[RecentAnswers], *, now_s: float) -> list[ServerActivity]:
    """Every server that ever answered, by address."""
    last_s: dict[str, float] = {}
    for recent in recents:
        for server, at_s in recent.last_s.items():
            last_s[server] = max(at_s, last_s.get(server, at_s))
    answers = [one for recent in recents for one in recent.since(now_s - WINDOW_S)]
    found = []
    for server, at_s in sorted(last_s.items()):
        own = [one for one in answers if one.server == server]
        found.append(
            ServerActivity(
                server=server,
                answers=len(own),
                tokens_per_s=measure_speed(own, now_s=now_s),
                last_answer_age_s=max(0.0, now_s - at_s),
            )
        )
    return found
