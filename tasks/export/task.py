"""The task that writes the training data."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from serving.embedded.errors import ModelError
from serving.embedded.model import DEMO_MODEL, DEMO_NAMES, default_cache_dir, resolve_model
from tasks.aggregate.stats import DatasetStats
from tasks.export.configs import Target
from tasks.export.export_run import export_run
from tasks.export.formats.conversations import Retokenizer
from tasks.export.formats.vocab import PT_FILES
from tasks.export.left_out import count_left_out, say_left_out, split_left_out
from tasks.export.report import ExportReport
from tasks.export.rows import ExportDataset
from tasks.export.split.problems import find_split_problems
from tasks.records.run_file import read_run_file, read_setting
from tasks.tokens.draft_vocab import choose_draft_vocab_size
from tasks.tokens.tokenizer import TokenizerError, load_tokenizer

logger = logging.getLogger(__name__)

EXPORT_FOLDER = "export"


@dataclass(frozen=True, slots=True)
class ExportRules:
    """What is exported and how; `partial` takes datasets that are below their budget too.

    A draft_vocab_size of 0 leaves the format vocab out; None is the usual one, or a smaller target's.
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
    report = await asyncio.to_thread(export_datasets, output_dir, stats, rules)
    if report is not None:
        _log_left_out(report)
    return report


def export_datasets(
    output_dir: Path, stats: Sequence[DatasetStats], rules: ExportRules
) -> ExportReport | None:
    """The same without Prefect."""
    done = [one for one in stats if one.rows and (rules.partial or one.status != "incomplete")]
    _warn_of_missing([one for one in stats if one not in done])
    if not done:
        return None
    run = read_run_file(output_dir)
    target = _read_target(output_dir, run)
    report = export_run(
        datasets=[_to_dataset(output_dir, one) for one in done],
        out_dir=output_dir / EXPORT_FOLDER,
        eval_fraction=rules.eval_fraction,
        seed=rules.seed,
        formats=rules.formats,
        draft_vocab_size=choose_draft_vocab_size(rules.draft_vocab_size, target.vocab_size),
        drop_duplicates=rules.drop_duplicates,
        decontaminate=[Path(path).expanduser() for path in rules.decontaminate],
        target=target,
        retokenizer=_load_retokenizer(run) if "conversations" in rules.formats else "not asked for",
        provenance={key: run[key] for key in ("fingerprint", "accepted_changes") if key in run},
    )
    for problem in find_split_problems(report):
        logger.warning("%s", problem)
    if report.unchanged:
        logger.info("export unchanged: %d rows are in %s already", report.total.rows, report.out_dir)
        return report
    if "vocab" in rules.formats and rules.draft_vocab_size != 0 and "left_out" in report.vocab:
        logger.warning("exported without draft vocabulary: %s", report.vocab["left_out"])
    if isinstance(why := report.vocab.get("pt_files"), str):
        logger.info("%s: %s", ", ".join(PT_FILES), why)
    if "conversations" in rules.formats:
        logger.info("conversations are lossy; measured on them: %s", _say_loss(report.conversations))
    logger.info("exported %d rows to %s", report.total.rows, report.out_dir)
    return report


def _warn_of_missing(stats: Sequence[DatasetStats]) -> None:
    if empty := [one.name for one in stats if not one.rows]:
        logger.warning("not exported, for they have no answers: %s", ", ".join(empty))
    if incomplete := [one.name for one in stats if one.rows]:
        names = ", ".join(incomplete)
        logger.warning("not exported, for they are not complete: %s (export.partial takes them too)", names)


def _log_left_out(report: ExportReport) -> None:
    trouble, harmless = split_left_out(count_left_out(report))
    if trouble:
        logger.warning("%s", say_left_out(trouble))
    if harmless:
        logger.info("%s", say_left_out(harmless))


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


def _load_retokenizer(run: Mapping[str, Any]) -> Retokenizer:
    """The tokenizer that the rows were made with, or why it is not here; the demo's is not fetched."""
    details, fingerprint = run.get("details", {}), run.get("fingerprint", {})
    target = details.get("target") or {}
    try:
        name = target.get("tokenizer") or (
            _find_embedded_tokenizer(target.get("model") or "demo")
            if details.get("server_mode") == "embedded"
            else target.get("model") or fingerprint.get("model")
        )
        if not name:
            return "run.json does not tell the target's tokenizer"
        loaded = load_tokenizer(
            str(name),
            revision=target.get("revision"),
            trust_remote_code=bool(target.get("trust_remote_code")),
        )
    except (TokenizerError, ModelError) as exc:
        return str(exc)
    found = (loaded.identity.files_sha256, loaded.identity.chat_template_sha256)
    if found != (fingerprint.get("tokenizer_sha256"), fingerprint.get("chat_template_sha256")):
        return f"the tokenizer {name} is not the one that the rows were made with"
    return loaded


def _find_embedded_tokenizer(model: str) -> str:
    """Where the embedded engine's is."""
    if model in DEMO_NAMES:
        return str(default_cache_dir() / DEMO_MODEL)
    return str(resolve_model(model).tokenizer_dir)


def _say_loss(found: Mapping[str, Any]) -> str:
    if why := found.get("not_measured"):
        return f"nothing ({why})"
    return f"{found['rows_that_differ']} of {found['measured_rows']} rows are other ids when tokenized again"
