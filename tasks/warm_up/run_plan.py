"""What a run is about to make: tokens, answers, hours and bytes, dataset by dataset.

Knows budgets, what is on disk and what answers were measured or are expected to be; does not know servers or
Prefect. Invariant: a dataset is planned up to its budget, or up to its prompts where these end first.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.table import Table

from tasks.generate.forecast import DEFAULT_MEAN_TOKENS
from tasks.records.dataset_plan import TOTAL, DatasetPlan
from tasks.records.times import format_duration

# Measured on the demo's rows (a vocabulary of 49,152 ids): 4.3 bytes an id with its comma, 2.9 to 4.3 bytes
# of text a completion token, 300 to 410 bytes of names, counts and times a row. Its export: 6.6 bytes a token
# of JSON Lines (the id and a mask of two bytes), 1.6 of parquet, where so few rows flatter it.
_TEXT_BYTES = 4.5
_ROW_BYTES = 420
_MASK_BYTES = 2.3
_PARQUET_BYTES = 3.0
_ARROW_BYTES = 5.0
_TRUSTED_ROWS = 20  # from so many answers on, their mean is believed more than what was expected


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What a dataset has already."""

    rows: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDataset:
    """One dataset: what it is to reach, what it has, and what its answers are like.

    `prompts` is how many there are, as far as that is known; `prompt_tokens` is their mean.
    """

    goal: DatasetPlan
    on_disk: OnDisk
    prompts: int | None
    prompt_tokens: float
    answer_tokens: float

    @property
    def left_samples(self) -> int:
        """Answers still to be made."""
        if not self.is_generated:
            return 0
        return int(min(math.ceil(self._budget_left / self.answer_tokens), self._answers_left))

    @property
    def left_tokens(self) -> int:
        """Completion tokens still to be made."""
        return round(min(self._budget_left, self.left_samples * self.answer_tokens))

    @property
    def is_generated(self) -> bool:
        """Whether the target answers; else its finished conversations are only tokenized."""
        return self.goal.budget_tokens is not None

    @property
    def runs_out(self) -> bool:
        """Whether its prompts are used up before the budget is reached, as it seems now."""
        if not self.is_generated:
            return False
        if self.goal.max_samples is not None and self._answers_left == self._samples_left:
            return False
        return self._answers_left * self.answer_tokens < self._budget_left

    @property
    def all_tokens(self) -> float:
        """Prompt and completion tokens of all its rows in the end."""
        prompts = (self.on_disk.rows + self._rows_left) * self.prompt_tokens
        return prompts + self.on_disk.completion_tokens + self.left_tokens

    def left_bytes(self, id_bytes: float) -> float:
        """What raw_responses.jsonl will grow by."""
        prompts = self._rows_left * self.prompt_tokens * id_bytes
        return prompts + self.left_tokens * (id_bytes + _TEXT_BYTES) + self._rows_left * _ROW_BYTES

    @property
    def _rows_left(self) -> int:
        if self.is_generated:
            return self.left_samples
        return int(self._answers_left) if self._answers_left < math.inf else 0

    @property
    def _budget_left(self) -> int:
        return max(0, (self.goal.budget_tokens or 0) - self.on_disk.completion_tokens)

    @property
    def _samples_left(self) -> float:
        limit = self.goal.max_samples
        return math.inf if limit is None else max(0, limit - self.on_disk.rows)

    @property
    def _answers_left(self) -> float:
        prompts = math.inf if self.prompts is None else max(0, self.prompts - self.on_disk.rows)
        return min(prompts, self._samples_left)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All datasets of a run, and how fast the servers are (None: not measured)."""

    datasets: tuple[PlannedDataset, ...]
    tokens_per_s: float | None = None

    @property
    def left_tokens(self) -> int:
        """Completion tokens still to be made."""
        return sum(one.left_tokens for one in self.datasets)

    def to_line(self) -> str:
        """The sum, for a log."""
        if not any(one.is_generated for one in self.datasets):
            return "to make: nothing; finished conversations are only tokenized"
        samples = sum(one.left_samples for one in self.datasets)
        line = f"to make: about {self.left_tokens:,} tokens in {samples:,} answers"
        if self.tokens_per_s is None:
            return f"{line}; the speed was not measured"
        return f"{line}, {self._duration(self.left_tokens)} at the measured {self.tokens_per_s:,.0f} tokens/s"

    def to_rows(self) -> list[dict[str, str]]:
        """A line per dataset and one for the total, as text: the rows of a Prefect table artifact."""
        rows = [self._row(one) for one in self.datasets]
        numbers = {
            "budget": sum(one.goal.budget_tokens or 0 for one in self.datasets),
            "on disk": sum(one.on_disk.completion_tokens for one in self.datasets if one.is_generated),
            "tokens to make": self.left_tokens,
            "answers": sum(one.left_samples for one in self.datasets),
        }
        total = {"dataset": TOTAL, **{name: f"{value:,}" for name, value in numbers.items()}}
        return [*rows, {**total, "mean answer": "", "time": self._duration(self.left_tokens), "note": ""}]

    def _row(self, one: PlannedDataset) -> dict[str, str]:
        if not one.is_generated:
            empty = dict.fromkeys(
                ("budget", "on disk", "tokens to make", "answers", "mean answer", "time"), ""
            )
            return {"dataset": one.goal.name, **empty, "note": "finished conversations: nothing is generated"}
        return {
            "dataset": one.goal.name,
            "budget": f"{one.goal.budget_tokens:,}",
            "on disk": f"{one.on_disk.completion_tokens:,}",
            "tokens to make": f"{one.left_tokens:,}",
            "answers": f"{one.left_samples:,}",
            "mean answer": f"{one.answer_tokens:,.0f}",
            "time": self._duration(one.left_tokens),
            "note": f"about {one.prompts:,} prompts may not suffice" if one.runs_out else "",
        }

    def _duration(self, tokens: int) -> str:
        if not tokens:
            return format_duration(0)
        return format_duration(tokens / self.tokens_per_s if self.tokens_per_s else None)


def estimate_bytes(plan: RunPlan, *, vocab_size: int, formats: Collection[str]) -> int:
    """Bytes that the rest of the run and its export will write."""
    # The digits of the largest id: most ids are a digit shorter, and each has a comma.
    id_bytes = float(len(str(vocab_size)))
    rows = sum(one.left_bytes(id_bytes) for one in plan.datasets)
    per_token = _PARQUET_BYTES * ("parquet" in formats) + (id_bytes + _MASK_BYTES) * ("jsonl" in formats)
    per_token += _ARROW_BYTES * ("arrow" in formats)
    return round(rows + per_token * sum(one.all_tokens for one in plan.datasets))


def expect_answer_tokens(expected: float | None, on_disk: OnDisk, *, max_new_tokens: int) -> float:
    """The mean length to plan with: of the answers there are, else as expected, else a broad guess."""
    if on_disk.rows >= _TRUSTED_ROWS:
        mean = on_disk.completion_tokens / on_disk.rows
    else:
        mean = DEFAULT_MEAN_TOKENS if expected is None else expected
    return max(1.0, min(mean, float(max_new_tokens)))


def plan_table(plan: RunPlan) -> Table:
    """The same rows for a terminal, the total below a rule."""
    rows = plan.to_rows()
    table = Table(pad_edge=False)
    for name in rows[0]:
        left = name in ("dataset", "note")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for row in rows[:-1]:
        table.add_row(*row.values())
    table.add_section()
    table.add_row(*rows[-1].values(), style="bold")
    return table


def mean(values: Sequence[int], *, default: float) -> float:
    """The mean, or the default of nothing."""
    return sum(values) / len(values) if values else default
