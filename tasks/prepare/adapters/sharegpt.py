"""ShareGPT-style rows: `conversations` of {from, value}, with optional `id`, `system` and `tools`.

Knows that dumps mix {from, value} and {role, content}, may start with the assistant and hold empty turns
(the shared cleaning drops those), and that tool dumps write a call as a turn from `function_call` whose
value is the call's JSON. OpenThoughts rows are of this shape too, from user and assistant in one release,
from human and gpt in the other; their scores stay behind.
"""

from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.errors import RowRejected
from tasks.prepare.adapters.fields import optional_text, require, row_id, scalars, to_list, to_mapping
from tasks.prepare.adapters.messages import ID_FIELDS
from tasks.prepare.adapters.tools import to_tools

_CALLERS = ("function_call", "tool_call")


def adapt_sharegpt(row: Mapping[str, Any]) -> Conversation:
    """Read one ShareGPT-style row.

    Raises:
        RowRejected: the row has no usable conversations, tools or calls.
    """
    return _adapt(row, "source")


def adapt_openthoughts(row: Mapping[str, Any]) -> Conversation:
    """Read one OpenThoughts row.

    Raises:
        RowRejected: the row has no usable conversations.
    """
    return _adapt(row, "source", "domain", "difficulty")


def _adapt(row: Mapping[str, Any], *meta_fields: str) -> Conversation:
    turns = [_to_turn(turn) for turn in to_list(require(row, "conversations"), "conversations")]
    system = optional_text(row, "system")
    if system.strip():
        turns.insert(0, {"role": "system", "content": system})
    return Conversation(
        turns,
        id=row_id(row, *ID_FIELDS),
        tools=to_tools(row.get("tools")),
        meta=scalars(row, *meta_fields),
    )


def _to_turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowRejected("bad_field", f"a turn is {type(turn).__name__}, not an object")
    speaker = turn.get("role") if turn.get("from") is None else turn["from"]
    texts = [turn[name] for name in ("value", "content") if name in turn]
    said = {"content": next((text for text in texts if text is not None), None)} if texts else {}
    if isinstance(speaker, str) and speaker.strip().lower() in _CALLERS:
        return {"role": "assistant", "content": "", "tool_calls": _to_calls(said.get("content"))}
    return {**turn, "role": speaker, **said}


def _to_calls(value: Any) -> list[Any]:
    """The call, or the list of calls, in the turn's JSON."""
    try:
        if isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("[")):
            return to_list(value, "value")
        return [to_mapping(value, "value")]
    except RowRejected as exc:
        raise RowRejected("bad_tool_call", exc.detail) from exc
