"""A dataset opened to be generated: its prompts, its log counted, its checkpoint restored.

Knows what is on disk and where the checkpoint lives; does not know servers, budgets or when it is enough.
Invariant: while it is open no other process writes it, and the log is the truth: a checkpoint that is lost,
damaged or not saved costs only the time to count the rows again.
"""

import asyncio
import contextlib
import logging
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from tasks.generate.chains import History, resume_chains
from tasks.generate.forecast import LengthForecast
from tasks.prepare.preparation import open_prompts, read_report
from tasks.records.folder_lock import hold_folder_lock
from tasks.records.prompt_file import PromptFile
from tasks.records.response_log import ResponseLog, ResumePoint
from tasks.records.rows import Response

logger = logging.getLogger(__name__)

CHECKPOINT_TIMEOUT_S = 60.0


class CheckpointStore(Protocol):
    """Where one dataset's checkpoint lives."""

    async def load(self) -> dict[str, Any] | None:
        """The last checkpoint, or None when there is none that can be trusted."""

    async def save(self, checkpoint: dict[str, Any]) -> None:
        """Replace the checkpoint."""


@dataclass(slots=True)
class OpenedDataset:
    """A dataset whose log is counted and held against other writers.

    `histories` are those of the conversations that stopped between two turns, by the next turn's position.
    """

    name: str
    prompts: PromptFile
    prompts_key: str
    log: ResponseLog
    forecast: LengthForecast
    histories: dict[int, History]
    checkpoints: CheckpointStore
    rows_before: int
    resumed: str

    async def save_checkpoint(self) -> None:
        """Save what is on disk now; a failure is logged, for the log itself is the truth."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        snapshot = self.log.progress.to_checkpoint(prompts_key=self.prompts_key, updated_at=now)
        snapshot["lengths"] = self.forecast.save()
        try:
            async with asyncio.timeout(CHECKPOINT_TIMEOUT_S):
                await asyncio.to_thread(self.log.sync)
                await self.checkpoints.save(snapshot)
        except Exception as exc:  # noqa: BLE001  a checkpoint must never stop generation
            logger.warning("%s: the checkpoint could not be saved (%r); generation goes on", self.name, exc)


@contextlib.asynccontextmanager
async def open_dataset(
    folder: Path,
    *,
    name: str,
    checkpoints: CheckpointStore,
    prior_mean_tokens: float | None,
    retry_rejected: bool,
) -> AsyncIterator[OpenedDataset]:
    """A prepared dataset, resumed from whatever is on disk; with `retry_rejected` what was rejected is open.

    Raises:
        FolderLockedError: another process generates it.
        RecordError: a row of the log cannot be read.
    """
    with hold_folder_lock(folder), contextlib.closing(open_prompts(folder)) as prompts:
        report = read_report(folder)
        prompts_key = report.key if report is not None else "unknown"
        with contextlib.closing(ResponseLog(folder, prompts)) as log:
            forecast, point = await _resume(
                log, name, checkpoints, prompts_key=prompts_key, prior_mean_tokens=prior_mean_tokens
            )
            if retry_rejected:
                log.progress.reopen_set_aside()
            opened = OpenedDataset(
                name=name,
                prompts=prompts,
                prompts_key=prompts_key,
                log=log,
                forecast=forecast,
                histories=await asyncio.to_thread(resume_chains, log),
                checkpoints=checkpoints,
                rows_before=log.progress.rows,
                resumed=_describe(point, log),
            )
            if point.scanned_rows:
                await opened.save_checkpoint()  # or each later run would read them again
            yield opened


async def _resume(
    log: ResponseLog,
    name: str,
    checkpoints: CheckpointStore,
    *,
    prompts_key: str,
    prior_mean_tokens: float | None,
) -> tuple[LengthForecast, ResumePoint]:
    checkpoint = await _load(checkpoints, name)
    forecast = _restore_forecast(checkpoint, prior_mean_tokens)
    lengths, caps = array("q"), array("q")

    def learn(response: Response) -> None:
        cut = response.finish_reason == "length"
        lengths.append(response.completion_tokens)
        caps.append(response.completion_tokens if cut else response.completion_tokens + 1)

    def say(rows: int) -> None:
        logger.info("%s: %d rows counted so far", name, rows)

    point = await asyncio.to_thread(
        log.resume, checkpoint, prompts_key=prompts_key, on_response=learn, on_scan=say
    )
    if not point.from_checkpoint:
        forecast = LengthForecast(prior_mean_tokens=prior_mean_tokens)
    for tokens, cap in zip(lengths, caps, strict=True):
        forecast.observe(tokens, max_new_tokens=max(cap, 1))
    return forecast, point


async def _load(checkpoints: CheckpointStore, name: str) -> dict[str, Any] | None:
    try:
        async with asyncio.timeout(CHECKPOINT_TIMEOUT_S):
            return await checkpoints.load()
    except Exception as exc:  # noqa: BLE001  a checkpoint must never stop generation
        logger.warning("%s: the checkpoint could not be loaded (%r); all rows are counted again", name, exc)
        return None


def _restore_forecast(checkpoint: dict[str, Any] | None, prior_mean_tokens: float | None) -> LengthForecast:
    try:
        state = (checkpoint or {})["lengths"]
        return LengthForecast.restore(state, prior_mean_tokens=prior_mean_tokens)
    except (AttributeError, LookupError, TypeError, ValueError):
        return LengthForecast(prior_mean_tokens=prior_mean_tokens)


def _describe(point: ResumePoint, log: ResponseLog) -> str:
    progress = log.progress
    if not progress.rows:
        text = "starts from nothing"
    else:
        how = "from the checkpoint" if point.from_checkpoint else "by counting every row"
        text = (
            f"resumes with {progress.rows} responses and {progress.completion_tokens:,} tokens on disk "
            f"({how}, {point.scanned_rows} rows read)"
        )
    if point.cut_bytes:
        text += f"; a torn last line of {point.cut_bytes} bytes was cut, its prompt is asked again"
    if progress.duplicates:
        text += f"; {progress.duplicates} duplicate rows are not counted"
    return f"{text}; {point.note}" if point.note else text
