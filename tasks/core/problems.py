"""What somebody who looks at a run should know is wrong.

Knows statistics and words; does not know where they are shown. Invariant: a sentence names its dataset, if
it is not of the whole run, and nothing is named that needs no look; what is true of every large source is a
note, no trouble.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tasks.core.pace import SILENT_S, Pace, find_idle, measure_pace
from tasks.core.stats import PAUSE_S, DatasetStats, Gap
from tasks.core.stats_views import format_counts
from tasks.core.times import format_ago, format_duration, format_past, format_time

_SET_ASIDE_SHARE, _EMPTY_SHARE = 0.02, 0.01  # below them it is the way of the world
_CUT_SHARE, _MOSTLY = 1 / 4, 2 / 3  # of the tokens; half is soon reached, cut answers being the longest
_NEARLY_ALL = 0.9
_PAUSED_S = 900.0  # all pauses together
_SILENT_ALONE = 2
_REASONS = 3
_ENOUGH_ROWS = 20  # to tell from when prompts run out
_FIRST_NOTE = 6
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


def find_problems(
    stats: Sequence[DatasetStats],
    *,
    now_s: float,
    idle_s: Sequence[float | None] | None = None,
    pace: Pace | None = None,
    ended: bool = False,
) -> Problems:
    """A sentence for each; a dataset that is not done is none while the run goes on.

    Args:
        stats: of the datasets of a run.
        now_s: seconds since 1970.
        idle_s: how long each dataset has had no answer, where that is known better than from `now_s`.
        pace: of the datasets together, where it is known already.
        ended: nothing generates any more; otherwise a run is at work while answers come.
    """
    idle_s = find_idle(stats, now_s=now_s) if idle_s is None else idle_s
    found = [problem for one in stats for problem in _find(one)]
    found += _find_stop(stats, idle_s, now_s=now_s, ended=ended)
    found += _find_events(stats, pace or measure_pace(stats), now_s=now_s)
    found.sort(key=lambda problem: problem[0])
    return Problems(
        [sentence for rank, sentence in found if rank < _FIRST_NOTE],
        [sentence for rank, sentence in found if rank >= _FIRST_NOTE],
    )


def is_running(idle_s: Sequence[float | None], *, ended: bool = False) -> bool:
    """Whether answers still come."""
    return not ended and any(idle is not None and idle < SILENT_S for idle in idle_s)


def _find_stop(
    stats: Sequence[DatasetStats], idle_s: Sequence[float | None], *, now_s: float, ended: bool
) -> list[tuple[int, str]]:
    """That the run stopped, or which of its datasets did while others go on: one sentence, or a few."""
    left = [one for one in stats if one.status == "incomplete"]
    known = [idle for idle in idle_s if idle is not None]
    if not left or not (known or ended):
        return []
    if not is_running(idle_s, ended=ended):
        when = f" at {format_ago(now_s - min(known), now_s=now_s)}," if known else ","
        missing = f"{len(left)} of {len(stats)} datasets not done"
        word = "ended" if ended else "stopped"
        return [(1, f"the run {word}{when} with {missing}: run the same command again to go on")]
    silent = [
        (one.name, idle)
        for one, idle in zip(stats, idle_s, strict=True)
        if one.status == "incomplete" and idle is not None and idle >= SILENT_S
    ]
    if len(silent) > _SILENT_ALONE:
        least = format_duration(min(idle for _, idle in silent))
        names = ", ".join(name for name, _ in silent)
        return [(1, f"{len(silent)} datasets: no answer for {least} or more: {names}")]
    return [(1, f"{name}: no answer for {format_duration(idle)}") for name, idle in silent]


def _find_events(
    stats: Sequence[DatasetStats], pace: Pace | None, *, now_s: float
) -> Iterator[tuple[int, str]]:
    """What became of the run's speed."""
    if pace is None:
        return
    if pace.fall is not None and any(one.status == "incomplete" for one in stats):
        speeds = f"from {pace.fall.before:,.0f} to {pace.fall.after:,.0f} tokens/s"
        yield _FIRST_NOTE, f"speed fell {speeds} at about {format_past(pace.fall.at_s, now_s=now_s)}"
    if sum(pause.seconds for pause in pace.pauses) > _PAUSED_S:
        yield _FIRST_NOTE, describe_pauses(pace.pauses)


