"""The two records everything is built on: a prepared prompt and a finished response.

Knows their JSON shape on disk; does not know files, servers or templates. Invariant: a record
read back from its own JSON line is equal to the record that was written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from tasks.records import exact_json

FinishReason = Literal["stop", "length"]
SEQUENCES = "sequences"  # of a finished conversation: its rows
MAX_COUNT = (
    1 << 40
)  # a turn or a count of tokens: none is near it, and the sums of millions stay below 64 bits


class RecordError(ValueError):
    """A JSON line is not the record it should be; the message names the field."""


@dataclass(slots=True)  # to make a frozen one takes four times as long, a thirtieth of preparing a row
class Prompt:
    """One prompt as the chat template will see it; a value: nobody changes one that was made.

    `id` comes from the source's own id or a hash of the content, never from a line number.
    `messages` are OpenAI-style: role is system, user, assistant or tool.
    `tools` are OpenAI tool schemas: {"type": "function", "function": {...}}.

    A conversation with several answers to come has `answer_after`: how many messages go before each; with
    `own_history` each is given on the answers that the target gave before, else on those in `messages`.
    `at_turn` makes the prompt of one of them, whose number is `turn`; that is never on disk.
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    answer_after: list[int] = field(default_factory=list)
    own_history: bool = False
    turn: int = 0

    @property
    def answers(self) -> int:
        """How many answers the conversation is to get."""
        return len(self.answer_after) or 1

    def at_turn(self, turn: int) -> "Prompt":
        """The prompt of one answer: the messages before it, as the row has them."""
        if not self.answer_after:
            return self
        return replace(self, messages=self.messages[: self.answer_after[turn]], turn=turn)

    def with_history(self, answers: Sequence[str]) -> "Prompt":
        """The same with the target's own answers in place of the row's, the first ones first."""
        if not answers:
            return self
        messages = list(self.messages)
        for at, answer in zip(self.answer_after, answers, strict=False):
            messages[at] = {"role": "assistant", "content": answer}
        return replace(self, messages=messages)

    def to_line(self) -> bytes:
        """One JSON line, newline included; optional fields are left out when empty."""
        return self.to_line_with(exact_json.dumps(self.messages), prompt_id=self.id)

    def to_line_with(self, messages: bytes, *, prompt_id: str) -> bytes:
        """The same under another id, and with the JSON of the messages, which is nearly all the work."""
        row: dict[str, Any] = {"id": prompt_id, "messages": orjson.Fragment(messages)}
        if self.tools:
            row["tools"] = self.tools
        if self.chat_template_kwargs:
            row["chat_template_kwargs"] = self.chat_template_kwargs
        if self.meta:
            row["meta"] = self.meta
        if self.answer_after:
            row["answer_after"] = self.answer_after
            row["own_history"] = self.own_history
        return exact_json.dumps(row, orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_line(cls, line: bytes) -> "Prompt":
        """Read a line that `to_line` wrote.

        Raises:
            RecordError: the line is not JSON or lacks `id` or `messages`.
        """
        row = load_object(line, loads=exact_json.loads)
        try:
            return cls(
                id=str(row["id"]),
                messages=list(row["messages"]),
                tools=row.get("tools"),
                chat_template_kwargs=row.get("chat_template_kwargs") or {},
                meta=row.get("meta") or {},
                answer_after=row.get("answer_after") or [],
                own_history=bool(row.get("own_history")),
            )
        except KeyError as exc:
            raise RecordError(f"prompt line has no field {exc}") from exc


@dataclass(frozen=True, slots=True)
class Response:
    """One generation as the server gave it: a row of raw_responses.jsonl.

    `input_ids` are the ids the model saw and `output_ids` the ids it produced, stop token included; int64
    arrays where a reader that is in a hurry made them.
    Rows of older files may lack both (`None`): they count towards the budget but are not token-exact.
    """

    id: str
    turn: int
    input_ids: list[int] | None
    output_ids: list[int] | None
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    attempt: int = 1
    lane: str = "short"
    server: str = ""
    latency_s: float = 0.0
    finished_at: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        """One flat JSON line, newline included; `extra` keys are merged in at the top level."""
        row: dict[str, Any] = {name: getattr(self, name) for name in _RESPONSE_FIELDS}
        for name in ("input_ids", "output_ids"):
            if row[name] is None:
                del row[name]
        return orjson.dumps({**self.extra, **row}, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_line(cls, line: bytes) -> "Response":
        """Read a row in the current shape or in the older one (counts under `usage`).

        Raises:
            RecordError: not JSON, without an id or a token count, or with one that no answer has.
        """
        return cls.from_row(load_object(line))

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Response":
        """The same for a row that is parsed already."""
        usage = row.get("usage") or {}
        try:
            response = cls(
                id=str(row["id"]),
                turn=int(row.get("turn") or 0),
                input_ids=row.get("input_ids"),
                output_ids=row.get("output_ids"),
                text=row.get("text") or "",
                finish_reason=str(row.get("finish_reason") or "stop"),
                prompt_tokens=int(row["prompt_tokens"] if "prompt_tokens" in row else usage["prompt_tokens"]),
                completion_tokens=int(
                    row["completion_tokens"] if "completion_tokens" in row else usage["completion_tokens"]
                ),
                cached_tokens=int(row.get("cached_tokens") or 0),
                attempt=int(row.get("attempt") or 1),
                lane=str(row.get("lane") or "short"),
                server=str(row.get("server") or ""),
                latency_s=float(row.get("latency_s") or 0.0),
                finished_at=str(row.get("finished_at") or ""),
                extra={k: v for k, v in row.items() if k not in _RESPONSE_FIELDS},
            )
        except KeyError as exc:
            raise RecordError(f"response row has no field {exc}") from exc
        except (TypeError, ValueError, OverflowError) as exc:
            raise RecordError(f"response row has a field of the wrong type: {exc}") from exc
        for count in (response.turn, response.prompt_tokens, response.completion_tokens):
            if abs(count) > MAX_COUNT:
                raise RecordError(f"response row has a turn or a token count of {str(count)[:20]}")
        return response


@dataclass(frozen=True, slots=True)
class Rejected:
    """A prompt or source row rejected: a line of rejected.jsonl.

    `reason` is a short stable code (e.g. "no_user_turn", "prompt_too_long", "http_400"), `detail` a
    sentence. `permanent` says whether a resume asks it again. `where` is file:line for source rows. `turn` is
    the number of the answer, in a conversation that is to get several.
    """

    id: str
    reason: str
    detail: str
    permanent: bool
    stage: Literal["prepare", "generate"]
    attempts: int = 0
    status: int | None = None
    where: str = ""
    turn: int = 0

    def to_line(self) -> bytes:
        """One JSON line, newline included."""
        return orjson.dumps(
            {name: getattr(self, name) for name in _REJECTED_FIELDS}, option=orjson.OPT_APPEND_NEWLINE
        )

    @classmethod
    def from_line(cls, line: bytes) -> "Rejected":
        """Read a line that `to_line` wrote.

        Raises:
            RecordError: not JSON, or a field is missing or of the wrong type.
        """
        row = {"turn": 0, **load_object(line)}  # lines of older versions have none
        try:
            rejected = cls(**{name: row[name] for name in _REJECTED_FIELDS})
        except KeyError as exc:
            raise RecordError(f"rejected line has no field {exc}") from exc
        for name, kind in _REJECTED_KINDS.items():
            if type(value := getattr(rejected, name)) is not kind:
                raise RecordError(f"rejected line has a field of the wrong type: {name} is {value!r:.40}")
        return rejected


_RESPONSE_FIELDS = tuple(name for name in Response.__dataclass_fields__ if name != "extra")
_REJECTED_FIELDS = tuple(Rejected.__dataclass_fields__)
_REJECTED_KINDS = {
    **dict.fromkeys(("id", "reason", "detail", "stage", "where"), str),
    "permanent": bool,
    "turn": int,
}


def load_object(line: bytes, *, loads: Callable[[bytes], Any] = orjson.loads) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        RecordError: it is none.
    """
    try:
        row = loads(line)
    except ValueError as exc:
        raise RecordError(f"not a JSON line: {exc}") from exc
    if not isinstance(row, dict):
        raise RecordError(f"a JSON object was expected, not {type(row).__name__}")
    return row


def is_empty_answer(completion_tokens: int, finish_reason: str) -> bool:
    """Whether an answer is nothing, or nothing but the stop token."""
    return completion_tokens == 0 or (completion_tokens == 1 and finish_reason == "stop")


def read_turn(sequence: Mapping[str, Any]) -> int:
    """The number that a sequence of a finished conversation has.

    Raises:
        ValueError: it is none.
    """
    value = sequence.get("turn") or 0
    if not isinstance(value, int) or abs(value) > MAX_COUNT:
        raise ValueError(f"a sequence's turn is {value!r:.40}")
    return int(value)
