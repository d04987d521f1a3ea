"""The servers of a run: those that run already, or one that the run starts itself and shares.

Knows which kind the parameters ask for; does not know what is asked of a server.
"""

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from flows.catalog import list_datasets
from flows.parameters import RunParameters
from serving.client.errors import LaunchRefused
from serving.embedded.launcher import EmbeddedServer
from serving.embedded.model import DEMO_MODEL, DEMO_NAMES, resolve_model
from serving.launch.command import (
    API_KEY_VARIABLE,
    LaunchCommand,
    build_command,
    default_key_path,
    read_changes,
)
from serving.launch.launched import launch_server
from serving.launch.model_checks import check_model
from serving.launch.profile import load_profile
from serving.launch.sglang_install import find_install
from serving.launch.supervisor import SGLangServer
from serving.shared_server import give_up_server, share_server
from tasks.warm_up.server_facts import redact_launch

logger = logging.getLogger(__name__)

SERVER_LOG = "server.log"


@contextlib.asynccontextmanager
async def open_server(parameters: RunParameters) -> AsyncIterator[Sequence[str]]:
    """The base URLs to use; one that is started here lives as long as somebody in output_dir uses it.

    There are none where none is needed.

    Raises:
        EmbeddedError, LaunchRefused, UnknownProfile, ServerDown: it could not be started.
    """
    if not needs_server(parameters):
        yield []
        return
    if parameters.server.mode == "connect":
        yield parameters.server.base_urls
        return
    kinds = {"embedded": _start_embedded, "launch": _start_sglang}
    start = functools.partial(kinds[parameters.server.mode], parameters)
    async with share_server(Path(parameters.output_dir), start) as url:
        yield [url]


def needs_server(parameters: RunParameters) -> bool:
    """Whether any dataset of completed parameters is to be answered, or only a server can name the model."""
    is_named = parameters.server.mode != "connect" or bool(parameters.target.model)
    return not is_named or any(dataset.kind == "generate" for dataset in list_datasets(parameters))


def name_model(parameters: RunParameters) -> tuple[str | None, str | None]:
    """The model and its tokenizer as a server would name them; None where only a running one knows.

    Raises:
        ModelError: mode embedded, and there is no such model.
    """
    target = parameters.target
    if parameters.server.mode != "embedded":
        return target.model, target.tokenizer
    model = target.model or "demo"
    tokenizer = target.tokenizer or str(resolve_model(model).tokenizer_dir)
    return (DEMO_MODEL if model in DEMO_NAMES else model), tokenizer


@contextlib.asynccontextmanager
async def _start_embedded(parameters: RunParameters, port: int) -> AsyncIterator[str]:
    async with EmbeddedServer(
        model=parameters.target.model or "demo",
        log_file=Path(parameters.output_dir) / SERVER_LOG,
        slots=parameters.server.slots,
        context_length=parameters.server.context_length,
        port=port,
    ) as embedded:
        yield embedded.url


@contextlib.asynccontextmanager
async def _start_sglang(parameters: RunParameters, _port: int) -> AsyncIterator[str]:
    """On the port of the parameters, be it the first start or one after a kill -9 of its owner."""
    server = parameters.server
    command = build_launch_command(parameters)
    for warning in check_model(load_profile(str(server.profile), server.preset), command):
        logger.warning("%s", warning)
    logger.info("starting SGLang: %s", command.to_shell())
    async with launch_server(
        command,
        log_file=Path(parameters.output_dir) / SERVER_LOG,
        restarts=server.restarts,
        ready_timeout_s=server.load_timeout_s,
        stall_timeout_s=server.stall_timeout_s,
        on_trouble=logger.warning,
    ) as launched:
        telling = asyncio.create_task(_tell_failure(launched, Path(parameters.output_dir)))
        try:
            yield launched.base_url
        finally:
            telling.cancel()


async def _tell_failure(launched: SGLangServer, output_dir: Path) -> None:
    """Let all who use the server know when it stays down, wherever they run."""
    failure = await launched.wait_failed()
    give_up_server(output_dir, str(failure).partition("\n")[0])


def describe_launch(parameters: RunParameters) -> dict[str, Any] | None:
    """How mode launch starts its server, without secrets, for run.json; None in the other modes.

    Raises:
        UnknownProfile, LaunchRefused: as `build_launch_command`.
    """
    server = parameters.server
    if server.mode != "launch":
        return None
    command = build_launch_command(parameters)
    profile = load_profile(str(server.profile), server.preset)
    secrets = [] if command.key_file is None else [command.key_file.api_key]
    shown = redact_launch(flags=server.launch_flags, argv=command.argv, env=command.env, secrets=secrets)
    return {
        "profile": profile.name,
        "preset": profile.preset,
        "launch_flags": shown["flags"],
        "argv": shown["argv"],
        "env": shown["env"],
    }


def build_launch_command(parameters: RunParameters) -> LaunchCommand:
    """The command of mode launch.

    Raises:
        UnknownProfile: no such profile or preset.
        LaunchRefused: a flag or value that SGLang would not take; every problem is a line that names the
            parameter.
    """
    server, lanes = parameters.server, parameters.lanes
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    trusted = {"trust-remote-code": ""} if parameters.target.trust_remote_code else {}
    build = functools.partial(
        build_command,
        load_profile(str(server.profile), server.preset),
        model=str(parameters.target.model),
        port=server.port,
        concurrency=lanes.short.concurrency + lanes.long.concurrency,
        api_key=api_key,
        key_file=default_key_path(server.port) if api_key else None,
        launcher=find_install(Path(server.python) if server.python else None).launcher,
    )
    build(overrides=trusted)  # what is refused here has another cause than the flags
    changes, unset = read_changes(server.launch_flags)
    try:
        return build(overrides={**trusted, **changes}, unset=unset)
    except LaunchRefused as exc:
        lines = [f"server.launch_flags: {line}" for line in str(exc).splitlines()]
        raise LaunchRefused("\n".join(lines)) from exc
