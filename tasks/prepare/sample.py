"""A look at the first rows of a dataset's source, before anything is prepared.

Knows sources and adapters; does not know servers. Invariant: what it costs does not grow with the source.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tasks.prepare.preparation import PrepareOptions, adapt_rows
from tasks.prepare.sources import HubDataset, Source
from tasks.prepare.sources.parquet import count_rows
from tasks.records.rows import Prompt

SAMPLE_ROWS = 32
_LOOK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PromptSample:
    """The first prompts of a source; `rows` is how many rows it has, None when that is not cheaply known.

    `is_whole` when there are no other rows than those that were looked at.
    """

    prompts: list[Prompt]
    rows: int | None
    is_whole: bool


def sample_prompts(source: Source, options: PrepareOptions, *, limit: int = SAMPLE_ROWS) -> PromptSample:
    """Read the first rows.

    Raises:
        SourceError: a file cannot be read, or is not what its name says.
    """
    rows = list(islice(adapt_rows(source, options), limit))
    prompts = [row for row in rows if isinstance(row, Prompt)]
    if len(rows) < limit:
        return PromptSample(prompts, len(rows), is_whole=True)
    return PromptSample(prompts, _estimate_rows(source), is_whole=False)


def _estimate_rows(source: Source) -> int | None:
    if isinstance(source, HubDataset):
        return None
    counts = [_estimate_rows_of(path) for path in source]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _estimate_rows_of(path: Path) -> int | None:
    """Exact for parquet and for a small file of lines; the head's lines tell of a large one."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return count_rows(path)
    if not name.endswith((".jsonl", ".ndjson")):
        return None
    with path.open("rb") as stream:
        head = stream.read(_LOOK_BYTES)
    lines = head.count(b"\n") + (not head.endswith(b"\n"))
    return round(lines * path.stat().st_size / len(head)) if head else 0
