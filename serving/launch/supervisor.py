"""Start an SGLang server, keep it running, and stop it.

Knows when to start it again and when to give up; does not know how its command was made, nor who sends
requests. Invariant: however the block ends, and should we be killed inside it, no process of the server lives
on; it is not started more often than it may be (docs/adr/0010).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from serving.client.errors import (
    KvCacheTooSmall,
    ServerDown,
    ServerMisconfigured,
    ServingError,
    StartFailed,
    StaysDown,
)
from serving.client.sglang import SGLangClient
from serving.client.stall import STALL_TIMEOUT_S, StallWatch
from serving.launch.command import KeyFile
from serving.launch.server_process import ServerCommand, ServerProcess

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 1800.0
GRACE_S = 30.0
REFILL_AFTER_S = 3600.0
"""A server that was healthy for so long has all its restarts again."""

_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class SGLangServer:
    """A server that lives as long as an `async with` block, started again when it dies or freezes.

    Args:
        argv: The command that serves.
        base_url: Where it will answer; its port must be free.
        log_file: Where its output goes (appended); its folder is created. It may hold the api key.
        env: Added to our environment, of which the server gets everything but what looks like a secret, and
            the Hub's token.
        api_key: For the pages that want it; never shown.
        key_file: Where the server reads the key from: written for each start, gone when the server is, also
            should we be killed.
        restarts: How often it may be started again; refilled after an hour of health.
        ready_timeout_s: How long one start may take; weights are loaded meanwhile.
        stall_timeout_s: How long it may show no work with requests in flight.
        grace_s: How long it may take to end after SIGTERM.
        min_kv_tokens: A KV cache that holds fewer is an error: --mem-fraction-static is wrong.
        on_event: Gets the lines that a person should see; called from the event loop.
        on_trouble: Gets those of them that tell of a death; where it is None they go to on_event.

    Attributes:
        failure: Why it stays down; None while it runs or is being started again.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        base_url: str,
        log_file: Path,
        env: Mapping[str, str] | None = None,
        api_key: str | None = None,
        key_file: KeyFile | None = None,
        restarts: int = 3,
        ready_timeout_s: float = READY_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        grace_s: float = GRACE_S,
        min_kv_tokens: int | None = None,
        on_event: Callable[[str], None] = logger.info,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.failure: StaysDown | None = None
        self._command = ServerCommand(
            tuple(argv), dict(env or {}), self.base_url, log_file, api_key, key_file
        )
        self._restarts = restarts
        self._ready_timeout_s = ready_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._grace_s = grace_s
        self._min_kv_tokens = min_kv_tokens
        self._on_event = on_event
        self._on_trouble = on_trouble or on_event
        self._used = 0
        self._server: ServerProcess | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the server's parent, which is also its process group; None while it is down."""
        if self._server is None or self._server.process.has_ended:
            return None
        return self._server.process.pid

    async def __aenter__(self) -> Self:
        """Start it and wait until it is ready; a first start that fails is not repeated.

        Raises:
            PortTaken: another process has its port; nothing was started.
            StartFailed: it ended, or was not ready in time; says why where that is known, and ends with
                lines of its log.
            KvCacheTooSmall: it holds fewer tokens than it should.
        """
        self._client = SGLangClient(self.base_url, api_key=self._command.api_key)
        self._stalls = StallWatch(self._client, timeout_s=self._stall_timeout_s)
        try:
            server = await self._start()
        except BaseException:
            await self._stop()
            raise
        self._keeper = asyncio.create_task(self._keep(server))
        self._keeper.add_done_callback(self._tell_bug)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it: SIGTERM, a grace period, SIGKILL to all its processes."""
        if exc is not None and self.failure is not None:
            exc.add_note(str(self.failure))
        self._keeper.cancel()
        try:
            await asyncio.wait([self._keeper])
        finally:
            await self._stop()

    async def wait_failed(self) -> StaysDown:
        """Wait until it stays down; why it does. Never returns while it runs; only inside of the block."""
        return await asyncio.shield(self._keeper)

    def report_stalled(self, why: str = "it took requests and did nothing with them") -> None:
        """Say that it does nothing, as the on_stall of a pool does; believed when no token comes out."""
        self._stalls.report(why)

    async def _start(self) -> ServerProcess:
        """Start it, once."""
        self._server = server = await ServerProcess.start(self._command, tell=self._on_event)
        await server.wait_ready(self._client, timeout_s=self._ready_timeout_s)
        await self._check_settings()
        return server

    async def _check_settings(self) -> None:
        """Also that it takes our key: without one, every question about its life is a 401."""
        try:
            tokens = (await self._client.server_info()).get("max_total_num_tokens")
        except ServerMisconfigured as exc:
            raise StartFailed(
                f"{exc}: give the server's key as api_key", failure="wrong_key", requires_user_action=True
            ) from exc
        except ServingError as exc:
            raise StartFailed(f"{self.base_url}: ready, but it does not tell its settings: {exc}") from exc
        least = self._min_kv_tokens
        if least is not None and isinstance(tokens, int) and tokens < least:
            raise KvCacheTooSmall(
                f"{self.base_url}: the KV cache holds {tokens:,} tokens, at least {least:,} were expected: "
                "raise --mem-fraction-static, or see with nvidia-smi that nothing else is on the GPUs"
            )

    async def _keep(self, server: ServerProcess) -> StaysDown:
        """Start it again whenever it dies or freezes; returns when it may not be started any more."""
        clock = asyncio.get_running_loop().time
        while True:
            ready_s = clock()
            why = await self._wait_trouble(server)
            if clock() - ready_s >= REFILL_AFTER_S:
                self._used = 0
            restarted = await self._restart(why)
            if isinstance(restarted, StaysDown):
                self.failure = restarted
                self._on_trouble(_headline(restarted))
                return restarted
            server = restarted

    async def _wait_trouble(self, server: ServerProcess) -> ServerDown:
        death = asyncio.create_task(server.wait_death())
        stall = asyncio.create_task(self._stalls.wait())
        try:
            await asyncio.wait([death, stall], return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                return death.result()
            await server.process.kill()
            return server.explain(ServerDown, f"was killed, for {stall.result()}")
        finally:
            death.cancel()
            stall.cancel()

    async def _restart(self, why: ServerDown) -> ServerProcess | StaysDown:
        while self._used < self._restarts:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._used)
            self._used += 1
            self._on_trouble(
                f"{_headline(why)}; starting it again in {pause_s:g} s "
                f"(restart {self._used} of {self._restarts})"
            )
            await asyncio.sleep(pause_s)
            try:
                return await self._start()
            except ServerDown as exc:
                await self._kill()
                why = exc
        headline, _, rest = str(why).partition("\n")
        said = f"{headline}; it stays down, for its {self._restarts} restarts are used up"
        text = "\n".join([said, rest]).strip()
        return StaysDown(text, failure=why.failure, requires_user_action=why.requires_user_action)

    def _tell_bug(self, keeper: asyncio.Task[StaysDown]) -> None:
        """What must not happen is at least said: from here on nobody watches the server."""
        if not keeper.cancelled() and (exc := keeper.exception()) is not None:
            self._on_trouble(f"the server at {self.base_url} is not watched any more: {exc!r}")

    async def _kill(self) -> None:
        if self._server is not None:
            await self._server.process.kill()

    async def _stop(self) -> None:
        try:
            if self._server is not None:
                await self._server.process.stop(grace_s=self._grace_s)
        finally:
            await self._client.close()


def _headline(error: ServerDown) -> str:
    return str(error).partition("\n")[0]
