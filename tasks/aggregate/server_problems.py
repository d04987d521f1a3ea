"""Which servers give nothing, or much less than the others.

Knows what each server did in the last minutes; does not know why. Invariant: a server is judged by the others
of the same minutes only, so that long answers, a pause or the end of a run blame none.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from tasks.aggregate.recent_answers import WINDOW_S, ServerActivity
from tasks.aggregate.run_progress import QUIET_S
from tasks.aggregate.stats_views import count_of
from tasks.records.times import format_duration

_ENOUGH = 20  # answers of another server: less may be chance
_LOW_SHARE = 1 / 4


def find_silent(servers: Sequence[ServerActivity]) -> list[ServerActivity]:
    """Those that had no answer for a while, where others had one."""
    silent = [one for one in servers if one.last_answer_age_s >= QUIET_S]
    return silent if len(silent) < len(servers) else []


def find_server_problems(servers: Sequence[ServerActivity]) -> Iterator[str]:
    """A sentence for each server that the others leave far behind, what to do included."""
    silent = find_silent(servers)
    for at, one in enumerate(servers):
        others = [*servers[:at], *servers[at + 1 :]]
        usual = median(other.answers for other in others) if others else 0
        missed = usual * min(one.last_answer_age_s, WINDOW_S) / WINDOW_S
        is_silent = one in silent and missed >= _ENOUGH
        if is_silent or (usual >= _ENOUGH and one.answers < _LOW_SHARE * usual):
            no_answer = f"no answer for {format_duration(one.last_answer_age_s)}, " if is_silent else ""
            count = f"{count_of(one.answers, 'answer')} in {format_duration(WINDOW_S)}"
            yield f"{name_server(one)}: {no_answer}{count}; look at its log ({_compare(others, usual)})"


def name_server(one: ServerActivity) -> str:
    """Its address, where the answers name it."""
    return one.server or "(not named)"


def _compare(others: Sequence[ServerActivity], usual: float) -> str:
    if len(others) == 1:
        return f"{name_server(others[0])}: {usual:,.0f}"
    return f"median of the others: {usual:,.0f}"
