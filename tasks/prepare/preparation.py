"""From source rows to prompts.jsonl: adapted, told apart, shuffled, reported.

Knows sources, adapters and the dispatch order; does not know templates or servers. Invariant: the same
source, options and seed give the same bytes; every row read is a prompt, a duplicate, a rejected row or one
left over.
"""

import contextlib
import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tasks.prepare.parallel_draft import copy_kept, draft_source, start_workers
from tasks.prepare.prompt_draft import PromptDraft
from tasks.prepare.row_batches import PrepareOptions, make_batches
from tasks.prepare.sources import Source, iter_rows, name_empty
from tasks.prepare.worker_process import Worker
from tasks.records.files import name_in_errors, remove_stale_temps, replace_atomically, write_json_atomically
from tasks.records.prompt_file import PromptFile, write_entries
from tasks.records.response_log import REJECTED, parse_line, read_lines
from tasks.records.rows import Prompt, Rejected

__all__ = [
    "PROMPTS",
    "REPORT",
    "EmptyDatasetError",
    "PrepareOptions",
    "PrepareReport",
    "adapt_rows",
    "open_prompts",
    "prepare_prompts",
    "read_report",
]

PROMPTS = "prompts.jsonl"
REPORT = "prepare.json"
_DRAFT = ".prompts.draft"

_Step = TypeVar("_Step")


class EmptyDatasetError(ValueError):
    """A source without a single usable prompt."""


