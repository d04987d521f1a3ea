"""What a run shows in Prefect's UI: artifacts that are created once and then updated in place.

Knows Prefect's artifact calls and their traps; does not know what is shown. Invariant: an artifact is shown,
never needed: no call outlasts its timeout, and none raises because of what Prefect's server does.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
LAST_CALL_S = 5.0  # of a run that may have been interrupted


class KeptArtifact:
    """One artifact of the current run: created by the first `write`, updated by the later ones."""

    def __init__(self) -> None:
        self._id: UUID | None = None
        self._written: tuple[Any, str | None] | None = None

    async def write(self, artifact: Artifact) -> None:
        """Show it; does nothing outside a run, or when it is shown already."""
        if not is_in_run():
            return
        content = (await artifact.aformat(), artifact.description)
        if content == self._written:
            return
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if self._id is None:
                    self._id = (await artifact.acreate()).id
                else:
                    await _update(self._id, *content)
        except Exception as exc:  # noqa: BLE001  generation goes on without it
            logger.debug("artifact %s not written: %r", artifact.key, exc)
        else:
            self._written = content


async def create_artifact(artifact: Artifact) -> None:
    """Show what is shown once; a failure is logged. Does nothing outside a run."""
    if not is_in_run():
        return
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await artifact.acreate()
    except Exception as exc:  # noqa: BLE001  the artifact only shows what is on disk
        logger.warning("the artifact %s could not be written: %r", artifact.key, exc)


@contextlib.asynccontextmanager
async def show_beside(show: Callable[[bool], Awaitable[None]], *, every_s: float) -> AsyncIterator[None]:
    """Await `show(False)` again and again while the block runs, and `show(True)` once at its end.

    What `show` raises is dropped. A call in progress at the end is let finish: cancelled while it creates an
    artifact, it would leave one that nobody updates. All that is bounded by LAST_CALL_S.
    """
    ended = asyncio.Event()
    side = asyncio.create_task(_show_until(ended, show, every_s))
    try:
        yield
    finally:
        ended.set()
        try:
            await asyncio.wait({side}, timeout=LAST_CALL_S)
        finally:
            side.cancel()
            await asyncio.gather(side, return_exceptions=True)


def is_in_run() -> bool:
    """Whether a flow or task run is around us that artifacts would belong to."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


def artifact_key(kind: str, name: str) -> str:
    """A key as Prefect wants them: lowercase letters, numbers and dashes."""
    key = f"{kind}-{name}".lower()
    return "".join(char if char.isascii() and char.isalnum() else "-" for char in key).strip("-")


def run_artifact_key(output_dir: Path, what: str) -> str:
    """The key of an artifact of a whole run.

    The UI keeps one history for each key of a server, so that two folders of one name need two keys.
    """
    path = str(output_dir.resolve())
    return artifact_key(
        "run", f"{output_dir.resolve().name}-{hashlib.sha256(path.encode()).hexdigest()[:6]}-{what}"
    )


async def _show_until(ended: asyncio.Event, show: Callable[[bool], Awaitable[None]], every_s: float) -> None:
    while not ended.is_set():
        await _show(show, ended=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await ended.wait()
    await _show(show, ended=True)


async def _show(show: Callable[[bool], Awaitable[None]], *, ended: bool) -> None:
    try:
        await show(ended)
    except Exception as exc:  # noqa: BLE001  the next one may do better
        logger.debug("nothing was shown: %r", exc)


async def _update(artifact_id: UUID, data: Any, description: str | None) -> None:
    """Replace what an artifact shows.

    The client's `update_artifact` sends the same and emits an event with all of it too, a row of Prefect's
    database each time that is kept for a week (3.9.1).
    """
    update = ArtifactUpdate(data=data, description=description)
    async with get_client() as client:
        response = await client.request(
            "PATCH",
            "/artifacts/{id}",
            path_params={"id": artifact_id},
            json=update.model_dump(mode="json", exclude_unset=True),
        )
    response.raise_for_status()
