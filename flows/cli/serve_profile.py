"""`draftmill serve --profile`: choose, check, compare and start a real SGLang server.

Knows how the command's options become a launch command, and how profiles are compared; does not know typer.
Invariant: nothing is started that our checks, or SGLang's own parser where it is installed, refuse.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flows.cli.interrupts import run_until_interrupted
from serving.client.errors import LaunchRefused
from serving.launch.command import (
    API_KEY_VARIABLE,
    LaunchCommand,
    build_command,
    default_key_path,
)
from serving.launch.flag_table import load_flag_table
from serving.launch.launched import launch_server
from serving.launch.model_checks import check_model
from serving.launch.profile import Profile, list_profiles, load_profile
from serving.launch.sglang_install import Install, ask_parser, find_install

EXPLAIN_WIDTH = 100  # of a file or a pipe
COMPARE_WIDTH = 136
_LEFT_OUT = "·"


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """What the command line asked for; `settings` are its --set texts, `unset` its --unset names."""

    profile: str
    model: str
    preset: str | None = None
    port: int = 30000
    settings: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    python: Path | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A checked command, and what is allowed and better known before it starts."""

    profile: Profile
    install: Install
    command: LaunchCommand
    warnings: list[str]


def prepare_launch(request: ServeRequest) -> Launch:
    """The checked command; SGLang's own parser is not asked here.

    Raises:
        UnknownProfile: no such profile or preset.
        LaunchRefused: a flag or value that SGLang would not take, or a model that cannot be served with them.
    """
    profile = load_profile(request.profile, request.preset)
    if request.python is not None and not os.access(request.python, os.X_OK):
        raise LaunchRefused(f"--python: {request.python} is no program that can be run")
    install = find_install(request.python)
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    command = build_command(
        profile,
        model=request.model,
        port=request.port,
        overrides=parse_settings(request.settings),
        unset=request.unset,
        api_key=api_key,
        key_file=default_key_path(request.port) if api_key else None,
        launcher=install.launcher,
    )
    return Launch(profile, install, command, check_model(profile, command))


def check_with_sglang(install: Install, command: LaunchCommand) -> str:
    """Ask SGLang's own parser; says in a few words who checked.

    Raises:
        LaunchRefused: it refuses the flags.
    """
    known = load_flag_table().version
    ours = f"checked against the flags of SGLang {known}"
    if install.python is None:
        return f"{ours}; no SGLang here to ask"
    flags = command.argv[len(install.launcher) :]
    if command.key_file is not None:  # it need not be written to be checked
        flags = flags[: flags.index("--config")]
    verdict = ask_parser(install.python, flags, command.env)
    if verdict.problem is not None:
        raise LaunchRefused(verdict.problem)
    if verdict.version is None:
        return f"{ours}; {install.python} has no SGLang to ask"
    if verdict.version != known:
        ours = f"{ours}, which is not the installed version,"
    return f"{ours} and by the parser of the installed SGLang {verdict.version}"


def run_server(command: LaunchCommand, *, port: int, say: Callable[[str], None]) -> int:
    """Serve until Ctrl-C or SIGTERM, or until it stays down; returns the exit code.

    Raises:
        ServerDown: it could not be started, or died or froze too often.
    """
    log_file = default_key_path(port).with_suffix(".log")

    async def serve() -> int:
        async with launch_server(command, log_file=log_file, on_event=say) as server:
            say(f"serving at {server.base_url}; its log is {log_file}; Ctrl-C stops it")
            raise await server.wait_failed()

    return run_until_interrupted(serve(), exit_code=0, last_words="draftmill: stopped at once")


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """`flag=value` texts as a mapping; `flag=` is a switch.

    Raises:
        LaunchRefused: texts without an equals sign, or one flag twice; every problem is a line.
    """
    values: dict[str, str] = {}
    problems = []
    for text in settings:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name.strip("-"):
            shown = name if name.strip("-") else text  # what follows an equals sign may be a secret
            problems.append(f"--set {shown}: write flag=value, or flag= for a flag without a value")
        elif name in values:
            problems.append(f"--set {name}: it is set twice; set it once")
        values[name] = value
    if problems:
        raise LaunchRefused("\n".join(problems))
    return values


def compare_profiles() -> RenderableType:
    """Flags and variables as rows, profiles as columns."""
    profiles = [load_profile(name) for name in list_profiles()]
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for profile in profiles:
        table.add_column(profile.name, overflow="fold", min_width=len(profile.name))
    table.add_row("hardware", *(profile.hardware for profile in profiles))
    table.add_row("model", *(profile.model for profile in profiles))
    expected = [
        f"{profile.expected_kv_tokens:,}" if profile.expected_kv_tokens else "unknown" for profile in profiles
    ]
    table.add_row("KV tokens, at least", *expected)
    table.add_row("presets", *(", ".join(profile.presets) or _LEFT_OUT for profile in profiles))
    table.add_section()
    columns = [_flag_cells(profile) for profile in profiles]
    _add_rows(table, columns)
    table.add_section()
    _add_rows(table, [profile.env_values() for profile in profiles])
    legend = f"{_LEFT_OUT} left to SGLang; auto: left to it, and what it picks. Presets change variables."
    return Group(table, Text(f"{legend} The reasons: --explain."))


def make_table_console(width: int) -> Console:
    """As wide as the terminal, or as `width` where there is none."""
    console = Console()
    if not console.is_terminal:
        console.width = width
    return console


def _flag_cells(profile: Profile) -> dict[str, str]:
    values = profile.flag_values()
    cells = {setting.flag: values[setting.same_as or setting.flag] or "yes" for setting in profile.flags}
    return cells | {auto.flag: f"auto ({auto.picks})" for auto in profile.auto}


def _add_rows(table: Table, columns: Sequence[Mapping[str, str]]) -> None:
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, _LEFT_OUT) for column in columns))
