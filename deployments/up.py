"""`draftmill up`: a Prefect server where there is none, and the processes that serve the deployments.

Knows who is started, in which order, and who is stopped when; does not know what the deployments do.
Invariant: whatever it started ends with it, the runs first, so that they can still say how they ended.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from threading import Event
from types import FrameType

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from deployments.automations import ensure_automation
from deployments.definitions import GROUPS, read_group
from deployments.registration import register
from flows.patience import find_problem
from flows.prefect_server import UI_PORT, PrefectServerError, is_prefect, run_prefect_server

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0  # Prefect kills a run 30 s after it asked it to end
_LOOK_EVERY_S = 0.5
_LONGEST_PAUSE_S = 30.0
_HEARTBEAT_S = 60


def run_up(
    api_url: str | None,
    *,
    port: int = UI_PORT,
    limit: int = 5,
    reset: bool = False,
    say: Callable[[str], None],
) -> None:
    """Serve the deployments until SIGINT or SIGTERM.

    Args:
        api_url: the Prefect server that is configured; None looks for one at `port`, and starts it there.
        port: of a server that has to be started.
        limit: runs at a time, of the pipeline and of datasets each.
        reset: take the deployments as prefect.yaml has them, whatever was changed on the server.
        say: prints a line.

    Raises:
        PrefectServerError: the configured server does not answer, or none could be started.
        PrefectFileError: prefect.yaml cannot be deployed.
    """
    with _catch_signals() as stop, _find_server(api_url, port) as ui:
        if stop.is_set():
            return
        with temporary_settings({PREFECT_API_URL: f"{ui}/api"}):
            asyncio.run(_prepare_server(reset, say))
        env = {
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(_HEARTBEAT_S),
            **os.environ,
            "PREFECT_API_URL": f"{ui}/api",
        }
        groups = [_Group(group, limit, env) for group in GROUPS]
        say(f"watch, start and retry runs at {ui}; Ctrl-C stops them and saves")
        try:
            while not stop.wait(_LOOK_EVERY_S):
                for group in groups:
                    group.look()
        finally:
            say("stopping; runs are cancelled and save what they have")
            _stop_all(groups)


@contextlib.contextmanager
def _catch_signals() -> Iterator[Event]:
    stop = Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _find_server(api_url: str | None, port: int) -> Iterator[str]:
    """The UI's address of a Prefect server that answers; one is started where none is configured."""
    ui = f"http://127.0.0.1:{port}" if api_url is None else api_url.rstrip("/").removesuffix("/api")
    if api_url is not None:
        if (problem := asyncio.run(find_problem())) is not None:
            raise PrefectServerError(problem)
        yield ui
        return
    if is_prefect(ui):
        yield ui
        return
    with run_prefect_server(PREFECT_HOME.value() / "draftmill-server.log", ports=[port]) as started:
        yield started


async def _prepare_server(reset: bool, say: Callable[[str], None]) -> None:
    """Register here first: a serving process, which may start often, neither resets nor says what is kept."""
    async with get_client() as client:
        await ensure_automation(client)
        for deployment in [deployment for group in GROUPS for deployment in read_group(group)]:
            registration = await register(client, deployment, reset=reset)
            for line in [*registration.describe_changes(), *registration.describe_kept()]:
                say(line)


class _Group:
    """A process that serves a group of deployments, started again when it dies."""

    def __init__(self, name: str, limit: int, env: dict[str, str]) -> None:
        self.name = name
        self._argv = [sys.executable, "-m", "deployments.serve", name, str(limit), str(os.getpid())]
        self._env = env
        self._pause_s = 1.0
        self._due_s = 0.0
        self._start()

    def look(self) -> None:
        """Start it again where it has ended, later each time that it ends soon."""
        if self.process.poll() is None:
            return
        if not self._due_s:
            lived_s = time.monotonic() - self._started_s
            self._pause_s = 1.0 if lived_s > _LONGEST_PAUSE_S else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._due_s = time.monotonic() + self._pause_s
            logger.warning(
                "what serves %s has ended (status %s); starting it again in %.0f s",
                self.name, self.process.returncode, self._pause_s,
            )  # fmt: skip
        elif time.monotonic() >= self._due_s:
            self._start()

    def _start(self) -> None:
        self._due_s = 0.0
        self._started_s = time.monotonic()
        self.process = subprocess.Popen(
            self._argv, env=self._env, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _stop_all(groups: list[_Group]) -> None:
    """Ask all to end at once, then wait for each; what is left after that is killed, runs and all."""
    for group in groups:
        group.process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for group in groups:
        try:
            group.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group.process.pid, signal.SIGKILL)
            group.process.wait()
