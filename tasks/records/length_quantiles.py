"""Quantiles of lengths in tokens, from a histogram."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthQuantiles:
    """completion_tokens per row; each quantile is a length that occurred."""

    p5: int
    p25: int
    p50: int
    p75: int
    p95: int
    max: int
    mean: float


def length_quantiles(counts: Mapping[int, int]) -> LengthQuantiles | None:
    """Quantiles of a histogram {length: rows}, or None when it is empty."""
    if not counts:
        return None
    lengths = np.array(sorted(counts), np.int64)
    upto = np.cumsum([counts[int(length)] for length in lengths])
    rows = int(upto[-1])

    def quantile(percent: int) -> int:
        rank = max(1, -(-rows * percent // 100))
        return int(lengths[np.searchsorted(upto, rank)])

    tokens = sum(length * n for length, n in counts.items())
    return LengthQuantiles(
        p5=quantile(5),
        p25=quantile(25),
        p50=quantile(50),
        p75=quantile(75),
        p95=quantile(95),
        max=int(lengths[-1]),
        mean=tokens / rows,
    )
