"""SWE-agent trajectories: nebius's `trajectory` or SWE-smith's `messages`.

Knows nebius's quirks (the role `ai`; the system text in `system_prompt` with `text` null) and SWE-smith's
(`messages` as JSON text; observations as user turns, or as tool turns with a list `tool_call_ids`). Several
rows may share an `instance_id`: preparation tells them apart by content.
"""

from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.errors import RowRejected
from tasks.prepare.adapters.fields import require, row_id, scalars, to_list
from tasks.prepare.adapters.tools import to_tools

_META_FIELDS = ("instance_id", "model_name", "model", "exit_status", "resolved", "target")


def adapt_sweagent(row: Mapping[str, Any]) -> Conversation:
    """Read one SWE-agent trajectory of either set.

    Raises:
        RowRejected: it has no usable turns.
    """
    field = "messages" if row.get("trajectory") is None and row.get("messages") is not None else "trajectory"
    turns = to_list(require(row, field), field)
    return Conversation(
        [_to_turn(turn) for turn in turns],
        id=row_id(row, "traj_id", "instance_id"),
        tools=to_tools(row.get("tools")),
        meta=scalars(row, *_META_FIELDS),
    )


def _to_turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowRejected("bad_field", f"a turn is {type(turn).__name__}, not an object")
    texts = [turn[key] for key in ("text", "content", "system_prompt") if key in turn]
    said = {"content": next((text for text in texts if text is not None), None)} if texts else {}
    ids = turn.get("tool_call_ids")
    label = {"tool_call_id": ids[0]} if isinstance(ids, list) and ids else {}
    return {**turn, **label, **said}
