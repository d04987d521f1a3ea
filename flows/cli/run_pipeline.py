"""What `draftmill run` does once Prefect is there: run the flow, print what came of it."""

import shlex
import sys
from pathlib import Path

import typer
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, get_current_settings, temporary_settings

from flows.cli.console import make_console
from flows.parameters import RunParameters
from flows.patience import find_problem
from flows.pipeline import DatasetsFailedError, RunReport, generate_drafter_data
from flows.prefect_server import UI_PORT
from flows.refusals import all_need_change
from tasks.aggregate.stats_views import stats_table


async def run_pipeline(parameters: RunParameters, ui: str | None) -> int:
    """Run the flow on the server at `ui`, or on the one that Prefect knows; returns the exit code."""
    api = {PREFECT_API_URL: f"{ui}/api"} if ui else {}
    with temporary_settings(api):
        if (problem := await find_problem()) is not None:
            typer.echo(f"draftmill: {problem}", err=True)
            return 1
        try:
            state = await generate_drafter_data(parameters, return_state=True)
        finally:
            await APILogHandler.aflush()  # before the server goes, else each line waits for its retries
    outcome = await state.aresult(raise_on_failure=False)
    if isinstance(outcome, RunReport):
        _print_report(outcome)
        _print_ui(state.state_details.flow_run_id, ui)
        return 0
    if isinstance(outcome, DatasetsFailedError):
        _print_report(outcome.report)
    typer.echo(f"draftmill: {_explain(outcome)}", err=True)
    _print_ui(state.state_details.flow_run_id, ui)
    return exit_code_of(outcome)


def _explain(outcome: object) -> str:
    if isinstance(outcome, OSError):  # a full disk, mostly, and not in generation: that one says more itself
        return f"{outcome}; every response is kept. Put it right and run the same command again"
    return str(outcome)


def exit_code_of(outcome: object) -> int:
    """2 when something has to be changed for every failure, 1 when one may pass by itself."""
    failures = outcome.failed.values() if isinstance(outcome, DatasetsFailedError) else [outcome]
    return 2 if all_need_change(failures) else 1


def _print_report(report: RunReport) -> None:
    console = make_console()
    console.print()
    if report.stats:
        console.print(stats_table(report.stats))
    if report.results and not any(result.new_rows for result in report.results):
        console.print("Resumed: everything was there already, nothing was generated again.")
    for result in report.results:
        if result.outcome == "exhausted":
            console.print(result.to_line())
    if report.export is None:
        console.print("Nothing was exported: no dataset is complete.")
    else:
        total = report.export.total
        typer.echo(
            f"Export: {total.rows} rows, {total.loss_tokens:,} trained tokens in {report.export.out_dir}"
        )


def _print_ui(flow_run_id: object, ui: str | None) -> None:
    """Where the run can be looked at, also when the server that came with it has gone."""
    before = f"{up_command()}, then open " if ui else ""
    address = (f"http://127.0.0.1:{UI_PORT}" if ui else str(PREFECT_UI_URL.value())).rstrip("/")
    typer.echo(f"Prefect UI: {before}{address}/runs/flow-run/{flow_run_id}")


def up_command() -> str:
    """What starts a server that stays, on the runs of the one that was there."""
    home = get_current_settings().home
    words = [shlex.quote(str(Path(sys.executable).with_name("draftmill"))), "up"]
    if home != Path.home() / ".prefect":
        words.insert(0, f"PREFECT_HOME={shlex.quote(str(home))}")
    return " ".join(words)
