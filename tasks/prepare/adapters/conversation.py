"""What an adapter makes of a row: a conversation in OpenAI's shape, before any rule was applied to it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


class Conversation(NamedTuple):  # a frozen dataclass takes three times as long to make
    """One source row's turns, as the row has them.

    `turns` are {"role", "content", …} with any role name of the role table. `id` is the row's own, "" where
    the schema has none. `tools` are OpenAI tool schemas. `meta` is carried to the export and decides nothing.
    """

    turns: Sequence[Any]
    id: str = ""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({})
    meta: Mapping[str, Any] = MappingProxyType({})
