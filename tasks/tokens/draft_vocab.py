"""Which of the target's ids the draft model can say: counts, the map between both vocabularies, coverage.

Knows ids and counts; does not know files or splits. Invariant: `nonzero(t2d) == d2t + arange(K)`, and the
same counts give the same map.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAFT_VOCAB_SIZE = 32_000  # what drafters mostly have
_FIRST_STEP = 1000


@dataclass(frozen=True, slots=True, eq=False)
class VocabMap:
    """`t2d` bool (V,): the id is in the draft vocabulary. `d2t` int64 (K,): target id = i + d2t[i]."""

    t2d: np.ndarray
    d2t: np.ndarray


class VocabCounts:
    """How often each dataset has each id, int64 (V,) each: flat memory, whatever is counted."""

    def __init__(self, target_vocab_size: int) -> None:
        self.target_vocab_size = target_vocab_size
        self.datasets: dict[str, np.ndarray] = {}

    def add(self, dataset: str, ids: np.ndarray) -> None:
        """Count ids, int32 (n,), none negative.

        Raises:
            ValueError: an id is not below target_vocab_size.
        """
        counts = np.bincount(ids, minlength=self.target_vocab_size)
        if len(counts) > self.target_vocab_size:
            raise ValueError(
                f"dataset {dataset!r} has the id {len(counts) - 1}, but the target has "
                f"{self.target_vocab_size} ids"
            )
        if dataset in self.datasets:
            self.datasets[dataset] += counts
        else:
            self.datasets[dataset] = counts

    @property
    def total(self) -> np.ndarray:
        """All datasets together, int64 (V,)."""
        total = np.zeros(self.target_vocab_size, np.int64)
        for counts in self.datasets.values():
            total += counts
        return total


def build_vocab_map(
    counts: Mapping[int, int] | np.ndarray, *, draft_vocab_size: int, target_vocab_size: int
) -> VocabMap:
    """Keep the most frequent target tokens as the draft vocabulary.

    Args:
        counts: Occurrences per target id, counted where loss_mask == 1; int64 (target_vocab_size,), or a
            mapping of those that were seen.
        draft_vocab_size: K, how many are kept.
        target_vocab_size: V, how many there are.

    Returns:
        t2d bool (target_vocab_size,) and d2t int64 (draft_vocab_size,), ordered by target id.
        Ties go to the smaller id; the lowest unseen ids fill a vocabulary that would be too small.

    Raises:
        ValueError: draft_vocab_size exceeds target_vocab_size, or an id is not below it.
    """
    check_draft_vocab_size(draft_vocab_size, target_vocab_size)
    dense = _to_array(counts, target_vocab_size)
    # Stable: equal counts stay in the order of their ids, and those of 0 come last.
    # speculators 0.9.0 chooses the same; SpecForge 0.2.0, of equal counts, what its rows had first.
    chosen = np.sort(np.argsort(-dense, kind="stable")[:draft_vocab_size])
    t2d = np.zeros(target_vocab_size, np.bool_)
    t2d[chosen] = True
    return VocabMap(t2d, chosen.astype(np.int64) - np.arange(draft_vocab_size, dtype=np.int64))


def check_draft_vocab_size(draft_vocab_size: int, target_vocab_size: int) -> None:
    """Raise where there is no draft vocabulary of this size.

    Raises:
        ValueError: it exceeds target_vocab_size, or is not positive.
    """
    if not 1 <= draft_vocab_size <= target_vocab_size:
        raise ValueError(
            f"draft_vocab_size is {draft_vocab_size}, but the target has {target_vocab_size} ids; name at "
            f"least 1 and at most {target_vocab_size}, or 0, for a draft model with all ids"
        )


def choose_draft_vocab_size(wanted: int | None, target_vocab_size: int | None) -> int | None:
    """How many ids to choose; None for no vocabulary (0), the usual size (or a smaller target's) for None."""
    if wanted is not None:
        return wanted or None
    return DRAFT_VOCAB_SIZE if target_vocab_size is None else min(DRAFT_VOCAB_SIZE, target_vocab_size)


def measure_curve(counts: np.ndarray) -> list[tuple[int, float | None]]:
    """What share of the tokens the K most frequent ids make, for K of 1,000, 2,000, 4,000, … and all."""
    size = len(counts)
    reached = np.concatenate([[0], np.cumsum(np.sort(counts)[::-1])])
    return [(step, _share(reached[step], reached[-1])) for step in _list_steps(size)]


def measure_coverage(counts: np.ndarray, t2d: np.ndarray) -> float | None:
    """What share of the tokens is in the draft vocabulary; None of nothing."""
    return _share(counts[t2d].sum(), counts.sum())


def _share(part: np.integer, whole: np.integer) -> float | None:
    return round(int(part) / int(whole), 6) if whole else None


def _list_steps(size: int) -> Sequence[int]:
    steps = []
    step = _FIRST_STEP
    while step < size:
        steps.append(step)
        step *= 2
    return [*steps, size]


def _to_array(counts: Mapping[int, int] | np.ndarray, size: int) -> np.ndarray:
    ids = counts if isinstance(counts, Mapping) else range(len(counts))
    if len(ids) and (min(ids) < 0 or max(ids) >= size):
        raise ValueError(f"counts name the id {max(ids)}, but the target has {size} ids")
    if isinstance(counts, Mapping):
        dense = np.zeros(size, np.int64)
        dense[list(counts.keys())] = list(counts.values())
        return dense
    return np.concatenate([counts, np.zeros(size - len(counts), np.int64)]).astype(np.int64)
