"""Open and close what a run needs: the embedded server when there is one, and the session.

The bridge from parameters, which only flows know, to the plain rules that tasks take.
"""

import contextlib
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flows.catalog import list_datasets
from flows.parameters import DatasetSettings, RunParameters
from flows.servers import describe_launch, name_model, needs_server, open_server
from serving.shared_server import find_failure
from tasks.aggregate.on_disk import count_from_checkpoints
from tasks.export.task import ExportRules
from tasks.generate.adapt_window import adapt_window
from tasks.generate.dispatch import DispatchRules
from tasks.generate.generation import GenerationRules
from tasks.generate.session import Session, find_session, use_session
from tasks.prepare.lane import Lane
from tasks.prepare.preparation import PrepareOptions
from tasks.prepare.task import PrepareRequest
from tasks.records.dataset_plan import DatasetPlan
from tasks.records.run_file import update_run_file
from tasks.warm_up.open_session import WarmUpRules, close_session
from tasks.warm_up.planning import DatasetWork
from tasks.warm_up.task import warm_up_server


@contextlib.asynccontextmanager
async def join_run(parameters: RunParameters, *, place: int = 0) -> AsyncIterator[Session]:
    """The session of the run around us; one of our own for a dataset that is run by itself.

    It then takes turns with the datasets of other processes in output_dir, as the `place`-th of them.
    """
    if session := find_session():
        yield session
        return
    turns = {"turns_folder": Path(parameters.output_dir), "turn_place": place}
    async with open_run(parameters, **turns) as session:
        yield session


@contextlib.asynccontextmanager
async def open_run(parameters: RunParameters, **turns: Any) -> AsyncIterator[Session]:
    """A checked server and a session on it, for the datasets of the block.

    `turns` are the fields of WarmUpRules for datasets that take turns between processes.

    Raises:
        RunFolderError: output_dir holds rows made with other settings.
        PreflightError, NotReady: the run could not succeed.
        EmbeddedError, LaunchRefused, UnknownProfile, ServerDown: a server could not be started.
    """
    async with open_server(parameters) as base_urls:
        session, report = await warm_up_server(
            replace(to_warm_up_rules(parameters, base_urls), **turns), count_from_checkpoints
        )
        try:
            record_run(
                parameters,
                session.fingerprint,
                servers=report.settings or None,
                target_vocab_size=session.target.vocab_size,
            )
            resources = session.resources
            if parameters.server.mode == "launch":
                resources.find_permanent_failure = functools.partial(
                    find_failure, Path(parameters.output_dir)
                )
            async with adapt_window(resources.window, resources.pool, parameters.lanes.concurrency):
                with use_session(session):
                    yield session
        finally:
            await close_session(session)


def to_warm_up_rules(parameters: RunParameters, base_urls: Sequence[str]) -> WarmUpRules:
    """What warm-up has to know."""
    model, tokenizer = parameters.target.model, parameters.target.tokenizer
    if not needs_server(parameters):
        model, tokenizer = name_model(parameters)
    elif parameters.server.mode == "embedded":
        model = None  # it says what it serves
    return WarmUpRules(
        base_urls=base_urls,
        model=model,
        tokenizer=tokenizer,
        revision=parameters.target.revision,
        trust_remote_code=parameters.target.trust_remote_code,
        tool_calls_as_text=parameters.target.tool_calls_as_text,
        sampling=parameters.sampling.model_dump(),
        lanes=to_lanes(parameters),
        seed=parameters.seed,
        output_dir=Path(parameters.output_dir),
        datasets=[to_work(parameters, dataset) for dataset in list_datasets(parameters)],
        long_prompt_tokens=parameters.lanes.long_prompt_tokens,
        export_formats=parameters.export.formats,
        draft_vocab_size=parameters.export.draft_vocab_size,
        measure_s=parameters.server.measure_s,
        unused_settings=[f"server.{name}" for name in parameters.server.find_unused()],
        concurrent_datasets=parameters.concurrent_datasets,
        ready_timeout_s=parameters.server.ready_timeout_s,
        request_timeout_s=parameters.server.request_timeout_s,
        stall_timeout_s=parameters.server.stall_timeout_s,
    )


def to_lanes(parameters: RunParameters) -> list[Lane]:
    """The two lanes, short first."""
    lanes = parameters.lanes
    return [
        Lane("short", lanes.short.concurrency, lanes.short.max_new_tokens),
        Lane("long", lanes.long.concurrency, lanes.long.max_new_tokens),
    ]


def to_plan(parameters: RunParameters, dataset: DatasetSettings) -> DatasetPlan:
    """What a dataset is to reach; no tokens where nothing is generated."""
    budget_tokens = dataset.budget_tokens or parameters.max_tokens_per_dataset
    is_generated = dataset.kind == "generate"
    return DatasetPlan(dataset.name, budget_tokens if is_generated else None, parameters.max_samples)


