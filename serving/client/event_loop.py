"""Which event loop answers are waited for in."""

import asyncio
from collections.abc import Callable


def find_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Uvloop's where there is one (docs/adr/0006), else None: asyncio's own."""
    try:
        import uvloop
    except ImportError:  # Windows has none
        return None
    return uvloop.new_event_loop
