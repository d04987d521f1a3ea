"""The `draftmill` command: what flows/cli/app.py has, and `up`, which stands above the flows."""

from typing import Annotated

import typer

from deployments.errors import PrefectFileError
from flows.cli.app import app, main
from flows.cli.exits import EXIT_BAD_INPUT, EXIT_FAILED, fail, say
from flows.cli.starting import set_up_prefect

__all__ = ["main"]

_UP_EPILOG = """\
\b
Environment:
  PREFECT_API_URL    a Prefect server that runs already; without one, it is
                     looked for at --port, and started there when it is not
  PREFECT_HOME       where a server that is started keeps its runs (~/.prefect)
  PREFECT_SERVER_DATABASE_CONNECTION_URL
                     its database when that is Postgres:
                     postgresql+asyncpg://user:password@host:5432/name
  DRAFTMILL_API_KEY  the key of the SGLang servers, if they ask for one
"""


@app.command(epilog=_UP_EPILOG)
def up(
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Of the Prefect server, where one has to be started.")
    ] = 4200,
    limit: Annotated[
        int, typer.Option(min=1, metavar="RUNS", help="Runs at a time, of the pipeline and of datasets each.")
    ] = 5,
    reset: Annotated[
        bool,
        typer.Option(
            "--reset", help="Take what prefect.yaml says, also where a deployment was changed on the server."
        ),
    ] = False,
) -> None:
    """Serve the deployments of prefect.yaml: start, watch, schedule and retry runs in the Prefect UI.

    It stays until Ctrl-C or SIGTERM, which cancels the runs and saves. What it started is started again when
    it dies. What was changed on a deployment in the UI is kept, and named; of prefect.yaml it takes what
    changed there since the last start. Where both changed, prefect.yaml wins. --reset takes it all.

    Example: draftmill up, then open http://127.0.0.1:4200
    """
    set_up_prefect()
    from flows.prefect_server import PrefectServerError, PrefectUrlError, find_api_url

    say("starting; Prefect takes half a minute")
    try:
        api_url = find_api_url()
        from deployments.up import run_up

        run_up(api_url, port=port, limit=limit, reset=reset, say=say)
    except (PrefectUrlError, PrefectFileError) as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    except PrefectServerError as exc:
        fail(str(exc), EXIT_FAILED)
