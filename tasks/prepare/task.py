"""The task that turns a dataset's source into prompts.jsonl."""

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import TableArtifact
from prefect.cache_policies import NO_CACHE

from tasks.artifacts import artifact_key, create_artifact
from tasks.prepare.measure_lengths import FindLengths
from tasks.prepare.preparation import PrepareOptions, PrepareReport
from tasks.prepare.preparation import prepare_prompts as prepare
from tasks.prepare.prompt_lengths import PromptLengths
from tasks.prepare.sources import hash_source, resolve_source, watch_source
from tasks.records.folder_lock import hold_folder_lock
from tasks.records.run_file import update_run_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """One dataset to prepare under a run's folder.

    `fingerprint` is the run's, without datasets; `sampling` is what this one samples otherwise; `details` are
    recorded and decide nothing. `long_prompt_tokens` is where the long lane begins, None where nothing is
    generated.
    """

    output_dir: Path
    source: str
    options: PrepareOptions
    fingerprint: Mapping[str, Any]
    details: Mapping[str, Any]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    accept_changed: tuple[str, ...] = ()
    long_prompt_tokens: int | None = None

    @property
    def folder(self) -> Path:
        """Where the dataset lives."""
        return self.output_dir / self.options.name

    def full_fingerprint(self, source_sha256: str) -> dict[str, Any]:
        """The run's fingerprint with this dataset's own fields."""
        options = self.options
        own: dict[str, Any] = {
            "adapter": options.adapter,
            "source_sha256": source_sha256,
            "system_prompt": options.system_prompt,
            "chat_template_kwargs": dict(options.chat_template_kwargs),
        }
        if options.shape != "last":  # what is as it always was is not named: older folders go on
            own["turns"] = options.shape
        if not options.keep_system_prompts:
            own["keep_system_prompts"] = False
        if self.sampling:
            own["sampling"] = dict(self.sampling)
        return {**self.fingerprint, "datasets": {self.options.name: own}}

    def full_details(self) -> dict[str, Any]:
        """What run.json records of this dataset beside its fingerprint."""
        return {"datasets": {self.options.name: {"source": self.source, **self.details}}}


@task(name="prepare-prompts", cache_policy=NO_CACHE, persist_result=False)
async def prepare_prompts(request: PrepareRequest, find_lengths: FindLengths | None = None) -> PrepareReport:
    """Prepare one dataset in a worker thread; returns what became of its rows.

    `find_lengths` measures its prompts.
    """
    stop = threading.Event()
    try:
        report = await asyncio.to_thread(_prepare, request, stop)
    finally:
        stop.set()  # when we are cancelled the thread goes on, and the process would wait for it
    logger.info("%s: %s", request.options.name, report.to_line())
    lengths = None
    if find_lengths is not None:
        lengths = await find_lengths(request.folder, report, long_prompt_tokens=request.long_prompt_tokens)
        logger.info("%s: %s", request.options.name, lengths.to_line())
    await _show(request.options.name, report, lengths)
    return report


async def _show(name: str, report: PrepareReport, lengths: PromptLengths | None) -> None:
    """A table of what became of the rows, and of what the prompts are like."""
    counts = {
        "rows read": report.rows_read,
        "conversations": report.conversations,
        "prompts": report.prompts,
        "duplicates": report.duplicates,
        "left over": report.left_over,
        "null fields removed": report.nulls_removed,
        **{f"rejected: {reason}": count for reason, count in report.rejected.items()},
    }
    rows: list[dict[str, Any]] = [{"what": what, "count": count} for what, count in counts.items()]
    rows += lengths.to_rows() if lengths else []
    await create_artifact(
        TableArtifact(table=rows, key=artifact_key("prepare", name), description=f"The prompts of {name}")
    )


def _prepare(request: PrepareRequest, stop: threading.Event) -> PrepareReport:
    """The fingerprint is checked before anything is written: a refused change leaves the folder as it is."""
    source = resolve_source(request.source, base=Path.cwd())
    check_source = watch_source(source)
    source_sha256 = hash_source(source, cache_folder=request.output_dir)
    with hold_folder_lock(request.folder):
        update_run_file(
            request.output_dir,
            fingerprint=request.full_fingerprint(source_sha256),
            details=request.full_details(),
            now=datetime.now(UTC).isoformat(timespec="seconds"),
            accept_changed=request.accept_changed,
        )
        return prepare(
            request.folder,
            source,
            options=request.options,
            source_sha256=source_sha256,
            check_source=check_source,
            is_stopped=stop.is_set,
        )
