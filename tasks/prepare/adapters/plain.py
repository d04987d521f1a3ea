"""Rows with one text to answer: `prompt` (a string, or messages) or `text`, with optional `id` and `system`.

Knows that a `prompt` may be a list of messages, as preference datasets have it. Whatever answer the row has
beside it is left out.
"""

from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.fields import optional_text, require, require_text, row_id, scalars
from tasks.prepare.adapters.messages import ID_FIELDS


def adapt_prompt(row: Mapping[str, Any]) -> Conversation:
    """Read a row whose question is in `prompt`.

    Raises:
        RowRejected: there is none, or it is neither text nor messages.
    """
    prompt = require(row, "prompt")
    turns = prompt if isinstance(prompt, list) else [_user_turn(require_text(row, "prompt"))]
    return _make(row, turns)


def adapt_text(row: Mapping[str, Any]) -> Conversation:
    """Read a row whose question is in `text`.

    Raises:
        RowRejected: there is none, or it is not text.
    """
    return _make(row, [_user_turn(require_text(row, "text"))])


def _make(row: Mapping[str, Any], turns: list[Any]) -> Conversation:
    system = optional_text(row, "system")
    opening = [{"role": "system", "content": system}] if system.strip() else []
    return Conversation([*opening, *turns], id=row_id(row, *ID_FIELDS), meta=scalars(row, "source"))


def _user_turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
