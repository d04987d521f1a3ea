"""How long the answers of one dataset are, learned while they arrive.

Knows: finished lengths, and how far unfinished answers have got. Does not know: time, budgets, servers.
Invariant: an answer is modelled as min(T, max_new_tokens) with T drawn from one distribution per forecast, so
an answer that stopped at its cap is censored, exactly as one still in flight is, and caps may be mixed.

The estimate is Kaplan-Meier on a fixed grid of lengths (every integer up to about 45, then 2% wide bins), so
its cost does not grow with the number of answers. A prior enters as a few imaginary answers: each hazard is
(events + prior events) / (at risk + prior at risk), the posterior mean under a Beta-Stacy prior. It rules
before the first answer and beyond the longest one, and fades everywhere else.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Bins = NDArray[np.intp]

STATE_VERSION = 1
LONGEST_TOKENS = 1 << 18
DEFAULT_MEAN_TOKENS = 3_000.0  # between the planning figures of the ten datasets, 1,500 to 8,000
DEFAULT_PRIOR_ANSWERS = 4.0
PRIOR_SIGMA = 1.0  # lognormal
# The prior's hazards may all be wrong by this factor together, which independent bins would average away: an
# unseen second mode (30% answers of 9,000 tokens) overshoots 1M by 12% instead of 0.7% with 600 in flight.
PRIOR_DOUBT = 1.0
_BINS_PER_OCTAVE = 32
_TINY = 1e-12


def _build_edges() -> NDArray[np.int64]:
    octaves = round(math.log2(LONGEST_TOKENS))
    powers = np.exp2(np.arange(octaves * _BINS_PER_OCTAVE + 1) / _BINS_PER_OCTAVE)
    return np.unique(np.round(powers).astype(np.int64))


# Bin k holds the lengths EDGES[k] .. EDGES[k + 1] - 1; anything longer falls into the last bin.
EDGES = _build_edges()
_EDGES_F: Floats = EDGES.astype(np.float64)
_EDGE_LIST: list[int] = EDGES.tolist()
_BINS = len(EDGES) - 1
_WIDTHS: Floats = np.diff(_EDGES_F)
_CENTRES: Floats = _EDGES_F[:-1] + (_WIDTHS - 1) / 2
_HALF_STEPS: Floats = (_WIDTHS - 1) / 2
_MEAN_EXPOSURE: Floats = 0.5 + 0.5 / _WIDTHS


@dataclass(frozen=True, slots=True)
class InFlightEstimate:
    """Expected final tokens of everything in flight, and the variance of that sum."""

    mean_tokens: float
    variance: float


@dataclass(frozen=True, slots=True)
class LengthCurve:
    """A survival curve of answer lengths on EDGES, with what conditional moments need.

    Attributes:
        table: Three rows over the bins + 1 edges: P(T >= EDGES[k]), and the sums over t < EDGES[k] of
            P(T >= t) and of t P(T >= t).
        bin_sums: Sum of P(T >= t) over each bin.
        log_variance: Variance of log P(T >= EDGES[k + 1] | T >= EDGES[k]): how little is known, per bin.
        prior_part: The share of that log that only the prior says, per bin.
        progress_scale: True over estimated progress of an answer still running, per bin: below 1, because a
            slow request runs longer than a fast one.
    """

    table: Floats
    bin_sums: Floats
    log_variance: Floats
    prior_part: Floats
    progress_scale: Floats

    @property
    def survival(self) -> Floats:
        """P(T >= EDGES[k]), shape (bins + 1,)."""
        survival: Floats = self.table[0]
        return survival

    def mean_and_variance(self, progress: ArrayLike, max_new_tokens: ArrayLike) -> tuple[Floats, Floats]:
        """Mean and variance of each final length, given that the answer has passed `progress` tokens."""
        done, caps = self._correct(progress, max_new_tokens)
        residual, variance, _, _, _ = self._residuals(done, caps)
        return done + residual, variance

    def mean_tokens(self, max_new_tokens: float) -> float:
        """Mean final length of an answer not yet started."""
        return float(np.interp(max_new_tokens + 1.0, _EDGES_F, self.table[1]))

    def estimate_in_flight(self, progress: ArrayLike, max_new_tokens: ArrayLike) -> InFlightEstimate:
        """Sum over answers in flight; the variance holds both their spread and the doubt about the curve."""
        done, caps = self._correct(progress, max_new_tokens)
        residual, variance, weight, first, last = self._residuals(done, caps)
        # Answers expected to be running in bin k: survival[k] * running[k]. What they still add beyond it is
        # what an error in that bin's hazard scales: Greenwood's formula, for this sum instead of the mean.
        steps = np.bincount(first, weight, _BINS + 1) - np.bincount(last, weight, _BINS + 1)
        running = np.maximum(np.cumsum(steps[:-1]), 0.0)
        beyond = np.cumsum((self.bin_sums * running)[:0:-1])[::-1]
        doubt = float(np.dot(beyond * beyond, self.log_variance[:-1]))
        doubt += (PRIOR_DOUBT * float(np.dot(beyond, self.prior_part[:-1]))) ** 2
        return InFlightEstimate(float(done.sum() + residual.sum()), float(variance.sum()) + doubt)

    def _correct(self, progress: ArrayLike, max_new_tokens: ArrayLike) -> tuple[Floats, Floats]:
        caps = np.minimum(np.asarray(max_new_tokens, dtype=np.float64), LONGEST_TOKENS - 1.0)
        done = np.clip(np.asarray(progress, dtype=np.float64), 0.0, caps)
        bins, _ = _locate(np.maximum(done, 1.0))
        return np.minimum(done * self.progress_scale[bins], caps), caps

    def _residuals(self, done: Floats, caps: Floats) -> tuple[Floats, Floats, Floats, Bins, Bins]:
        """Residual mean and variance, 1 / P(T > done), and the bins of done + 1 and caps + 1."""
        first, at_done = _locate(done + 1.0)
        last, at_cap = _locate(caps + 1.0)
        low, high = _read(self.table, first, at_done), _read(self.table, last, at_cap)
        weight = 1.0 / np.maximum(low[0], _TINY)
        between, turning = high[1] - low[1], high[2] - low[2]
        room = caps - done
        residual = np.minimum(np.maximum(between * weight, 0.0), room)
        second = (2.0 * turning - (2.0 * done + 1.0) * between) * weight
        variance = np.minimum(np.maximum(second - residual * residual, 0.0), room * room / 4.0)
        return residual, variance, weight, first, last


class LengthForecast:
    """Counts finished lengths and turns them, with the progress of unfinished ones, into a LengthCurve.

    Args:
        prior_mean_tokens: Expected mean before any answer; None is a broad guess.
        prior_answers: How many answers the prior is worth.
    """

    def __init__(
        self, *, prior_mean_tokens: float | None = None, prior_answers: float = DEFAULT_PRIOR_ANSWERS
    ) -> None:
        mean = DEFAULT_MEAN_TOKENS if prior_mean_tokens is None else float(prior_mean_tokens)
        if mean <= 0 or prior_answers <= 0:
            raise ValueError(f"prior of {prior_answers} answers of {mean} tokens: both must be positive")
        self._finished = np.zeros(_BINS)
        self._capped = np.zeros(_BINS)
        survival = _lognormal_survival(mean)
        self._prior_at_risk = prior_answers * survival[:-1]
        self._prior_events = -prior_answers * np.diff(survival)
        self._last_survival = survival[:-1]

    @property
    def observed(self) -> int:
        """Finished answers seen, those that stopped at their cap included."""
        return int(self._finished.sum() + self._capped.sum())

    def observe(self, completion_tokens: int, *, max_new_tokens: int) -> None:
        """Count one finished answer; at its cap it only says that T is at least that long."""
        if completion_tokens >= max_new_tokens:
            self._capped[_bin_of(max_new_tokens - 1)] += 1
        else:
            self._finished[_bin_of(completion_tokens)] += 1

    def fit(
        self,
        progress: ArrayLike = (),
        *,
        progress_error: float = 0.0,
        max_new_tokens: float = LONGEST_TOKENS,
    ) -> LengthCurve:
        """Estimate the curve, with answers in flight as censored observations.

        Args:
            progress: Tokens that each unfinished answer has passed.
            progress_error: Relative standard deviation of `progress`. Unaccounted for, requests sent together
                look equally far, the fastest of them finishes ahead of all and looks like the last survivor,
                and the curve falls to nothing: 30% too low after a window of 150 was sent at once.
            max_new_tokens: The largest cap in flight; no answer is still running beyond it.
        """
        done = np.asarray(progress, dtype=np.float64)
        bins, part = _locate(np.minimum(done[done >= 1.0], LONGEST_TOKENS - 1.0))
        running = np.bincount(bins, minlength=_BINS).astype(np.float64)
        if progress_error <= 0:
            # Inside a wide bin an answer still running was at risk for the part of the bin it has passed.
            exposed = np.bincount(bins, np.minimum(part + 1.0 / _WIDTHS[bins], 1.0), _BINS).astype(np.float64)
            return self._build_curve(running, exposed, np.ones(_BINS))
        # True progress is spread around the estimate, and less likely where the answer would have ended
        # before: weigh by the last curve. Each call is one step of expectation-maximization.
        kernel, offsets = _build_kernel(progress_error)
        possible = np.where(_EDGES_F[:-1] < max_new_tokens, np.maximum(self._last_survival, 1e-9), _TINY)
        seen = np.convolve(possible, kernel, "same")
        spread = possible * np.convolve(running / seen, kernel, "same")
        octaves = np.convolve(possible, kernel * offsets, "same") / (-_BINS_PER_OCTAVE * seen)
        curve = self._build_curve(spread, spread * _MEAN_EXPOSURE, np.exp2(octaves))
        self._last_survival = curve.survival[:-1]
        return curve

    def save(self) -> dict[str, Any]:
        """A small JSON-able state: counts of the bins in use."""
        return {
            "version": STATE_VERSION,
            "bins_per_octave": _BINS_PER_OCTAVE,
            "finished": _to_pairs(self._finished),
            "capped": _to_pairs(self._capped),
        }

    @classmethod
    def restore(
        cls,
        state: dict[str, Any],
        *,
        prior_mean_tokens: float | None = None,
        prior_answers: float = DEFAULT_PRIOR_ANSWERS,
    ) -> Self:
        """Rebuild from `save`; the prior is configuration and comes from the caller.

        Raises:
            ValueError: The state was saved by another version or on another grid.
        """
        grid, ours = (state.get("version"), state.get("bins_per_octave")), (STATE_VERSION, _BINS_PER_OCTAVE)
        if grid != ours:
            raise ValueError(f"forecast state has (version, bins per octave) {grid}, this code has {ours}")
        forecast = cls(prior_mean_tokens=prior_mean_tokens, prior_answers=prior_answers)
        for name, counts in (("finished", forecast._finished), ("capped", forecast._capped)):
            for index, count in state[name]:
                counts[index] = count
        return forecast

    def _build_curve(self, running: Floats, exposed: Floats, progress_scale: Floats) -> LengthCurve:
        """Hazards from events over numbers at risk; `exposed`: what `running` was at risk in its own bin."""
        left = running + self._finished + self._capped
        at_risk = np.cumsum(left[::-1])[::-1] - running + exposed + self._prior_at_risk
        at_risk = np.maximum(at_risk, _TINY)
        hazard = np.minimum((self._finished + self._prior_events) / at_risk, 1.0)
        kept = 1.0 - hazard
        table = np.zeros((3, _BINS + 1))
        table[0, 0] = 1.0
        np.cumprod(kept, out=table[0, 1:])
        bin_sums = _WIDTHS * table[0, :-1] + np.diff(table[0]) * _HALF_STEPS
        np.cumsum(bin_sums, out=table[1, 1:])
        np.cumsum(bin_sums * _CENTRES, out=table[2, 1:])
        kept = np.maximum(kept, 1e-9)
        return LengthCurve(
            table=table,
            bin_sums=bin_sums,
            log_variance=hazard / (kept * (at_risk + 1.0)),
            prior_part=self._prior_events / (kept * at_risk),
            progress_scale=progress_scale,
        )


def _build_kernel(relative_error: float) -> tuple[Floats, Floats]:
    """Gaussian weights over neighbouring bins (the grid is logarithmic), and the bins' offsets."""
    deviation = relative_error * _BINS_PER_OCTAVE / math.log(2)
    reach = math.ceil(2.5 * deviation)
    offsets = np.arange(-reach, reach + 1, dtype=np.float64)
    weights = np.exp(-0.5 * (offsets / deviation) ** 2)
    return weights / weights.sum(), offsets


def _lognormal_survival(mean_tokens: float) -> Floats:
    location = math.log(mean_tokens) - PRIOR_SIGMA**2 / 2
    scores = (np.log(_EDGES_F) - location) / (PRIOR_SIGMA * math.sqrt(2))
    survival = np.array([math.erfc(score) / 2 for score in scores])
    survival[0] = 1.0
    return survival


def _locate(tokens: Floats) -> tuple[Bins, Floats]:
    """Bin of each length, and how far into the bin it lies (0 to 1)."""
    bins = np.minimum(_EDGES_F.searchsorted(tokens, side="right") - 1, _BINS - 1)
    return bins, (tokens - _EDGES_F[bins]) / _WIDTHS[bins]


def _read(table: Floats, bins: Bins, part: Floats) -> Floats:
    low = table.take(bins, axis=1)
    return low + part * (table.take(bins + 1, axis=1) - low)


def _bin_of(tokens: int) -> int:
    return min(max(bisect_right(_EDGE_LIST, tokens) - 1, 0), _BINS - 1)


def _to_pairs(counts: Floats) -> list[list[int]]:
    return [[int(index), int(counts[index])] for index in np.flatnonzero(counts)]
