"""Serve one group of deployments: register them, start their runs as processes, stop them on SIGTERM.

Run as `python -m deployments.serve GROUP LIMIT PARENT_PID`. The parent's runs and the datasets' runs are two
groups with slots of their own: in one group the datasets would wait for a slot that their parent holds.
"""

import asyncio
import logging
import os
import signal
import sys

from prefect import aserve
from prefect.client.orchestration import get_client

from deployments.definitions import read_group
from deployments.registration import register
from serving.parent import watch_parent

logger = logging.getLogger(__name__)


async def serve_group(group: str, *, limit: int) -> None:
    """Serve until SIGTERM, which cancels what runs and lets it save.

    Args:
        group: a work pool's name in prefect.yaml.
        limit: runs at a time.
    """
    deployments = read_group(group)
    async with get_client() as client:
        for deployment in deployments:
            registration = await register(client, deployment)
            for line in registration.describe_changes():
                logger.warning(line)
    await aserve(*deployments, limit=limit, pause_on_shutdown=False, print_starting_message=False)


if __name__ == "__main__":
    watch_parent(int(sys.argv[3]), lambda: os.kill(os.getpid(), signal.SIGTERM))
    asyncio.run(serve_group(sys.argv[1], limit=int(sys.argv[2])))
