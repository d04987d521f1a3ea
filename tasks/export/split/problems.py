"""What is wrong with the split of an export, in words.

Knows counts; does not know rows, nor where it is said. Invariant: of a split as it was asked
for nothing is said.
"""

from collections.abc import Iterator

from tasks.export.report import ExportReport
from tasks.export.split.assign import SPLITS


def find_split_problems(report: ExportReport) -> Iterator[str]:
    """A line for each: rows whose prompt was not found, a split that was asked for and has no row."""
    by_id = {count.name: count.split_by_id for count in report.datasets if count.split_by_id}
    if by_id:
        names = ", ".join(f"{name} {n:,}" for name, n in by_id.items())
        yield (
            f"split: the prompts of {sum(by_id.values()):,} rows are not in prompts.jsonl ({names}); these "
            "rows were split by conversation id, so the same prompt may be in train and in eval"
        )
    for split in SPLITS:
        if report.split_by["eval_fraction"] and report.total.rows and not report.splits[split].rows:
            yield (
                f"split: {split} has no row; rows with the same first user turn stay together, "
                f"{_explain_empty(report)}"
            )


def _explain_empty(report: ExportReport) -> str:
    rows, groups = report.total.rows, report.split_by["different_keys"]
    if groups == 1:
        return f"and all {rows:,} rows do: use more prompts"
    return (
        f"and the {rows:,} rows are {groups:,} such groups: change eval_fraction "
        f"({report.split_by['eval_fraction']}) or the seed"
    )
