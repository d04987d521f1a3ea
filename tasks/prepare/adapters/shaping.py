"""From a conversation to what is asked of the target: its last answer, every one of them, or none.

Knows the modes of `turns` and trajectories; does not know datasets, templates or files. The modes:

- last: the turns up to the last user turn or tool result; the target writes one answer.
- each: the target writes every assistant turn in order, each on the answers that it gave before
  (on-policy). Only for conversations without tools: a tool's result follows from the call that was made.
- independent: the target writes every assistant turn, each on the turns that the row has before it. For
  tools and agents, where what comes later depends on the original actions.
- trajectory: nothing is asked; the row's assistant turns, with their thoughts, are what is learnt.

Invariant: what is asked comes after a user or tool turn, or the row is rejected.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import orjson

from tasks.prepare.adapters.common import Turn, clean_turns
from tasks.prepare.adapters.conversation import Conversation
from tasks.prepare.adapters.errors import RowRejected
from tasks.prepare.adapters.recorded import record_turns
from tasks.records import exact_json
from tasks.records.rows import Prompt

Turns = Literal["last", "each", "independent"]
Shape = Literal["last", "each", "independent", "trajectory"]

_ID_CHARS = 16
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_ASKERS = ("user", "tool")


def make_prompt(
    conversation: Conversation,
    shape: Shape = "last",
    *,
    keep_system: bool = True,
    system_prompt: str | None = None,
) -> Prompt:
    """Clean a conversation and say where the target's answers go.

    Its system turns may be left out; `system_prompt` is put first where it then has none. A trajectory is
    left as it is.

    Raises:
        RowRejected: a turn is unusable, nothing is left to answer or to learn, or "tool_turns" where `each`
            cannot go on from the target's own answer.
    """
    if shape == "trajectory":
        return _make(conversation, record_turns(conversation.turns))
    messages = clean_turns(conversation.turns, keep_system=keep_system)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return _ask(conversation, messages, shape)


def content_id(prompt: Prompt) -> str:
    """16 hex digits of the sha256 of what the template sees, and of which answers are asked for."""
    text = _CANONICAL.encode({"messages": prompt.messages, **_besides_messages(prompt)})
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_CHARS]


def hash_content(prompt: Prompt, messages: bytes) -> int:
    """64 bits that tell the same contents apart as `content_id` does, in a third of the time.

    Args:
        prompt: A cleaned one: only what a tool call carries may have its keys in any order.
        messages: The JSON of its messages.
    """
    if _find_calls(prompt.messages):
        messages = exact_json.dumps(prompt.messages, orjson.OPT_SORT_KEYS)
    digest = hashlib.sha256(messages)
    if prompt.tools or prompt.chat_template_kwargs or prompt.answer_after:
        digest.update(exact_json.dumps(_besides_messages(prompt), orjson.OPT_SORT_KEYS))
    return int.from_bytes(digest.digest()[:8], "little")


def has_rounded(prompt: Prompt) -> bool:
    """Whether a number in it may be an integer past 64 bits that was rounded when its row was read."""
    if not (prompt.tools or prompt.chat_template_kwargs or prompt.meta or _find_calls(prompt.messages)):
        return False  # as most are: nothing but text
    return any(
        part and exact_json.has_rounded(part)
        for part in (prompt.tools, prompt.chat_template_kwargs, prompt.meta, prompt.messages)
    )


def _besides_messages(prompt: Prompt) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "tools": prompt.tools or None,
        "chat_template_kwargs": prompt.chat_template_kwargs,
    }
    if prompt.answer_after:
        seen |= {"answer_after": prompt.answer_after, "own_history": prompt.own_history}
    return seen


def _ask(conversation: Conversation, messages: list[Turn], turns: Turns) -> Prompt:
    while messages[-1]["role"] not in _ASKERS:
        messages.pop()
    if turns == "last":
        return _make(conversation, messages)
    if turns == "each" and (conversation.tools or _find_tool(messages)):
        raise RowRejected(
            "tool_turns", "turns 'each' cannot go on from another answer where tools are used; "
            "turns 'independent' keeps the row's own history",
        )  # fmt: skip
    places = _answer_places(messages)
    if len(places) == 1:
        return _make(conversation, messages)
    return _make(conversation, messages, answer_after=places, own_history=turns == "each")


def _make(conversation: Conversation, messages: list[Turn], **answers: Any) -> Prompt:
    _, row_id, tools, kwargs, meta = conversation
    return Prompt(row_id, messages, tools, {**kwargs}, {**meta}, **answers)


def _answer_places(messages: Sequence[Turn]) -> list[int]:
    """How many messages come before each answer: where an assistant turn, or the end, follows a question."""
    roles = [message["role"] for message in messages]
    followers = [*roles[1:], "assistant"]
    return [
        at
        for at, (role, follower) in enumerate(zip(roles, followers, strict=True), 1)
        if follower == "assistant" and role in _ASKERS
    ]


def _find_calls(messages: Sequence[Turn]) -> bool:
    for message in messages:  # noqa: SIM110  as below
        if "tool_calls" in message:
            return True
    return False


def _find_tool(messages: Sequence[Turn]) -> bool:
    for message in messages:  # noqa: SIM110  any() over a generator takes three times as long
        if message["role"] == "tool" or "tool_calls" in message:
            return True
    return False
