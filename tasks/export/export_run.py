"""From the datasets' response logs to one folder of training data.

Knows which formats there are, in which order an export is made, and whether one is there already; reading,
the files of each format and the words are for the other modules. Invariants: the same logs give the same
bytes; a row is exported or counted with the reason why not; a reader sees the old export or the new.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.export.batches import ReadCounts, Reading, read_batches
from tasks.export.card import build_card
from tasks.export.configs import Target, write_configs
from tasks.export.contamination import EvalFile, EvalSetError, describe_files
from tasks.export.earlier import explain_foreign
from tasks.export.files import (
    TOKENS_PER_GROUP,
    ExportError,
    ExportInputError,
    FileEntry,
    RowBatch,
    Sink,
    write_file,
)
from tasks.export.formats.arrow import TOKENS_PER_SHARD, ArrowSink
from tasks.export.formats.conversations import ConversationSink, Retokenizer, describe_retokenizer
from tasks.export.formats.jsonl import JsonlSink
from tasks.export.formats.parquet import ParquetSink
from tasks.export.formats.vocab import VocabSink
from tasks.export.key import Rules, build_key
from tasks.export.report import (
    MANIFEST,
    ExportReport,
    Totals,
    build_manifest,
    read_unchanged,
)
from tasks.export.rows import ExportDataset, hash_logs, hash_prompts
from tasks.export.split.assign import SPLITS
from tasks.export.threads import BackgroundSink
from tasks.prepare.sources.hash_cache import HashCache
from tasks.prepare.worker_process import WorkerDiedError
from tasks.records.files import dump_json
from tasks.records.folders import FolderError, ForeignFolderError, fill_folder, hold_folder, owned_folders
from tasks.tokens.draft_vocab import check_draft_vocab_size

FORMATS = ("parquet", "jsonl", "arrow", "vocab", "conversations")
_ROW_FORMATS = FORMATS[:3]
_SET_VOCAB_SIZE = (
    "write details.target_vocab_size into it (vocab_size of the model's config.json) and export again"
)


def export_run(
    *,
    datasets: Sequence[ExportDataset],
    out_dir: Path,
    eval_fraction: float,
    seed: int,
    formats: Collection[str],
    provenance: Mapping[str, Any],
    draft_vocab_size: int | None = None,
    drop_duplicates: bool = False,
    decontaminate: Sequence[Path] = (),
    target: Target | None = None,
    retokenizer: Retokenizer = "no tokenizer was given",
    rows_per_file: int | None = None,
    tokens_per_group: int = TOKENS_PER_GROUP,
    tokens_per_shard: int = TOKENS_PER_SHARD,
) -> ExportReport:
    """Write, check and swap in an export of these datasets, in this order; nothing where it is there already.

    Args:
        datasets: the ones to export; choosing by status is the caller's.
        out_dir: replaced whole; must be missing, empty or an earlier export.
        eval_fraction: share of first user turns in eval, 0 <= eval_fraction < 1.
        seed: of the split.
        formats: of FORMATS.
        provenance: JSON-able, goes into the manifest as it is.
        draft_vocab_size: of the format vocab; None leaves that out.
        drop_duplicates: leave out rows with the ids and the mask of an earlier row.
        decontaminate: evaluation sets; rows that share 13 words in a row with one are left out.
        target: the model that the data is of; without its vocab_size the format vocab is left out.
        retokenizer: measures what the format conversations loses; or why that is not measured.
        rows_per_file: starts another Parquet file after so many rows of a split.
        tokens_per_group: bounds a Parquet row group and an Arrow batch, and with them the memory.
        tokens_per_shard: bounds an Arrow file.

    Raises:
        ValueError: an unknown format, a number out of range, or two datasets of one name.
        ExportInputError: an evaluation set cannot be used, or the prompts be read, where these are
            needed; out_dir is not ours to replace; the rows have an id that the target lacks.
        ExportError: another process writes to out_dir, or what was written does not check.
    """
    rules = Rules(
        eval_fraction=eval_fraction,
        seed=seed,
        formats=tuple(name for name in FORMATS if name in formats),
        draft_vocab_size=draft_vocab_size,
        drop_duplicates=drop_duplicates,
        rows_per_file=rows_per_file,
        tokens_per_group=tokens_per_group,
        tokens_per_shard=tokens_per_shard,
    )
    target = target or Target()
    _check_arguments(datasets, formats, rules, target)
    _refuse_overlap(datasets, out_dir)
    with _as_export_error():
        evals = describe_files(decontaminate)
        with_conversations = "conversations" in rules.formats
        cache = HashCache(out_dir.parent)
        prompts = hash_prompts(datasets, cache, needs_texts=bool(evals) or with_conversations)
        cache.save()
    provenance = {**provenance, **_describe_evals(evals)}
    with _as_export_error(), hold_folder(out_dir):
        digests = hash_logs(datasets)
        described = describe_retokenizer(retokenizer) if with_conversations else None
        key = build_key(rules, target, provenance, datasets, digests, prompts=prompts, retokenizer=described)
        if (found := read_unchanged(out_dir, key)) is not None:
            return found
        reading = Reading(datasets, digests, rules, decontaminate, evals)
        with fill_folder(out_dir, explain_foreign=explain_foreign) as folder:
            sinks = _open_sinks(folder, rules, target, retokenizer)
            counts, files = _write_rows(reading, sinks)
            report = ExportReport(
                out_dir=out_dir,
                splits=counts.splits,
                datasets=counts.datasets,
                length_losses=counts.length_losses,
                files=files,
                key=key,
                split_by={**rules.split_by, "different_keys": counts.different_keys},
                vocab=_describe_vocab(sinks, rules, target),
                decontamination=counts.decontamination,
                conversations=_describe_conversations(sinks),
            )
            _check_sums(report, rules.formats)
            _write_descriptions(folder, report, rules, target, provenance)
    return report


def _check_arguments(
    datasets: Sequence[ExportDataset], formats: Collection[str], rules: Rules, target: Target
) -> None:
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown or not formats or isinstance(formats, str):
        raise ValueError(f"unknown export format {unknown or formats!r}; there are {', '.join(FORMATS)}")
    if not 0 <= rules.eval_fraction < 1:
        raise ValueError(f"eval_fraction is {rules.eval_fraction}; it must be at least 0 and below 1")
    for name in ("rows_per_file", "tokens_per_group", "tokens_per_shard"):
        value = getattr(rules, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if _explain_no_vocab(rules, target) is None and rules.draft_vocab_size and target.vocab_size:
        check_draft_vocab_size(rules.draft_vocab_size, target.vocab_size)
    names = [dataset.name for dataset in datasets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"datasets named more than once: {', '.join(twice)}")


def _refuse_overlap(datasets: Sequence[ExportDataset], out_dir: Path) -> None:
    """Replacing out_dir must never remove a response log."""
    for dataset in datasets:
        source = dataset.folder.resolve()
        if any(source.is_relative_to(folder.resolve()) for folder in owned_folders(out_dir)):
            raise ExportError(
                f"dataset {dataset.name!r} lies in {source}, which an export to {out_dir} would replace; "
                "name another out_dir"
            )


@contextlib.contextmanager
def _as_export_error() -> Iterator[None]:
    try:
        yield
    except ForeignFolderError as exc:
        raise ExportInputError(str(exc)) from exc
    except FolderError as exc:
        raise ExportError(str(exc)) from exc
    except WorkerDiedError as exc:
        raise ExportError(f"{exc}; the export that was there before is untouched") from exc
    except EvalSetError as exc:
        raise ExportInputError(str(exc)) from exc


def _describe_evals(evals: Sequence[EvalFile]) -> dict[str, Any]:
    """By name, not by path: the same files elsewhere make the same export."""
    files = [{"name": file.name, "sha256": file.sha256} for file in evals]
    return {"decontaminated_against": files} if files else {}


def _write_rows(reading: Reading, opened: Sequence[Sink]) -> tuple[ReadCounts, list[FileEntry]]:
    """Every row to every sink; returns what was counted of the rows, and the files."""
    with contextlib.ExitStack() as stack:
        sinks = [stack.enter_context(BackgroundSink(sink)) for sink in opened]

        def give(batch: RowBatch) -> None:
            for sink in sinks:
                sink.write(batch)

        counts = read_batches(reading, give)
        finished = [sink.finish() for sink in sinks]  # all of them at once, then the files in order
        return counts, [entry for files in finished for entry in files.result()]


def _write_descriptions(
    folder: Path, report: ExportReport, rules: Rules, target: Target, provenance: Mapping[str, Any]
) -> None:
    """The trainers' settings, the card, and last the manifest, which has them all."""
    vocab_size = report.vocab.get("draft_vocab_size")
    report.files.extend(
        write_configs(folder, formats=rules.formats, target=target, draft_vocab_size=vocab_size)
    )
    card = build_card(report).encode()
    report.files.append(write_file(folder, FileEntry("README.md", "card"), card))
    manifest = build_manifest(report, provenance=provenance)
    (folder / MANIFEST).write_bytes(dump_json(manifest))


