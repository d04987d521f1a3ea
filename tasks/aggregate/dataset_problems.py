"""What somebody should know is wrong with one dataset: what it is, what follows, and what to do.

Knows statistics and words; does not know the run around it. Invariant: a sentence names its dataset; what is
true of every large source is a note, no trouble.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from tasks.aggregate.stats import Damage, DatasetStats
from tasks.aggregate.stats_views import count_of, format_counts, shorten
from tasks.prepare.adapters.errors import RowReason
from tasks.prepare.row_batches import MALFORMED_ROW

SERVER, DAMAGED, STOPPED, SHORT, SLOW, INEXACT, EMPTY, UNANSWERED, UNUSABLE, CUT, FIRST_NOTE = range(11)
_SET_ASIDE_SHARE, _EMPTY_SHARE = 0.02, 0.01  # below them it is the way of the world
_WRONG_ADAPTER_SHARE = 0.2
_CUT_SHARE, _MOSTLY = 1 / 4, 1 / 2  # of the tokens: what is told, and what is trouble
_NEARLY_ALL = 0.9
_REASONS = _FEW = 3
_LIMITS = "lanes.short.max_new_tokens, lanes.long.max_new_tokens"
_ENOUGH_ROWS, _MANY_ROWS = 20, 500  # to judge answers from, and to call it certain
_OF_SOURCES = frozenset({MALFORMED_ROW, *get_args(RowReason)})  # of rows that became no prompt
_TOLD_WHY = "rejected.jsonl says why"
_LENGTH, _LENGTH_WORDS = "prompt_too_long", ("context", "maximum allowed length")
_TOO_LONG = "too long for the context; asking again will not help"


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
        text = f"{rows / whole:.0%} of its source rows cannot be used"
        if is_wrong:
            yield UNUSABLE, f"{text}; is the adapter the right one? {reasons} ({_TOLD_WHY})"
        else:
            yield FIRST_NOTE, f"{text} ({reasons})"


def split_rejected(rejected: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """The reasons of prompts without an answer, and those of source rows that became no prompt."""
    failed = {reason: count for reason, count in rejected.items() if reason not in _OF_SOURCES}
    return failed, {reason: count for reason, count in rejected.items() if reason in _OF_SOURCES}


def find_cut(stats: Sequence[DatasetStats]) -> Problem | None:
    """One sentence for all datasets, by the share of their tokens, the largest first.

    A few answers without an end can be most of what is trained on. Finished conversations were not cut here.
    """
    judged = [one for one in stats if one.budget_tokens is not None and one.rows >= _ENOUGH_ROWS]
    told = sorted(
        (one for one in judged if measure_cut(one) >= _CUT_SHARE), key=lambda one: -measure_cut(one)
    )
    worst = [one for one in told if measure_cut(one) >= _MOSTLY]
    if not told:
        return None
    lengths = sum((Counter(one.cut_lengths) for one in told), Counter[int]())
    text = f"cut off at max_new_tokens{_describe_limit(lengths)}: {_list_cut(worst or told)}"
    if not worst:
        return Problem(FIRST_NOTE, f"{text} (no problem below {_MOSTLY:.0%})")
    if rest := told[len(worst) :]:
        between = f"between {_CUT_SHARE:.0%} and {_MOSTLY:.0%}"
        few = ", ".join(one.name for one in rest) if len(rest) <= _FEW else ""
        text += f", and {few or count_of(len(rest), 'dataset')} {between}"
    return Problem(CUT, f"{text}. They are exported as they are, without a stop token{_advise_on_cut(told)}")


def measure_cut(stats: DatasetStats) -> float:
    """The share of the tokens that are in answers that were cut off."""
    return _count_tokens(stats.cut_lengths) / max(1, _count_tokens(stats.length_counts))


def _list_cut(stats: Sequence[DatasetStats]) -> str:
    """Each with the share of its tokens, and of how many of its answers they are."""
    of_tokens, of_answers, texts = " of its tokens", " of its answers", []
    for one in stats:
        texts.append(f"{one.name} {measure_cut(one):.0%}{of_tokens} ({_count_cut(one, of_answers)})")
        of_tokens = of_answers = ""  # the others are read like the first
    return ", ".join(texts)


def _count_cut(stats: DatasetStats, of_answers: str) -> str:
    cut = sum(stats.cut_lengths.values())
    if stats.status == "incomplete" and stats.rows < _MANY_ROWS:
        return f"{cut:,} of {count_of(stats.rows, 'answer')} so far"
    return f"{cut / max(1, stats.rows):.0%}{of_answers}"


def _advise_on_cut(stats: Sequence[DatasetStats]) -> str:
    """A larger limit helps only what is still to come."""
    if not (coming := [one.name for one in stats if one.status == "incomplete"]):
        return f"; a larger limit ({_LIMITS}) only matters to another run"
    whose = "what is to come" if len(coming) == len(stats) else ", ".join(coming)
    again = "and run it again with --accept-changed max_new_tokens"
    return f". For fewer of them in {whose}, stop the run, raise {_LIMITS}, {again}"


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
        f"{count_of(damage.lines, 'damaged line')} in {log}{_number_lines(damage)}"
        for log, damage in stats.damaged.items()
    ]
    where = " and ".join(logs) or f"{count_of(stats.unreadable, 'damaged line')} in its logs"
    them, prompts = ("them", "their prompts are") if stats.unreadable > 1 else ("it", "its prompt is")
    when, else_ = ("when this run has ended, ", "") if running else ("", ", or the next run will fail")
    again = f"({prompts} then asked again), and run the same command again"
    return f"{where}; {when}remove {them}{else_} {again}"


def _number_lines(damage: Damage) -> str:
    """All of them where they are few."""
    if not damage.numbers:
        return ""
    if damage.lines > len(damage.numbers):
        return f", from line {damage.numbers[0]}"
    return f" ({', '.join(map(str, damage.numbers))})"


def _describe_exhausted(stats: DatasetStats, failed: Mapping[str, int]) -> str:
    used_up = f"its prompts are used up, {shorten(count_missing(stats))} tokens short"
    more = f"{used_up}; give it more, or a smaller budget"
    if not _is_much(sum(failed.values()), stats.rows + sum(failed.values())):
        return more
    why = f"{sum(failed.values()):,} have no answer ({format_counts(_most_common(failed))})"
    too_long = _find_too_long(stats, failed)
    if len(too_long) == len(failed):
        return f"{more}. {why}, {_TOO_LONG}"
    return f"{more}. {why}: {_TOLD_WHY}. {_describe_retry(too_long)}"


def _find_too_long(stats: DatasetStats, failed: Mapping[str, int]) -> list[str]:
    """The reasons that are the prompt's length; of a server's refusal the one that is known tells."""
    example = stats.rejected_examples.get("http_400", "").lower()
    is_length = "token" in example and any(word in example for word in _LENGTH_WORDS)
    return [reason for reason in failed if reason == _LENGTH or (reason == "http_400" and is_length)]


def _describe_retry(too_long: Sequence[str]) -> str:
    but = f", not with {' and '.join(too_long)}" if too_long else ""
    return f"--retry-rejected helps only where the cause has gone (server, limits){but}"


def _describe_failed(stats: DatasetStats, failed: Mapping[str, int]) -> str:
    """What a later run does with them depends on whether the failure may pass by itself."""
    count, final = sum(failed.values()), stats.permanently_rejected
    reasons = format_counts(_most_common(failed))
    if stats.budget_tokens is None:
        return f"{count_of(count, 'conversation')} cannot be converted ({reasons}); {_TOLD_WHY}"
    again = f"the next run asks {count - final:,} of them again"
    if final >= count:
        too_long = _find_too_long(stats, failed)
        if len(too_long) == len(failed):
            return f"{count_of(count, 'prompt')} without an answer ({reasons}), {_TOO_LONG}"
        again = f"no run asks them again by itself: {_describe_retry(too_long)}"
    elif not final:
        again = "the next run asks them again"
    return f"{count_of(count, 'prompt')} without an answer ({reasons}); {again} ({_TOLD_WHY})"


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
