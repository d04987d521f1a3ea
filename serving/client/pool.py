"""Several servers as one: who takes the next request, and who is set aside.

Knows which servers are up and how loaded each is; does not know prompts or retries. Invariant: a
lease is always given back, and `has_room` is False exactly while no server is up.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from serving.client.errors import (
    BadReply,
    ConnectionBroken,
    NotReady,
    RequestFailed,
    ServerFailed,
    ServerLost,
    ServerStalled,
    ServerUnreachable,
    ServingError,
)
from serving.client.protocol import ServerLoad
from serving.client.sglang import SGLangClient

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 2.0
FAILURES_TO_SET_ASIDE = 10
LONGEST_PAUSE_S = 60.0
WATCH_EVERY_S = 10.0
STALL_TIMEOUT_S = 300.0


@dataclass(slots=True)
class _Member:
    client: SGLangClient
    in_flight: int = 0
    up: bool = True
    down_since_s: float = 0.0
    probe: asyncio.Task[None] | None = None
    check: asyncio.Task[bool] | None = None
    failures_in_a_row: int = 0
    pause_s: float = 0.0
    watch: asyncio.Task[None] | None = None
    load: ServerLoad | None = None
    alive_s: float = 0.0
    has_stalled: bool = False
    leases: set[asyncio.Timeout] = field(default_factory=set)


class ServerPool:
    """Least in flight first; a server that cannot be reached is set aside until `/ready` answers again.

    So is one that answers, but with FAILURES_TO_SET_ASIDE errors of its own in a row: being quick at failing
    it would draw most requests. And a router that says that its servers are away. Both pause longer each
    time, for their `/ready` may go on saying yes: a router's does until its health checks have failed.

    And one that does nothing for `stall_timeout_s` while requests are with it: no answer came back and its
    `/v1/loads` shows no work. Those requests are called back, and it returns when it makes a token again. A
    server that has no `/v1/loads` is never judged so. `on_stall` is given its base URL, for
    whoever can start it again.

    A pool without servers is never up.
    """

    def __init__(
        self,
        clients: Sequence[SGLangClient],
        *,
        probe_every_s: float = PROBE_EVERY_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        on_stall: Callable[[str], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._members = [_Member(client) for client in clients]
        self._probe_every_s = probe_every_s
        self._stall_timeout_s = stall_timeout_s
        self._watch_every_s = min(WATCH_EVERY_S, stall_timeout_s / 5)
        self._on_stall = on_stall
        self._clock = clock or asyncio.get_running_loop().time
        self._listeners: set[Callable[[], None]] = set()

    @property
    def clients(self) -> list[SGLangClient]:
        """All servers, up or down."""
        return [member.client for member in self._members]

    @property
    def is_up(self) -> bool:
        """Whether any server takes requests."""
        return any(member.up for member in self._members)

    @property
    def down_for_s(self) -> float:
        """How long no server has been up; 0 while one is."""
        if self.is_up or not self._members:
            return 0.0
        return self._clock() - max(member.down_since_s for member in self._members)

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever a server comes up or goes down; returns how to stop that."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[SGLangClient]:
        """The least loaded server that is up, for one request.

        When `ServerUnreachable` leaves the block, the server is asked whether it is ready: if so, only
        this connection broke; if not, the server is set aside.

        Raises:
            ServerUnreachable: no server is up, or this one is down.
            ServerLost: it went down with the request, or it stalled.
            ConnectionBroken: the connection broke, the server is up.
        """
        member = min((m for m in self._members if m.up), key=lambda m: m.in_flight, default=None)
        if member is None:
            raise ServerUnreachable("no server is up", server="")
        self._start_watch(member)
        member.in_flight += 1
        try:
            async with asyncio.timeout(None) as lease:
                member.leases.add(lease)
                try:
                    yield member.client
                finally:
                    member.leases.discard(lease)
        except ServerUnreachable as exc:
            if exc.status is not None:
                self._set_aside_for_longer(member, exc)
                raise
            if member.up and await self._is_still_ready(member):
                raise ConnectionBroken(str(exc), server=exc.server) from exc
            self._set_aside(member, exc)
            if exc.was_sent:
                raise ServerLost(str(exc), server=exc.server) from exc
            raise
        except TimeoutError as exc:  # nobody but _call_back ends a lease
            raise ServerStalled(self._describe_stall(member), server=member.client.base_url) from exc
        except (ServerFailed, BadReply) as exc:
            member.failures_in_a_row += 1
            if member.failures_in_a_row >= FAILURES_TO_SET_ASIDE:
                self._set_aside_for_longer(member, exc)
            raise
        else:
            member.failures_in_a_row, member.pause_s = 0, 0.0
            member.alive_s = self._clock()
        finally:
            member.in_flight -= 1

    async def wait_ready(self, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> None:
        """Wait until every server answers `/ready`.

        Raises:
            NotReady: one did not within timeout_s; names it and the last failure.
        """
        deadline = self._clock() + timeout_s
        for member in self._members:
            while (why := await member.client.explain_not_ready()) is not None:
                if self._clock() >= deadline:
                    raise NotReady(
                        f"the server is not ready after {timeout_s:g} s: {why}. "
                        "Start it, or correct server.base_urls"
                    )
                if on_wait is not None:
                    on_wait(why)
                await asyncio.sleep(min(self._probe_every_s, max(0.0, deadline - self._clock())))

    async def close(self) -> None:
        """Stop probing and close every client."""
        for member in self._members:
            running = [task for task in (member.probe, member.check, member.watch) if task is not None]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await member.client.close()

    def _start_watch(self, member: _Member) -> None:
        if not member.in_flight:
            member.alive_s = self._clock()
        if member.watch is None:
            member.watch = asyncio.create_task(self._watch(member))

    async def _watch(self, member: _Member) -> None:
        """Look at a working server again and again; a server that shows no load is not judged."""
        member.load = await self._look(member)
        while True:
            await asyncio.sleep(self._watch_every_s)
            if not member.in_flight or not member.up:
                continue
            seen, member.load = member.load, await self._look(member) or member.load
            if seen is None or member.load is None or member.load.work != seen.work:
                member.alive_s = self._clock()
            elif self._clock() - member.alive_s > self._stall_timeout_s:
                self._call_back(member)

    async def _look(self, member: _Member) -> ServerLoad | None:
        try:
            async with asyncio.timeout(self._watch_every_s):
                return await member.client.load()
        except (ServingError, TimeoutError) as exc:
            logger.debug("no load from %s: %s", member.client.base_url, exc)
            return None

    def _call_back(self, member: _Member) -> None:
        """Take every request back from a server that does nothing."""
        member.has_stalled = True
        self._set_aside(member, ServerStalled(self._describe_stall(member), server=member.client.base_url))
        for lease in member.leases:
            lease.reschedule(0.0)
        if self._on_stall is not None:
            self._on_stall(member.client.base_url)

    def _describe_stall(self, member: _Member) -> str:
        return (
            f"{member.client.base_url}: it has done nothing for {self._stall_timeout_s:g} s with requests in "
            "flight; they are asked again"
        )

    async def _is_still_ready(self, member: _Member) -> bool:
        """One question for all requests that break at the same time."""
        if member.check is None or member.check.done():
            member.check = asyncio.create_task(member.client.is_ready())
        return await asyncio.shield(member.check)

    def _set_aside_for_longer(self, member: _Member, exc: RequestFailed) -> None:
        if member.up:  # once, however many requests fail together
            member.pause_s = min(LONGEST_PAUSE_S, max(self._probe_every_s, 2 * member.pause_s))
            self._set_aside(member, exc)

    def _set_aside(self, member: _Member, exc: RequestFailed) -> None:
        if not member.up:
            return
        member.up = False
        member.down_since_s = self._clock()
        every_s = max(self._probe_every_s, member.pause_s)
        logger.warning("server set aside: %s; asking every %g s until it is ready", exc, every_s)
        member.probe = asyncio.create_task(self._readmit(member))
        self._notify()

    async def _readmit(self, member: _Member) -> None:
        while True:
            await asyncio.sleep(max(self._probe_every_s, member.pause_s))
            if not await member.client.is_ready():
                continue
            if not member.has_stalled or await member.client.is_making_progress():
                break
        member.up, member.has_stalled = True, False
        member.failures_in_a_row = 0
        logger.info(
            "server %s is back after %.0f s", member.client.base_url, self._clock() - member.down_since_s
        )
        self._notify()

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()
