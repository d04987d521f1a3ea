"""A launched SGLang: the checked command under the supervisor, with the key's file as long as it may be read.

Knows how the command and the supervisor go together; knows neither's inside. Invariant: after the block
neither the server nor the key's file is there.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from serving.client.pool import STALL_TIMEOUT_S
from serving.launch.command import LaunchCommand
from serving.launch.sglang_install import check_installed
from serving.launch.supervisor import READY_TIMEOUT_S, SGLangServer

logger = logging.getLogger(__name__)

_MIN_KV_SHARE = 0.5  # of what a profile expects; the known failure is a fortieth


@contextlib.asynccontextmanager
async def launch_server(
    command: LaunchCommand,
    *,
    log_file: Path,
    restarts: int = 3,
    ready_timeout_s: float = READY_TIMEOUT_S,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    on_event: Callable[[str], None] = logger.info,
    on_trouble: Callable[[str], None] | None = None,
) -> AsyncIterator[SGLangServer]:
    """Start it and wait until it is ready; it is started again when it dies or freezes.

    Raises:
        LaunchRefused: the program is not there, or SGLang in it.
        PortTaken, StartFailed, KvCacheTooSmall: as SGLangServer says.
    """
    await asyncio.to_thread(check_installed, command.argv, command.env)
    expected = command.expected_kv_tokens
    key_file = command.key_file
    try:
        async with SGLangServer(
            command.argv,
            base_url=command.base_url,
            log_file=log_file,
            env=command.env,
            api_key=None if key_file is None else key_file.api_key,
            key_file=key_file,
            restarts=restarts,
            ready_timeout_s=ready_timeout_s,
            stall_timeout_s=stall_timeout_s,
            min_kv_tokens=None if expected is None else int(_MIN_KV_SHARE * expected),
            on_event=on_event,
            on_trouble=on_trouble,
        ) as server:
            yield server
    finally:
        if key_file is not None:
            key_file.remove()  # should its guardian have been killed
