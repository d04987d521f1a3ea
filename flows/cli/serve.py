"""The command `draftmill serve`: a small model of our own, or a real SGLang with a profile's flags."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from flows.cli import serve_profile as serve_command
from flows.cli.exits import EXIT_BAD_INPUT, EXIT_FAILED, fail, say
from flows.cli.explain_profile import explain_profile
from serving.client.errors import LaunchRefused, ServerDown, UnknownProfile

EPILOG = """\
\b
Environment:
  DRAFTMILL_API_KEY  with --profile: the key that the server asks for; it goes
                     to the server in a file of mode 600, never on its command
                     line
"""


def serve(
    model: Annotated[
        str | None,
        typer.Option(
            help="With --profile: a folder or Hub id. Else demo (the default), a .gguf file or its folder."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free port, without --profile.")
    ] = 30000,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Serve with a real SGLang, set up for this hardware.")
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="A preset of the profile.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FLAG=VALUE",
            help="Change one of SGLang's flags (FLAG= for one without a value), or an environment variable; "
            "may be repeated.",
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(metavar="FLAG", help="Leave out what the profile sets; may be repeated."),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The interpreter SGLang is installed in; else sglang on PATH."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, print the command, start nothing.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print every flag with its reason, start nothing.")
    ] = False,
    profiles: Annotated[bool, typer.Option("--profiles", help="Compare the profiles and exit.")] = False,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Requests worked on at once, without --profile (8).")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(min=128, help="Tokens of prompt and answer, without --profile (2048).")
    ] = None,
) -> None:
    """Serve a model: a small one on this machine's CPU, or with --profile a real SGLang on known hardware.

    Example: draftmill serve --port 30000, then draftmill run --base-url http://127.0.0.1:30000 ...

    Example: draftmill serve --profile rtx-pro-6000-x8 --model moonshotai/Kimi-K2.5 --explain
    """
    if profiles:
        serve_command.make_table_console(serve_command.COMPARE_WIDTH).print(serve_command.compare_profiles())
        return
    if profile is None:
        given = {"--preset": preset, "--set": settings, "--unset": unset, "--python": python}
        lonely = [
            name for name, value in (given | {"--dry-run": dry_run, "--explain": explain}).items() if value
        ]
        if lonely:
            fail(f"{', '.join(lonely)}: only with --profile; see draftmill serve --profiles", EXIT_BAD_INPUT)
        _serve_embedded(model or "demo", port, slots or 8, context_length or 2048)
    if slots or context_length:
        fail("--slots and --context-length: not with --profile; use --set context-length=N", EXIT_BAD_INPUT)
    if model is None:
        fail("--profile needs --model: a folder or a Hub id", EXIT_BAD_INPUT)
    request = serve_command.ServeRequest(
        profile, model, preset, port, tuple(settings or ()), tuple(unset or ()), python
    )
    _serve_profile(request, dry_run=dry_run, explain=explain)


def _serve_embedded(model: str, port: int, slots: int, context_length: int) -> NoReturn:
    from serving.embedded.__main__ import main as serve_embedded

    argv = ["--model", model, "--port", str(port), "--slots", str(slots)]
    raise typer.Exit(serve_embedded([*argv, "--context-length", str(context_length)]) or 0)


def _serve_profile(request: serve_command.ServeRequest, *, dry_run: bool, explain: bool) -> None:
    try:
        launch = serve_command.prepare_launch(request)
        command = launch.command
        for warning in launch.warnings:
            say(warning)
        if explain:
            width = serve_command.make_table_console(serve_command.EXPLAIN_WIDTH).width
            typer.echo(explain_profile(launch.profile, command, width=width))
        if explain and not dry_run:
            return
        checked = serve_command.check_with_sglang(launch.install, command)
    except (UnknownProfile, LaunchRefused) as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    say(checked)
    if dry_run:
        typer.echo(command.to_shell())
        if command.key_file is not None:
            say(f'{command.key_file.path}, mode 600, is written when it is started: api-key: "***"')
        return
    try:
        code = serve_command.run_server(command, port=request.port, say=say)
    except (LaunchRefused, ServerDown) as exc:
        fail(str(exc), EXIT_BAD_INPUT if exc.requires_user_action else EXIT_FAILED)
    raise typer.Exit(code)
