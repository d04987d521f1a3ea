"""`draftmill run`: the whole pipeline, on a Prefect server of its own where none is configured."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.exits import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, fail, leave, say
from flows.cli.options import (
    AcceptChanged,
    BaseUrls,
    Budget,
    Datasets,
    Mode,
    Output,
    ParamFile,
    RetryRejected,
    Samples,
    to_overrides,
)
from flows.cli.starting import check_folder, check_free, load_parameters, set_up_prefect, to_server

_AGAIN = "Run the same command again to go on"


EPILOG = """\
\b
Exit status:
  0    every dataset is complete, or has used all its prompts
  1    a failure that may pass by itself: a server is away, a dataset failed
  2    refused until something is changed: a parameter, what draftmill check
       finds, what SGLang cannot be started with, settings other than the
       folder's, a damaged run.json, an output folder or PREFECT_API_URL that
       cannot be used
  130  interrupted by Ctrl-C or SIGTERM; the same command goes on

\b
Environment:
  DRAFTMILL_API_KEY  the key of the SGLang servers, if they ask for one
  PREFECT_API_URL    the Prefect server to use; without one, a server with its
                     UI is started for the run
  PREFECT_HOME       where such a server keeps its runs (~/.prefect)
"""


def run(
    param_file: ParamFile = None,
    dataset: Datasets = None,
    max_tokens_per_dataset: Budget = None,
    max_samples: Samples = None,
    output_dir: Output = None,
    base_url: BaseUrls = None,
    mode: Mode = None,
    accept_changed: AcceptChanged = None,
    retry_rejected: RetryRejected = False,
    help_parameters: Annotated[
        bool, typer.Option("--help-parameters", help="Print every parameter with its default and exit.")
    ] = False,
) -> None:
    """Run the pipeline: prepare, generate, aggregate, export. Run it again to resume.

    Flags win over the parameter file. Nothing that was generated is generated again.

    Example: draftmill run --param-file params.yaml --max-tokens-per-dataset 3000
    """
    if help_parameters:
        _print_parameters()
        return
    overrides = to_overrides(max_samples, max_tokens_per_dataset, output_dir, accept_changed, retry_rejected)
    server = to_server(base_url, mode)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends a run as Ctrl-C does, from the start
    try:
        code = _run_flow(load_parameters(param_file, overrides, server=server, only=dataset))
    except KeyboardInterrupt:  # before the flow took over, or after it
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        say(f"interrupted; everything generated is saved. {_AGAIN}")
    leave(code)


def _run_flow(parameters: Any) -> int:
    from flows.prefect_server import PrefectServerError, PrefectUrlError, find_api_url, run_prefect_server

    set_up_prefect()
    output_dir = Path(parameters.output_dir)
    check_folder(output_dir)
    check_free(output_dir)
    say("starting; Prefect takes some seconds")
    try:
        if find_api_url() is not None:
            return _run_on_server(parameters, None)
        with run_prefect_server(output_dir / "prefect.log") as ui:
            say(f"watch this run at {ui}/runs")
            return _run_on_server(parameters, ui)
    except PrefectUrlError as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    except PrefectServerError as exc:
        fail(str(exc), EXIT_FAILED)


def _run_on_server(parameters: Any, ui: str | None) -> int:
    from flows.cli.interrupts import run_until_interrupted
    from flows.cli.run_pipeline import run_pipeline

    return run_until_interrupted(
        run_pipeline(parameters, ui),
        exit_code=EXIT_INTERRUPTED,
        last_words=f"draftmill: stopped at once; what is on disk is kept. {_AGAIN}",
    )


def _print_parameters() -> None:
    from flows.parameters import describe_parameters

    typer.echo(describe_parameters())
