"""Look at a run from what it leaves behind: run.json, the prepare reports and the checkpoints.

Knows where these are; does not know who asks, nor in which process a dataset is generated. Invariant: a look
reads what is small and whatever the size of the logs, and never them.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.aggregate.run_progress import DatasetProgress, DatasetWatch, RunProgress
from tasks.checkpoints import CheckpointUnreadableError, PrefectCheckpointStore, make_checkpoint_key
from tasks.prepare.preparation import read_report
from tasks.records.dataset_plan import DatasetPlan
from tasks.records.run_file import read_run_file

logger = logging.getLogger(__name__)


class RunWatch:
    """Looks at the datasets of a run again and again."""

    def __init__(self, output_dir: Path, plans: Sequence[DatasetPlan]) -> None:
        self._output_dir = output_dir
        self._datasets = [DatasetWatch(plan) for plan in plans]
        self._stores: dict[str, PrefectCheckpointStore] = {}

    async def look(self, *, ended: bool = False) -> RunProgress:
        """How far each dataset is; with `ended`, none is generated any more.

        Raises:
            RunFolderError: run.json is damaged.
            OSError, httpx.HTTPError: the storage of the checkpoints cannot be asked for.
        """
        run = await asyncio.to_thread(read_run_file, self._output_dir)
        return RunProgress(
            tuple([await self._look_at(one, run.get("fingerprint"), ended=ended) for one in self._datasets])
        )

    async def _look_at(
        self, dataset: DatasetWatch, fingerprint: dict[str, Any] | None, *, ended: bool
    ) -> DatasetProgress:
        name = dataset.plan.name
        checkpoint = None if fingerprint is None else await self._read_checkpoint(name, fingerprint)
        return await asyncio.to_thread(self._describe, dataset, checkpoint, ended)

    def _describe(
        self, dataset: DatasetWatch, checkpoint: dict[str, Any] | None, ended: bool
    ) -> DatasetProgress:
        report = read_report(self._output_dir / dataset.plan.name)
        return dataset.look(checkpoint, report, at_s=time.time(), ended=ended)

    async def _read_checkpoint(self, name: str, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
        key = make_checkpoint_key(self._output_dir, fingerprint=fingerprint, dataset=name)
        store = self._stores.setdefault(key, PrefectCheckpointStore(key))
        try:
            return await store.read()
        except CheckpointUnreadableError as exc:
            logger.debug("the checkpoint of %s cannot be read: %s", name, exc)
            return None
