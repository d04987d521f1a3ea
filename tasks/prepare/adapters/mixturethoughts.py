"""Mixture-of-Thoughts rows: `messages`, `num_tokens`, `source`; no id.

Knows that the answers carry another model's `<think>` blocks, which the shared cleaning drops.
"""

from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.fields import require, scalars, to_list


def adapt_mixturethoughts(row: Mapping[str, Any]) -> Conversation:
    """Read one Mixture-of-Thoughts row.

    Raises:
        RowRejected: the row has no usable messages.
    """
    return Conversation(to_list(require(row, "messages"), "messages"), meta=scalars(row, "source"))
