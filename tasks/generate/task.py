"""The task that generates one dataset, with its progress artifact.

Knows Prefect's side of generation: which failures are worth a retry, and what the UI shows. The work is
done in `tasks.generate.generation`.
"""

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import ProgressArtifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from serving.client.errors import ServerMisconfigured
from tasks.artifacts import KeptArtifact, artifact_key, show_beside
from tasks.checkpoints import PrefectCheckpointStore, make_checkpoint_key
from tasks.generate.dispatch import ServersGoneError
from tasks.generate.generation import (
    GenerationResult,
    GenerationRules,
    GenerationStatus,
    NothingAnsweredError,
    generate_dataset,
)
from tasks.generate.session import get_session
from tasks.generate.tokenization import tokenize_dataset
from tasks.records.append_file import AppendError
from tasks.records.folder_lock import FolderLockedError
from tasks.records.rows import RecordError
from tasks.tokens.trajectories import TrajectoryRenderer

logger = logging.getLogger(__name__)

ARTIFACT_EVERY_S = 5.0
_LASTING = (
    ServerMisconfigured,
    ServersGoneError,
    NothingAnsweredError,
    AppendError,
    FolderLockedError,
    RecordError,
)


def is_worth_a_retry(_task: Any, _run: Any, state: State[Any]) -> bool:
    """Whether a failed generation may succeed by itself a little later."""
    return not isinstance(state.data, _LASTING)


@task(
    name="generate-responses",
    cache_policy=NO_CACHE,
    persist_result=False,
    retry_condition_fn=is_worth_a_retry,
)
async def generate_responses(output_dir: Path, rules: GenerationRules) -> GenerationResult:
    """Bring one prepared dataset of the current session to its budget, or its conversations to ids."""
    session = get_session()
    key = make_checkpoint_key(output_dir, fingerprint=session.fingerprint, dataset=rules.name)
    folder, checkpoints = output_dir / rules.name, PrefectCheckpointStore(key)
    async with _show_progress(rules.name) as show:
        if rules.budget_tokens is None:
            result = await tokenize_dataset(
                folder,
                rules=rules,
                renderer=TrajectoryRenderer(session.target, session.resources.renderer),
                threads=session.resources.threads,
                checkpoints=checkpoints,
                on_status=show.update,
            )
        else:
            result = await generate_dataset(
                folder,
                rules=rules,
                resources=session.resources,
                checkpoints=checkpoints,
                on_status=show.update,
            )
    logger.info(result.to_line())
    return result


class _Progress:
    """The latest status, for a side task: an artifact update must never hold up generation."""

    def __init__(self) -> None:
        self.latest: GenerationStatus | None = None

    def update(self, status: GenerationStatus) -> None:
        """Keep it, and log it unless the dataset only waits for its turn."""
        before, self.latest = self.latest, status
        is_same = before is not None and (before.rows, before.is_paused) == (status.rows, status.is_paused)
        if status.in_flight or not is_same:
            logger.info(status.to_line())


@contextlib.asynccontextmanager
async def _show_progress(name: str) -> AsyncIterator[_Progress]:
    progress, kept = _Progress(), KeptArtifact()

    async def show(_ended: bool) -> None:
        if (status := progress.latest) is not None:
            await kept.write(
                ProgressArtifact(
                    progress=min(100.0, 100.0 * status.share),
                    key=artifact_key("progress", name),
                    description=status.to_line(),
                )
            )

    async with show_beside(show, every_s=ARTIFACT_EVERY_S):
        yield progress
