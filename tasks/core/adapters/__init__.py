"""Adapters: one source row in, one conversation out, and the shapes that a prompt is made of it in.

Knows the schemas of public datasets by name; does not know files. Invariant: an adapter returns what the row
says, or raises RowRejected; it never changes the row. The id is the row's own, or "" where the schema has
none: the caller then takes `content_id`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tasks.core.adapters.conversation import Conversation
from tasks.core.adapters.errors import RowRejected
from tasks.core.adapters.glaive import adapt_glaive
from tasks.core.adapters.messages import adapt_messages
from tasks.core.adapters.opencodeinstruct import adapt_opencodeinstruct
from tasks.core.adapters.shaping import Shape, Turns, content_id, make_prompt
from tasks.core.adapters.ultrachat import adapt_ultrachat

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Conversation",
    "RowRejected",
    "Shape",
    "Turns",
    "content_id",
    "get_adapter",
    "make_prompt",
]

Adapter = Callable[[Mapping[str, Any]], Conversation]

ADAPTERS: dict[str, Adapter] = {
    "glaive": adapt_glaive,
    "messages": adapt_messages,
    "opencodeinstruct": adapt_opencodeinstruct,
    "ultrachat": adapt_ultrachat,
}


def get_adapter(name: str) -> Adapter:
    """The adapter of that name.

    Raises:
        ValueError: there is none.
    """
    try:
        return ADAPTERS[name]
    except KeyError:
        raise ValueError(f"unknown adapter {name!r}; known: {', '.join(sorted(ADAPTERS))}") from None
