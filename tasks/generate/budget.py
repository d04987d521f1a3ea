"""Whether one more request may be sent under a token budget.

Knows: what has completed, what is in flight and since when, and a LengthForecast. Does not know: clocks,
prompts, servers. Invariant: with nothing in flight, `may_dispatch` is exactly `completed_tokens < budget`, so
a run ends below its budget only when prompts ran out.

A request that was sent cannot be taken back; one that was held back can still be sent, and that costs nothing
while many others keep the server busy. So the question is not whether the expected total is below the budget
but whether it surely is: hold back while expected total + margin reaches the budget. The margin is 2 to 3
standard deviations of the in-flight total with a full window and shrinks to none as it empties, where holding
back would string the last requests out one after the other.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from tasks.generate.forecast import Floats, InFlightEstimate, LengthCurve, LengthForecast

BudgetPolicy = Literal["forecast", "drain"]

# Margin in standard deviations: MARGIN * n / (n + HALF_WINDOW) with n in flight. The trade is flat: at 10M
# and window 150, 4 and 150 overshoot by 0.10% instead of 0.06% and take 1% less time (simulated).
MARGIN = 3.0
HALF_WINDOW = 40.0
_MIN_ERROR, _MAX_ERROR = 0.03, 0.4  # of the progress estimate, whatever the latencies say


class TokenBudget:
    """Says when to stop dispatching so that the budget is just reached after the window has drained.

    Args:
        completed_tokens: Tokens of earlier runs that already count.
        policy: "drain" dispatches until completed tokens reach the budget.
        forecast: Shared or restored lengths; a new one when None.
    """

    def __init__(
        self,
        *,
        budget_tokens: int,
        completed_tokens: int = 0,
        policy: BudgetPolicy = "forecast",
        forecast: LengthForecast | None = None,
    ) -> None:
        if budget_tokens < 0 or completed_tokens < 0:
            raise ValueError(
                f"budget of {budget_tokens} tokens, {completed_tokens} completed: both must be >= 0"
            )
        self.budget_tokens = budget_tokens
        self.policy: BudgetPolicy = policy
        self.forecast = forecast if forecast is not None else LengthForecast()
        self._completed_tokens = completed_tokens
        self._window = _Window()
        self._speed = _DecodeSpeed()
        self._granted = 0  # dispatches that need no new estimate
        self._answers_to_wait = 0  # before a new estimate could say anything but no

    @property
    def completed_tokens(self) -> int:
        """Exact sum of what has been counted."""
        return self._completed_tokens

    @property
    def in_flight(self) -> int:
        """Requests dispatched and neither completed nor dropped."""
        return len(self._window)

    @property
    def reached(self) -> bool:
        """Whether completed tokens are at or above the budget."""
        return self._completed_tokens >= self.budget_tokens

    def may_dispatch(self, *, now_s: float) -> bool:
        """Whether one more request may be sent now.

        After True, call `dispatched` before any await, or two workers share one permission. After False, ask
        again when a request has completed or was dropped: nothing else changes the answer.
        """
        if self.reached:
            return False
        if self.policy == "drain" or self._completed_tokens + self._window.cap_tokens < self.budget_tokens:
            return True
        if not self.in_flight or self._granted > 0:
            return True
        if self._answers_to_wait <= 0:
            self._decide(now_s)
        return self._granted > 0

    def dispatched(self, request_id: int, *, now_s: float, max_new_tokens: int) -> None:
        """Count a request as in flight."""
        self._window.add(request_id, now_s, max_new_tokens)
        self._granted -= 1

    def completed(self, request_id: int, *, completion_tokens: int, now_s: float) -> None:
        """Count a good answer's tokens and learn its length and speed."""
        sent_s, max_new_tokens = self._window.remove(request_id)
        self._completed_tokens += completion_tokens
        self.forecast.observe(completion_tokens, max_new_tokens=max_new_tokens)
        self._speed.observe(completion_tokens, latency_s=now_s - sent_s)
        self._answers_to_wait -= 1

    def dropped(self, request_id: int) -> None:
        """Forget a failed or rejected attempt: nothing counts and nothing is learned.

        A retry that is certain is `dispatched` again at once, not after its backoff, to keep its place.
        """
        self._window.remove(request_id)
        self._answers_to_wait -= 1

    def expected_in_flight_tokens(self, now_s: float) -> float:
        """Expected final tokens of everything in flight."""
        return self._estimate(now_s)[1].mean_tokens

    def expected_total(self, now_s: float) -> float:
        """Expected completed tokens if nothing more is sent."""
        return self._completed_tokens + self.expected_in_flight_tokens(now_s)

    def _estimate(self, now_s: float) -> tuple[LengthCurve, InFlightEstimate]:
        caps = self._window.max_new_tokens
        progress = np.minimum(self._speed.progress(now_s - self._window.sent_s), caps - 1.0)
        curve = self.forecast.fit(
            progress,
            progress_error=self._speed.relative_error,
            max_new_tokens=float(caps.max(initial=0.0)),
        )
        return curve, curve.estimate_in_flight(progress, caps)

    def _decide(self, now_s: float) -> None:
        """Grant dispatches, or wait for answers; far from the line, several before the next estimate."""
        curve, estimate = self._estimate(now_s)
        n = self.in_flight
        margin = MARGIN * n / (n + HALF_WINDOW) * math.sqrt(estimate.variance)
        room = self.budget_tokens - self._completed_tokens - estimate.mean_tokens - margin
        requests = int(abs(room) / curve.mean_tokens(float(self._window.max_new_tokens.max())))
        if room > 0:
            self._granted = max(1, min(requests // 4, n // 8))
        else:
            self._granted = 0
            self._answers_to_wait = 1 + min(requests, n // 8)


class _Window:
    """Requests in flight, as arrays: when each was sent and its cap."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._slots: dict[int, int] = {}
        self._sent_s: Floats = np.zeros(64)
        self._caps: Floats = np.zeros(64)
        self.cap_tokens = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def sent_s(self) -> Floats:
        return self._sent_s[: len(self._ids)]

    @property
    def max_new_tokens(self) -> Floats:
        return self._caps[: len(self._ids)]

    def add(self, request_id: int, now_s: float, max_new_tokens: int) -> None:
        if request_id in self._slots:
            raise ValueError(f"request {request_id} is already in flight; drop it before it is sent again")
        slot = len(self._ids)
        if slot == len(self._caps):
            self._sent_s = np.concatenate([self._sent_s, np.zeros(slot)])
            self._caps = np.concatenate([self._caps, np.zeros(slot)])
        self._slots[request_id] = slot
        self._ids.append(request_id)
        self._sent_s[slot] = now_s
        self._caps[slot] = max_new_tokens
        self.cap_tokens += max_new_tokens

    def remove(self, request_id: int) -> tuple[float, int]:
        """Send time and cap of a request that leaves; the last slot moves into its place."""
        try:
            slot = self._slots.pop(request_id)
        except KeyError:
            raise ValueError(f"request {request_id} is not in flight; nothing was counted") from None
        sent_s, cap = float(self._sent_s[slot]), int(self._caps[slot])
        last = self._ids.pop()
        if last != request_id:
            end = len(self._ids)
            self._ids[slot] = last
            self._slots[last] = slot
            self._sent_s[slot], self._caps[slot] = self._sent_s[end], self._caps[end]
        self.cap_tokens -= cap
        return sent_s, cap


class _DecodeSpeed:
    """Tokens an answer has by a given age: a wait before the first token, then a steady speed.

    Both come from a weighted line through the latencies of recent answers; weights fall with length because
    the noise of a latency grows with it.
    """

    _MEMORY = 0.995  # about the last 200 answers

    def __init__(self) -> None:
        self._weight = self._tokens = self._latency = self._square = self._product = 0.0
        self._off = self._decode = 0.0

    def observe(self, completion_tokens: int, *, latency_s: float) -> None:
        wait_s, per_token_s = self._fit_line()
        decode_s = per_token_s * completion_tokens
        keep = self._MEMORY
        self._off = self._off * keep + (latency_s - wait_s - decode_s) ** 2
        self._decode = self._decode * keep + decode_s**2
        weight = 1.0 / max(completion_tokens, 64)
        self._weight = self._weight * keep + weight
        self._tokens = self._tokens * keep + weight * completion_tokens
        self._latency = self._latency * keep + weight * latency_s
        self._square = self._square * keep + weight * completion_tokens**2
        self._product = self._product * keep + weight * completion_tokens * latency_s

    @property
    def relative_error(self) -> float:
        """Relative error of `progress`, from how far recent latencies were off the line."""
        if self._decode <= 0:
            return _MAX_ERROR
        return min(max(math.sqrt(self._off / self._decode), _MIN_ERROR), _MAX_ERROR)

    def progress(self, age_s: Floats) -> Floats:
        """Estimated tokens so far; zero before the first answer told the speed."""
        wait_s, per_token_s = self._fit_line()
        if per_token_s <= 0:
            return np.zeros_like(age_s)
        return np.maximum((age_s - wait_s) / per_token_s, 0.0)

    def _fit_line(self) -> tuple[float, float]:
        """Wait and seconds per token."""
        if self._tokens <= 0 or self._latency <= 0:
            return 0.0, 0.0
        mean_tokens, mean_latency = self._tokens / self._weight, self._latency / self._weight
        through_origin = mean_latency / mean_tokens
        spread = self._square / self._weight - mean_tokens**2
        if spread < (0.1 * mean_tokens) ** 2:  # all of one length: the wait cannot be told apart
            return 0.0, through_origin
        slope = (self._product / self._weight - mean_tokens * mean_latency) / spread
        # A few early answers can tilt the line: the wait is neither negative nor most of a latency.
        slope = min(max(slope, 0.5 * through_origin), through_origin)
        return mean_latency - slope * mean_tokens, slope
