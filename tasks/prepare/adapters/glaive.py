"""glaive-function-calling-v2 rows: two strings, `system` and `chat`.

Knows its quirks: a `SYSTEM:` prefix followed by function schemas, one JSON object after another;
turns marked `USER:`, `ASSISTANT:` and `FUNCTION RESPONSE:`; calls written as `<functioncall>` with
their arguments between single quotes, which is not JSON. The rows carry no id. Invariant: a schema
or a call that can't be read rejects the row; neither is ever passed on as plain text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.common import Turn
from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.errors import RowRejected
from tasks.prepare.adapters.fields import require_text
from tasks.prepare.adapters.tools import make_tool_call, to_tool
from tasks.records import exact_json

_END = "<|endoftext|>"
_CALL = "<functioncall>"
_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_MARKER = re.compile(r"^[ \t]*(USER|ASSISTANT|FUNCTION RESPONSE):", re.MULTILINE)
_LOOSE_CALL = re.compile(
    r'\{\s*"name"\s*:\s*"(?P<name>[^"]+)"\s*,\s*"arguments"\s*:\s*\'(?P<arguments>.*)\'\s*\}', re.DOTALL
)
_SCHEMA_GAP = re.compile(r"[\s,]*")
_TOOL_INTRODUCTION = re.compile(r"following functions", re.IGNORECASE)


def adapt_glaive(row: Mapping[str, Any]) -> Conversation:
    """Read one Glaive row.

    A system text that only introduces the functions is left out, because the template introduces
    them itself; any other system text is kept.

    Raises:
        RowRejected: a field is missing, or a schema, call or turn can't be read.
    """
    text, tools = split_system(require_text(row, "system"))
    opening: list[Turn] = [{"role": "system", "content": text}] if text else []
    return Conversation([*opening, *split_chat(require_text(row, "chat"))], tools=tools or None)


def split_system(system: str) -> tuple[str, list[dict[str, Any]]]:
    """The system text to keep ("" for none) and the tools.

    Raises:
        RowRejected: "bad_tools".
    """
    text = system.strip().removeprefix("SYSTEM:").strip()
    start = text.find("{")
    if start < 0:
        return text, []
    introduction = text[:start].strip()
    tools = [to_tool(schema) for schema in _read_objects(text[start:])]
    return ("" if _TOOL_INTRODUCTION.search(introduction) else introduction), tools


def split_chat(chat: str) -> list[Turn]:
    """The transcript as OpenAI-style turns; calls and their responses share a made-up id.

    The ids are Kimi's, "functions.NAME:COUNT": its template prints them, others ignore them.

    Raises:
        RowRejected: "bad_chat" or "bad_tool_call".
    """
    before, *pieces = _MARKER.split(chat.replace(_END, ""))
    if before.strip():
        raise RowRejected("bad_chat", f"chat starts with {before.strip()[:60]!r}, not with a known speaker")
    turns: list[Turn] = []
    waiting: list[dict[str, Any]] = []  # calls without a response so far
    n_calls = 0
    for marker, content in zip(pieces[::2], pieces[1::2], strict=True):
        turn: Turn = {"role": _ROLES[marker], "content": content.strip()}
        if turn["role"] == "assistant" and _CALL in content:
            turn = _calling_turn(turn["content"], first=n_calls)
            n_calls += len(turn["tool_calls"])
            waiting = list(turn["tool_calls"])
        elif turn["role"] == "tool" and waiting:
            call = waiting.pop(0)
            turn |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
        turns.append(turn)
    return turns


def parse_call(text: str, *, number: int = 0) -> dict[str, Any]:
    """One call as written after `<functioncall>`, in the OpenAI shape.

    Raises:
        RowRejected: "bad_tool_call" when it can't be read or its arguments are no JSON object.
    """
    name, arguments = _read_call(text.strip())
    call = make_tool_call(name, arguments, call_id=f"functions.{name}:{number}")
    if not isinstance(call["function"]["arguments"], dict):
        raise RowRejected(
            "bad_tool_call", f"the arguments of {name!r} are no JSON object: {text.strip()[:80]!r}"
        )
    return call


def _calling_turn(content: str, *, first: int) -> Turn:
    before, *calls = content.split(_CALL)
    tool_calls = [parse_call(call, number=first + i) for i, call in enumerate(calls)]
    return {"role": "assistant", "content": before.strip(), "tool_calls": tool_calls}


def _read_call(text: str) -> tuple[Any, Any]:
    try:
        call = exact_json.loads(text)
    except ValueError:
        loose = _LOOSE_CALL.fullmatch(text)
        if loose is None:
            raise RowRejected("bad_tool_call", f"unreadable function call: {text[:80]!r}") from None
        return loose["name"], loose["arguments"].replace("\\'", "'")
    if not isinstance(call, dict):
        raise RowRejected("bad_tool_call", f"a function call is not an object: {text[:80]!r}")
    return call.get("name"), call.get("arguments")


def _read_objects(text: str) -> list[Any]:
    # Not strict: some descriptions hold raw newlines.
    decoder = json.JSONDecoder(strict=False, parse_float=exact_json.parse_float)
    objects, at = [], 0
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as exc:
            raise RowRejected(
                "bad_tools", f"unreadable function schema {text[at : at + 60]!r}: {exc}"
            ) from exc
        objects.append(value)
        gap = _SCHEMA_GAP.match(text, end)
        at = gap.end() if gap else end
    return objects
