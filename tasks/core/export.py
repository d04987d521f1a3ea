"""From the datasets' response logs to one folder of training data.

Knows which rows are exported, under which id and into which split; the files are made by export_parquet
and export_files, the words by export_report. Invariants: the same logs give the same bytes; a row is
exported or counted with the reason why not; a reader sees the old export or the new one.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tasks.core.export_files import ExportError, ExportRow, FileEntry, JsonlSink, Sink
from tasks.core.export_parquet import TOKENS_PER_GROUP, ParquetSink, check_parquet
from tasks.core.export_report import (
    LENGTH_LIMITS,
    MANIFEST,
    DatasetCount,
    ExportReport,
    LengthLoss,
    Totals,
    build_card,
    build_manifest,
)
from tasks.core.files import dump_json
from tasks.core.folders import FolderError, owned_folders, replace_folder_atomically
from tasks.core.masks import NotTokenExact, Sample, is_empty_answer, samples_from_response
from tasks.core.records import RecordError, Response
from tasks.core.response_log import RESPONSES, read_lines
from tasks.core.split import SPLITS, assign_split

FORMATS = ("jsonl", "parquet")
_REPORT_ROWS = 1000


@dataclass(frozen=True, slots=True)
class ExportDataset:
    """A dataset to export; `status` and `kind` are only passed on to the manifest."""

    name: str
    folder: Path
    status: str
    kind: str = "generate"


def export_run(
    *,
    datasets: Sequence[ExportDataset],
    out_dir: Path,
    eval_fraction: float,
    seed: int,
    formats: Collection[str],
    provenance: Mapping[str, Any],
    rows_per_file: int | None = None,
    tokens_per_group: int = TOKENS_PER_GROUP,
    on_rows: Callable[[int], None] | None = None,
) -> ExportReport:
    """Write, check and swap in an export of these datasets, in this order.

    Args:
        datasets: the ones to export; choosing by status is the caller's.
        out_dir: replaced whole; must be missing, empty or an earlier export.
        eval_fraction: share of conversations in eval, 0 <= eval_fraction < 1.
        seed: of the split.
        formats: of FORMATS.
        provenance: JSON-able, goes into the manifest as it is.
        rows_per_file: starts another Parquet file after so many rows of a split.
        tokens_per_group: bounds a Parquet row group, and with it the memory.
        on_rows: told the number of rows exported so far, every 1,000 rows.

    Raises:
        ValueError: an unknown format, a number out of range, or two datasets of one name.
        ExportError: out_dir may not be replaced, or what was written does not check.
    """
    _check_arguments(datasets, eval_fraction, formats, rows_per_file, tokens_per_group)
    _refuse_overlap(datasets, out_dir)
    split_by = {"key": "conversation_id", "seed": seed, "eval_fraction": eval_fraction}
    report = ExportReport(
        out_dir=out_dir,
        splits={split: Totals() for split in SPLITS},
        datasets=[DatasetCount(d.name, d.status, d.kind) for d in datasets],
        length_losses=[LengthLoss(limit) for limit in LENGTH_LIMITS],
        files=[],
    )
    with _as_export_error(), replace_folder_atomically(out_dir, marker=MANIFEST) as folder:
        with contextlib.ExitStack() as stack:
            sinks = _open_sinks(stack, folder, formats, rows_per_file, tokens_per_group)
            for done, row in enumerate(_read_all(datasets, report.datasets), start=1):
                split = assign_split(row.conversation_id, seed=seed, eval_fraction=eval_fraction)
                for sink in sinks:
                    sink.add(split, row)
                report.splits[split].add(row.sample)
                for loss in report.length_losses:
                    loss.add(row.sample)
                if on_rows is not None and done % _REPORT_ROWS == 0:
                    on_rows(done)
            report.files.extend(entry for sink in sinks for entry in sink.finish())
        _check_export(folder, report, formats)
        manifest = build_manifest(report, split=split_by, provenance=provenance)
        (folder / "README.md").write_text(build_card(report, split=split_by), encoding="utf-8")
        (folder / MANIFEST).write_bytes(dump_json(manifest))
    return report


def _check_arguments(
    datasets: Sequence[ExportDataset],
    eval_fraction: float,
    formats: Collection[str],
    rows_per_file: int | None,
    tokens_per_group: int,
) -> None:
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown or not formats or isinstance(formats, str):
        raise ValueError(f"unknown export format {unknown or formats!r}; there are {', '.join(FORMATS)}")
    if not 0 <= eval_fraction < 1:
        raise ValueError(f"eval_fraction is {eval_fraction}; it must be at least 0 and below 1")
    if (rows_per_file is not None and rows_per_file < 1) or tokens_per_group < 1:
        raise ValueError(f"rows_per_file {rows_per_file} and tokens_per_group {tokens_per_group}: at least 1")
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
    except FolderError as exc:
        raise ExportError(str(exc)) from exc


def _open_sinks(
    stack: contextlib.ExitStack,
    folder: Path,
    formats: Collection[str],
    rows_per_file: int | None,
    tokens_per_group: int,
) -> list[Sink]:
    sinks: list[Sink] = []
    if "parquet" in formats:
        sinks.append(ParquetSink(folder, rows_per_file=rows_per_file, tokens_per_group=tokens_per_group))
    if "jsonl" in formats:
        sinks.append(JsonlSink(folder))
    return [stack.enter_context(sink) for sink in sinks]


def _read_all(datasets: Sequence[ExportDataset], counts: Sequence[DatasetCount]) -> Iterator[ExportRow]:
    for dataset, count in zip(datasets, counts, strict=True):
        yield from _read_rows(dataset.folder / RESPONSES, count)


def _read_rows(path: Path, count: DatasetCount) -> Iterator[ExportRow]:
    """The exportable rows of a log; everything else is counted. Holds the ids, about 100 bytes a row."""
    if not path.exists():
        return
    seen: set[str | tuple[str, int]] = set()
    count.source_bytes = 0
    for end, line in read_lines(path):
        count.source_bytes = end
        try:
            response = Response.from_line(line)
        except RecordError:
            count.skipped["unreadable"] += 1
            continue
        key = (response.id, response.turn) if response.turn else response.id
        if key in seen:
            count.duplicates += 1
            continue
        seen.add(key)
        try:
            samples = samples_from_response(response)
        except NotTokenExact as exc:
            count.skipped[exc.reason] += 1
            continue
        for sample in samples:
            if is_empty_answer(sample.n_loss, sample.finish_reason):
                count.skipped["empty_answer"] += 1
                continue
            count.exported.add(sample)
            yield _to_export_row(response, sample, count.name)
    if path.stat().st_size > count.source_bytes:
        count.skipped["torn_last_line"] += 1


def _to_export_row(response: Response, sample: Sample, dataset: str) -> ExportRow:
    meta = response.extra.get("meta") or {}
    return ExportRow(
        id=f"{response.id}#{sample.turn}" if sample.turn else response.id,
        sample=sample,
        dataset=dataset,
        conversation_id=str(response.extra.get("conversation_id") or response.id),
        meta=orjson.dumps(meta, option=orjson.OPT_SORT_KEYS).decode(),
    )


def _check_export(folder: Path, report: ExportReport, formats: Collection[str]) -> None:
    """Read the Parquet files back; hold every format's files against what the datasets gave."""
    for entry in report.files:
        if entry.format == "parquet":
            check_parquet(folder, entry)
    for name in formats:
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
