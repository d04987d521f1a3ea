"""A sink in a thread of its own: writing, hashing and packing leave the interpreter to the reading.

Knows order and how far a sink may fall behind; does not know formats. Invariant: batches reach a sink in
their order, one at a time, and its error reaches who writes to it.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from tasks.export.files import FileEntry, RowBatch, Sink

_WAITING = 2


class BackgroundSink:
    """Gives batches to a sink in the background; at most two wait, for they are memory."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(sink).__name__)
        self._given: deque[Future[None]] = deque()

    def write(self, batch: RowBatch) -> None:
        """Give it a batch, once there is room.

        Raises:
            Exception: what the sink raised at an earlier one.
        """
        while len(self._given) >= _WAITING:
            self._given.popleft().result()
        self._given.append(self._thread.submit(self._sink.write, batch))

    def finish(self) -> "Future[list[FileEntry]]":
        """The files, once all is written; raises there what the sink raised."""
        return self._thread.submit(self._finish)

    def _finish(self) -> list[FileEntry]:
        for one in self._given:
            one.result()
        return self._sink.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._sink.close()