def _open_sinks(folder: Path, rules: Rules, target: Target, retokenizer: Retokenizer) -> list[Sink]:
    sinks: list[Sink] = []
    if "parquet" in rules.formats:
        sinks.append(ParquetSink(folder, rows_per_file=rules.rows_per_file))
    if "jsonl" in rules.formats:
        sinks.append(JsonlSink(folder))
    if "arrow" in rules.formats:
        sinks.append(ArrowSink(folder, tokens_per_shard=rules.tokens_per_shard))
    if rules.draft_vocab_size and target.vocab_size and _explain_no_vocab(rules, target) is None:
        sizes = {"draft_vocab_size": rules.draft_vocab_size, "target_vocab_size": target.vocab_size}
        sinks.append(VocabSink(folder, **sizes))
    if "conversations" in rules.formats:
        sinks.append(ConversationSink(folder, retokenizer))
    return sinks


def _describe_vocab(sinks: Sequence[Sink], rules: Rules, target: Target) -> dict[str, Any]:
    for sink in sinks:
        if isinstance(sink, VocabSink):
            return sink.description
    return {"left_out": _explain_no_vocab(rules, target)}


def _describe_conversations(sinks: Sequence[Sink]) -> dict[str, Any]:
    return next((sink.description for sink in sinks if isinstance(sink, ConversationSink)), {})


