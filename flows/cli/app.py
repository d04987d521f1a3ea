"""The command line. The same parameters as the UI's form, and exit codes a script can use.

0: every dataset is complete or exhausted. 1: a failure that may pass by itself. 2: refused until something is
changed. 130: Ctrl-C, everything saved. Prefect is imported only by commands that need it: it takes seconds.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from flows.cli.console import make_console
from flows.cli.options import (
    AcceptChanged,
    BaseUrls,
    Budget,
    Datasets,
    Mode,
    OnDisk,
    Output,
    ParamFile,
    RetryRejected,
    Rows,
    Samples,
    Whole,
    to_overrides,
)

app = typer.Typer(
    name="draftmill",
    help="Make token-exact training data for EAGLE-3 drafters with an SGLang server, under token budgets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
_STARTS_SGLANG = "starts SGLang, which takes minutes for a big model, and stops it afterwards"
_AGAIN = "Run the same command again to go on"
_RUN_EPILOG = """\
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

_CHECK_EPILOG = """\
\b
Exit status:
  0  the run can start
  1  a server does not answer or may start later, or another run is at work in
     the folder
  2  something has to be changed first; each is named in a line of its own

\b
Environment:
  DRAFTMILL_API_KEY  the key of the SGLang servers, if they ask for one
"""

_PREVIEW_EPILOG = """\
\b
Exit status:
  0  shown
  1  the server that was to be asked for its tokenizer does not answer
  2  something has to be changed: a dataset, its source, the tokenizer

\b
Environment:
  DRAFTMILL_API_KEY  the key of such a server, if it asks for one
"""


def main() -> None:
    """Entry point of the `draftmill` command."""
    try:
        app()
    except OSError as exc:  # a full disk or a missing permission is no bug: a traceback would hide the path
        if exc.errno is None:
            raise
        say(f"cannot go on: {exc}")
        sys.exit(EXIT_FAILED)


@app.command(epilog=_RUN_EPILOG)
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
    server = _to_server(base_url, mode)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends a run as Ctrl-C does, from the start
    try:
        code = _run_flow(_load(param_file, overrides, server=server, only=dataset))
    except KeyboardInterrupt:  # before the flow took over, or after it
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        say(f"interrupted; everything generated is saved. {_AGAIN}")
    _exit(code)


@app.command(epilog=_CHECK_EPILOG)
def check(
    param_file: ParamFile = None,
    dataset: Datasets = None,
    max_tokens_per_dataset: Budget = None,
    max_samples: Samples = None,
    output_dir: Output = None,
    base_url: BaseUrls = None,
    mode: Mode = None,
    accept_changed: AcceptChanged = None,
    retry_rejected: RetryRejected = False,
) -> None:
    """Check whether a run could succeed, and print its plan. Takes the flags of run and generates nothing.

    Example: draftmill check --param-file params.yaml
    """
    overrides = to_overrides(max_samples, max_tokens_per_dataset, output_dir, accept_changed, retry_rejected)
    server = _to_server(base_url, mode)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = _run_check(_load(param_file, overrides, server=server, only=dataset))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    _exit(code)


@app.command(epilog=_PREVIEW_EPILOG)
def preview(
    param_file: ParamFile = None,
    dataset: Datasets = None,
    output_dir: Output = None,
    base_url: BaseUrls = None,
    mode: Mode = None,
    rows: Rows = 3,
    on_disk: OnDisk = None,
    whole: Whole = False,
) -> None:
    """Show a few prompts or finished rows as the model sees them, with what is trained on between ⟦ and ⟧.

    Starts nothing and changes nothing. A server is asked only where target.model and target.tokenizer are
    empty.

    Example: draftmill preview --param-file params.yaml --dataset B2_opencodeinstruct
    """
    server = _to_server(base_url, mode)
    overrides = to_overrides(None, None, output_dir, None, False)
    parameters = _load(param_file, overrides, server=server, only=dataset)
    try:
        _run_preview(parameters, rows=rows, on_disk=on_disk, whole=whole)
    except KeyboardInterrupt:
        _exit(EXIT_INTERRUPTED)


