"""What the folder of a run says about itself: which datasets it has, and how they are exported.

Knows run.json's details; does not know Prefect's runs or the command line, which both ask here. Invariant:
nothing is written, and no lock is held.
"""

from pathlib import Path
from types import NoneType
from typing import Any

from flows.parameters import Export
from tasks.aggregate import DatasetPlan
from tasks.core.export_files import ExportError
from tasks.core.export_report import ExportReport
from tasks.core.run_file import RunFolderError, read_run_file, read_setting
from tasks.export import ExportRules


def read_plans(output_dir: Path) -> list[DatasetPlan]:
    """What each dataset of a run was last meant to reach.

    Raises:
        RunFolderError: the folder is not one of a run, or its run.json is damaged.
    """
    run = read_run_file(output_dir)
    datasets = run.get("details", {}).get("datasets", {})
    if not datasets:
        raise RunFolderError(
            f"{str(output_dir)!r} is not the folder of a run: it has no run.json with datasets"
        )
    return [_read_plan(output_dir, run, name) for name in datasets]


def _read_plan(output_dir: Path, run: dict[str, Any], name: str) -> DatasetPlan:
    where = ("details", "datasets", name)
    is_generated = read_setting(output_dir, run, *where, "kind", kind=str | None) != "trajectory"
    return DatasetPlan(
        name,
        read_setting(output_dir, run, *where, "budget_tokens", kind=int if is_generated else NoneType),
        read_setting(output_dir, run, *where, "max_samples", kind=int | None),
    )


def read_export_rules(
    output_dir: Path, *, eval_fraction: float | None, seed: int | None, partial: bool
) -> ExportRules:
    """The rules that a run exports by; an eval_fraction or a seed of None is the run's own.

    Raises:
        RunFolderError: run.json is damaged.
    """
    run = read_run_file(output_dir)
    run["details"].setdefault("export", {})
    own = read_setting(output_dir, run, "details", "export", kind=dict)
    run["details"]["export"] = {**Export().model_dump(), **own}
    if eval_fraction is None:
        eval_fraction = read_setting(output_dir, run, "details", "export", "eval_fraction", kind=int | float)
    if seed is None:
        seed = read_setting(output_dir, run, "fingerprint", "seed", kind=int)
    return ExportRules(
        eval_fraction=eval_fraction,
        seed=seed,
        formats=read_setting(output_dir, run, "details", "export", "formats", kind=list),
        partial=partial,
    )


def check_exported(report: ExportReport | None, output_dir: Path) -> ExportReport:
    """The report of an export that was made.

    Raises:
        ExportError: there was nothing to export.
    """
    if report is None:
        raise ExportError(f"{output_dir}: no dataset is complete; partial (--partial) exports what there is")
    return report