def _explain_no_vocab(rules: Rules, target: Target) -> str | None:
    """Why there is no draft vocabulary; None where there is one."""
    if "vocab" not in rules.formats:
        return "not one of the formats"
    if rules.draft_vocab_size is None:
        return "none was asked for (draft_vocab_size is 0)"
    if target.vocab_size is None:
        return f"run.json does not tell how many ids the target has; {_SET_VOCAB_SIZE}"
    if target.vocab_size < 1:
        return (
            f"details.target_vocab_size in run.json is {target.vocab_size}, and no target has so few ids; "
            f"{_SET_VOCAB_SIZE}"
        )
    return None


def _check_sums(report: ExportReport, formats: Collection[str]) -> None:
    """Hold every format's files against what the datasets gave."""
    for name in (name for name in formats if name in _ROW_FORMATS):
        for split in SPLITS:
            files = [entry for entry in report.files if (entry.format, entry.split) == (name, split)]
            if _sum_files(files) != report.splits[split]:
                raise ExportError(
                    f"{name} {split}: {_sum_files(files)} in files, {report.splits[split]} read"
                )
    exported = Totals(
        sum(count.exported.rows for count in report.datasets),
        sum(count.exported.tokens for count in report.datasets),
        sum(count.exported.loss_tokens for count in report.datasets),
    )
    if exported != report.total:
        raise ExportError(f"the datasets gave {exported}, the splits hold {report.total}")


def _sum_files(files: Sequence[FileEntry]) -> Totals:
    return Totals(sum(f.rows for f in files), sum(f.tokens for f in files), sum(f.loss_tokens for f in files))
