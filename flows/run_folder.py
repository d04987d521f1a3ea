"""What the folder of a run says about how it is exported.

Knows run.json's details; does not know Prefect's runs or the command line, which both ask here. Invariant:
nothing is written, and no lock is held.
"""

from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from flows.parameters import Export
from tasks.aggregate.stats import DatasetStats
from tasks.export.files import ExportError
from tasks.export.report import ExportReport
from tasks.export.task import ExportRules
from tasks.records.run_file import RunFolderError, read_run_file, read_setting
from tasks.tokens.draft_vocab import check_draft_vocab_size


def read_export_rules(
    output_dir: Path,
    *,
    eval_fraction: float | None,
    seed: int | None,
    formats: Sequence[str] | None = None,
    draft_vocab_size: int | None = None,
    drop_duplicates: bool | None = None,
    decontaminate: Sequence[str] | None = None,
    partial: bool,
) -> ExportRules:
    """The rules that a run exports by; None is the run's own, and a draft_vocab_size of 0 is none.

    Raises:
        RunFolderError: run.json is damaged, or the draft vocabulary would be larger than the target's.
    """
    run = read_run_file(output_dir)
    run["details"].setdefault("export", {})
    own = read_setting(output_dir, run, "details", "export", kind=dict)
    run["details"]["export"] = {**Export().model_dump(), **own}

    def choose(given: Any, name: str, kind: type | UnionType) -> Any:
        return read_setting(output_dir, run, "details", "export", name, kind=kind) if given is None else given

    if seed is None:
        seed = read_setting(output_dir, run, "fingerprint", "seed", kind=int)
    formats = choose(formats, "formats", list)
    draft_vocab_size = choose(draft_vocab_size, "draft_vocab_size", int | None)
    target_vocab_size = run["details"].get("target_vocab_size")
    if (
        "vocab" in formats
        and draft_vocab_size
        and isinstance(target_vocab_size, int)
        and target_vocab_size > 0
    ):
        try:
            check_draft_vocab_size(draft_vocab_size, target_vocab_size)
        except ValueError as exc:
            raise RunFolderError(f"{output_dir}: {exc}") from exc
    return ExportRules(
        eval_fraction=choose(eval_fraction, "eval_fraction", int | float),
        seed=int(seed or 0),
        formats=list(formats or []),
        draft_vocab_size=draft_vocab_size,
        drop_duplicates=choose(drop_duplicates, "drop_duplicates", bool),
        decontaminate=choose(decontaminate, "decontaminate", list),
        partial=partial,
    )


def check_exported(
    report: ExportReport | None, output_dir: Path, stats: Sequence[DatasetStats]
) -> ExportReport:
    """The report of an export that was made.

    Raises:
        ExportError: there was nothing to export.
    """
    if report is None and not any(one.rows for one in stats):
        raise ExportError(f"{output_dir}: no dataset has an answer yet, so there is nothing to export")
    if report is None:
        raise ExportError(f"{output_dir}: no dataset is complete; partial (--partial) exports what there is")
    return report
