"""The words of an export's rows: the messages of a prompt and what the target answered.

Knows prompts.jsonl and the responses that were read before; does not know ids. Invariant: a row's messages
are those that the target was shown, or there are none: a history is never made of the source's answers.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

from tasks.export.files import ExportInputError, Messages
from tasks.generate.chains import to_history
from tasks.prepare.preparation import PROMPTS, open_prompts
from tasks.records.rows import SEQUENCES, RecordError, Response


class ConversationReader:
    """One dataset's conversations, asked for row by row in the order of its log.

    Holds 36 bytes a prompt, and the answers of conversations that are to go on.

    Raises:
        ExportInputError: the dataset has no whole prompts.jsonl.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._prompts = open_prompts(folder)
        except (OSError, RecordError) as exc:
            raise ExportInputError(
                f"{folder / PROMPTS} cannot be read ({exc}), and it has the texts"
            ) from exc
        self._answers: dict[int, str] = {}

    def read(self, response: Response) -> Messages | None:
        """The messages up to the answer, which is the last one; None where they are not known."""
        position = self._prompts.find(response.id, response.turn)
        if position is None:
            return None
        prompt = self._prompts.read(position)
        if is_trajectory(response):
            return _drop_after_answer(prompt.messages)
        if prompt.own_history and prompt.turn:
            history = [self._answers.get(position - n) for n in range(prompt.turn, 0, -1)]
            if any(answer is None for answer in history):
                return None
            prompt = prompt.with_history([answer for answer in history if answer is not None])
        self._keep(position, prompt.turn, response)
        return [*prompt.messages, {"role": "assistant", "content": response.text}]

    def _keep(self, position: int, turn: int, response: Response) -> None:
        """For the turns that build on it; the last one needs none of them any more."""
        follows, after = self._prompts.follows, position + 1
        answer = to_history(response.text, response.finish_reason)
        if answer is not None and after < len(follows) and follows[after]:
            self._answers[position] = answer
        else:
            for before in range(position - turn, position):
                self._answers.pop(before, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._prompts.close()


def _drop_after_answer(messages: Messages) -> Messages:
    """Without what comes after the target's last turn."""
    answers = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
    return messages[: answers[-1] + 1] if answers else messages


def is_trajectory(response: Response) -> bool:
    """Whether it is a finished conversation, whose prompt has the answers."""
    return SEQUENCES in response.extra or "loss_spans" in response.extra
