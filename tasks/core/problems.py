"""What somebody who looks at a run should know is wrong.

Knows statistics and words; does not know where they are shown. Invariant: a sentence names the dataset,
and nothing is named that needs no look.
"""

from collections.abc import Mapping, Sequence

from tasks.core.stats import DatasetStats
from tasks.core.stats_views import format_counts

_SET_ASIDE_SHARE, _CUT_SHARE, _EMPTY_SHARE = 0.02, 0.10, 0.01  # below them it is the way of the world
_REASONS = 3


def find_problems(stats: Sequence[DatasetStats], *, running: bool = False) -> list[str]:
    """A sentence for each, the worst kind first; a dataset that is not done is none while the run goes on."""
    found = [problem for one in stats for problem in _find(one, running=running)]
    return [sentence for _, sentence in sorted(found, key=lambda problem: problem[0])]


def _find(stats: DatasetStats, *, running: bool) -> list[tuple[int, str]]:
    """Each with its rank."""
    found = []
    if stats.unreadable:
        found.append((0, f"{stats.unreadable:,} lines of its logs are damaged; a run stops at the first"))
    if stats.status == "incomplete" and not running:
        found.append((1, f"not done, {_describe_missing(stats)}; the same command goes on"))
    if stats.status == "exhausted":
        found.append((2, f"its prompts are used up, {_missing(stats):,} tokens short of its budget"))
    if stats.not_token_exact:
        found.append((3, f"{stats.not_token_exact:,} rows are not token-exact, and are not exported"))
    if stats.empty > _EMPTY_SHARE * stats.rows:
        found.append((4, f"{stats.empty:,} answers are empty"))
    if _is_much_set_aside(stats):
        found.append((5, f"set aside: {format_counts(_most_common(stats.rejected))}"))
    cut = stats.finish_reasons.get("length", 0)
    if cut and cut >= _CUT_SHARE * stats.rows:
        found.append((6, f"{cut / stats.rows:.0%} of its answers were cut at max_new_tokens"))
    return [(rank, f"{stats.name}: {sentence}") for rank, sentence in found]


def _is_much_set_aside(stats: DatasetStats) -> bool:
    """Of the source rows, or of the prompts that were tried."""
    of_source = stats.prepare.get("rejected", 0)
    of_prompts = max(0, sum(stats.rejected.values()) - of_source)
    shares = ((of_source, stats.prepare.get("rows_read", 0)), (of_prompts, stats.rows + of_prompts))
    return any(part and part >= _SET_ASIDE_SHARE * whole for part, whole in shares)


def _most_common(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:_REASONS])


def _missing(stats: DatasetStats) -> int:
    return max(0, (stats.budget_tokens or 0) - stats.completion_tokens)


def _describe_missing(stats: DatasetStats) -> str:
    if not stats.rows:
        return "it has no row yet"
    if stats.budget_tokens is not None:
        return f"{_missing(stats):,} tokens short of its budget"
    if stats.prompts is None:
        return "with prompts that are not prepared"
    return f"{stats.prompts - stats.answered:,} of {stats.prompts:,} conversations to go"
