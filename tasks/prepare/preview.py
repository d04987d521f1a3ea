"""What a preview shows of a prompt, a finished conversation or a row: its ids, and what each of them is.

Knows templates, lanes and masks; does not know files or colours. Invariant: the ids are those that a run
would send or has on disk, and `TRAINED` is exactly where the exported `loss_mask` is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tasks.prepare.lane import Lane
from tasks.records.rows import Prompt, Rejected, Response
from tasks.tokens.masks import NotTokenExact, samples_from_response
from tasks.tokens.rendering import Renderer, RenderError, fit_max_new_tokens
from tasks.tokens.tokenizer import TargetTokenizer
from tasks.tokens.trajectories import TrajectoryRenderer

PROMPT, TRAINED, REPLACED = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """One sequence to show.

    `kinds` uint8 (seq_len,) says of each id whether it is PROMPT, TRAINED, or REPLACED: an answer of the
    row's, where the run has the target's own. `awaits_answer` when the target's answer follows.
    """

    title: str
    ids: Sequence[int] = ()
    kinds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    notes: tuple[str, ...] = ()
    awaits_answer: bool = False


class Previewer:
    """Renders prompts as a run does, with where they go and how much room is left for their answers."""

    def __init__(
        self,
        target: TargetTokenizer,
        *,
        lanes: Sequence[Lane],
        long_prompt_tokens: int,
        context_length: int | None,
        calls_as_text: bool = False,
    ) -> None:
        self.renderer = Renderer(target, calls_as_text=calls_as_text)
        self._trajectories = TrajectoryRenderer(target, self.renderer)
        self._lanes = {lane.name: lane for lane in lanes}
        self._long_prompt_tokens = long_prompt_tokens
        self._context_length = context_length
        self._ends = target.stop_ids | frozenset(target.tokenizer.all_special_ids)

    def show_prompt(self, prompt: Prompt) -> list[Shown]:
        """The prompt of each answer that a conversation is to get, on the history that the row has."""
        rendered = self.renderer.render_all([prompt.at_turn(turn) for turn in range(prompt.answers)])
        return [self._show_turn(prompt, rendered, turn) for turn in range(prompt.answers)]

    def show_trajectory(self, prompt: Prompt) -> list[Shown]:
        """The sequences of a finished conversation, or why it is rejected."""
        try:
            rows = self._trajectories.render(prompt)
        except RenderError as exc:
            return [Shown(prompt.id, notes=(_say_rejected(exc),))]
        shown = []
        for row in rows:
            kinds = np.full(len(row.input_ids), PROMPT, np.uint8)
            for start, end in row.loss_spans:
                kinds[start:end] = TRAINED
            title = _title(prompt.id, row.turn, f"{len(kinds):,} tokens", _count_trained(kinds))
            shown.append(Shown(title, row.input_ids, kinds))
        return shown

    def _show_turn(self, prompt: Prompt, rendered: Sequence[list[int] | RenderError], turn: int) -> Shown:
        ids = rendered[turn]
        if isinstance(ids, RenderError):
            return Shown(_title(prompt.id, turn), notes=(_say_rejected(ids),))
        kinds = np.full(len(ids), PROMPT, np.uint8)
        notes = []
        if prompt.own_history and turn:
            notes.append("⟨ ⟩ are the row's own answers; the run has the target's there")
            self._mark_replaced(ids, kinds, rendered[:turn])
        lane = self._lanes["long" if len(ids) >= self._long_prompt_tokens else "short"]
        parts = [f"{lane.name} lane", f"{len(ids):,} prompt tokens"]
        wanted = lane.max_new_tokens
        try:
            fitted = fit_max_new_tokens(len(ids), max_new_tokens=wanted, context_length=self._context_length)
        except RenderError as exc:
            return Shown(_title(prompt.id, turn, *parts), ids, kinds, (*notes, _say_rejected(exc)))
        lowered = "" if fitted == wanted else f" (the lane's {wanted:,} do not fit)"
        parts.append(f"max_new_tokens {fitted:,}{lowered}")
        return Shown(_title(prompt.id, turn, *parts), ids, kinds, tuple(notes), awaits_answer=True)

    def _mark_replaced(
        self, ids: Sequence[int], kinds: np.ndarray, earlier: Sequence[list[int] | RenderError]
    ) -> None:
        """An answer goes from where its own prompt ends, as far as this one shows it, to its end of turn."""
        for prompt_ids in earlier:
            if not isinstance(prompt_ids, RenderError):
                start = _count_same(prompt_ids, ids)
                end = next((at for at in range(start, len(ids)) if ids[at] in self._ends), len(ids))
                kinds[start:end] = REPLACED


def show_response(response: Response) -> list[Shown]:
    """The samples that the export makes of a row, or why it makes none."""
    try:
        samples = samples_from_response(response)
    except NotTokenExact as exc:
        return [Shown(_title(response.id, response.turn), notes=(f"not exported: {exc.reason}: {exc}",))]
    shown = []
    for sample in samples:
        kinds = np.where(sample.loss_mask == 1, TRAINED, PROMPT).astype(np.uint8)
        parts = [
            f"{sample.n_tokens:,} tokens",
            _count_trained(kinds),
            f"finish_reason {sample.finish_reason}",
        ]
        if response.lane in ("short", "long"):
            parts.insert(0, f"{response.lane} lane")
        shown.append(Shown(_title(sample.id, sample.turn, *parts), sample.input_ids.tolist(), kinds))
    return shown


def say_rejected(row: Rejected) -> str:
    """Which row the adapter rejected, and why."""
    return f"{row.where}  {row.reason}: {row.detail}"


def _title(name: str, turn: int, *parts: str) -> str:
    return " · ".join([name, f"turn {turn}", *parts])


def _count_trained(kinds: np.ndarray) -> str:
    return f"{int((kinds == TRAINED).sum()):,} trained on"


def _say_rejected(error: RenderError) -> str:
    return f"rejected: {error.reason}: {error.detail}"


def _count_same(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids they have in common at the beginning."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))
