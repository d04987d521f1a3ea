"""From a finished conversation of the target to token ids, with its own turns marked.

Knows templates and tokens; does not know files. Invariant: the ids before a marked span are those that
`Renderer.render` gives for the messages before that turn, and the span is the turn as the template writes
it, its end-of-turn token included; a conversation for which this cannot be shown is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.records.rows import Prompt
from tasks.tokens.call_style import has_calls
from tasks.tokens.recorded_turn import TurnReader, prepare_turn
from tasks.tokens.rendering import Renderer, RenderError
from tasks.tokens.tokenizer import TargetTokenizer

_PROBE_THOUGHT = "draftmill_probe_thought"


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One sequence to train on.

    `turn` numbers the first assistant turn that is marked in it, from 0. `loss_spans` are half-open,
    ascending and disjoint: the ids that the target generated.
    """

    turn: int
    input_ids: list[int]
    loss_spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant turn, by places in a text that begins with its prompt and its answer."""

    number: int
    message: int
    answer_start: int
    stop_start: int
    stop_end: int
    stop_id: int


class TrajectoryRenderer:
    """Renders finished conversations; safe to use from several threads.

    Turns share a row as long as each one's prompt and answer begin the next one's prompt. Where a template
    rewrites history (those that drop earlier thoughts) or a token would reach across the start of an
    answer, the turn has a row of its own.

    Tools that the template ignores are refused, though `Renderer` would write them into the system text:
    what the target saw when the conversation was made is then not known.
    """

    def __init__(self, target: TargetTokenizer, renderer: Renderer) -> None:
        self._renderer = renderer
        style = renderer.call_style
        self._reader = TurnReader(target, style)
        self._arguments = "object" if style is None else style.arguments

    def render(self, prompt: Prompt) -> list[TrajectoryRow]:
        """The rows of a conversation that ends with a turn of the assistant, in the order of their turns.

        Raises:
            RenderError: the conversation cannot be shown to be what the target saw and generated.
        """
        recorded = prompt.messages
        prompt = replace(prompt, messages=[prepare_turn(one, self._arguments) for one in recorded])
        self._refuse_unshown(prompt)
        groups = self._group_turns(prompt)
        for text, turns in groups:
            for turn in turns:
                _check_arguments(recorded[turn.message], text[turn.answer_start : turn.stop_end], turn.number)
        rows = [row for text, turns in groups for row in self._make_rows(prompt, text, turns)]
        return sorted(rows, key=lambda row: row.turn)

    def count_tokens(self, prompt: Prompt) -> int:
        """How long a whole conversation is, at a fraction of what its rows cost.

        Raises:
            RenderError: the template refuses it.
        """
        prompt = replace(prompt, messages=[prepare_turn(one, self._arguments) for one in prompt.messages])
        [ids] = self._renderer.encode([self._renderer.render_text(prompt, add_generation_prompt=False)])
        return len(ids)

    def _refuse_unshown(self, prompt: Prompt) -> None:
        messages = prompt.messages
        if not messages or messages[-1].get("role") != "assistant":
            raise RenderError("no_final_answer", "the conversation does not end with an assistant's turn")
        if prompt.tools and not self._renderer.shows_tools(messages):
            raise RenderError(
                "tools_not_rendered", "the chat template shows no tools: what it saw is unknown"
            )
        if has_calls(messages) and self._renderer.call_style is None:
            raise RenderError("tool_calls_not_rendered", "the chat template shows no tool calls")
        if any(one.get("reasoning_content") for one in messages if one.get("role") == "assistant"):
            thought = {"role": "assistant", "content": "x", "reasoning_content": _PROBE_THOUGHT}
            if not self._shows(_PROBE_THOUGHT, thought, prompt.chat_template_kwargs):
                raise RenderError("thought_not_rendered", "the chat template shows no reasoning_content")

    def _shows(self, probe: str, message: dict[str, Any], template_kwargs: dict[str, Any]) -> bool:
        conversation = Prompt("probe", [{"role": "user", "content": "hello"}, message], None, template_kwargs)
        try:
            return probe in self._renderer.render_text(conversation, add_generation_prompt=False)
        except RenderError:
            return False

    def _group_turns(self, prompt: Prompt) -> list[tuple[str, list[_Turn]]]:
        """Turns by the text that shows them all; from the last on, for it holds most of the others."""
        groups: list[tuple[str, list[_Turn]]] = []
        indexes = [n for n, one in enumerate(prompt.messages) if one.get("role") == "assistant"]
        for number, index in reversed(list(enumerate(indexes))):
            text, turn = self._read_turn(prompt, index, number)
            if groups and groups[-1][0].startswith(text) and turn.stop_end <= groups[-1][1][0].answer_start:
                groups[-1][1].insert(0, turn)
            else:
                groups.append((text, [turn]))
        return groups

    def _read_turn(self, prompt: Prompt, index: int, number: int) -> tuple[str, _Turn]:
        """The text of a turn's prompt and answer, up to the end-of-turn token, and its places in it."""
        messages = prompt.messages
        before = self._renderer.render_text(replace(prompt, messages=messages[:index]))
        after = self._renderer.render_text(
            replace(prompt, messages=messages[: index + 1]), add_generation_prompt=False
        )
        if not after.startswith(before):
            raise RenderError(
                "prompt_not_prefix",
                f"assistant turn {number} does not follow its prompt, which ends with {before[-40:]!r}",
            )
        start = len(before)
        try:
            stop = self._reader.find_stop(messages[index], after[start:])
        except RenderError as exc:
            raise RenderError(exc.reason, f"assistant turn {number}: {exc.detail}") from exc
        turn = _Turn(number, index, start, start + stop.start, start + stop.end, stop.id)
        return after[: turn.stop_end], turn

    def _make_rows(self, prompt: Prompt, text: str, turns: Sequence[_Turn]) -> list[TrajectoryRow]:
        """One row with the turns, and one for each turn whose first token the others' row does not have."""
        last = turns[-1]
        # render_all gives the same ids as render, at half the cost.
        [ids] = self._renderer.render_all([replace(prompt, messages=prompt.messages[: last.message])])
        if isinstance(ids, RenderError):
            raise ids
        found = self._find_spans(ids, text, turns)
        if found is None and len(turns) > 1:
            return self._make_rows_apart(prompt, text, turns)
        spans, apart, piece, piece_start = found or ([], [], ids, 0)
        marked = [turn for turn in turns if turn not in apart]
        answer = self._encode_answer(piece, text[piece_start : last.answer_start], text, last)
        spans.append((len(ids), len(ids) + len(answer)))
        ids.extend(answer)
        for turn, (start, end) in zip(marked, spans, strict=True):
            self._check_answer(ids[start:end], text, turn)
        row = TrajectoryRow(marked[0].number, ids, spans)
        return [row, *self._make_rows_apart(prompt, text, apart)]

    def _make_rows_apart(self, prompt: Prompt, text: str, turns: Sequence[_Turn]) -> list[TrajectoryRow]:
        return [row for turn in turns for row in self._make_rows(prompt, text[: turn.stop_end], [turn])]

    def _find_spans(
        self, ids: Sequence[int], text: str, turns: Sequence[_Turn]
    ) -> tuple[list[tuple[int, int]], list[_Turn], list[int], int] | None:
        """Where the answers before the last one are in the ids of the last one's prompt.

        A tokenizer splits a text at special tokens before anything else, so the ids from one of them on do
        not depend on what is before it. The prompts are therefore compared piece by piece, each from the
        end-of-turn token of the turn before: the cost is linear.

        Returns:
            The spans, the turns that have none because a token reaches across their start, and the last
            prompt's piece with its place in the text; None when the ids are not those of the pieces.
        """
        first_start, place = _find_last_stop(ids, text, turns[0])
        starts = [first_start, *(turn.stop_start for turn in turns[:-1])]
        pieces = self._renderer.encode(
            [text[start : turn.answer_start] for start, turn in zip(starts, turns, strict=True)]
        )
        spans: list[tuple[int, int]] = []
        apart: list[_Turn] = []
        for start, turn, piece in zip(starts, turns[:-1], pieces, strict=False):
            begin = place + len(piece)
            if ids[place:begin] != piece:
                apart.append(turn)
                [whole] = self._renderer.encode([text[start : turn.stop_end]])
                begin = place + len(whole) - 1
                if ids[place : begin + 1] != whole:
                    return None
            try:
                place = ids.index(turn.stop_id, begin)
            except ValueError:
                return None
            if turn not in apart:
                spans.append((begin, place + 1))
        return (spans, apart, pieces[-1], starts[-1]) if ids[place:] == pieces[-1] else None

    def _encode_answer(self, piece: list[int], piece_text: str, text: str, turn: _Turn) -> list[int]:
        """The ids of an answer behind its prompt, or by itself when a token would reach across its start.

        By itself means behind a special token: some tokenizers add a blank at the beginning of a text.
        """
        answer = text[turn.answer_start : turn.stop_end]
        [ids] = self._renderer.encode([piece_text + answer])
        if ids[: len(piece)] == piece and len(ids) > len(piece):
            return ids[len(piece) :]
        return self._renderer.encode([text[turn.stop_start : turn.stop_end] + answer])[0][1:]

    def _check_answer(self, ids: Sequence[int], text: str, turn: _Turn) -> None:
        name = f"assistant turn {turn.number}"
        if ids[-1] != turn.stop_id:
            raise RenderError("no_end_of_turn", f"{name}: the tokenizer does not end it with its last token")
        if not {*self._reader.stop_ids, turn.stop_id}.isdisjoint(ids[:-1]):
            raise RenderError("special_token_in_answer", f"{name}: an end-of-turn token within it")
        # Behind another token, for a tokenizer may drop a blank at the beginning of a text.
        said = self._renderer.decode([turn.stop_id, *ids])
        if said != text[turn.stop_start : turn.stop_end] + text[turn.answer_start : turn.stop_end]:
            raise RenderError(
                "answer_not_reversible", f"{name}: its ids say {said[:80]!r}, not the same text"
            )


def _check_arguments(message: Mapping[str, Any], answer: str, number: int) -> None:
    """The text of a call's arguments is what was generated; a template that writes its own shows another."""
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str) and arguments not in answer:
            raise RenderError(
                "arguments_rewritten",
                f"assistant turn {number}: the template writes {arguments[:80]!r} otherwise than recorded",
            )


def _find_last_stop(ids: Sequence[int], text: str, turn: _Turn) -> tuple[int, int]:
    """The last end-of-turn token in a turn's prompt, by its places in the text and in the ids; or 0, 0.

    Should a text that only looks like one be among those before it, the ids there will not be those of the
    piece.
    """
    stop = text[turn.stop_start : turn.stop_end]
    start = text.rfind(stop, 0, turn.answer_start)
    if start < 0:
        return 0, 0
    place = -1
    for _ in range(text.count(stop, 0, start) + 1):
        try:
            place = ids.index(turn.stop_id, place + 1)
        except ValueError:
            return 0, 0
    return start, place
