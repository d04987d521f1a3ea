"""What `draftmill check` does: all that a run does before its first prompt, and no more.

Knows the order; the checks are the run's own. Invariant: no Prefect server is asked for anything, and nothing
is left in output_dir but the locks and the server.log of a server that was started here.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from flows.catalog import list_datasets
from flows.cli.console import make_console
from flows.opening import to_prepare_request, to_warm_up_rules
from flows.parameters import RunParameters
from flows.refusals import requires_user_action
from flows.servers import open_server
from serving.client.errors import ServingError
from serving.embedded.errors import EmbeddedError
from tasks.aggregate.on_disk import count_from_logs
from tasks.prepare.sources import SourceError, hash_source, resolve_source
from tasks.records.run_file import RunFolderError, check_fingerprint, datasets_with_rows
from tasks.warm_up.open_session import close_session, open_session
from tasks.warm_up.preflight import Finding, PreflightError
from tasks.warm_up.run_plan import RunPlan, plan_table

OK, NOT_ANSWERING, REFUSED = 0, 1, 2
_SIGNS = {"note": "ok", "warning": "note", "problem": "CHANGE", "refusal": "CHANGE"}


async def check_run(parameters: RunParameters) -> int:
    """Print what was checked and the plan; returns the exit code."""
    try:
        with shown_logs():
            findings, plan = await _check(parameters)
    except PreflightError as exc:
        findings, plan = exc.findings, None
    except (ServingError, EmbeddedError) as exc:
        _say(str(exc))
        return REFUSED if requires_user_action(exc) else NOT_ANSWERING
    return _report(findings, plan)


def remove_traces(output_dir: Path) -> None:
    """The folder that a check has made, unless there is more in it than locks."""
    left = [path for path in output_dir.iterdir() if not path.name.endswith(".lock")]
    if not left:
        for path in output_dir.iterdir():
            path.unlink()
        output_dir.rmdir()


@contextlib.contextmanager
def shown_logs() -> Iterator[None]:
    """The lines of our own modules on standard error, as a run shows them."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("draftmill: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("tasks", "serving")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # Prefect's console would say it again
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


async def _check(parameters: RunParameters) -> tuple[list[Finding], RunPlan]:
    async with open_server(parameters) as base_urls:
        rules = replace(to_warm_up_rules(parameters, base_urls), measure_from_tokens=0)
        session, report = await open_session(rules, count_rows=count_from_logs)
        await close_session(session)
    refused = await asyncio.to_thread(_check_folder, parameters, session.fingerprint)
    return [*report.findings, *refused], report.plan


def _check_folder(parameters: RunParameters, fingerprint: Mapping[str, Any]) -> list[Finding]:
    """Whether the rows that are there were made with these settings; only their sources are read."""
    output_dir = Path(parameters.output_dir)
    datasets: dict[str, Any] = {}
    findings = []
    for dataset in list_datasets(parameters):
        if dataset.name in datasets_with_rows(output_dir):
            request = to_prepare_request(parameters, dataset, fingerprint)
            try:
                sha256 = hash_source(resolve_source(request.source, base=Path.cwd()))
            except (SourceError, OSError) as exc:
                findings.append(Finding("problem", f"dataset {dataset.name!r}: {exc}"))
                continue
            datasets |= request.full_fingerprint(sha256)["datasets"]
    try:
        check_fingerprint(
            output_dir, {**fingerprint, "datasets": datasets}, accept_changed=parameters.accept_changed
        )
    except RunFolderError as exc:
        findings.append(Finding("refusal", str(exc)))
    return findings


def _report(findings: Sequence[Finding], plan: RunPlan | None) -> int:
    """What was found out on standard output, what has to be changed on standard error, a line each."""
    wrong = list(dict.fromkeys(one.text for one in findings if _SIGNS[one.level] == "CHANGE"))
    for one in findings:
        if one.text not in wrong:
            typer.echo(f"{_SIGNS[one.level]:>4}  {one.text}")
    if plan is not None:
        console = make_console()
        console.print()
        console.print(plan_table(plan))
        typer.echo(plan.to_line())
    for text in wrong:
        _say(text)
    if not wrong:
        typer.echo("The run can start.")
    return REFUSED if wrong else OK


def _say(text: str) -> None:
    typer.echo(f"draftmill: {text}", err=True)
