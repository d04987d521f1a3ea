"""`draftmill monitor`: how far a run is, live."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.console import make_console
from flows.cli.exits import EXIT_BAD_INPUT, EXIT_FAILED, fail

EPILOG = """\
\b
Exit status:
  0  everything is done, or Ctrl-C: whoever looks interrupts nothing
  2  the folder is not one of a run
"""


def monitor(
    output_dir: Annotated[Path, typer.Argument(help="The folder of a run, wherever the run is at work.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each look instead.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Time between two looks.")] = 2.0,
) -> None:
    """Watch a run: budgets, speed, when it will be done, servers, what went wrong. Only reads files.

    A dataset without an answer for five minutes is "stopped". The end is reckoned from the last hour of work.
    """
    from flows.monitor.live import FolderGoneError, print_json, show_live
    from tasks.records.run_file import RunFolderError

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal gets its cursor back
    try:
        if as_json:
            print_json(output_dir, sys.stdout, every_s=every, once=once)
        else:
            show_live(output_dir, make_console(), every_s=every, once=once)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except RunFolderError as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    except FolderGoneError as exc:
        fail(str(exc), EXIT_FAILED)