class PreparationStoppedError(RuntimeError):
    """Nobody waits for the prompts any more; what was prepared before is as it was."""


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What became of every row of a source: rows_read = conversations + duplicates + rejected + left_over.

    `prompts` is how many answers the conversations are to get; `left_over` are those beyond max_prompts.
    `nulls_removed` counts the null fields with which parquet padded the rows' structs.
    """

    key: str
    rows_read: int
    conversations: int
    prompts: int
    duplicates: int
    rejected: dict[str, int]
    left_over: int = 0
    nulls_removed: int = 0
    reused: bool = False

    def to_line(self) -> str:
        """For the log."""
        rejected = sum(self.rejected.values())
        became = f"{self.prompts} prompts, {self.duplicates} duplicates and {rejected} rejected"
        parts = [f"{self.rows_read} rows are {became}"]
        parts += [f"{self.left_over} are left over"] if self.left_over else []
        parts += [f"{self.nulls_removed} null fields that parquet pads removed"] if self.nulls_removed else []
        return "; ".join(parts) + " (prepared before)" * self.reused


def prepare_prompts(
    folder: Path,
    sources: Source,
    *,
    options: PrepareOptions,
    source_sha256: str,
    check_source: Callable[[], None] = lambda: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> PrepareReport:
    """Write `<folder>/prompts.jsonl`, its index and prepare.json; keep them when they are up to date.

    Hold the dataset's lock: rejected.jsonl is rewritten, with what generation rejected kept.

    Args:
        folder: Of the dataset.
        sources: What `resolve_source` found.
        options: What becomes of its rows.
        source_sha256: What it hashed to.
        check_source: Raises where it is not what was hashed; called when all of it was read.
        is_stopped: Whether to give up; asked again and again.

    Raises:
        EmptyDatasetError: no row became a prompt; says what became of them.
        PreparationStoppedError: it was stopped.
        SourceError: a file that is no data at all.
        WorkerDiedError: a process that prepares rows of a large source was killed.
    """
    remove_stale_temps(folder)
    key = options.key(source_sha256)
    if (known := read_report(folder)) is not None and known.key == key and (folder / PROMPTS).exists():
        return dataclasses.replace(known, reused=True)
    for _ in _read_generation_rejects(folder):
        pass  # a damaged line is found before anything is written
    with _open_draft(folder, options) as draft, start_workers(sources, options, draft) as workers:
        rows = _go_on(draft_source(sources, options, draft, workers), is_stopped)
        rejected = _collect(rows, folder / _DRAFT / REJECTED)
        check_source()
        draft.settle(max_prompts=options.max_prompts)
        report = PrepareReport(
            key=key,
            rows_read=len(draft) + rejected.total(),
            conversations=draft.conversations,
            prompts=draft.answers,
            duplicates=draft.duplicates,
            rejected=dict(sorted(rejected.items())),
            left_over=draft.left_over,
            nulls_removed=draft.nulls_removed,
        )
        if not report.prompts:
            _write_rejected(folder, folder / _DRAFT / REJECTED)
            why = f"rejected: {report.rejected or 'none'}" if report.rows_read else name_empty(sources)
            raise EmptyDatasetError(
                f"dataset {options.name!r}: {report.rows_read} rows read, none became a prompt "
                f"({why}); check its source and its adapter "
                f"{options.adapter!r}"
            )
        _write_prompts(folder, draft, workers, is_stopped, own_history=options.shape == "each")
        _write_rejected(folder, folder / _DRAFT / REJECTED)
    write_json_atomically(folder / REPORT, dataclasses.asdict(report))
    return report


def read_report(folder: Path) -> PrepareReport | None:
    """What the last preparation said, or None."""
    try:
        data = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        data = {"left_over": 0, "nulls_removed": 0, **data}  # reports of older versions lack them
        return PrepareReport(**{f.name: data[f.name] for f in dataclasses.fields(PrepareReport)})
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def open_prompts(folder: Path) -> PromptFile:
    """The prepared prompts of a dataset folder."""
    return PromptFile(folder / PROMPTS)


def adapt_rows(sources: Source, options: PrepareOptions) -> Iterator[Prompt | Rejected]:
    """Every row of a source, in its order, as a prompt or with why it is none."""
    for row in iter_rows(sources):
        for batch in make_batches([row], options):
            yield from map(Prompt.from_line, batch.lines)
            yield from (Rejected.from_line(line) for _, line in batch.rejected)


def _read_generation_rejects(folder: Path) -> Iterator[bytes]:
    """The lines of rejected.jsonl that generation wrote."""
    path = folder / REJECTED
    for end, line in read_lines(path):
        if parse_line(Rejected.from_line, line, path, end).stage == "generate":
            yield line


@contextlib.contextmanager
def _open_draft(folder: Path, options: PrepareOptions) -> Iterator[PromptDraft]:
    """An empty draft in a folder of its own, which is removed in the end."""
    place = folder / _DRAFT
    shutil.rmtree(place, ignore_errors=True)  # of a killed preparation
    place.mkdir(parents=True)
    try:
        with name_in_errors(place), contextlib.closing(PromptDraft(place, seed=options.seed)) as draft:
            yield draft
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _go_on(steps: Iterable[_Step], is_stopped: Callable[[], bool]) -> Iterator[_Step]:
    """The same, until it is stopped."""
    for step in steps:
        if is_stopped():
            raise PreparationStoppedError("the preparation was stopped; nothing was changed")
        yield step


def _collect(rejected: Iterable[list[tuple[str, bytes]]], path: Path) -> Counter[str]:
    """Write the rejected rows to a file; returns how many they are by reason."""
    reasons: Counter[str] = Counter()
    with path.open("wb") as set_aside:
        for rows in rejected:
            for reason, line in rows:
                reasons[reason] += 1
                set_aside.write(line)
    return reasons


def _write_prompts(
    folder: Path,
    draft: PromptDraft,
    workers: Sequence[Worker],
    is_stopped: Callable[[], bool],
    *,
    own_history: bool,
) -> None:
    with replace_atomically(folder / PROMPTS) as out:
        if workers:
            for _ in _go_on(copy_kept(draft, Path(out.name), workers), is_stopped):
                pass
        else:
            out.writelines(_go_on(draft.read_lines(), is_stopped))
        (folder / REPORT).unlink(missing_ok=True)  # a crash from here on must not leave a stale key
    write_entries(folder / PROMPTS, draft.make_entries(own_history=own_history))


def _write_rejected(folder: Path, drafted: Path) -> None:
    with drafted.open("rb") as lines, replace_atomically(folder / REJECTED) as out:
        shutil.copyfileobj(lines, out)
        out.writelines(_read_generation_rejects(folder))
