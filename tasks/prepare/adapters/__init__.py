"""Adapters: one source row in, one conversation out, and the shapes that a prompt is made of it in.

Knows the schemas of public datasets by name; does not know files. Invariant: an adapter returns what the row
says, or raises RowRejected; it never changes the row. The id is the row's own, or "" where the schema has
none: the caller then takes `content_id`. Imports records only.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.errors import RowRejected
from tasks.prepare.adapters.glaive import adapt_glaive
from tasks.prepare.adapters.magicoder import adapt_magicoder
from tasks.prepare.adapters.messages import adapt_messages
from tasks.prepare.adapters.mixturethoughts import adapt_mixturethoughts
from tasks.prepare.adapters.opencodeinstruct import adapt_opencodeinstruct
from tasks.prepare.adapters.plain import adapt_prompt, adapt_text
from tasks.prepare.adapters.shaping import Shape, Turns, content_id, has_rounded, hash_content, make_prompt
from tasks.prepare.adapters.sharegpt import adapt_openthoughts, adapt_sharegpt
from tasks.prepare.adapters.sweagent import adapt_sweagent
from tasks.prepare.adapters.ultrachat import adapt_ultrachat

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Conversation",
    "RowRejected",
    "Shape",
    "Turns",
    "content_id",
    "get_adapter",
    "has_rounded",
    "hash_content",
    "make_prompt",
]

Adapter = Callable[[Mapping[str, Any]], Conversation]

ADAPTERS: dict[str, Adapter] = {
    "glaive": adapt_glaive,
    "magicoder": adapt_magicoder,
    "messages": adapt_messages,
    "mixturethoughts": adapt_mixturethoughts,
    "opencodeinstruct": adapt_opencodeinstruct,
    "openthoughts": adapt_openthoughts,
    "prompt": adapt_prompt,
    "sharegpt": adapt_sharegpt,
    "sweagent": adapt_sweagent,
    "text": adapt_text,
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
