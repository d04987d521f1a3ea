"""Reading the fields of a source row: presence, type, JSON held as text.

Knows no schema; each adapter names its fields. Invariant: a value of the wrong kind rejects the row
with the field's name, and the row itself is never changed.
"""

import math
from collections.abc import Mapping
from typing import Any

from tasks.prepare.adapters.errors import RowRejected
from tasks.records import exact_json

_TAKEN_KWARGS = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
    }
)  # transformers 5
_META_TEXT_CHARS = 200  # labels and scores, not texts


def require(row: Mapping[str, Any], name: str) -> Any:
    """The field's value.

    Raises:
        RowRejected: "missing_field" when it is absent or null.
    """
    value = row.get(name)
    if value is None:
        present = ", ".join(sorted(map(str, row))) or "none"
        raise RowRejected("missing_field", f"field {name!r} is missing or null; fields present: {present}")
    return value


def require_text(row: Mapping[str, Any], name: str) -> str:
    """The field's value when it is a string.

    Raises:
        RowRejected: "missing_field", or "bad_field" when it is something else.
    """
    value = require(row, name)
    if not isinstance(value, str):
        raise RowRejected("bad_field", f"field {name!r} is {type(value).__name__}, not a string")
    return value


def optional_text(row: Mapping[str, Any], name: str) -> str:
    """The field's text, "" when it is absent or null."""
    return "" if row.get(name) is None else require_text(row, name)


def to_list(value: Any, name: str) -> list[Any]:
    """A list, given as such or as JSON text.

    Raises:
        RowRejected: "bad_json" or "bad_field".
    """
    if isinstance(value, str):
        value = _load(value, name)
    if not isinstance(value, list):
        raise RowRejected("bad_field", f"field {name!r} is {type(value).__name__}, not a list")
    return value


def to_mapping(value: Any, name: str) -> dict[str, Any]:
    """An object, given as such or as JSON text.

    Raises:
        RowRejected: "bad_json" or "bad_field".
    """
    if isinstance(value, str):
        value = _load(value, name)
    if not isinstance(value, Mapping):
        raise RowRejected("bad_field", f"field {name!r} is {type(value).__name__}, not an object")
    return dict(value)


def to_template_kwargs(value: Any) -> dict[str, Any]:
    """Arguments for the chat template, none of which is an argument of ours to what renders it.

    Raises:
        RowRejected: "bad_json" or "bad_field".
    """
    kwargs = to_mapping(value, "chat_template_kwargs")
    if taken := find_taken_kwargs(kwargs):
        raise RowRejected("bad_field", f"chat_template_kwargs has {taken[0]!r}, which is not the template's")
    return kwargs


def find_taken_kwargs(kwargs: Mapping[str, Any]) -> list[str]:
    """The names among them that are arguments of `apply_chat_template` itself, not of the template."""
    return [name for name in kwargs if name in _TAKEN_KWARGS]


def row_id(row: Mapping[str, Any], *names: str) -> str:
    """The first of the fields that holds an id, as text; "" when none does."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and (text := value.strip()):
            return text
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
    return ""


def scalars(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The named fields (all of them when none is named) that are short text, numbers or booleans.

    An integer past 64 bits is given as text: the answers' log, which repeats labels, has no such numbers.
    """
    given = {name: row[name] for name in names or tuple(row) if name in row and _is_small(row[name])}
    return {name: str(one) if _is_long(one) else one for name, one in given.items()}


def _is_small(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= _META_TEXT_CHARS
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int)


def _is_long(value: Any) -> bool:
    return isinstance(value, int) and exact_json.is_long(value)


def _load(text: str, name: str) -> Any:
    try:
        return exact_json.loads(text)
    except ValueError as exc:
        raise RowRejected("bad_json", f"field {name!r} is text that is not JSON: {exc}") from exc
