"""OpenAI-style rows: `messages`, with optional `tools` (or the older `functions`), `system`, `id`, `meta`.

Knows that `messages` and `tools` may be JSON text (SWE-smith's are). Invariant: a row without `messages` is
rejected, never guessed at.
"""

from collections.abc import Mapping
from typing import Any

from tasks.core.adapters.conversation import Conversation
from tasks.core.adapters.fields import (
    optional_text,
    require,
    row_id,
    scalars,
    to_list,
    to_mapping,
    to_template_kwargs,
)
from tasks.core.adapters.tools import to_tools

ID_FIELDS = ("id", "prompt_id", "conversation_id", "uuid")


def adapt_messages(row: Mapping[str, Any]) -> Conversation:
    """Read one OpenAI-style row; a `system` field goes before the messages.

    Raises:
        RowRejected: the row has no usable messages, tools or template arguments.
    """
    turns = to_list(require(row, "messages"), "messages")
    system = optional_text(row, "system")
    if system.strip() and not _starts_with(turns, system):
        turns = [{"role": "system", "content": system}, *turns]
    kwargs = row.get("chat_template_kwargs")
    meta = row.get("meta")
    return Conversation(
        turns,
        id=row_id(row, *ID_FIELDS),
        tools=to_tools(row.get("tools") or row.get("functions")),
        chat_template_kwargs=to_template_kwargs(kwargs) if kwargs else {},
        meta={**scalars(row, "source"), **(scalars(to_mapping(meta, "meta")) if meta else {})},
    )


def _starts_with(turns: list[Any], system: str) -> bool:
    first = turns[0] if turns and isinstance(turns[0], Mapping) else {}
    return first.get("role") == "system" and first.get("content") == system
