"""What somebody who looks at a run should know is wrong.

Knows statistics and words; does not know where they are shown. Invariant: a sentence names the dataset,
and nothing is named that needs no look; what is true of every large source is a note, no trouble.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.core.stats import DatasetStats
from tasks.core.stats_views import format_counts

_SET_ASIDE_SHARE, _CUT_SHARE, _EMPTY_SHARE = 0.02, 0.10, 0.01  # below them it is the way of the world
_REASONS = 3
_MOSTLY = 0.5
_ENOUGH_ROWS = 20  # to tell from when prompts run out
_FIRST_NOTE = 6
_GO_ON = "; run the same command again to go on"
_OF_SOURCES = frozenset(
    {
        *(
            "malformed_row",
            "missing_field",
            "bad_field",
            "bad_json",
            "bad_chat",
            "bad_tools",
            "bad_tool_call",
        ),
        *("unknown_role", "not_text", "no_user_turn", "no_assistant_turn", "several_parts", "tool_turns"),
    }
)  # reasons of rows that became no prompt


@dataclass(frozen=True, slots=True)
class Problems:
    """What somebody has to see to, and what is only worth knowing; the worst kind first."""

    trouble: list[str]
    notes: list[str]


def find_problems(stats: Sequence[DatasetStats], *, running: bool = False) -> Problems:
    """A sentence for each; a dataset that is not done is none while the run goes on."""
    found = [problem for one in stats for problem in _find(one, running=running)]
    waiting = [one.name for one in stats if _is_waiting(one)]
    if waiting and not running:
        found.append((1, f"{', '.join(waiting)}: not begun{_GO_ON}"))
    found.sort(key=lambda problem: problem[0])
    return Problems(
        [sentence for rank, sentence in found if rank < _FIRST_NOTE],
        [sentence for rank, sentence in found if rank >= _FIRST_NOTE],
    )


def _find(stats: DatasetStats, *, running: bool) -> list[tuple[int, str]]:
    """Each with its rank."""
    found = []
    if stats.unreadable:
        found.append((0, f"{stats.unreadable:,} lines of its logs are damaged; a run stops at the first"))
    if stats.status == "incomplete" and not running and not _is_waiting(stats):
        found.append((1, f"not done, {_describe_missing(stats)}{_GO_ON}"))
    if stats.status == "exhausted":
        found.append((2, f"its prompts are used up, {_missing(stats):,} tokens short of its budget"))
    if (end := _find_shortfall(stats)) is not None:
        found.append(
            (2, f"its prompts will be used up at about {end:,.0f} of {stats.budget_tokens:,} tokens")
        )
    if stats.not_token_exact:
        found.append((3, f"{stats.not_token_exact:,} rows have no exact token ids, and are not exported"))
    if stats.empty > _EMPTY_SHARE * stats.rows:
        found.append((4, f"{stats.empty:,} answers are empty"))
    failed = {reason: n for reason, n in stats.rejected.items() if reason not in _OF_SOURCES}
    if _is_much(sum(failed.values()), stats.rows + sum(failed.values())):
        found.append((5, f"prompts without an answer: {format_counts(_most_common(failed))}"))
    unusable = {reason: n for reason, n in stats.rejected.items() if reason in _OF_SOURCES}
    if _is_much(sum(unusable.values()), stats.prepare.get("rows_read", 0)):
        found.append((7, f"source rows that cannot be used: {format_counts(_most_common(unusable))}"))
    cut = stats.finish_reasons.get("length", 0)
    if cut and cut >= _CUT_SHARE * stats.rows:
        rank = 4 if cut >= _MOSTLY * stats.rows else _FIRST_NOTE
        found.append((rank, f"{cut / stats.rows:.0%} of its answers were cut off at max_new_tokens"))
    return [(rank, f"{stats.name}: {sentence}") for rank, sentence in found]


def _is_waiting(stats: DatasetStats) -> bool:
    return stats.status == "incomplete" and not stats.rows and not stats.unreadable


def _is_much(part: int, whole: int) -> bool:
    return part > 0 and part >= _SET_ASIDE_SHARE * whole


def _find_shortfall(stats: DatasetStats) -> float | None:
    """The tokens at which the prompts will be used up, where that is short of the budget."""
    if stats.status != "incomplete" or stats.prompts is None or stats.rows < _ENOUGH_ROWS:
        return None
    if stats.budget_tokens is None:
        return None
    left = max(0, stats.prompts - stats.answered - stats.permanently_rejected)
    end = stats.completion_tokens * (1 + left / stats.rows)
    return end if end < (1 - _SET_ASIDE_SHARE) * stats.budget_tokens else None


def _most_common(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:_REASONS])


def _missing(stats: DatasetStats) -> int:
    return max(0, (stats.budget_tokens or 0) - stats.completion_tokens)


def _describe_missing(stats: DatasetStats) -> str:
    if stats.budget_tokens is not None:
        return f"{_missing(stats):,} tokens short of its budget"
    if stats.prompts is None:
        return "with prompts that are not prepared"
    return f"{stats.prompts - stats.answered:,} of {stats.prompts:,} conversations to go"
