"""What the folder of a run says about how it is exported.

Knows run.json's details; does not know Prefect's runs or the command line, which both ask here. Invariant:
nothing is written, and no lock is held.
"""

from pathlib import Path

from flows.parameters import Export
from tasks.core.export_files import ExportError
from tasks.core.export_report import ExportReport
from tasks.core.run_file import read_run_file, read_setting
from tasks.export import ExportRules


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
