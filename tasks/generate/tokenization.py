"""Bring finished conversations of the target to token ids: nothing is asked of a server.

Knows the order of things; masks are made in `trajectories`. Invariants: a conversation is one row,
on disk before it is counted, with one sequence or, where a template rewrites history, one for each turn; one
that cannot be shown to be what the target saw is rejected with the reason.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from datetime import UTC, datetime
from pathlib import Path

from tasks.generate.generation import (
    GenerationResult,
    GenerationRules,
    GenerationStatus,
    conclude,
    has_reached,
    is_finished,
    open_for,
)
from tasks.generate.opened_dataset import CheckpointStore, OpenedDataset
from tasks.records.rows import SEQUENCES, Prompt, Rejected, Response
from tasks.tokens.rendering import RenderError
from tasks.tokens.trajectories import TrajectoryRenderer, TrajectoryRow

logger = logging.getLogger(__name__)

_BATCH = 8
_Rendered = list[TrajectoryRow] | RenderError


async def tokenize_dataset(
    folder: Path,
    *,
    rules: GenerationRules,
    renderer: TrajectoryRenderer,
    threads: Executor,
    checkpoints: CheckpointStore,
    on_status: Callable[[GenerationStatus], None],
) -> GenerationResult:
    """Tokenize what is left of one prepared dataset of finished conversations.

    Raises:
        FolderLockedError: another process writes it.
        AppendError, RecordError: as their own docs say.
    """
    async with open_for(folder, rules, checkpoints) as opened:
        logger.info("%s: %s", rules.name, opened.resumed)
        if not is_finished(opened.log, rules):
            async with _show_and_save(opened, rules, on_status):
                await _tokenize(opened, rules, renderer, threads)
        return conclude(opened, rules)


async def _tokenize(
    opened: OpenedDataset, rules: GenerationRules, renderer: TrajectoryRenderer, threads: Executor
) -> None:
    loop, place = asyncio.get_running_loop(), 0
    while positions := opened.log.progress.find_open(place, limit=_BATCH):
        place = positions[-1] + 1
        prompts = [opened.prompts.read(position) for position in positions]
        rendered = await loop.run_in_executor(threads, _render_all, renderer, prompts)
        for position, prompt, one in zip(positions, prompts, rendered, strict=True):
            if has_reached(opened.log, rules):
                return
            if isinstance(one, RenderError):
                opened.log.reject(_to_rejected(prompt, one), position=position)
            else:
                opened.log.append(_to_response(prompt, one), position=position)


def _render_all(renderer: TrajectoryRenderer, prompts: Sequence[Prompt]) -> list[_Rendered]:
    return [_try(renderer, prompt) for prompt in prompts]


def _try(renderer: TrajectoryRenderer, prompt: Prompt) -> _Rendered:
    try:
        rows = renderer.render(prompt)
    except RenderError as exc:
        return exc
    if all(end - start == 1 for row in rows for start, end in row.loss_spans):
        return RenderError("empty_answer", "the target's turns hold nothing but the token that ends them")
    return rows


def _to_response(prompt: Prompt, rows: Sequence[TrajectoryRow]) -> Response:
    trained = sum(end - start for row in rows for start, end in row.loss_spans)
    sequences = [{"turn": row.turn, "input_ids": row.input_ids, "loss_spans": row.loss_spans} for row in rows]
    return Response(
        id=prompt.id,
        turn=0,
        input_ids=None,
        output_ids=None,
        text="",
        finish_reason="stop",
        prompt_tokens=sum(len(row.input_ids) for row in rows) - trained,
        completion_tokens=trained,
        lane="none",
        finished_at=f"{datetime.now(UTC).replace(tzinfo=None).isoformat(timespec='seconds')}Z",
        extra={SEQUENCES: sequences, **({"meta": prompt.meta} if prompt.meta else {})},
    )


def _to_rejected(prompt: Prompt, error: RenderError) -> Rejected:
    return Rejected(prompt.id, error.reason, error.detail, permanent=True, stage="generate")


@contextlib.asynccontextmanager
async def _show_and_save(
    opened: OpenedDataset, rules: GenerationRules, on_status: Callable[[GenerationStatus], None]
) -> AsyncIterator[None]:
    """Status and checkpoint every so often, and in the end."""

    async def keep() -> None:
        for _ in itertools.count():
            await asyncio.sleep(rules.checkpoint_every_s)
            on_status(_status(opened, rules))
            await opened.save_checkpoint()

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.shield(opened.save_checkpoint())
        on_status(_status(opened, rules))


def _status(opened: OpenedDataset, rules: GenerationRules) -> GenerationStatus:
    progress = opened.log.progress
    return GenerationStatus(
        name=rules.name,
        rows=progress.rows,
        prompts=len(progress.done),
        completion_tokens=progress.completion_tokens,
        budget_tokens=None,
        in_flight=0,
        retries=0,
        given_up=sum(progress.rejected.values()),
        tokens_per_s=0.0,
    )
