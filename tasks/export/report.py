"""What an export counted, as manifest.json.

Knows sums; does not know responses, file formats or the card. Invariant: nothing here depends on the time or
the machine, so equal exports have equal manifests.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tasks.export.files import FileEntry
from tasks.export.split.assign import SPLITS, Split
from tasks.tokens.masks import Sample

MANIFEST = "manifest.json"
EXPORT_FORMAT = 5  # raise it when the same rows give other bytes
LENGTH_LIMITS = (2048, 4096, 8192, 16384, 32768)


@dataclass(slots=True)
class Totals:
    """Rows, their tokens, and the tokens under the mask."""

    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0

    def add(self, sample: Sample) -> None:
        """Count a sample."""
        self.rows += 1
        self.tokens += sample.n_tokens
        self.loss_tokens += sample.n_loss


@dataclass(slots=True)
class DatasetCount:
    """What was exported of a dataset and what was not.

    `skipped` counts lines by reason; "torn_last_line" is one that was not whole. `duplicates` are further
    rows of an (id, turn), `exact_duplicates` those left out for having the ids and the mask of an earlier
    row of any dataset. `texts_unknown` are exported rows that are in no conversation. `split_by_id` are those
    whose prompt was not found: they are split by their conversation id. `shared_conversations` have a first
    user turn that another dataset has too. `source_bytes` is how much of the log was read and `source_sha256`
    its hash, None when there was no log.
    """

    name: str
    status: str
    kind: str
    source_bytes: int | None = None
    source_sha256: str | None = None
    exported: Totals = field(default_factory=Totals)
    duplicates: int = 0
    exact_duplicates: int = 0
    texts_unknown: int = 0
    split_by_id: int = 0
    shared_conversations: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class LengthLoss:
    """What a trainer loses that cuts rows at `max_length`."""

    max_length: int
    rows_cut: int = 0
    rows_without_loss: int = 0
    loss_tokens_lost: int = 0

    def add(self, sample: Sample) -> None:
        """Count a sample."""
        if sample.n_tokens <= self.max_length:
            return
        lost = int(sample.loss_mask[self.max_length :].sum())
        self.rows_cut += 1
        self.rows_without_loss += lost == sample.n_loss
        self.loss_tokens_lost += lost


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A finished export; both splits are there, also when one has no rows and no file.

    `key` is of everything that it was made of. `split_by` says how rows were split, and how many keys there
    were to split them by. `vocab` describes the draft vocabulary, or has "left_out".
    `decontamination` is empty where nothing was compared with evaluation sets, `conversations` where none
    were written.
    With `unchanged` the export was there already, and nothing was written.
    """

    out_dir: Path
    splits: dict[Split, Totals]
    datasets: list[DatasetCount]
    length_losses: list[LengthLoss]
    files: list[FileEntry]
    key: str
    split_by: dict[str, Any]
    vocab: dict[str, Any] = field(default_factory=dict)
    decontamination: dict[str, Any] = field(default_factory=dict)
    conversations: dict[str, Any] = field(default_factory=dict)
    unchanged: bool = False

    @property
    def total(self) -> Totals:
        """Both splits together."""
        parts = self.splits.values()
        return Totals(
            sum(t.rows for t in parts), sum(t.tokens for t in parts), sum(t.loss_tokens for t in parts)
        )


def build_manifest(report: ExportReport, *, provenance: Mapping[str, Any]) -> Any:
    """The manifest as JSON-able values."""
    return {
        "format": EXPORT_FORMAT,
        "key": report.key,
        "files": [asdict(entry) for entry in report.files],
        "splits": {name: asdict(report.splits[name]) for name in SPLITS},
        "split_by": report.split_by,
        "datasets": [_describe(count) for count in report.datasets],
        "max_length": [asdict(loss) for loss in report.length_losses],
        "provenance": dict(provenance),
        "total": asdict(report.total),
        "vocab": report.vocab,
        "decontamination": report.decontamination,
        "conversations": report.conversations,
    }


def read_unchanged(out_dir: Path, key: str) -> ExportReport | None:
    """The report of the export in a folder, when it has this key and all its files."""
    try:
        manifest = orjson.loads((out_dir / MANIFEST).read_bytes())
        if manifest["key"] != key:
            return None
        report = _read_report(out_dir, manifest)
        if any((out_dir / file.path).stat().st_size != file.bytes for file in report.files):
            return None
    except (OSError, ValueError, KeyError, TypeError):  # none, damaged, of an older format, or a file is gone
        return None
    return report


def _read_report(out_dir: Path, manifest: Mapping[str, Any]) -> ExportReport:
    return ExportReport(
        out_dir=out_dir,
        splits={split: Totals(**manifest["splits"][split]) for split in SPLITS},
        datasets=[_read_count(dict(one)) for one in manifest["datasets"]],
        length_losses=[LengthLoss(**one) for one in manifest["max_length"]],
        files=[FileEntry(**one) for one in manifest["files"]],
        key=manifest["key"],
        split_by=manifest["split_by"],
        vocab=manifest["vocab"],
        decontamination=manifest["decontamination"],
        conversations=manifest["conversations"],
        unchanged=True,
    )


def _describe(count: DatasetCount) -> dict[str, Any]:
    return {
        "name": count.name,
        "status": count.status,
        "kind": count.kind,
        "source_bytes": count.source_bytes,
        "source_sha256": count.source_sha256,
        **asdict(count.exported),
        "duplicates": count.duplicates,
        "exact_duplicates": count.exact_duplicates,
        "texts_unknown": count.texts_unknown,
        "split_by_id": count.split_by_id,
        "shared_conversations": count.shared_conversations,
        "skipped": dict(count.skipped),
    }


def _read_count(row: dict[str, Any]) -> DatasetCount:
    """What _describe made."""
    exported = Totals(**{name: row.pop(name) for name in ("rows", "tokens", "loss_tokens")})
    return DatasetCount(**{**row, "skipped": Counter(row["skipped"])}, exported=exported)
