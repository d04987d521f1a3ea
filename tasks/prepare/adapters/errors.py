"""Why a source row cannot become a prompt.

RowRejected
    missing_field   a field of the schema is absent or null
    bad_field       a field has the wrong type or no JSON form
    bad_json        a field that holds JSON as text does not parse
    bad_chat        a transcript does not start with a known speaker
    bad_tools       a tool schema is unreadable or has no name
    bad_tool_call   a tool call is unreadable or has no name
    unknown_role    a turn's role is not in the role table
    not_text        a turn carries an image, sound or another non-text part
    no_user_turn    nothing is left to answer
    no_assistant_turn  nothing is left to learn, in a trajectory
    several_parts   a trajectory's turn has several texts or thoughts, and how they were joined is unknown
    tool_turns      a conversation with tools, where every turn was to be answered on the target's own history
"""

from typing import Literal

RowReason = Literal[
    "missing_field", "bad_field", "bad_json", "bad_chat", "bad_tools", "bad_tool_call", "unknown_role",
    "not_text", "no_user_turn", "no_assistant_turn", "several_parts", "tool_turns",
]  # fmt: skip


class RowRejected(Exception):
    """A row rejected: `reason` is one of the codes above, `detail` a sentence about this row."""

    def __init__(self, reason: RowReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: RowReason = reason
        self.detail = detail
