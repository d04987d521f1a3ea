"""What a dataset is to reach. Knows no files and no counts."""

from dataclasses import dataclass

TOTAL = "total"
"""The name of the line that sums datasets up."""


@dataclass(frozen=True, slots=True)
class DatasetPlan:
    """What a dataset was meant to reach; `budget_tokens` is None where nothing is generated."""

    name: str
    budget_tokens: int | None
    max_samples: int | None = None
