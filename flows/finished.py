"""Which datasets of a run need nothing more: found on disk, with no server to ask.

A run that is started again, by a schedule or a person, when all is there already must not fail because the
GPUs were given back meanwhile.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.opening import (
    record_run,
    to_generation_rules,
    to_prepare_request,
    to_run_details,
    to_warm_up_rules,
)
from flows.parameters import DatasetSettings, RunParameters
from tasks.checkpoints import PrefectCheckpointStore, make_checkpoint_key
from tasks.generate.generation import GenerationResult, find_result
from tasks.prepare.preparation import read_report
from tasks.prepare.sources import SourceError, hash_source, resolve_source
from tasks.prepare.task import PrepareRequest
from tasks.records.folder_lock import FolderLockedError
from tasks.records.rows import RecordError
from tasks.records.run_file import read_run_file
from tasks.warm_up.open_session import known_fingerprint

logger = logging.getLogger(__name__)


async def find_finished(
    parameters: RunParameters, datasets: Sequence[DatasetSettings]
) -> dict[str, GenerationResult]:
    """The results, by name, of datasets that are complete or exhausted under these very parameters.

    A dataset that another process writes, whose source cannot be read, or whose settings differ in anything,
    is none of them: generating it says what is wrong. Neither is any where the parameters ask to look again
    at what was settled.
    """
    run = read_run_file(Path(parameters.output_dir))
    if not run or parameters.accept_changed or parameters.retry_rejected or not _is_same(run, parameters):
        return {}
    fingerprint = {**run["fingerprint"], "datasets": {}}
    found = {}
    for dataset in datasets:
        request = to_prepare_request(parameters, dataset, fingerprint)
        if await asyncio.to_thread(_is_prepared, run, request):
            result = await _find_result(parameters, dataset, request)
            if result is not None:
                logger.info(result.to_line())
                found[dataset.name] = result
    if found:
        record_run(parameters, fingerprint)
    return found


def _is_same(run: Mapping[str, Any], parameters: RunParameters) -> bool:
    """Whether the folder was made with these settings, as far as that is known without a server."""
    known = known_fingerprint(to_warm_up_rules(parameters, []))
    details = to_run_details(parameters)
    return all(run["fingerprint"].get(name) == value for name, value in known.items()) and all(
        run["details"].get(name) == details[name] for name in ("server_mode", "target")
    )


def _is_prepared(run: Mapping[str, Any], request: PrepareRequest) -> bool:
    try:
        source = resolve_source(request.source, base=Path.cwd())
        source_sha256 = hash_source(source, cache_folder=request.output_dir)
    except (SourceError, OSError):
        return False  # the others may be finished, or go on
    report = read_report(request.folder)
    return (
        report is not None
        and report.key == request.options.key(source_sha256)
        and _own(run["fingerprint"], request) == _own(request.full_fingerprint(source_sha256), request)
        and _own(run["details"], request) == _own(request.full_details(), request)
    )


def _own(part: Mapping[str, Any], request: PrepareRequest) -> Any:
    """What a part of run.json says of the dataset."""
    return part["datasets"].get(request.options.name)


async def _find_result(
    parameters: RunParameters, dataset: DatasetSettings, request: PrepareRequest
) -> GenerationResult | None:
    key = make_checkpoint_key(request.output_dir, fingerprint=request.fingerprint, dataset=dataset.name)
    try:
        return await find_result(
            request.folder,
            rules=to_generation_rules(parameters, dataset),
            checkpoints=PrefectCheckpointStore(key),
        )
    except (FolderLockedError, RecordError):
        return None
