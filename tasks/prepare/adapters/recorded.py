"""The turns of a finished conversation, as the target saw and wrote them.

Knows OpenAI-style turns; does not know any dataset. Roles and calls are brought to the shape that templates
read, and content to one string; nothing is dropped or merged, be it empty, before the first question or a
second turn of one role. Invariant: a turn whose text would have to be guessed rejects the row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.prepare.adapters.common import THOUGHT_PARTS, Turn, clean_turn, to_text
from tasks.prepare.adapters.errors import RowRejected
from tasks.prepare.adapters.tools import to_tool_calls

_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_OTHER_CONTENT = ("refusal", "audio", "images")


def record_turns(turns: Sequence[Any]) -> list[Turn]:
    """The turns up to the last one of the assistant; what comes after it was not answered.

    Raises:
        RowRejected: "no_assistant_turn", "several_parts", or as for a turn of a prompt.
    """
    recorded = [_record_turn(turn) for turn in turns]
    last = max((at for at, turn in enumerate(recorded) if turn["role"] == "assistant"), default=None)
    if last is None:
        raise RowRejected("no_assistant_turn", "the conversation has no answer to learn")
    return recorded[: last + 1]


def _record_turn(turn: Any) -> Turn:
    if not isinstance(turn, Mapping):
        return clean_turn(turn)  # which says what is wrong with it
    _refuse_lost(turn)
    content, thoughts = _split_parts(turn.get("content"))
    recorded = {**clean_turn({**turn, "content": ""}), "content": content}
    if "tool_calls" in recorded:
        recorded["tool_calls"] = to_tool_calls(turn, as_recorded=True)
    thoughts += [turn[key] for key in _THOUGHT_FIELDS if isinstance(turn.get(key), str)]
    if recorded["role"] == "assistant" and (told := list(dict.fromkeys(filter(str.strip, thoughts)))):
        if len(told) > 1:
            raise RowRejected(
                "several_parts", "a turn has several thoughts: how they were written is unknown"
            )
        recorded["reasoning_content"] = told[0]
    return recorded


def _refuse_lost(turn: Mapping[str, Any]) -> None:
    """What the turn said beside its text, or where nobody looks for it, would be missing from it."""
    for name in _OTHER_CONTENT:
        if turn.get(name):
            raise RowRejected("not_text", f"a turn has {name!r}, which no template shows")
    says_otherwise = any(turn.get(name) for name in ("tool_calls", "function_call", *_THOUGHT_FIELDS))
    if turn.get("content") is None and not says_otherwise:
        fields = ", ".join(sorted(map(str, turn)))
        raise RowRejected("missing_field", f"a turn has no content; its fields are {fields}")


def _split_parts(content: Any) -> tuple[str, list[str]]:
    """The text and the thoughts of a turn's content."""
    if not isinstance(content, list):
        return to_text(content), []
    thoughts, texts = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in THOUGHT_PARTS:
            thoughts.append(str(part.get(kind) or part.get("text") or ""))
        else:
            texts.append(part)
    text = to_text(texts)
    if len(texts) > 1:  # joined by nothing, a blank or a line break, as the server and the template had it
        raise RowRejected("several_parts", f"a turn has {len(texts)} text parts, joined nobody knows how")
    return text, thoughts
