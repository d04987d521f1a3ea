"""ultrachat_200k rows: `prompt`, `prompt_id`, `messages`.

Knows that `prompt` only repeats the first message, and leaves it alone; answers the last user turn,
with the history as given.
"""

from collections.abc import Mapping
from typing import Any

from tasks.core.adapters.common import build_prompt
from tasks.core.adapters.fields import require, row_id, to_list
from tasks.core.records import Prompt


def adapt_ultrachat(row: Mapping[str, Any]) -> Prompt:
    """Make the prompt of one UltraChat row.

    Raises:
        RowRejected: the row has no usable messages.
    """
    return build_prompt(to_list(require(row, "messages"), "messages"), row_id=row_id(row, "prompt_id"))
