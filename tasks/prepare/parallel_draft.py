"""The draft of a large source written by several processes, and prompts.jsonl copied from it by them.

Knows sources, the draft and workers; does not know what a row means. A worker is told where a chunk of
lines is, reads it, and writes the prompts' lines into the draft itself: what comes back is the table of them.
Invariant: the prompts, what is rejected and the error that is raised are those of one process, in its order.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from tasks.prepare.draft_lines import DispatchOrder, DraftReader, DraftWriter, LineTable
from tasks.prepare.prompt_draft import KeptLines, PromptDraft
from tasks.prepare.row_batches import PrepareOptions, RowBatch, make_batches
from tasks.prepare.sources import Source, iter_rows
from tasks.prepare.sources.file_chunks import FileChunk, cut_file, has_chunks, read_chunk, read_first
from tasks.prepare.sources.files import to_data_files
from tasks.prepare.sources.readers import DataFile, SeenRows, read_file
from tasks.prepare.worker_process import Worker, count_workers

MAX_WORKERS = 4
"""Each holds some 60 MiB, and the machine has a server to feed."""

_MAX_CALLS = 2  # of each worker: it has the next one when it is done, and what they hold stays bounded
_COPY_BYTES = 1 << 20

_Rejected = list[tuple[str, bytes]]


@dataclass(slots=True)
class DraftedRows:
    """What became of rows whose lines are in the draft."""

    lines: LineTable = field(default_factory=LineTable)
    rejected: _Rejected = field(default_factory=list)
    seen: SeenRows = field(default_factory=SeenRows)


@contextmanager
def start_workers(source: Source, options: PrepareOptions, draft: PromptDraft) -> Iterator[Sequence[Worker]]:
    """One a core, as far as they are worth their start: none where the source is small."""
    count = count_workers(_count_bytes(source), most=MAX_WORKERS)
    with ExitStack() as running:
        yield [
            Worker(running, WorkerState, draft.folder, draft.order, n, options) for n in range(1, count + 1)
        ]


def draft_source(
    source: Source, options: PrepareOptions, draft: PromptDraft, workers: Sequence[Worker]
) -> Iterator[_Rejected]:
    """Write every row to the draft, in order; gives the rejected ones.

    Raises:
        SourceError: as `iter_rows` does.
        WorkerDiedError: one was killed, for its memory say.
    """
    if not workers or not isinstance(source, Sequence):
        yield from _draft_here(draft, make_batches(iter_rows(source), options))
        return
    waiting = deque[Iterator[_Rejected]]()
    for step in _share_out(source, options, draft, workers):
        waiting.append(step)
        if len(waiting) == _MAX_CALLS * len(workers):
            yield from waiting.popleft()
    for step in waiting:
        yield from step


def copy_kept(draft: PromptDraft, path: Path, workers: Sequence[Worker]) -> Iterator[None]:
    """Write the kept lines to a file that is there and empty, in dispatch order, some with each step.

    Raises:
        WorkerDiedError: one was killed.
    """
    waiting, end = deque[Worker](), 0
    for kept, worker in zip(draft.iter_kept(), cycle(workers), strict=False):
        if len(waiting) == _MAX_CALLS * len(workers):
            waiting.popleft().receive()
        worker.send(WorkerState.copy, kept, path, end)
        waiting.append(worker)
        end += int(kept.sizes.sum())
        yield
    for worker in waiting:
        worker.receive()
        yield


class WorkerState:
    """What a worker has at hand; it is made and called in its process only."""

    def __init__(self, folder: Path, order: DispatchOrder, number: int, options: PrepareOptions) -> None:
        self._writer = DraftWriter(folder, order, number=number)
        self._reader = DraftReader(folder)
        self._options = options

    def draft(self, chunk: FileChunk) -> DraftedRows:
        """Write the rows of a chunk to the draft."""
        drafted = DraftedRows()
        for batch in make_batches(drafted.seen.watch(read_chunk(chunk)), self._options):
            self._writer.write(batch, drafted.lines)
            drafted.rejected += batch.rejected
        self._writer.flush()
        return drafted

    def copy(self, kept: KeptLines, path: Path, offset: int) -> None:
        """Write kept lines to their place in the file."""
        with path.open("r+b", buffering=_COPY_BYTES) as out:
            out.seek(offset)
            out.writelines(kept.read(self._reader))
            out.flush()
            # Begins to write to the disk what the fsync in the end would have to wait for.
            os.posix_fadvise(out.fileno(), offset, int(kept.sizes.sum()), os.POSIX_FADV_DONTNEED)


def _count_bytes(source: Source) -> int:
    if not isinstance(source, Sequence):
        return 0
    return sum(path.stat().st_size for path in source if has_chunks(path))


def _share_out(
    paths: Sequence[Path], options: PrepareOptions, draft: PromptDraft, workers: Sequence[Worker]
) -> Iterator[Iterator[_Rejected]]:
    """Hand chunks to the workers in turn; a step takes what became of one, or does what is done here."""
    turns = cycle(workers)
    for path, file in zip(paths, to_data_files(paths), strict=True):
        chunks = cut_file(path, name=file.name) if has_chunks(path) else iter(())
        first_rows = read_first(chunks)
        if not first_rows:  # where the JSON begins, and whether it does, is not for a chunk to say
            yield _draft_here(draft, make_batches(read_file(file), options))
            continue
        seen = SeenRows()
        yield _draft_here(draft, make_batches(seen.watch(first_rows), options))
        for chunk, worker in zip(chunks, turns, strict=False):
            worker.send(WorkerState.draft, chunk)
            yield _take(draft, worker, seen)
        yield _check(file, seen)


def _draft_here(draft: PromptDraft, batches: Iterable[RowBatch]) -> Iterator[_Rejected]:
    for batch in batches:
        draft.extend(batch)
        yield batch.rejected


def _take(draft: PromptDraft, worker: Worker, seen: SeenRows) -> Iterator[_Rejected]:
    drafted: DraftedRows = worker.receive()
    seen.add(drafted.seen)
    draft.add(drafted.lines)
    yield drafted.rejected


def _check(file: DataFile, seen: SeenRows) -> Iterator[_Rejected]:
    seen.check(file)
    yield []
