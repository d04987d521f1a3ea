"""One start of an SGLang server: from its command over ready to its end.

Knows the process, its log and its port; starts nothing twice (`supervisor` does). Invariant: what is
told or raised holds no known secret, and an error ends with lines of this start's log and its path.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from serving.client.errors import ServerDown, StartFailed
from serving.client.sglang import SGLangClient
from serving.launch.command import KeyFile
from serving.launch.guarded import GuardedProcess
from serving.launch.known_failures import KnownFailure, explain_failure, explain_slow_start
from serving.launch.ports import check_port_is_free
from serving.launch.processes import environment_without_secrets, open_log, secrets_of
from serving.launch.redaction import redact_text, secrets_in_command
from serving.launch.server_log import LogReader, StartLog

_POLL_S = 0.5
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # the server downloads the model
_LOG_MODE = 0o600  # SGLang writes its api key into its log (0.5.23); ours has <redacted> there
_HTTP_PORT = 80
_LAST_LINES = 3
_LONGEST_SHOWN = 1000  # SGLang names every choice of a flag


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What to start.

    Attributes:
        argv: The command.
        env: Added to the environment.
        base_url: Where it will answer.
        log_file: Where its output goes.
        api_key: What its pages want.
        key_file: Where it reads the key from; there from each start to the end of what was started.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    base_url: str
    log_file: Path
    api_key: str | None = field(default=None, repr=False)
    key_file: KeyFile | None = None

    @property
    def secrets(self) -> set[str]:
        """Every value known to be secret."""
        known = secrets_in_command(self.argv) | secrets_of(self.env) | secrets_of(os.environ)
        return known | ({self.api_key} if self.api_key else set())

    def full_environment(self) -> dict[str, str]:
        """Ours but for what looks like a secret, the Hub's token, and its own."""
        hub = {name: os.environ[name] for name in _HUB_TOKENS if name in os.environ}
        return {**environment_without_secrets(), **hub, **self.env}


class ServerProcess:
    """A server that was started; made by `start`."""

    def __init__(
        self, command: ServerCommand, process: GuardedProcess, log_start: int, tell: Callable[[str], None]
    ) -> None:
        self.process = process
        self._command = command
        self._log = LogReader(command.log_file, log_start)
        self._progress = StartLog()
        self._tell = tell

    @classmethod
    async def start(cls, command: ServerCommand, *, tell: Callable[[str], None]) -> ServerProcess:
        """Start it; `tell` gets its progress.

        Raises:
            PortTaken: another process has its port; nothing was started.
            StartFailed: there is no such program, or its log cannot be written.
        """
        check_port_is_free(urlsplit(command.base_url).port or _HTTP_PORT)
        try:
            log, log_start = open_log(command.log_file, mode=_LOG_MODE)
            try:
                os.fchmod(log, _LOG_MODE)
                process = await _start_guarded(command, log)
            finally:
                os.close(log)
        except OSError as exc:
            raise StartFailed(
                f"the SGLang server cannot be started: {exc}",
                failure="cannot_be_started",
                requires_user_action=True,
            ) from exc
        return cls(command, process, log_start, tell)

    async def wait_ready(self, client: SGLangClient, *, timeout_s: float) -> None:
        """Wait until it is ready.

        Raises:
            StartFailed: it ended, or time was up.
        """
        clock = asyncio.get_running_loop().time
        began_s = clock()
        while True:
            self.read_log()
            if self.process.has_ended:
                status = await self.process.wait()
                what = f"ended {_name_status(status)} before it was ready"
                raise self.explain(StartFailed, what, status=status)
            if await client.is_ready():
                self._log.last_lines.clear()  # a death later on has nothing to do with a start's warnings
                self._tell(f"the SGLang server at {client.base_url} is ready after {clock() - began_s:.0f} s")
                return
            if clock() - began_s > timeout_s:
                raise self.explain(StartFailed, f"was not ready in {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)

    async def wait_death(self) -> ServerDown:
        """Wait until it has ended; why it did."""
        status = await self.process.wait()
        return self.explain(ServerDown, f"died {_name_status(status)}", status=status)

    def explain(self, kind: type[ServerDown], what: str, *, status: int | None = None) -> ServerDown:
        """An error about it: one line, then what its log says of it; its end where nothing is recognised."""
        self.read_log()
        known = self._recognise(status)
        message = f"the SGLang server at {self._command.base_url} {what}"
        log_file = self._command.log_file
        if known is None:
            lines = [message, f"The end of {log_file}:", *self._log.tail()]
            return kind(redact_text("\n".join(lines), self._command.secrets))
        lines = [f"{message}: {known.explanation}", f"Its log is {log_file}:"]
        lines += known.lines or self._log.tail(_LAST_LINES)
        shown = (redact_text(line, self._command.secrets)[:_LONGEST_SHOWN] for line in lines)
        return kind("\n".join(shown), failure=known.name, requires_user_action=known.requires_user_action)

    def read_log(self) -> None:
        """Tell what is new."""
        for line in self._log.read():
            if told := self._progress.feed(line):
                self._tell(redact_text(told, self._command.secrets))

    def _recognise(self, status: int | None) -> KnownFailure | None:
        stage = self._progress.stage
        known = explain_failure(self._log.last_lines, stage=stage, status=status)
        return known or (None if self.process.has_ended else explain_slow_start(stage))


async def _start_guarded(command: ServerCommand, log: int) -> GuardedProcess:
    secret = []
    if command.key_file is not None:
        command.key_file.write()
        secret = [command.key_file.path]
    return await GuardedProcess.start(
        command.argv, env=command.full_environment(), log=log, remove=secret, hide=command.secrets
    )


def _name_status(status: int | None) -> str:
    if status is None:
        return "for an unknown reason"
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"by {names.get(-status, f'signal {-status}')}"
    return f"with status {status}"
