"""The command line. The same parameters as the UI's form, and exit codes a script can use.

0: every dataset is complete or exhausted. 1: a failure that may pass by itself. 2: refused until something is
changed. 130: Ctrl-C, everything saved. Prefect is imported only by commands that need it: it takes seconds.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from flows.console import make_console
from flows.options import (
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

_MONITOR_EPILOG = """\
\b
Exit status:
  0  everything is done, or Ctrl-C: whoever looks interrupts nothing
  2  the folder is not one of a run
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


@app.command()
def stats(
    output_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what stats.json has instead of a table.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Write report.html into the folder too.")] = False,
) -> None:
    """Count what is on disk: rows, tokens, finish reasons, rejected prompts. Starts nothing."""
    from tasks.core.stats_views import stats_table, stats_to_json

    found = _collect_stats(output_dir)
    if report:
        from tasks.core.report import write_report

        say(f"see {write_report(output_dir, found)}")
    if as_json:
        typer.echo(json.dumps(stats_to_json(found), indent=1))
    else:
        make_console().print(stats_table(found))


@app.command(epilog=_MONITOR_EPILOG)
def monitor(
    output_dir: Annotated[Path, typer.Argument(help="The folder of a run, wherever the run is at work.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each look instead.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Time between two looks.")] = 2.0,
) -> None:
    """Watch a run: budgets, speed, when it will be done, servers, what went wrong. Only reads files.

    A dataset without a row for five minutes is "stopped". Speeds are those of the last five minutes.
    """
    from flows.monitor import print_json, show_live
    from tasks.core.run_file import RunFolderError

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal gets its cursor back
    try:
        if as_json:
            print_json(output_dir, sys.stdout, every_s=every, once=once)
        else:
            show_live(output_dir, make_console(), every_s=every, once=once)
    except KeyboardInterrupt:
        _exit(0)
    except RunFolderError as exc:
        fail(str(exc), EXIT_BAD_INPUT)


@app.command()
def export(
    output_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    eval_fraction: Annotated[
        float | None, typer.Option(min=0.0, max=0.99, help="Share held out; the run's own when left out.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the split; the run's own when left out.")] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Of parquet, jsonl, arrow, vocab, conversations, with commas; the run's own when left out.",
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(min=0, help="Ids of the draft model, 0 for no vocab; the run's own when left out."),
    ] = None,
    drop_duplicates: Annotated[
        bool | None, typer.Option(help="Leave out rows equal to an earlier one; the run's own when left out.")
    ] = None,
    decontaminate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Leave out rows that share 13 words in a row with this evaluation set. Repeat it for "
            "several; the run's own when left out.",
        ),
    ] = None,
    no_decontaminate: Annotated[
        bool, typer.Option("--no-decontaminate", help="Compare with no evaluation set, not the run's either.")
    ] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Take incomplete datasets too.")] = False,
) -> None:
    """Write the training data again from what is on disk; nothing when it is there already. Starts nothing.

    Example: draftmill export data/kimi-k25 --formats arrow,vocab --draft-vocab-size 16000
    """
    from flows.run_folder import check_exported, read_export_rules
    from tasks.core.export_files import ExportError, ExportInputError
    from tasks.core.report import write_report
    from tasks.core.run_file import RunFolderError
    from tasks.export import export_datasets

    found = _collect_stats(output_dir)
    _check_folder(output_dir)
    try:
        rules = read_export_rules(
            output_dir,
            eval_fraction=eval_fraction,
            seed=seed,
            formats=_split_formats(formats),
            draft_vocab_size=draft_vocab_size,
            drop_duplicates=drop_duplicates,
            decontaminate=[] if no_decontaminate else decontaminate or None,
            partial=partial,
        )
        report = check_exported(export_datasets(output_dir, found, rules), output_dir)
        write_report(output_dir, found)
    except (RunFolderError, ExportInputError) as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    except ExportError as exc:
        fail(str(exc), EXIT_FAILED)
    state = " (unchanged)" if report.unchanged else ""
    typer.echo(
        f"{report.total.rows} rows, {report.total.loss_tokens:,} trained tokens: {report.out_dir}{state}"
    )


def _split_formats(names: str | None) -> list[str] | None:
    from tasks.core.export import FORMATS

    formats = None if names is None else [name.strip() for name in names.split(",")]
    if formats is not None and (unknown := [name for name in formats if name not in FORMATS]):
        fail(f"--formats has {', '.join(map(repr, unknown))}; there are {', '.join(FORMATS)}", EXIT_BAD_INPUT)
    return formats


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
    from flows.servers import build_launch_command
    from serving.errors import LaunchRefused, UnknownProfile

    try:
        raw = read_param_file(param_file) if param_file is not None else {}
        raw = override_parameters(raw, overrides, server=server, only=only)
        parameters = complete_parameters(build_parameters(raw))
        if parameters.server.mode == "launch":  # now, not when Prefect is there
            build_launch_command(parameters)
    except (InputError, LaunchRefused, UnknownProfile) as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    return parameters


def _to_server(base_url: list[str] | None, mode: str | None) -> dict[str, Any]:
    if mode in ("embedded", "launch") and base_url:
        fail(f"--mode {mode} starts a server of its own; leave out --base-url, or the mode", EXIT_BAD_INPUT)
    return {"base_urls": base_url or None, "mode": mode or ("connect" if base_url else None)}


def _run_check(parameters: Any) -> int:
    from flows.interrupts import run_until_interrupted

    set_up_prefect()
    output_dir = Path(parameters.output_dir)
    was_there = output_dir.exists()
    _check_folder(output_dir)
    try:
        _check_free(output_dir)
        say(f"checking; it {_STARTS_SGLANG if parameters.server.mode == 'launch' else 'takes some seconds'}")
        from flows.check import check_run

        return run_until_interrupted(
            check_run(parameters), exit_code=EXIT_INTERRUPTED, last_words="draftmill: stopped at once"
        )
    finally:
        if not was_there:
            from flows.check import remove_traces

            remove_traces(output_dir)


def _run_preview(parameters: Any, **options: Any) -> None:
    set_up_prefect()
    from flows.catalog import InputError
    from flows.preview import PreviewRules, preview_datasets
    from serving.embedded.errors import EmbeddedError
    from serving.errors import ServingError
    from tasks.core.tokenizer import TokenizerError

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
    _check_folder(output_dir)
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


def _check_folder(output_dir: Path) -> None:
    from tasks.core.run_file import RunFolderError, check_run_folder

    try:
        check_run_folder(output_dir)
    except RunFolderError as exc:
        fail(str(exc), EXIT_BAD_INPUT)


def _check_free(output_dir: Path) -> None:
    """Say at once what the flow would find after half a minute: that another run is at it."""
    from tasks.core.folder_lock import RUN_LOCK, FolderLockedError, hold_folder_lock

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
    from flows.interrupts import run_until_interrupted
    from flows.run_command import run_pipeline

    return run_until_interrupted(
        run_pipeline(parameters, ui),
        exit_code=EXIT_INTERRUPTED,
        last_words=f"draftmill: stopped at once; what is on disk is kept. {_AGAIN}",
    )


def _collect_stats(output_dir: Path) -> list[Any]:
    from tasks.core.run_file import RunFolderError
    from tasks.core.run_stats import collect_stats, read_plans

    try:
        plans = read_plans(output_dir)
    except RunFolderError as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    return collect_stats(output_dir, plans)


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
