"""What to do while Prefect's server is away: wait, for nothing that we do depends on it.

Prefect's client tries a call for a minute or so and then fails the flow that made it (3.9.1).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
LONGEST_S = 3600.0
_SAY_EVERY_S = 60.0
_Result = TypeVar("_Result")


async def retry_while_prefect_down(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """The call's result; while Prefect's server is away it is tried again, for an hour at most."""
    started_s, said_s = time.monotonic(), float("-inf")
    while True:
        try:
            return await call()
        except (httpx.TransportError, PrefectHTTPStatusError) as exc:
            if isinstance(exc, PrefectHTTPStatusError) and not exc.response.is_server_error:
                raise
            if time.monotonic() - started_s >= LONGEST_S:
                raise
            if time.monotonic() - said_s >= _SAY_EVERY_S:
                said_s = time.monotonic()
                logger.warning("Prefect's server is away (%r); waiting for it, nothing is lost", exc)
            await asyncio.sleep(LOOK_EVERY_S)


@contextlib.asynccontextmanager
async def wait_until_prefect_acknowledges() -> AsyncIterator[None]:
    """Leave the block, unless it is cancelled, only when Prefect's server can hear how it ended.

    A flow that ends while the server is away would be Crashed whatever it did.
    """
    try:
        yield
    except Exception:
        await _wait_for_prefect()
        raise
    await _wait_for_prefect()


async def _wait_for_prefect() -> None:
    async def ask() -> None:
        async with get_client() as client:  # entering it asks already
            await client.hello()

    await retry_while_prefect_down(ask)


async def find_problem() -> str | None:
    """Why the configured server cannot be used, or None; a flow would fail on it in its own way."""
    client = get_client()  # entering it as a context would fail here, with a traceback
    error = await client.api_healthcheck()
    if error is None:
        return None
    return (
        f"the Prefect server at {PREFECT_API_URL.value()} does not answer ({error}); start it, or unset "
        "PREFECT_API_URL to have one started for you"
    )
