"""One recorded turn of the target in the text that its chat template makes of it.

Knows what a turn records and how it has to show; does not know ids. Invariant: a turn is found whole, up to
the token that ended it, or refused: nothing is added that was not recorded, and nothing is lost.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.tokens.call_style import ArgumentForm, CallStyle, arguments_as_text
from tasks.tokens.rendering import RenderError
from tasks.tokens.special_tokens import encode_plain, find_think_tokens
from tasks.tokens.tokenizer import TargetTokenizer


@dataclass(frozen=True, slots=True)
class StopToken:
    """The end-of-turn token of an answer's text: its place there, and its id."""

    start: int
    end: int
    id: int


class TurnReader:
    """Finds what a turn recorded, and the token that ended it, in the text behind its prompt."""

    def __init__(self, target: TargetTokenizer, call_style: CallStyle | None) -> None:
        tokenizer = target.tokenizer
        self._shows_call_ids = call_style is not None and call_style.shows_id
        self._stops = _find_stops(target)
        self._special = _find_special(tokenizer)
        think = find_think_tokens(tokenizer)
        self._thought_end = tokenizer.convert_ids_to_tokens(think.close_id) if think else None
        self._stop_pattern = _match_any(self._stops)
        self._foreign_pattern = _match_any([*self._stops, *self._special])

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer wherever they come."""
        return frozenset(self._stops.values())

    def find_stop(self, message: Mapping[str, Any], answer: str) -> StopToken:
        """The token that ended the turn; what the template writes behind it was not generated.

        Raises:
            RenderError: the answer lacks something recorded, shows what was not, or has no certain end.
        """
        self._refuse_special(message)
        recorded_end = _find_recorded(message, answer, shows_call_ids=self._shows_call_ids)
        self._refuse_invented_thought(message, answer)
        found = self._first_stop(answer) or self._closing_token(answer)
        if found is None:
            raise RenderError("no_end_of_turn", f"no end-of-turn token follows: {answer[-60:]!r}")
        if found.start < recorded_end:
            raise RenderError("special_token_in_answer", f"the turn goes on behind {answer[: found.end]!r}")
        # A call is closed by tokens of its own; behind plain text a second special token is an end too.
        if not message.get("tool_calls") and self._foreign_pattern.search(answer, recorded_end, found.start):
            raise RenderError(
                "no_end_of_turn",
                f"which token of {answer[recorded_end:]!r} ended the turn is not known; "
                "put the model's generation_config.json into the tokenizer's folder",
            )
        return found

    def _refuse_special(self, message: Mapping[str, Any]) -> None:
        """Decoding drops special tokens, so one in a recorded text was spelled out with other ids."""
        for text in _all_texts({key: value for key, value in message.items() if key != "role"}):
            if found := self._foreign_pattern.search(text):
                raise RenderError(
                    "special_token_in_answer", f"the target's turn has the text {found.group()!r} in it"
                )

    def _refuse_invented_thought(self, message: Mapping[str, Any], answer: str) -> None:
        """A thinking template writes an empty thought where none was recorded."""
        end = self._thought_end
        if end and end in answer and not message.get("reasoning_content") and end not in message["content"]:
            raise RenderError(
                "thought_missing",
                f"the template writes a thought ({end}) that was not recorded; "
                "when the target did not think, say so in chat_template_kwargs",
            )

    def _first_stop(self, answer: str) -> StopToken | None:
        match = self._stop_pattern.search(answer)
        return StopToken(match.start(), match.end(), self._stops[match.group()]) if match else None

    def _closing_token(self, answer: str) -> StopToken | None:
        """Any special token at the end, for a tokenizer whose own stop token is not the template's."""
        text = answer.rstrip()
        tokens = [token for token in self._special if text.endswith(token)]
        if not tokens:
            return None
        token = max(tokens, key=len)
        return StopToken(len(text) - len(token), len(text), self._special[token])


