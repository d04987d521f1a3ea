"""The task that writes the training data."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.core.export import export_run
from tasks.core.export_configs import Target
from tasks.core.export_report import ExportReport
from tasks.core.export_rows import ExportDataset
from tasks.core.export_vocab import PT_FILES
from tasks.core.run_file import read_run_file, read_setting
from tasks.core.stats import DatasetStats

logger = logging.getLogger(__name__)

EXPORT_FOLDER = "export"


@dataclass(frozen=True, slots=True)
class ExportRules:
    """What is exported and how; `partial` takes datasets that are below their budget too.

    Without a draft_vocab_size the format vocab is left out.
    """

    eval_fraction: float
    seed: int
    formats: Collection[str]
    draft_vocab_size: int | None = None
    drop_duplicates: bool = False
    decontaminate: Sequence[str] = ()
    partial: bool = False


@task(name="export-drafter-data", cache_policy=NO_CACHE, persist_result=False)
async def export_drafter_data(
    output_dir: Path, stats: Sequence[DatasetStats], rules: ExportRules
) -> ExportReport | None:
    """Export the datasets that are done; None when there is none."""
    return await asyncio.to_thread(export_datasets, output_dir, stats, rules)


def export_datasets(
    output_dir: Path, stats: Sequence[DatasetStats], rules: ExportRules
) -> ExportReport | None:
    """The same without Prefect."""
    done = [one for one in stats if one.rows and (rules.partial or one.status != "incomplete")]
    left_out = [one.name for one in stats if one not in done]
    if left_out:
        logger.warning(
            "not exported, for they are not complete: %s (export.partial takes them too)", ", ".join(left_out)
        )
    if not done:
        return None
    run = read_run_file(output_dir)
    report = export_run(
        datasets=[_to_dataset(output_dir, one) for one in done],
        out_dir=output_dir / EXPORT_FOLDER,
        eval_fraction=rules.eval_fraction,
        seed=rules.seed,
        formats=rules.formats,
        draft_vocab_size=rules.draft_vocab_size,
        drop_duplicates=rules.drop_duplicates,
        decontaminate=[Path(path).expanduser() for path in rules.decontaminate],
        target=_read_target(output_dir, run),
        provenance={key: run[key] for key in ("fingerprint", "accepted_changes") if key in run},
    )
    if report.unchanged:
        logger.info("export unchanged: %d rows are in %s already", report.total.rows, report.out_dir)
        return report
    if "vocab" in rules.formats and "left_out" in report.vocab:
        logger.warning("exported without draft vocabulary: %s", report.vocab["left_out"])
    if isinstance(why := report.vocab.get("pt_files"), str):
        logger.info("%s: %s", ", ".join(PT_FILES), why)
    logger.info("exported %d rows to %s", report.total.rows, report.out_dir)
    return report


def _to_dataset(output_dir: Path, stats: DatasetStats) -> ExportDataset:
    kind = "trajectory" if stats.budget_tokens is None else "generate"
    return ExportDataset(stats.name, output_dir / stats.name, stats.status, kind)


def _read_target(output_dir: Path, run: Mapping[str, Any]) -> Target:
    """What run.json says of the model; older ones do not tell how many ids it has."""
    known = {"target_vocab_size": None, "target": {}, **run.get("details", {})}
    return Target(
        model=str(run.get("fingerprint", {}).get("model") or Target().model),
        vocab_size=read_setting(output_dir, known, "target_vocab_size", kind=int | None),
        trust_remote_code=bool(known["target"].get("trust_remote_code")),
    )
