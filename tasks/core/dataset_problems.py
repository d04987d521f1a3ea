"""What somebody should know is wrong with one dataset: what it is, what follows, and what to do.

Knows statistics and words; does not know the run around it. Invariant: a sentence names its dataset; what is
true of every large source is a note, no trouble.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from tasks.core.adapters.errors import RowReason
from tasks.core.row_batches import MALFORMED_ROW
from tasks.core.stats import Damage, DatasetStats
from tasks.core.stats_views import count_of, format_counts

DAMAGED, STOPPED, SHORT, SLOW, INEXACT, EMPTY, UNANSWERED, UNUSABLE, CUT, FIRST_NOTE = range(10)
_SET_ASIDE_SHARE, _EMPTY_SHARE = 0.02, 0.01  # below them it is the way of the world
_WRONG_ADAPTER_SHARE = 0.2
_CUT_SHARE, _MOSTLY = 1 / 4, 1 / 2  # of the tokens: what is told, and what is trouble
_NEARLY_ALL = 0.9
_REASONS = 3
_ENOUGH_ROWS, _MANY_ROWS = 20, 500  # to judge answers from, and to call it certain
_OF_SOURCES = frozenset({MALFORMED_ROW, *get_args(RowReason)})  # of rows that became no prompt
_TOLD_WHY = "rejected.jsonl says why"


@dataclass(frozen=True, slots=True)
class Problem:
    """A sentence; `names` are the datasets that it is about, and `cost` what else tells its weight."""

    rank: int
    text: str
    names: tuple[str, ...] = ()
    cost: float = 0.0


def find_dataset_problems(stats: DatasetStats, *, running: bool) -> Iterator[Problem]:
    """Of one dataset, but for whether it goes on and where its answers were cut."""
    cost = float(count_missing(stats))
    for rank, text in _find(stats, running=running):
        yield Problem(rank, f"{stats.name}: {text}", (stats.name,), cost)


def _find(stats: DatasetStats, *, running: bool) -> Iterator[tuple[int, str]]:
    failed, unusable = split_rejected(stats.rejected)
    if stats.unreadable:
        yield DAMAGED, _describe_damage(stats, running=running)
    if stats.status == "exhausted":
        yield SHORT, _describe_exhausted(stats, failed)
    elif _is_much(sum(failed.values()), stats.rows + sum(failed.values())):
        yield UNANSWERED, _describe_failed(stats, failed)
    if (end := _find_shortfall(stats)) is not None:
        of_budget = f"{end:,.0f} of {stats.budget_tokens:,} tokens"
        yield SHORT, f"its prompts will be used up at about {of_budget}; give it more, or a smaller budget"
    if stats.not_token_exact:
        why = "whose token ids are missing or do not add up; they are not exported"
        yield INEXACT, f"{count_of(stats.not_token_exact, 'answer')} {why}: look at the server that gave them"
    if stats.empty > _EMPTY_SHARE * stats.rows:
        what = "that are empty; nothing is trained on them: look at its prompts with draftmill preview"
        yield EMPTY, f"{count_of(stats.empty, 'answer')} {what}"
    if (rows := sum(unusable.values())) and _is_much(rows, whole := _count_source_rows(stats, rows)):
        is_wrong = rows > _WRONG_ADAPTER_SHARE * whole
        reasons = format_counts(_most_common(unusable))
        advice = f"; is the adapter the right one? ({_TOLD_WHY})" if is_wrong else ""
        text = f"{rows / whole:.0%} of its source rows cannot be used ({reasons}){advice}"
        yield UNUSABLE if is_wrong else FIRST_NOTE, text


def split_rejected(rejected: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """The reasons of prompts without an answer, and those of source rows that became no prompt."""
    failed = {reason: count for reason, count in rejected.items() if reason not in _OF_SOURCES}
    return failed, {reason: count for reason, count in rejected.items() if reason in _OF_SOURCES}


def find_cut(stats: Sequence[DatasetStats]) -> Problem | None:
    """One sentence for all datasets, by the share of their tokens, the largest first.

    A few answers without an end can be most of what is trained on. Finished conversations were not cut here.
    """
    shares = [(_measure_cut(one), one) for one in stats if one.budget_tokens is not None]
    told = sorted((pair for pair in shares if pair[0] >= _CUT_SHARE), key=lambda pair: -pair[0])
    if not told:
        return None
    is_trouble = told[0][0] >= _MOSTLY
    named = [pair for pair in told if not is_trouble or pair[0] >= _MOSTLY]
    names = [f"{one.name} {share:.0%}{_say_so_far(one)}" for share, one in named]
    names[0] = names[0].replace("%", "% of its tokens", 1)
    if len(told) > len(named):
        names.append(f"{count_of(len(told) - len(named), 'more dataset')} from {_CUT_SHARE:.0%}")
    lengths: Counter[int] = Counter()
    for _, one in told:
        lengths.update(one.cut_lengths)
    judged = f"{'a problem from' if is_trouble else 'no problem below'} {_MOSTLY:.0%}"
    text = f"cut off at max_new_tokens{_describe_limit(lengths)}: {', '.join(names)} ({judged})"
    if not is_trouble:
        return Problem(FIRST_NOTE, text)
    kept = "They are exported as they are, without a stop token"
    advice = "leave it, or make another run with a larger max_new_tokens of the lanes"
    if any(one.status == "incomplete" for one in stats):
        advice = "leave it, or raise max_new_tokens of the lanes for what is to come"
        advice += " (--accept-changed max_new_tokens)"
    return Problem(CUT, f"{text}. {kept}: {advice}")


def _measure_cut(stats: DatasetStats) -> float:
    if stats.rows < _ENOUGH_ROWS:
        return 0.0
    return _count_tokens(stats.cut_lengths) / max(1, _count_tokens(stats.length_counts))


def _say_so_far(stats: DatasetStats) -> str:
    few = stats.status == "incomplete" and stats.rows < _MANY_ROWS
    return f" in {count_of(stats.rows, 'answer')} so far" if few else ""


def _count_tokens(counts: Mapping[int, int]) -> int:
    return sum(length * count for length, count in counts.items())


def _describe_limit(cut_lengths: Mapping[int, int]) -> str:
    """The one length that nearly all were cut at, or the two, of two lanes; else nothing."""
    common = sorted(cut_lengths, key=lambda length: -cut_lengths[length])[:2]
    for lengths in (common[:1], common):
        if sum(cut_lengths[length] for length in lengths) >= _NEARLY_ALL * sum(cut_lengths.values()):
            return " " + " or ".join(f"{length:,}" for length in sorted(lengths))
    return ""


def _describe_damage(stats: DatasetStats, *, running: bool) -> str:
    """Where, and what the refusal of a run says to do; never while a run writes to the log."""
    logs = [
        f"{count_of(damage.lines, 'damaged line')} in its {log}{_number_lines(damage)}"
        for log, damage in stats.damaged.items()
    ]
    where = " and ".join(logs) or f"{count_of(stats.unreadable, 'damaged line')} in its logs"
    them, prompts = ("them", "their prompts are") if stats.unreadable > 1 else ("it", "its prompt is")
    what = f"remove {them} ({prompts} then asked again) and run the same command again"
    if running:
        return f"{where}; when this run has ended, {what}"
    return f"{where}; the next run will fail on {them}: {what}"


def _number_lines(damage: Damage) -> str:
    """All of them where they are few."""
    if not damage.numbers:
        return ""
    if damage.lines > len(damage.numbers):
        return f", from line {damage.numbers[0]:,}"
    word = "line" if damage.lines == 1 else "lines"
    return f" ({word} {', '.join(f'{number:,}' for number in damage.numbers)})"


def _describe_exhausted(stats: DatasetStats, failed: Mapping[str, int]) -> str:
    used_up = f"its prompts are used up, {count_missing(stats):,} tokens short of its budget"
    more = "give it more prompts, or a smaller budget"
    if not _is_much(sum(failed.values()), stats.rows + sum(failed.values())):
        return f"{used_up}; {more}"
    why = f"{sum(failed.values()):,} have no answer ({format_counts(_most_common(failed))})"
    return f"{used_up}; {why}: {_TOLD_WHY}. Ask them again with --retry-rejected, or {more}"


def _describe_failed(stats: DatasetStats, failed: Mapping[str, int]) -> str:
    """What a later run does with them depends on whether the failure may pass by itself."""
    count, final = sum(failed.values()), stats.permanently_rejected
    reasons = format_counts(_most_common(failed))
    if stats.budget_tokens is None:
        return f"{count_of(count, 'conversation')} cannot be converted ({reasons}); {_TOLD_WHY}"
    again = f"the next run asks {count - final:,} of them again"
    if final >= count:
        again = "no run asks them again but with --retry-rejected"
    elif not final:
        again = "the next run asks them again"
    return f"{count_of(count, 'prompt')} without an answer ({reasons}); {_TOLD_WHY}, and {again}"


def count_missing(stats: DatasetStats) -> int:
    """The tokens that its budget lacks."""
    return max(0, (stats.budget_tokens or 0) - stats.completion_tokens)


def estimate_unreachable(stats: DatasetStats) -> float:
    """The tokens of its budget that its prompts do not give, or will not."""
    if stats.status == "exhausted":
        return float(count_missing(stats))
    end = _find_shortfall(stats)
    return 0.0 if end is None else (stats.budget_tokens or 0) - end


def _count_source_rows(stats: DatasetStats, unusable: int) -> int:
    return stats.prepare.get("rows_read") or unusable + (stats.prompts or 0)


def _is_much(part: int, whole: int) -> bool:
    return part > 0 and part >= _SET_ASIDE_SHARE * whole


def _find_shortfall(stats: DatasetStats) -> float | None:
    """The tokens at which the prompts will be used up, where that is short of the budget."""
    if stats.status != "incomplete" or stats.prompts is None or stats.rows < _ENOUGH_ROWS:
        return None
    if stats.budget_tokens is None:
        return None
    left = max(0, stats.prompts - stats.answered - stats.permanently_rejected)
    if stats.max_samples is not None and stats.rows + left >= stats.max_samples:
        return None  # the cap comes first
    end = stats.completion_tokens * (1 + left / stats.rows)
    return end if end < (1 - _SET_ASIDE_SHARE) * stats.budget_tokens else None


def _most_common(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:_REASONS])
