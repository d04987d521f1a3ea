"""Widens and narrows the window while a run goes on, for those who asked for it.

Knows whom to ask and whom to tell; what to do is decided in `concurrency`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from serving.client.errors import ServingError
from serving.client.pool import WATCH_EVERY_S, ServerPool
from serving.client.protocol import ServerLoad
from tasks.generate.concurrency import ConcurrencyControl, Look
from tasks.generate.window import Window

logger = logging.getLogger(__name__)

ConcurrencyMode = Literal["fixed", "auto"]


@contextlib.asynccontextmanager
async def adapt_window(
    window: Window, pool: ServerPool, mode: ConcurrencyMode, *, every_s: float = WATCH_EVERY_S
) -> AsyncIterator[None]:
    """Adapt the window to the servers' load while the block runs; mode fixed leaves it alone."""
    if mode == "fixed":
        yield
        return
    adapting = asyncio.create_task(_adapt(window, pool, every_s))
    try:
        yield
    finally:
        adapting.cancel()
        await asyncio.gather(adapting, return_exceptions=True)


async def _adapt(window: Window, pool: ServerPool, every_s: float) -> None:
    control = ConcurrencyControl()
    while True:
        await asyncio.sleep(every_s)
        loads = await _ask(pool)
        if not loads:
            continue
        why = control.update(_look(window, loads))
        if why is not None:
            window.resize(control.scale)
            sizes = ", ".join(f"{name} {window.slots(name)}" for name in window.lanes)
            logger.info("concurrency is now %s: %s", sizes, why)


async def _ask(pool: ServerPool) -> list[ServerLoad]:
    """The loads of the servers that tell; none when nothing is known."""
    loads = []
    for client in pool.clients:
        try:
            loads.append(await client.load())
        except ServingError as exc:
            logger.debug("no load from %s: %s", client.base_url, exc)
    return [load for load in loads if load is not None]


def _look(window: Window, loads: Sequence[ServerLoad]) -> Look:
    return Look(
        is_full=not all(map(window.has_room, window.lanes)),
        in_flight=window.in_flight,
        waiting=sum(load.waiting for load in loads),
        max_running=sum(load.max_running for load in loads),
        token_usage=max(load.token_usage for load in loads),
    )
