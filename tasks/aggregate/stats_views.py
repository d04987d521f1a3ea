"""Statistics as JSON, as Parquet and as tables.

Knows how numbers are shown; does not compute any. Invariant: every view of one list of statistics
shows the same figures.
"""

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tasks.aggregate.stats import PLOT_FIELDS, DatasetStats, total_stats
from tasks.records.files import write_bytes_atomically, write_json_atomically

_QUANTILES = ("p5", "p25", "p50", "p75", "p95", "max", "mean")
_LEFT = ("dataset", "status")
_TERMINAL = (
    *("dataset", "status", "answers", "completion tokens", "budget", "reached"),
    *("median", "cut off", "not used", "mean tokens/s"),
)
_SHORT = {
    "completion tokens": "tokens",
    "median": "median\nlength",
    "cut off": "cut\noff",
    "not used": "not\nused",
    "mean tokens/s": "mean\ntokens/s",
}
_FOOTER = (
    "reached: of the budget, or of the prompts where there is none; median length: of an answer, in tokens; "
    "cut off: at max_new_tokens; mean tokens/s: pauses of more than 5 minutes left out"
)
_LEFT_OUT = "total: its tokens and its speed leave out the datasets without a budget"
_WORDS = {"complete": "done", "incomplete": "not done", "exhausted": "out of prompts"}
_PARQUET_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("status", pa.string()),
        *(
            (name, pa.int64())
            for name in ("rows", "answered", "prompts", "prompt_tokens", "completion_tokens")
        ),
        *((name, pa.int64()) for name in ("budget_tokens", "max_samples")),
        ("reached_percent", pa.float64()),
        *((f"completion_{name}", pa.float64() if name == "mean" else pa.int64()) for name in _QUANTILES),
        *((name, pa.int64()) for name in ("empty", "not_token_exact", "duplicates", "unreadable")),
        *((name, pa.int64()) for name in ("permanently_rejected", "retries")),
        *((name, pa.string()) for name in ("started_at", "first_finished_at", "last_finished_at")),
        ("mean_tokens_per_s", pa.float64()),
        *((name, pa.string()) for name in ("finish_reasons", "rejected", "prepare")),
    ]
)


def stats_to_json(stats: Sequence[DatasetStats]) -> dict[str, Any]:
    """`{"datasets": [...], "total": {...}}`, ready for stats.json; what only plots need is left out."""
    return {"datasets": [_fields(one) for one in stats], "total": _fields(total_stats(stats))}


def stats_to_parquet(stats: Sequence[DatasetStats]) -> bytes:
    """stats.parquet: a row per dataset and no total, so that sums over it are right.

    Quantiles are columns `completion_*`; the three breakdowns are JSON text.
    """
    buffer = io.BytesIO()
    rows = [_flat_fields(one) for one in stats]
    pq.write_table(pa.Table.from_pylist(rows, schema=_PARQUET_SCHEMA), buffer, compression="zstd")
    return buffer.getvalue()


def write_stats(stats: Sequence[DatasetStats], folder: Path) -> None:
    """Replace stats.json and stats.parquet in a folder."""
    write_json_atomically(folder / "stats.json", stats_to_json(stats))
    write_bytes_atomically(folder / "stats.parquet", stats_to_parquet(stats))


def stats_rows(stats: Sequence[DatasetStats]) -> list[dict[str, str]]:
    """A line per dataset and one for the total, as text: the rows of a Prefect table artifact."""
    return [_row(one) for one in (*stats, total_stats(stats))]


def stats_table(stats: Sequence[DatasetStats]) -> RenderableType:
    """The main figures for a terminal, the total below a rule, and what the words mean."""
    table = Table(pad_edge=False, box=SIMPLE_HEAD, padding=0)
    for name in _TERMINAL:
        left = name in _LEFT
        table.add_column(_SHORT.get(name, name), justify="left" if left else "right", no_wrap=not left)
    *rows, total = (_terminal_row(one) for one in (*stats, total_stats(stats)))
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*total, style="bold")
    rejected = total_stats(stats).rejected
    left_out = _LEFT_OUT if len({one.budget_tokens is None for one in stats}) > 1 else ""
    aside = f"not used, with the reason in rejected.jsonl: {format_counts(rejected)}" if rejected else ""
    return Group(table, *(Text(text, style="dim") for text in (left_out, aside, _FOOTER) if text))


def _terminal_row(stats: DatasetStats) -> list[Text]:
    cut = stats.finish_reasons.get("length", 0)
    row = _row(stats) | {
        "budget": "" if stats.budget_tokens is None else shorten(stats.budget_tokens),
        "median": f"{stats.lengths.p50:,}" if stats.lengths else "",
        "cut off": f"{cut / stats.rows:.0%}" if stats.rows else "",
        "not used": f"{sum(stats.rejected.values()):,}",
    }
    return [Text(row[name], overflow="fold") for name in _TERMINAL]


def format_counts(counts: Mapping[str, int]) -> str:
    """Counts by name, as one cell of a table."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def count_of(number: int, what: str) -> str:
    """A number of things."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def shorten(count: int) -> str:
    """A count in three digits: 12,345 is 12.3k."""
    for unit, suffix in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if count >= unit:
            value = count / unit
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{suffix}"
    return str(count)


def format_percent(percent: float) -> str:
    """One decimal, and never 100.0% for what is short of it."""
    return f"{math.floor(percent * 10 + 1e-6) / 10:.1f}%"


def describe_status(status: str) -> str:
    """The status or state of a dataset in plain words; those that are plain stay."""
    return _WORDS.get(status, status)


def _fields(stats: DatasetStats) -> dict[str, Any]:
    fields = dataclasses.asdict(stats)
    return {name: value for name, value in fields.items() if name not in PLOT_FIELDS}


def _flat_fields(stats: DatasetStats) -> dict[str, Any]:
    fields = _fields(stats)
    lengths = fields.pop("lengths") or {}
    fields |= {f"completion_{name}": lengths.get(name) for name in _QUANTILES}
    for name in ("finish_reasons", "rejected", "prepare"):
        fields[name] = orjson.dumps(fields[name], option=orjson.OPT_SORT_KEYS).decode()
    return fields


def _row(stats: DatasetStats) -> dict[str, str]:
    lengths = stats.lengths
    return {
        "dataset": stats.name,
        "status": describe_status(stats.status),
        "answers": f"{stats.rows:,}",
        "prompts": "" if stats.prompts is None else f"{stats.prompts:,}",
        "prompt tokens": f"{stats.prompt_tokens:,}",
        "completion tokens": f"{stats.completion_tokens:,}",
        "budget": "" if stats.budget_tokens is None else f"{stats.budget_tokens:,}",
        "reached": format_percent(stats.reached_percent),
        "finish reasons": format_counts(stats.finish_reasons),
        "length p5/p50/p95/max": f"{lengths.p5}/{lengths.p50}/{lengths.p95}/{lengths.max}" if lengths else "",
        "mean": f"{lengths.mean:,.0f}" if lengths else "",
        "empty": f"{stats.empty:,}",
        "not used": format_counts(stats.rejected),
        "retries": f"{stats.retries:,}",
        "mean tokens/s": "" if stats.mean_tokens_per_s is None else f"{stats.mean_tokens_per_s:,.0f}",
    }
