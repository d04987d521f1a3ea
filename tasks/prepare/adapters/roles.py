"""The role table: the names that datasets give to speakers, and what a chat template calls them.

Knows names only. Invariant: a role comes out as system, user, assistant or tool, or the row is
rejected; nothing is guessed.
"""

from typing import Any, Literal

from tasks.prepare.adapters.errors import RowRejected

Role = Literal["system", "user", "assistant", "tool"]

ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def to_role(name: Any) -> Role:
    """The template's role for a dataset's name of a speaker; case and outer spaces don't matter.

    Raises:
        RowRejected: "unknown_role".
    """
    if not isinstance(name, str):
        raise _unknown(name)
    role = ROLES.get(name) or ROLES.get(name.strip().lower())
    if role is None:
        raise _unknown(name)
    return role


def _unknown(name: Any) -> RowRejected:
    return RowRejected("unknown_role", f"role {name!r} is not one of {', '.join(ROLES)}")
