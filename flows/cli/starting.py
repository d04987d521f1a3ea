"""What commands do before their work: parameters, the folder of a run, and the environment of Prefect.

Knows flags and files; Prefect is imported by nothing here.
"""

import os
from pathlib import Path
from typing import Any

from flows.cli.exits import EXIT_BAD_INPUT, EXIT_FAILED, fail


def load_parameters(
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


def to_server(base_url: list[str] | None, mode: str | None) -> dict[str, Any]:
    """The server section that --base-url and --mode stand for; ends the process where they contradict."""
    if mode in ("embedded", "launch") and base_url:
        fail(f"--mode {mode} starts a server of its own; leave out --base-url, or the mode", EXIT_BAD_INPUT)
    return {"base_urls": base_url or None, "mode": mode or ("connect" if base_url else None)}


def check_folder(output_dir: Path) -> None:
    """End the process when nothing can be written to the folder of a run."""
    from tasks.records.run_file import RunFolderError, check_run_folder

    try:
        check_run_folder(output_dir)
    except RunFolderError as exc:
        fail(str(exc), EXIT_BAD_INPUT)


def check_free(output_dir: Path) -> None:
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
