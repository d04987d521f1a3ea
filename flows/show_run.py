"""The artifacts of a whole run: a progress bar and a table of its datasets, kept up to date.

Knows what is shown and how often; the figures come from `watch_run`, so that it is all the same
whether datasets are generated in this process or elsewhere. Invariant: it never holds up the run.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from prefect.artifacts import ProgressArtifact, TableArtifact

from tasks.aggregate.run_progress import RunProgress
from tasks.aggregate.watch_run import RunWatch
from tasks.artifacts import KeptArtifact, is_in_run, run_artifact_key, show_beside
from tasks.records.dataset_plan import DatasetPlan

SHOW_EVERY_S = 10.0
_LOOK_TIMEOUT_S = 30.0


@contextlib.asynccontextmanager
async def show_run(output_dir: Path, plans: Sequence[DatasetPlan]) -> AsyncIterator[None]:
    """Show how far the datasets are while the block runs, and how far they got at its end.

    Does nothing outside a flow run.
    """
    if not is_in_run():
        yield
        return
    async with show_beside(_RunArtifacts(output_dir, plans).show, every_s=SHOW_EVERY_S):
        yield


class _RunArtifacts:
    def __init__(self, output_dir: Path, plans: Sequence[DatasetPlan]) -> None:
        self._output_dir = output_dir
        self._watch = RunWatch(output_dir, plans)
        self._bar, self._table = KeptArtifact(), KeptArtifact()

    async def show(self, ended: bool) -> None:
        async with asyncio.timeout(_LOOK_TIMEOUT_S):
            progress = await self._watch.look(ended=ended)
        await self._bar.write(self._make_bar(progress))
        await self._table.write(self._make_table(progress))

    def _make_bar(self, progress: RunProgress) -> ProgressArtifact:
        return ProgressArtifact(
            progress=round(progress.total.reached_percent, 2),
            key=run_artifact_key(self._output_dir, "progress"),
            description=f"{progress.to_line()}, in {self._output_dir.resolve()}",
        )

    def _make_table(self, progress: RunProgress) -> TableArtifact:
        return TableArtifact(
            table=progress.to_rows(),
            key=run_artifact_key(self._output_dir, "datasets"),
            description=f"The datasets in {self._output_dir.resolve()}",
        )
