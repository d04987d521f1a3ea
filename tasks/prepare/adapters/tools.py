"""Tool schemas and tool calls, brought to the OpenAI shape.

Knows the shapes that datasets use; does not know any template. Invariant: a tool is
{"type": "function", "function": {"name": ...}}, and the arguments of a call are an object wherever
the dataset gives one, as text or not: Kimi's and Qwen's templates iterate over them.
"""

from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.errors import RowRejected
from tasks.prepare.adapters.fields import to_list
from tasks.records import exact_json


def to_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool schemas from a list or JSON text, whole or as bare function objects; None when empty.

    Raises:
        RowRejected: "bad_tools".
    """
    if value is None or value == "":
        return None
    try:
        return [to_tool(tool) for tool in to_list(value, "tools")] or None
    except RowRejected as exc:
        raise RowRejected("bad_tools", exc.detail) from exc


def to_tool(value: Any) -> dict[str, Any]:
    """One tool schema in the OpenAI shape.

    Raises:
        RowRejected: "bad_tools" when it is no object or has no name.
    """
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not _is_name(function.get("name")):
        raise RowRejected("bad_tools", f"a tool without a name: {str(value)[:80]!r}")
    return {"type": "function", "function": dict(function)}


def to_tool_calls(turn: Mapping[str, Any], *, as_recorded: bool = False) -> list[dict[str, Any]]:
    """The calls of an assistant turn, from `tool_calls` or the older `function_call`.

    With `as_recorded` the text of arguments is kept to the letter: it is what was generated.

    Raises:
        RowRejected: "bad_tool_call".
    """
    calls = turn.get("tool_calls")
    if not calls:
        single = turn.get("function_call")
        if not single:
            return []
        calls = [single]
    if not isinstance(calls, list):
        raise RowRejected("bad_tool_call", f"tool_calls is {type(calls).__name__}, not a list")
    return [_to_tool_call(call, as_recorded=as_recorded) for call in calls]


def make_tool_call(name: Any, arguments: Any, *, call_id: str | None = None) -> dict[str, Any]:
    """A call in the OpenAI shape, its arguments parsed when they are the text of a JSON object.

    Raises:
        RowRejected: "bad_tool_call" when it has no name.
    """
    if not _is_name(name):
        raise RowRejected("bad_tool_call", f"a tool call has no name (name is {name!r})")
    call: dict[str, Any] = {"id": call_id} if call_id else {}
    return {**call, "type": "function", "function": {"name": name, "arguments": _to_arguments(arguments)}}


def _to_tool_call(call: Any, *, as_recorded: bool) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RowRejected("bad_tool_call", f"a tool call is not an object: {str(call)[:80]!r}")
    call_id = call.get("id")
    made = make_tool_call(
        function.get("name"),
        function.get("arguments"),
        call_id=call_id if isinstance(call_id, str) else None,
    )
    if as_recorded and isinstance(function.get("arguments"), str):
        made["function"]["arguments"] = function["arguments"]
    return made


def _to_arguments(value: Any) -> dict[str, Any] | str:
    if value is None or value == "":
        return {}  # a call without arguments
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise RowRejected("bad_tool_call", f"arguments are {type(value).__name__}, not an object or text")
    try:
        parsed = exact_json.loads(value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict) else value


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