def to_plan_details(parameters: RunParameters, dataset: DatasetSettings) -> dict[str, Any]:
    """What run.json records of a dataset's plan."""
    plan = to_plan(parameters, dataset)
    return {"kind": dataset.kind, "budget_tokens": plan.budget_tokens, "max_samples": plan.max_samples}


def to_prepare_options(parameters: RunParameters, dataset: DatasetSettings) -> PrepareOptions:
    """What decides a dataset's prompts besides its source."""
    return PrepareOptions(
        name=dataset.name,
        adapter=dataset.adapter,
        seed=parameters.seed,
        shape="trajectory" if dataset.kind == "trajectory" else dataset.turns,
        system_prompt=dataset.system_prompt,
        keep_system_prompts=dataset.keep_system_prompts,
        chat_template_kwargs=dataset.chat_template_kwargs,
        max_prompts=dataset.max_prompts,
    )


def to_work(parameters: RunParameters, dataset: DatasetSettings) -> DatasetWork:
    """What the plan of a run has to know of a dataset."""
    return DatasetWork(
        goal=to_plan(parameters, dataset),
        source=dataset.full_source,
        options=to_prepare_options(parameters, dataset),
        expected_mean_tokens=dataset.expected_mean_tokens,
    )


def to_prepare_request(
    parameters: RunParameters, dataset: DatasetSettings, fingerprint: Mapping[str, Any]
) -> PrepareRequest:
    """What preparation has to know; the fingerprint is the run's, without datasets."""
    return PrepareRequest(
        output_dir=Path(parameters.output_dir),
        source=dataset.full_source,
        options=to_prepare_options(parameters, dataset),
        fingerprint=fingerprint,
        details=to_plan_details(parameters, dataset),
        sampling=dataset.sampling.model_dump(exclude_none=True),
        accept_changed=tuple(parameters.accept_changed),
        long_prompt_tokens=parameters.lanes.long_prompt_tokens if dataset.kind == "generate" else None,
    )


def to_generation_rules(parameters: RunParameters, dataset: DatasetSettings) -> GenerationRules:
    """What generation has to know."""
    sampling = parameters.sampling
    own = dataset.sampling.model_dump(exclude_none=True)
    return GenerationRules(
        name=dataset.name,
        budget_tokens=to_plan(parameters, dataset).budget_tokens,
        dispatch=DispatchRules(
            sampling_params={**sampling.model_dump(exclude={"seed"}), **own},
            seed=sampling.seed,
            max_samples=parameters.max_samples,
            max_attempts=parameters.max_attempts,
            on_length=parameters.on_length,
            outage_timeout_s=parameters.server.outage_timeout_s,
        ),
        budget_policy=parameters.budget_policy,
        long_prompt_tokens=parameters.lanes.long_prompt_tokens,
        expected_mean_tokens=dataset.expected_mean_tokens,
        retry_rejected=parameters.retry_rejected,
    )


def to_export_rules(parameters: RunParameters) -> ExportRules:
    """What export has to know."""
    export = parameters.export
    return ExportRules(
        eval_fraction=export.eval_fraction,
        seed=parameters.seed,
        formats=export.formats,
        draft_vocab_size=export.draft_vocab_size,
        drop_duplicates=export.drop_duplicates,
        decontaminate=export.decontaminate,
        partial=export.partial,
    )


def record_run(
    parameters: RunParameters,
    fingerprint: Mapping[str, Any],
    *,
    servers: Mapping[str, Mapping[str, Any]] | None = None,
    target_vocab_size: int | None = None,
) -> None:
    """Check the run's fingerprint against the folder's and write both into run.json.

    `servers` are the settings of each, without secrets, and `target_vocab_size` is for the export; None
    leaves what is there. Servers and how one was launched are no part of the fingerprint: other concurrency
    flags do not make other data.

    Raises:
        RunFolderError: output_dir holds rows made with other settings.
    """
    plans = {one.name: to_plan_details(parameters, one) for one in list_datasets(parameters)}
    details = {"draftmill": version("draftmill"), **to_run_details(parameters), "plans": plans}
    if servers is not None:
        details |= {"servers": servers, "launch": describe_launch(parameters)}
    if target_vocab_size is not None:
        details["target_vocab_size"] = target_vocab_size
    update_run_file(
        Path(parameters.output_dir),
        fingerprint=fingerprint,
        details=details,
        now=datetime.now(UTC).isoformat(timespec="seconds"),
        accept_changed=parameters.accept_changed,
    )


def to_run_details(parameters: RunParameters) -> dict[str, Any]:
    """What run.json records of a run beside its fingerprint."""
    return {
        "server_mode": parameters.server.mode,
        "target": parameters.target.model_dump(),
        "export": parameters.export.model_dump(),
    }