def prepare_turn(message: dict[str, Any], form: ArgumentForm) -> dict[str, Any]:
    """An assistant's message as a template can show it; other messages as they are.

    Raises:
        RenderError: a part of it has not the shape that it should have.
    """
    if message.get("role") != "assistant":
        return message
    # SGLang writes "" too, where a template would print None.
    message = {**message, "content": "" if message.get("content") is None else message["content"]}
    for name in ("content", "reasoning_content"):
        if not isinstance(message.get(name) or "", str):
            raise RenderError(
                "content_not_text", f"an assistant's {name} is a {type(message[name]).__name__}"
            )
    if message.get("tool_calls"):
        message["tool_calls"] = [_prepare_call(call, form) for call in message["tool_calls"]]
    return message


def _prepare_call(call: Any, form: ArgumentForm) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RenderError("bad_tool_call", f"a tool call without a function's name: {str(call)[:80]}")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict)):
        raise RenderError("bad_tool_call", f"arguments are neither a text nor an object: {str(call)[:80]}")
    if form == "text":
        arguments = arguments_as_text(arguments)
    if form == "object" and isinstance(arguments, str):
        arguments = _parse_arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_arguments(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as exc:  # also for thousands of digits, or of brackets
        raise RenderError("bad_tool_call", f"a call's arguments are no JSON: {text[:80]!r}") from exc
    if not isinstance(parsed, dict):
        raise RenderError("bad_tool_call", f"a call's arguments are no object: {text[:80]!r}")
    return parsed


def _find_recorded(message: Mapping[str, Any], answer: str, *, shows_call_ids: bool) -> int:
    """The end of what was recorded, all of which must show: texts in this order, keys and ids anywhere."""
    end = 0
    for reason, text in (
        ("thought_not_rendered", message.get("reasoning_content") or ""),
        ("turn_not_rendered", message["content"]),
    ):
        end = _find_text(reason, text, answer, end)
    for call in message.get("tool_calls") or []:
        end = _find_call(call, answer, end, shows_id=shows_call_ids)
    return end


def _find_call(call: Mapping[str, Any], answer: str, start: int, *, shows_id: bool) -> int:
    """The end of a call; a template that shows ids may write one before or behind the arguments."""
    reason, arguments = "tool_calls_not_rendered", call["function"]["arguments"]
    end = _find_text(reason, call["function"]["name"], answer, start)
    if isinstance(arguments, str):
        end = _find_text(reason, arguments, answer, end)
    elif missing := [key for key in arguments if key not in answer]:
        raise RenderError(reason, f"the template does not show {missing[0]!r}")
    if not shows_id:
        return end
    if not call.get("id"):
        raise RenderError("bad_tool_call", "a call has no id, and the chat template writes one")
    return max(end, _find_text(reason, call["id"], answer, start))


def _find_text(reason: str, text: str, answer: str, start: int) -> int:
    """Where a text ends in the answer, behind `start`."""
    text = text.strip()
    found = answer.find(text, start)
    if found < 0:
        raise RenderError(reason, f"the template does not show {text[:80]!r}")
    return found + len(text)


def _all_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from (key, *_all_texts(one))
    elif isinstance(value, list):
        for one in value:
            yield from _all_texts(one)


def _find_stops(target: TargetTokenizer) -> dict[str, int]:
    """The stop tokens' texts, those that the tokenizer reads as one id."""
    tokenizer = target.tokenizer
    ids = {*target.stop_ids, tokenizer.eos_token_id} - {None}
    texts = {tokenizer.convert_ids_to_tokens(one): one for one in ids}
    return {text: one for text, one in texts.items() if text and encode_plain(tokenizer, text) == [one]}


def _find_special(tokenizer: Any) -> dict[str, int]:
    """Added tokens that are marked special; `<think>` and the like survive decoding and are not."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): one for one, token in added.items() if token.special and str(token).strip()}


def _match_any(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
