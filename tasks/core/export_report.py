"""What an export counted, as manifest.json and as the dataset card.

Knows sums and words; does not know responses or file formats. Invariant: nothing here depends on the
time or the machine, so equal exports have equal manifests.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.export_files import FileEntry
from tasks.core.masks import Sample
from tasks.core.split import SPLITS, Split

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
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
    rows of an (id, turn). `source_bytes` is how much of the log was read, None when there was no log.
    """

    name: str
    status: str
    kind: str
    source_bytes: int | None = None
    exported: Totals = field(default_factory=Totals)
    duplicates: int = 0
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
    """A finished export; both splits are there, also when one has no rows and no file."""

    out_dir: Path
    splits: dict[Split, Totals]
    datasets: list[DatasetCount]
    length_losses: list[LengthLoss]
    files: list[FileEntry]

    @property
    def total(self) -> Totals:
        """Both splits together."""
        parts = self.splits.values()
        return Totals(
            sum(t.rows for t in parts), sum(t.tokens for t in parts), sum(t.loss_tokens for t in parts)
        )


def build_manifest(report: ExportReport, *, split: Mapping[str, Any], provenance: Mapping[str, Any]) -> Any:
    """The manifest as JSON-able values."""
    return {
        "format": MANIFEST_FORMAT,
        "files": [asdict(entry) for entry in report.files],
        "splits": {name: asdict(report.splits[name]) for name in SPLITS},
        "split_by": dict(split),
        "datasets": [_describe(count) for count in report.datasets],
        "max_length": [asdict(loss) for loss in report.length_losses],
        "provenance": dict(provenance),
        "total": asdict(report.total),
    }


def build_card(report: ExportReport, *, split: Mapping[str, Any]) -> str:
    """README.md: what is here, how to load it, and the counts."""
    formats = {entry.format for entry in report.files}
    parts = [
        _front_matter(report),
        _INTRODUCTION,
        _files_section(report),
        _PARQUET_SECTION if "parquet" in formats else "",
        _JSONL_SECTION if "jsonl" in formats else "",
        _counts_section(report),
        _SPLIT_LINE.format_map(split),
        _lengths_section(report),
    ]
    return "\n".join(part for part in parts if part)


def _describe(count: DatasetCount) -> dict[str, Any]:
    return {
        "name": count.name,
        "status": count.status,
        "kind": count.kind,
        "source_bytes": count.source_bytes,
        **asdict(count.exported),
        "duplicates": count.duplicates,
        "skipped": dict(count.skipped),
    }


def _front_matter(report: ExportReport) -> str:
    splits = [name for name in SPLITS if any((f.format, f.split) == ("parquet", name) for f in report.files)]
    if not splits:
        return ""
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for name in splits:
        lines += [f"  - split: {name}", f"    path: data/{name}-*.parquet"]
    return "\n".join([*lines, "---", ""])


def _files_section(report: ExportReport) -> str:
    rows = [
        (f.path, f"{f.rows:,}", f"{f.tokens:,}", f"{f.loss_tokens:,}", f"{f.bytes:,}") for f in report.files
    ]
    return "## Files\n\n" + _table(("file", "rows", "tokens", "loss tokens", "bytes"), rows)


def _counts_section(report: ExportReport) -> str:
    rows = [
        (
            count.name,
            count.status,
            f"{count.exported.rows:,}",
            f"{count.exported.tokens:,}",
            f"{count.exported.loss_tokens:,}",
            f"{count.duplicates:,}",
            ", ".join(f"{reason} {n:,}" for reason, n in sorted(count.skipped.items())),
        )
        for count in report.datasets
    ]
    total = report.total
    rows.append(("total", "", f"{total.rows:,}", f"{total.tokens:,}", f"{total.loss_tokens:,}", "", ""))
    header = ("dataset", "status", "rows", "tokens", "loss tokens", "duplicates", "skipped")
    return "## Counts\n\n" + _table(header, rows)


def _lengths_section(report: ExportReport) -> str:
    rows = [
        (f"{x.max_length:,}", f"{x.rows_cut:,}", f"{x.rows_without_loss:,}", f"{x.loss_tokens_lost:,}")
        for x in report.length_losses
    ]
    header = ("max_length", "rows cut", "rows left without loss tokens", "loss tokens lost")
    return "## What a trainer's max_length would lose\n\n" + _table(header, rows)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [header, ("---",) * len(header), *rows]
    return "".join("| " + " | ".join(_cell(text) for text in row) + " |\n" for row in cells)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


_INTRODUCTION = """\
# Token-exact drafter training data

Written by draftmill. A row is one generation: `input_ids` are the ids the target model saw, followed by the
ids it produced; `loss_mask` is 1 exactly on the produced ids, the stop token included. Nothing is shifted,
cut or added. `manifest.json` has the hashes and the provenance.
"""
_SPLIT_LINE = """\
Split by a hash of the conversation id: seed {seed}, eval fraction {eval_fraction}. The turns of a
conversation stay together.
"""
_PARQUET_SECTION = """\
## Parquet

| column | type | |
| --- | --- | --- |
| id | string | the row's id; `<id>#<turn>` for the later turns of a conversation |
| input_ids | `list<int32>` | prompt and answer |
| loss_mask | `list<uint8>` | 1 on the answer |
| n_tokens, n_loss | int32 | their length, and the ones of the mask |
| finish_reason | string | "stop", or "length" when the answer was cut by max_new_tokens |
| dataset, conversation_id, turn | string, string, int32 | where the row comes from |
| meta | string | JSON |

```python
import pyarrow.dataset as ds

for batch in ds.dataset("data", format="parquet").to_batches(columns=["input_ids", "loss_mask"]):
    ids = batch["input_ids"]
    flat, starts = ids.values.to_numpy(), ids.offsets.to_numpy()  # row n is flat[starts[n] : starts[n + 1]]
```
"""
_JSONL_SECTION = """\
## JSONL

`jsonl/*.jsonl` has `id`, `input_ids` and `loss_mask` of the same rows in the same order, and no other key:
SpecForge `data.prompts_path`, `speculators prepare-data`.
"""
