"""The rows that an export lacks, in words.

Knows counts; does not know rows or where they are said. Invariant: an unknown reason is trouble.
"""

from collections import Counter
from collections.abc import Mapping

from tasks.export.report import MANIFEST, ExportReport

_HARMLESS = frozenset({"contaminated", "duplicates", "empty_answer", "exact_duplicates"})


def count_left_out(report: ExportReport) -> Counter[str]:
    """How many of all datasets' rows were left out, by the manifest's names of the reasons."""
    counts: Counter[str] = Counter()
    for one in report.datasets:
        counts.update(one.skipped)
        counts.update(duplicates=one.duplicates, exact_duplicates=one.exact_duplicates)
    return +counts


def split_left_out(counts: Mapping[str, int]) -> tuple[Counter[str], Counter[str]]:
    """Those that are lost for what is wrong with them, and those that nobody wants."""
    trouble = Counter({reason: n for reason, n in counts.items() if reason not in _HARMLESS})
    return trouble, Counter(counts) - trouble


def say_left_out(counts: Mapping[str, int]) -> str:
    """One line, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    reasons = ", ".join(f"{reason} {n:,}" for reason, n in ordered)
    return f"left out: {reasons}; {MANIFEST} has them by dataset"
