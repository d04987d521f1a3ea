"""Statistics as JSON, as Parquet and as tables.

Knows how numbers are shown; does not compute any. Invariant: every view of one list of statistics
shows the same figures.
"""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

from tasks.core.files import write_bytes_atomically, write_json_atomically
from tasks.core.stats import PLOT_FIELDS, DatasetStats, total_stats

_QUANTILES = ("p5", "p25", "p50", "p75", "p95", "max", "mean")
_LEFT = ("dataset", "status", "finish reasons", "set aside")
_TERMINAL = (
    "dataset",
    "status",
    "rows",
    "completion tokens",
    "budget",
    "reached",
    "length p5/p50/p95/max",
    "finish reasons",
    "set aside",
    "tokens/s",
)
_SHORT = {"completion tokens": "tokens", "length p5/p50/p95/max": "p5/p50/p95/max"}
_PARQUET_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("status", pa.string()),
        *(
            (name, pa.int64())
            for name in ("rows", "answered", "prompts", "prompt_tokens", "completion_tokens")
        ),
        ("budget_tokens", pa.int64()),
        ("budget_share", pa.float64()),
        *((f"completion_{name}", pa.float64() if name == "mean" else pa.int64()) for name in _QUANTILES),
        *((name, pa.int64()) for name in ("empty", "not_token_exact", "duplicates", "unreadable")),
        *((name, pa.int64()) for name in ("permanently_rejected", "retries")),
        *((name, pa.string()) for name in ("started_at", "first_finished_at", "last_finished_at")),
        ("tokens_per_s", pa.float64()),
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


def stats_table(stats: Sequence[DatasetStats]) -> Table:
    """The main columns of the same lines for a terminal of 100 columns, the total below a rule."""
    rows = [{name: row[name] for name in _TERMINAL} for row in stats_rows(stats)]
    table = Table(pad_edge=False)
    for name in rows[0]:
        left = name in _LEFT
        table.add_column(_SHORT.get(name, name), justify="left" if left else "right", overflow="fold")
    for row in rows[:-1]:
        table.add_row(*row.values())
    table.add_section()
    table.add_row(*rows[-1].values(), style="bold")
    return table


def format_counts(counts: Mapping[str, int]) -> str:
    """Counts by name, as one cell of a table."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


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
        "status": stats.status,
        "rows": f"{stats.rows:,}",
        "prompts": "" if stats.prompts is None else f"{stats.prompts:,}",
        "prompt tokens": f"{stats.prompt_tokens:,}",
        "completion tokens": f"{stats.completion_tokens:,}",
        "budget": "" if stats.budget_tokens is None else f"{stats.budget_tokens:,}",
        "reached": "" if stats.budget_share is None else f"{stats.budget_share:.1%}",
        "finish reasons": format_counts(stats.finish_reasons),
        "length p5/p50/p95/max": f"{lengths.p5}/{lengths.p50}/{lengths.p95}/{lengths.max}" if lengths else "",
        "mean": f"{lengths.mean:,.0f}" if lengths else "",
        "empty": f"{stats.empty:,}",
        "set aside": format_counts(stats.rejected),
        "retries": f"{stats.retries:,}",
        "tokens/s": "" if stats.tokens_per_s is None else f"{stats.tokens_per_s:,.0f}",
    }
