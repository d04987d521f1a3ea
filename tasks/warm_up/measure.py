"""How fast the servers are with the window full, found out in a few seconds.

Knows how to fill the window for a moment; does not know datasets. Invariant: it ends in time, and a failure
of it is no failure of the run, save one that no prompt could succeed after.
"""

import asyncio
import logging
import time
import uuid

from serving.client.errors import ServerMisconfigured, ServingError
from serving.client.pool import ServerPool
from serving.client.protocol import GenerationRequest

logger = logging.getLogger(__name__)

_FIRST_TOKENS, _MAX_TOKENS = 4, 1024


async def measure_speed(
    pool: ServerPool, input_ids: list[int], *, concurrency: int, seconds: float, room: int | None
) -> float | None:
    """Completion tokens per second with `concurrency` requests in flight; None when no round came back.

    Rounds of ever longer answers, until the next one would take longer than what is left: the last whole
    round is the least bent by prefills. `room` is the longest answer that fits.

    Raises:
        ServerMisconfigured: no prompt could succeed.
    """
    speed = None
    most = min(_MAX_TOKENS, _MAX_TOKENS if room is None else room)
    try:
        async with asyncio.timeout(seconds):
            deadline = time.monotonic() + seconds
            length = min(_FIRST_TOKENS, most)
            while length >= 1:
                started = time.monotonic()
                tokens = await _ask_all(pool, input_ids, concurrency, length)
                now = time.monotonic()
                speed = tokens / max(now - started, 1e-6)
                if length == most or now + 2 * (now - started) > deadline:
                    break
                length = min(2 * length, most)
    except TimeoutError:
        pass
    except ServerMisconfigured:
        raise
    except ServingError as exc:
        logger.warning("the speed could not be measured: %s", exc)
    return speed


async def _ask_all(pool: ServerPool, input_ids: list[int], concurrency: int, max_new_tokens: int) -> int:
    """Tokens that so many answers at once have made."""
    answers = [asyncio.create_task(_ask(pool, input_ids, max_new_tokens)) for _ in range(concurrency)]
    try:
        return sum(await asyncio.gather(*answers))
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


async def _ask(pool: ServerPool, input_ids: list[int], max_new_tokens: int) -> int:
    params = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "temperature": 1.0}
    request = GenerationRequest(f"measure-{uuid.uuid4().hex}", input_ids, params)
    async with pool.lease() as client:
        return (await client.generate(request)).completion_tokens
