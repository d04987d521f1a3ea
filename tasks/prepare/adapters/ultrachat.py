"""ultrachat_200k rows: `prompt`, `prompt_id`, `messages`.

Knows that `prompt` only repeats the first message, and leaves it alone.
"""

from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.fields import require, row_id, to_list


def adapt_ultrachat(row: Mapping[str, Any]) -> Conversation:
    """Read one UltraChat row.

    Raises:
        RowRejected: the row has no usable messages.
    """
    return Conversation(to_list(require(row, "messages"), "messages"), id=row_id(row, "prompt_id"))
