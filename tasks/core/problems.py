"""What somebody who looks at a run should know is wrong.

Knows statistics and words; does not know where they are shown. Invariant: a sentence names the dataset,
and nothing is named that needs no look.
"""

from collections.abc import Sequence

from tasks.core.stats import DatasetStats

_SET_ASIDE_SHARE, _CUT_SHARE, _EMPTY_SHARE = 0.01, 0.10, 0.01  # below them it is the way of the world


def find_problems(stats: Sequence[DatasetStats], *, running: bool = False) -> list[str]:
    """A sentence for each, by dataset; a dataset that is not done is none while the run goes on."""
    return [sentence for one in stats for sentence in _find(one, running=running)]


def _find(stats: DatasetStats, *, running: bool) -> list[str]:
    found = []
    if stats.unreadable:
        found.append(f"{stats.unreadable:,} lines of its logs are damaged; a run stops at the first")
    if stats.status == "exhausted":
        found.append(f"its prompts are used up, {_missing(stats):,} tokens short of its budget")
    elif stats.status == "incomplete" and not running:
        found.append(f"not done, {_describe_missing(stats)}; the same command goes on")
    aside = sum(stats.rejected.values())
    if aside and aside >= _SET_ASIDE_SHARE * (stats.rows + aside):
        reason, count = max(stats.rejected.items(), key=lambda item: item[1])
        found.append(f"{aside:,} set aside ({aside / (stats.rows + aside):.1%}), {count:,} for {reason}")
    cut = stats.finish_reasons.get("length", 0)
    if cut and cut >= _CUT_SHARE * stats.rows:
        found.append(f"{cut / stats.rows:.0%} of its answers were cut at max_new_tokens")
    if stats.empty > _EMPTY_SHARE * stats.rows:
        found.append(f"{stats.empty:,} answers are empty")
    if stats.not_token_exact:
        found.append(f"{stats.not_token_exact:,} rows are not token-exact, and are not exported")
    return [f"{stats.name}: {sentence}" for sentence in found]


def _missing(stats: DatasetStats) -> int:
    return max(0, (stats.budget_tokens or 0) - stats.completion_tokens)


def _describe_missing(stats: DatasetStats) -> str:
    if stats.budget_tokens is not None:
        return f"{_missing(stats):,} tokens short of its budget"
    if stats.prompts is None:
        return "not begun"
    return f"{stats.prompts - stats.answered:,} of {stats.prompts:,} conversations to go"