def describe_pauses(pauses: Sequence[Gap]) -> str:
    """How often and how long nothing came, and when for the longest time; the longest comes first."""
    longest = pauses[0]
    span = f"{format_time(longest.start_s)} to {format_time(longest.end_s)} UTC"
    if len(pauses) == 1:
        return f"stood still {format_duration(longest.seconds)} ({span})"
    whole = format_duration(sum(pause.seconds for pause in pauses))
    one = f"the longest {format_duration(longest.seconds)} ({span})"
    return f"stood still {len(pauses)} times for more than {format_duration(PAUSE_S)}, {whole} in all, {one}"


def _find(stats: DatasetStats) -> list[tuple[int, str]]:
    """Each with its rank."""
    found = []
    if stats.unreadable:
        found.append((0, _describe_damage(stats)))
    if stats.status == "exhausted":
        found.append((2, f"its prompts are used up, {_missing(stats):,} tokens short of its budget"))
    if (end := _find_shortfall(stats)) is not None:
        found.append(
            (2, f"its prompts will be used up at about {end:,.0f} of {stats.budget_tokens:,} tokens")
        )
    if stats.not_token_exact:
        why = "whose token ids are missing or do not add up: they are not exported"
        found.append((3, f"{stats.not_token_exact:,} answers {why}"))
    if stats.empty > _EMPTY_SHARE * stats.rows:
        found.append((4, f"{stats.empty:,} answers are empty"))
    failed = {reason: n for reason, n in stats.rejected.items() if reason not in _OF_SOURCES}
    if _is_much(sum(failed.values()), stats.rows + sum(failed.values())):
        found.append((5, f"prompts without an answer: {format_counts(_most_common(failed))}"))
    unusable = {reason: n for reason, n in stats.rejected.items() if reason in _OF_SOURCES}
    if _is_much(sum(unusable.values()), stats.prepare.get("rows_read", 0)):
        found.append((7, f"source rows that cannot be used: {format_counts(_most_common(unusable))}"))
    found += _find_cut(stats)
    return [(rank, f"{stats.name}: {sentence}") for rank, sentence in found]


def _find_cut(stats: DatasetStats) -> Iterator[tuple[int, str]]:
    """By their share of the tokens: a few answers without an end can be most of what is trained on."""
    cut, cut_tokens = sum(stats.cut_lengths.values()), _count_tokens(stats.cut_lengths)
    share = cut_tokens / max(1, _count_tokens(stats.length_counts))
    if share < _CUT_SHARE:
        return
    answers = f"{cut / max(1, stats.rows):.0%} of its answers ({share:.0%} of its tokens)"
    limit = _describe_limit(stats.cut_lengths)
    rank = 4 if share >= _MOSTLY else _FIRST_NOTE + 1
    yield rank, f"{answers} were cut off at max_new_tokens{limit}"


def _count_tokens(counts: Mapping[int, int]) -> int:
    return sum(length * count for length, count in counts.items())


def _describe_limit(cut_lengths: Mapping[int, int]) -> str:
    """The one length that nearly all were cut at, or the two, of two lanes; else nothing."""
    common = sorted(cut_lengths, key=lambda length: -cut_lengths[length])[:2]
    for lengths in (common[:1], common):
        if sum(cut_lengths[length] for length in lengths) >= _NEARLY_ALL * sum(cut_lengths.values()):
            return " " + " or ".join(f"{length:,}" for length in sorted(lengths))
    return ""


def _describe_damage(stats: DatasetStats) -> str:
    """Where, and what the refusal of a run says to do."""
    logs = [
        f"{count_of(damage.lines, 'damaged line')} in its {log}, from line {damage.first:,}"
        for log, damage in stats.damaged.items()
    ]
    where = " and ".join(logs) or f"{count_of(stats.unreadable, 'damaged line')} in its logs"
    what = "remove them (their prompts are" if stats.unreadable > 1 else "remove it (its prompt is"
    return f"{where}; a run stops there: {what} then asked again) and run the same command again"


def count_of(number: int, what: str) -> str:
    """A number of things."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


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


def _missing(stats: DatasetStats) -> int:
    return max(0, (stats.budget_tokens or 0) - stats.completion_tokens)
