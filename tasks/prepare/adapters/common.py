"""The cleaning that the turns of every prompt go through.

Knows OpenAI-style turns; does not know any dataset, nor what is asked of them (shaping.py does). The
rules, in order:

1. Roles go through the role table; content becomes one string (text parts are joined by a newline,
   null counts as empty); images and sound reject the row.
2. Thoughts leave the assistant's turns: a prompt's history holds answers only.
3. Empty turns are dropped, except tool results (a command may print nothing) and assistant turns
   that call tools.
4. Whatever comes before the first user turn is dropped, except system turns.
5. Consecutive turns of one role become one, joined by a blank line, except tool results and
   assistant turns that call tools, which stay as they are.

A finished conversation of the target is not cleaned (recorded.py).

Invariant: the turns have a user turn, every content is a string, and the source row is left as it was.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.prepare.adapters.errors import RowRejected
from tasks.prepare.adapters.roles import ROLES, to_role
from tasks.prepare.adapters.tools import to_tool_calls

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
THOUGHT_PARTS = frozenset({"thinking", "reasoning"})

_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_CUT_THOUGHT = re.compile(r"\A\s*<think>.*\Z", re.DOTALL)  # the answer ended inside its thought
_UNOPENED_THOUGHT = re.compile(r"\A.*</think>\s*", re.DOTALL)  # the template wrote the opening mark

_CONTENT_FIELDS = frozenset({"content", "tool_calls", "function_call"})

Turn = dict[str, Any]


def clean_turns(turns: Sequence[Any], *, keep_system: bool = True) -> list[Turn]:
    """The turns a template is given, by the rules at the top of this module.

    Raises:
        RowRejected: "no_user_turn", "unknown_role", "not_text", "bad_field" or "bad_tool_call".
    """
    kept: list[Turn] = []
    has_user = False
    for given in turns:  # once over them all: a list for each rule took a tenth of preparing a row
        turn = clean_turn(given)
        role, content = turn["role"], turn["content"]
        if (not content or content.isspace()) and role != "tool" and "tool_calls" not in turn:
            continue
        if role == "user":
            has_user = True
        elif not (has_user if role != "system" else keep_system):
            continue
        if kept and kept[-1]["role"] == role and _may_merge(kept[-1], turn):
            kept[-1] = {**kept[-1], "content": f"{kept[-1]['content']}\n\n{turn['content']}"}
        else:
            kept.append(turn)
    if not has_user:
        raise RowRejected("no_user_turn", f"none of the {len(turns)} turns is a user turn with text")
    return kept


def clean_turn(turn: Any) -> Turn:
    """One turn with the template's role, content as one string, and the keys a template reads.

    Raises:
        RowRejected: see `clean_turns`.
    """
    if not isinstance(turn, dict):
        raise RowRejected("bad_field", f"a turn is {type(turn).__name__}, not an object")
    role, content = turn.get("role"), turn.get("content")
    role = (ROLES.get(role) if isinstance(role, str) else None) or to_role(role)  # most need no call
    if not isinstance(content, str):
        if content is None and not _CONTENT_FIELDS.intersection(turn):
            fields = ", ".join(sorted(map(str, turn)))
            raise RowRejected("missing_field", f"a turn has no content; its fields are {fields}")
        content = to_text(content)
    if role == "user":
        return {"role": role, "content": content}
    if role == "assistant":
        return _clean_answer(turn, content)
    if role == "tool":
        labels = {key: turn[key] for key in ("tool_call_id", "name") if isinstance(turn.get(key), str)}
        return {"role": role, "content": content, **labels}
    return {"role": role, "content": content}


def to_text(content: Any) -> str:
    """A turn's content as one string; null is "".

    Raises:
        RowRejected: "not_text" for a part that is no text, "bad_field" for anything else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowRejected("bad_field", f"content is {type(content).__name__}, not text or a list of parts")
    return "\n".join(text for text in map(_part_text, content) if text is not None)


def drop_thoughts(text: str) -> str:
    """The text without `<think>` blocks, also where one was cut or its opening mark is missing."""
    if ">" not in text or "think>" not in text:  # a single character is found 20 times as fast
        return text
    text = _CUT_THOUGHT.sub("", _THOUGHT.sub("", text))
    return _UNOPENED_THOUGHT.sub("", text)


def _clean_answer(turn: Mapping[str, Any], content: str) -> Turn:
    if ">" in content:
        content = drop_thoughts(content)
    cleaned: Turn = {"role": "assistant", "content": content}
    if ("tool_calls" in turn or "function_call" in turn) and (calls := to_tool_calls(turn)):
        cleaned["tool_calls"] = calls
    return cleaned


def _part_text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise RowRejected("not_text", f"a content part of type {kind!r} is not text")
    if kind in THOUGHT_PARTS:
        return None
    text = part.get("text") if kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise RowRejected("not_text", f"a content part of type {kind!r} is not text")
    return text


def _may_merge(one: Turn, other: Turn) -> bool:
    """Whether two turns of the same role become one."""
    return one["role"] != "tool" and "tool_calls" not in one and "tool_calls" not in other