def _load(
    param_file: Path | None, overrides: dict[str, Any], *, server: dict[str, Any], only: list[str] | None
) -> Any:
    """Checked, complete parameters out of a file and flags; ends the process when they are wrong."""
    from flows.catalog import (
        InputError,
        build_parameters,
        complete_parameters,
        override_parameters,
        read_param_file,
    )
    from flows.servers import build_launch_command, needs_server
    from serving.client.errors import LaunchRefused, UnknownProfile

    try:
        raw = read_param_file(param_file) if param_file is not None else {}
        raw = override_parameters(raw, overrides, server=server, only=only)
        parameters = complete_parameters(build_parameters(raw))
        if parameters.server.mode == "launch" and needs_server(parameters):  # now, not when Prefect is there
            build_launch_command(parameters)
    except (InputError, LaunchRefused, UnknownProfile) as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    return parameters


def _to_server(base_url: list[str] | None, mode: str | None) -> dict[str, Any]:
    if mode in ("embedded", "launch") and base_url:
        fail(f"--mode {mode} starts a server of its own; leave out --base-url, or the mode", EXIT_BAD_INPUT)
    return {"base_urls": base_url or None, "mode": mode or ("connect" if base_url else None)}


def _run_check(parameters: Any) -> int:
    from flows.cli.interrupts import run_until_interrupted
    from flows.servers import needs_server

    set_up_prefect()
    starts_sglang = parameters.server.mode == "launch" and needs_server(parameters)
    output_dir = Path(parameters.output_dir)
    was_there = output_dir.exists()
    check_folder(output_dir)
    try:
        _check_free(output_dir)
        say(f"checking; it {_STARTS_SGLANG if starts_sglang else 'takes some seconds'}")
        from flows.cli.check import check_run

        return run_until_interrupted(
            check_run(parameters), exit_code=EXIT_INTERRUPTED, last_words="draftmill: stopped at once"
        )
    finally:
        if not was_there:
            from flows.cli.check import remove_traces

            remove_traces(output_dir)


def _run_preview(parameters: Any, **options: Any) -> None:
    set_up_prefect()
    from flows.catalog import InputError
    from flows.cli.preview import PreviewRules, preview_datasets
    from serving.client.errors import ServingError
    from serving.embedded.errors import EmbeddedError
    from tasks.tokens.tokenizer import TokenizerError

    try:
        preview_datasets(parameters, PreviewRules(**options), make_console())
    except (InputError, TokenizerError, EmbeddedError) as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    except ServingError as exc:
        fail(str(exc), EXIT_BAD_INPUT if exc.needs_change else EXIT_FAILED)


def _run_flow(parameters: Any) -> int:
    from flows.prefect_server import PrefectServerError, PrefectUrlError, find_api_url, run_prefect_server

    set_up_prefect()
    output_dir = Path(parameters.output_dir)
    check_folder(output_dir)
    _check_free(output_dir)
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


def check_folder(output_dir: Path) -> None:
    """End the process when nothing can be written to the folder of a run."""
    from tasks.records.run_file import RunFolderError, check_run_folder

    try:
        check_run_folder(output_dir)
    except RunFolderError as exc:
        fail(str(exc), EXIT_BAD_INPUT)


def _check_free(output_dir: Path) -> None:
    """Say at once what the flow would find after half a minute: that another run is at it."""
    from tasks.records.folder_lock import RUN_LOCK, FolderLockedError, hold_folder_lock

    try:
        with hold_folder_lock(output_dir, RUN_LOCK):
            pass
    except FolderLockedError as exc:
        fail(str(exc), EXIT_FAILED)


def set_up_prefect() -> None:
    """The environment that Prefect reads when it is imported; call it before.

    Prefect's client follows the environment's proxies, which cannot reach this machine's own ports.
    """
    from flows.prefect_server import QUIET

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    for name in ("NO_PROXY", "no_proxy"):
        known = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*known, "127.0.0.1", "localhost"]))


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


def say(text: str) -> None:
    """Print a line for a person."""
    typer.echo(f"draftmill: {text}", err=True)


def fail(message: str, code: int) -> NoReturn:
    """Print why, and end the process."""
    say(message)
    raise typer.Exit(code)


def _exit(code: int) -> NoReturn:
    raise typer.Exit(code)
