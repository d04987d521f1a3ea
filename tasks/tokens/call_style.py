"""How a chat template writes an assistant's tool calls, and calls in the form that it takes.

Knows templates by what they make of a probe; does not know tokens. Invariant: a call is handed to a template
only in a form in which the template was seen to show its arguments and what names it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# What a template can show of a call's arguments: a text and an object, only a text, only an object.
ArgumentForm = Literal["as_recorded", "text", "object"]
Messages = list[dict[str, Any]]

_NAME = "draftmill_probe_call"
_ID = "drftmll07"  # nine letters and digits: Mistral's templates refuse any other id
_OBJECT = {"draftmill_probe_key": "draftmill_probe_value"}
_TEXT = '{"draftmill_probe_key":  "draftmill_probe_value"}'  # two blanks: JSON that is written anew has one


@dataclass(frozen=True, slots=True)
class CallStyle:
    """What a template shows of a call: its arguments in some form, its function's name, its id.

    Kimi's templates show the id and never the name, which the id holds (`functions.NAME:0`).
    """

    arguments: ArgumentForm
    shows_name: bool
    shows_id: bool

    def adapt(self, messages: Messages) -> Messages:
        """Messages whose calls are as the template takes them; an id is made where only ids are shown."""
        if not has_calls(messages):
            return messages
        if self.arguments == "text":
            messages = [_map_calls(message, _with_text) for message in messages]
        return messages if self.shows_name else _make_missing_ids(messages)


def find_call_style(render: Callable[[Messages], str | None]) -> CallStyle | None:
    """Probe a template, which `render` applies; None where it shows no calls in any form.

    `render` returns None where the template raises.
    """
    as_object, as_text = render(_probe(_OBJECT)), render(_probe(_TEXT))
    takes_object = as_object is not None and _shows_object(as_object)
    takes_text = as_text is not None and _TEXT in as_text
    shown = as_object if takes_object else as_text if takes_text else None
    if shown is None or not (_NAME in shown or _ID in shown):
        return None
    form: ArgumentForm = "object" if takes_object else "text"
    if takes_object and takes_text:
        form = "as_recorded"
    return CallStyle(form, shows_name=_NAME in shown, shows_id=_ID in shown)


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any turn calls a tool."""
    return any(message.get("tool_calls") for message in messages)


def calls_as_text(messages: Messages) -> Messages:
    """The same messages with tool calls at the end of their content, for a template that shows none."""
    if not has_calls(messages):
        return messages
    rewritten = []
    for message in messages:
        calls = message.get("tool_calls")
        if not calls:
            rewritten.append(message)
            continue
        text = "\n".join(f"<tool_call>{_function_json(call)}</tool_call>" for call in calls)
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        plain["content"] = f"{message.get('content') or ''}\n{text}".strip()
        rewritten.append(plain)
    return rewritten


def arguments_as_text(arguments: Any) -> Any:
    """An object as JSON text; a text stays as it is."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _probe(arguments: Any) -> Messages:
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def _shows_object(text: str) -> bool:
    """Whether keys and values show, but not as Python prints a dict: no model was trained on that."""
    return all(word in text for pair in _OBJECT.items() for word in pair) and str(_OBJECT) not in text


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments_as_text(function.get("arguments"))}}


def _make_missing_ids(messages: Messages) -> Messages:
    """Kimi's ids: the function's name and the call's number in the conversation, from 0.

    From Moonshot's tool calling guide for Kimi K2 (docs/tool_call_guidance.md of its repository). A tool's
    result without an id gets that of the first call that has no result yet.
    """
    numbered = _count_calls(messages)
    waiting: list[str] = []

    def name(call: dict[str, Any]) -> dict[str, Any]:
        number = next(numbered)
        made = call if call.get("id") else {**call, "id": f"functions.{call['function']['name']}:{number}"}
        waiting.append(made["id"])
        return made

    return [_with_result_id(_map_calls(message, name), waiting) for message in messages]


def _count_calls(messages: Messages) -> Iterator[int]:
    return iter(range(sum(len(message.get("tool_calls") or ()) for message in messages)))


def _with_result_id(message: dict[str, Any], waiting: list[str]) -> dict[str, Any]:
    if message.get("role") != "tool":
        return message
    answered = message.get("tool_call_id") or (waiting[0] if waiting else None)
    if answered in waiting:
        waiting.remove(answered)
    return message if answered is None else {**message, "tool_call_id": answered}


def _map_calls(message: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def _function_json(call: Mapping[str, Any]) -> str:
    return json.dumps(call.get("function", call), ensure_ascii=False)
