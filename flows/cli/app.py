"""The command line. The same parameters as the UI's form, and exit codes a script can use.

0: every dataset is complete or exhausted. 1: a failure that may pass by itself. 2: refused until something is
changed. 130: Ctrl-C, everything saved. Prefect is imported only by commands that need it: it takes seconds.
"""

import sys
from collections.abc import Callable
from typing import Any

import typer

from flows.cli import check, export, monitor, preview, run, serve, stats
from flows.cli.exits import EXIT_FAILED, say

COMMANDS: tuple[tuple[Callable[..., Any], str], ...] = (
    (run.run, run.EPILOG),
    (check.check, check.EPILOG),
    (preview.preview, preview.EPILOG),
    (stats.stats, stats.EPILOG),
    (monitor.monitor, monitor.EPILOG),
    (export.export, export.EPILOG),
    (serve.serve, serve.EPILOG),
)
"""Each command with what stands below its help."""

app = typer.Typer(
    name="draftmill",
    help="Make token-exact training data for EAGLE-3 drafters with an SGLang server, under token budgets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command, _epilog in COMMANDS:
    app.command(epilog=_epilog)(_command)


def main() -> None:
    """Entry point of the `draftmill` command."""
    try:
        app()
    except OSError as exc:  # a full disk or a missing permission is no bug: a traceback would hide the path
        if exc.errno is None:
            raise
        say(f"cannot go on: {exc}")
        sys.exit(EXIT_FAILED)
