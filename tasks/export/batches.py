"""A run's logs as batches of rows for the sinks, read here or, where they are large, by a process of its own.

Knows which rows there are, the split of each and what is counted of them; does not know formats. Invariant:
the batches, the counts and the errors are the same whoever reads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.export.contamination import EvalFile, EvalIndex
from tasks.export.duplicates import ExactDuplicates
from tasks.export.files import Batcher, RowBatch
from tasks.export.key import Rules
from tasks.export.report import LENGTH_LIMITS, DatasetCount, LengthLoss, Totals
from tasks.export.rows import ExportDataset, LogDigest, RowFilter, read_export_rows
from tasks.export.split.assign import SPLITS, Split, assign_split
from tasks.export.split.keys import SplitKeys, count_different, count_shared
from tasks.prepare.preparation import PROMPTS
from tasks.prepare.worker_process import Worker, count_workers

_CALLS = 2  # it reads the next batch while we take one


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read: logs as far as they were hashed, and the evaluation sets that are left out of them."""

    datasets: Sequence[ExportDataset]
    digests: Sequence[LogDigest | None]
    rules: Rules
    eval_paths: Sequence[Path] = ()
    eval_files: Sequence[EvalFile] = ()


@dataclass(slots=True)
class ReadCounts:
    """What was counted of the rows that were read, and of the others; `different_keys` of a split."""

    datasets: list[DatasetCount]
    splits: dict[Split, Totals] = field(default_factory=lambda: {split: Totals() for split in SPLITS})
    length_losses: list[LengthLoss] = field(default_factory=lambda: [LengthLoss(n) for n in LENGTH_LIMITS])
    different_keys: int = 0
    decontamination: dict[str, Any] = field(default_factory=dict)


def read_batches(reading: Reading, give: Callable[[RowBatch], None]) -> ReadCounts:
    """Give every batch, in order.

    Parsing and what the sinks do hold the interpreter in turns: with a process for each, both cores work.

    Raises:
        ExportInputError, EvalSetError: prompts or evaluation sets cannot be read.
        WorkerDiedError: the process was killed.
    """
    with ExitStack() as running:
        take = _open(reading, running)
        while isinstance(taken := take(), RowBatch):
            give(taken)
        return taken


class WorkerState:
    """The batches one after the other, wherever they are read."""

    def __init__(self, reading: Reading) -> None:
        self._counts = ReadCounts([DatasetCount(d.name, d.status, d.kind) for d in reading.datasets])
        self._batches = _iter_batches(reading, self._counts)

    def take(self) -> RowBatch | ReadCounts:
        """The next batch; what was counted when there is none any more."""
        return next(self._batches, self._counts)


def _open(reading: Reading, running: ExitStack) -> Callable[[], RowBatch | ReadCounts]:
    n_bytes = sum(digest.bytes for digest in reading.digests if digest is not None)
    if not count_workers(n_bytes, most=1):
        return WorkerState(reading).take
    worker = Worker(running, WorkerState, reading)
    for _ in range(_CALLS - 1):
        worker.send(WorkerState.take)

    def take() -> RowBatch | ReadCounts:
        worker.send(WorkerState.take)
        taken: RowBatch | ReadCounts = worker.receive()
        return taken

    return take


def _iter_batches(reading: Reading, counts: ReadCounts) -> Iterator[RowBatch]:
    rules = reading.rules
    row_filter = RowFilter(
        exact=ExactDuplicates() if rules.drop_duplicates else None,
        evals=EvalIndex.read(reading.eval_paths, reading.eval_files) if reading.eval_files else None,
        conversations="conversations" in rules.formats,
    )
    batcher = Batcher(rules.tokens_per_group, rules.rows_per_file)
    keys = [SplitKeys(dataset.folder / PROMPTS) for dataset in reading.datasets]
    for row in read_export_rows(reading.datasets, reading.digests, counts.datasets, keys, row_filter):
        split = assign_split(row.split_key, seed=rules.seed, eval_fraction=rules.eval_fraction)
        counts.splits[split].add(row.sample)
        for loss in counts.length_losses:
            loss.add(row.sample)
        yield from batcher.add(split, row)
    yield from batcher.flush()
    counts.different_keys = count_different(keys)
    for count, shared in zip(counts.datasets, count_shared(keys), strict=True):
        count.shared_conversations = shared
    if row_filter.evals is not None:
        counts.decontamination = row_filter.evals.describe()
