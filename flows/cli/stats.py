"""`draftmill stats`: what is on disk of a run."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.console import make_console
from flows.cli.exits import EXIT_BAD_INPUT, fail, say

EPILOG = """\
\b
Exit status:
  0  counted, whatever the counts are
  1  report.html cannot be written
  2  the folder is not one of a run, or its run.json is damaged
"""


def stats(
    output_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what stats.json has instead of a table.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Write report.html into the folder too.")] = False,
) -> None:
    """Count what is on disk: answers, tokens, finish reasons, rejected prompts. Starts nothing."""
    from tasks.aggregate.stats_views import stats_table, stats_to_json

    found = collect_run_stats(output_dir)
    if report:
        from tasks.aggregate.report import write_report

        say(f"see {write_report(output_dir, found)}")
    if as_json:
        typer.echo(json.dumps(stats_to_json(found), indent=1))
    else:
        make_console().print(stats_table(found))


def collect_run_stats(output_dir: Path) -> list[Any]:
    """The statistics of each dataset; ends the process where the folder is no run's."""
    from tasks.aggregate.run_stats import collect_stats, read_plans
    from tasks.records.run_file import RunFolderError

    try:
        plans = read_plans(output_dir)
    except RunFolderError as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    return collect_stats(output_dir, plans)
