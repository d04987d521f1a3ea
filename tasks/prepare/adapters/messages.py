"""OpenAI-style rows: `messages`, with optional `tools` (or the older `functions`), `system`, `id`, `meta`.

Knows that `messages` and `tools` may be JSON text (SWE-smith's are). Invariant: a row without `messages` is
rejected, never guessed at.
"""

from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.fields import (
    optional_text,
    require,
    row_id,
    scalars,
    to_list,
    to_mapping,
    to_template_kwargs,
)
from tasks.prepare.adapters.tools import to_tools

ID_FIELDS = ("id", "prompt_id", "conversation_id", "uuid")


def adapt_messages(row: Mapping[str, Any]) -> Conversation:
    """Read one OpenAI-style row; a `system` field goes before the messages.

    Raises:
        RowRejected: the row has no usable messages, tools or template arguments.
    """
    turns = to_list(require(row, "messages"), "messages")
    if "system" in row:
        system = optional_text(row, "system")
        if system.strip() and not _starts_with(turns, system):
            turns = [{"role": "system", "content": system}, *turns]
    tools = to_tools(row.get("tools") or row.get("functions"))
    kwargs = to_template_kwargs(given) if (given := row.get("chat_template_kwargs")) else {}
    labels = scalars(row, "source") if "source" in row else {}
    if meta := row.get("meta"):
        labels.update(scalars(to_mapping(meta, "meta")))
    return Conversation(turns, row_id(row, *ID_FIELDS), tools, kwargs, labels)


def _starts_with(turns: list[Any], system: str) -> bool:
    first = turns[0] if turns and isinstance(turns[0], Mapping) else {}
    return first.get("role") == "system" and first.get("content") == system
