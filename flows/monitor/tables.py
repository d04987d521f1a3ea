"""The two tables of a look: the datasets and the servers.

Knows rich and what one look found; does not know what else is on the screen. Invariant: no line is wider than
the terminal, and columns of less value go first.
"""

from collections import Counter
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasks.aggregate.dataset_problems import split_rejected
from tasks.aggregate.log_watch import RunLook
from tasks.aggregate.run_progress import DatasetProgress, State, describe_state
from tasks.aggregate.server_problems import find_silent, name_server
from tasks.aggregate.stats_views import describe_status, format_counts, format_percent, shorten
from tasks.records.times import format_duration

_COLOURS: dict[State, str] = {
    "generating": "cyan",
    "waiting": "dim",
    "stopped": "bold red",
    "damaged": "bold red",
    "complete": "green",
    "exhausted": "yellow",
}
_BAR_WIDTH, _MIN_BAR, _NAME_WIDTH = 20, 3, 8  # the first at most, the others at least
_SPEED, _CUT = "tok/s (5 min)", "cut off"
_DROPPED = ("answers", "rows skipped", "unanswered", _CUT, _SPEED, "done in")  # first, when it is narrow
_LONGER = {_CUT: "cut off (answers)"}  # where there is room: the problems say the share of the tokens
BY_NEED: tuple[State, ...] = ("damaged", "stopped", "generating", "exhausted", "waiting", "complete")


def render_datasets(look: RunLook, shown: Sequence[int], *, width: int) -> RenderableType:
    """A line for each that is shown; the others are counted."""
    datasets = look.progress.datasets
    rows = [_to_cells(look, at) for at in shown]
    table = _render_rows([datasets[at] for at in shown], rows, width=width)
    hidden = Counter(one.state for one in datasets) - Counter(datasets[at].state for at in shown)
    if not hidden:
        return table
    more = format_counts({describe_status(state): hidden[state] for state in BY_NEED if hidden[state]})
    return Group(table, Text(f"and {hidden.total()} more: {more}", style="dim"))


def _to_cells(look: RunLook, at: int) -> dict[str, str]:
    """Finished conversations are no answers: what their dataset does is no matter of the servers."""
    one, idle_s = look.progress.datasets[at], look.idle_s[at]
    left_s = look.progress.find_earlier_end(one)
    failed, skipped = (sum(part.values()) for part in split_rejected(one.rejected))
    is_asked = one.budget_tokens is not None
    is_moving = is_asked and not look.progress.total.is_done  # the speeds add up to the whole's
    cut = one.finish_reasons.get("length", 0)
    return {
        "dataset": one.name,
        "state": describe_state(one, idle_s),
        "reached": format_percent(one.reached_percent),
        "tokens": _describe_tokens(one),
        _SPEED: f"{one.tokens_per_s:,.0f}" if one.tokens_per_s and is_moving else "",
        "done in": "" if left_s is None else format_duration(left_s),
        "answers": f"{one.rows:,}" if is_asked else "",
        _CUT: f"{cut / one.rows:.0%}" if one.rows and is_asked else "",
        "unanswered": f"{failed:,}" if failed else "",
        "rows skipped": f"{skipped:,}" if skipped else "",
    }


def _render_rows(datasets: Sequence[DatasetProgress], rows: list[dict[str, str]], *, width: int) -> Table:
    """The columns that a width has room for, and a bar in what is left of it."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(cell_len(text) for text in (name, *(row[name] for row in rows))) for name in names}
    for name in _DROPPED:
        if name in widths and sum(widths.values()) + len(widths) - 1 > width:
            del widths[name]
    spare = width - sum(widths.values()) - len(widths) + 1
    headings = {name: name for name in widths}
    for name, longer in _LONGER.items():
        if name in widths and spare - (more := len(longer) - widths[name]) > _MIN_BAR:
            headings[name], spare = longer, spare - more
    name_width = max(_NAME_WIDTH, widths["dataset"] + min(0, spare))
    bar_width = min(_BAR_WIDTH, spare - 1)
    columns = [*widths]
    if bar_width >= _MIN_BAR:
        columns.insert(2, "")
    table = _make_table([headings.get(name, "") for name in columns])
    for one, row in zip(datasets, rows, strict=True):
        cells: dict[str, RenderableType] = {**row, "state": Text(row["state"], style=_COLOURS[one.state])}
        cells[""] = ProgressBar(total=100, completed=min(100.0, one.reached_percent), width=max(1, bar_width))
        if cell_len(one.name) > name_width:
            cells["dataset"] = Text(set_cell_size(one.name, name_width - 1) + "…")
        table.add_row(*(Text(cell) if isinstance(cell := cells[name], str) else cell for name in columns))
    return table


def _make_table(columns: Sequence[str]) -> Table:
    """Words to the left, numbers to the right, one space between."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        is_text = name in ("dataset", "state", "", "server")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
    return table


def render_servers(look: RunLook) -> Table:
    """A line each; one that is silent while others answer is told apart."""
    table = _make_table(("server", "answers (5 min)", _SPEED, "last answer"))
    for one in look.servers:
        age = format_duration(one.last_answer_age_s)
        is_silent = one in find_silent(look.servers)
        last = Text(f"no answer for {age}", style="yellow") if is_silent else Text(f"{age} ago")
        table.add_row(Text(name_server(one)), f"{one.answers:,}", f"{one.tokens_per_s:,.0f}", last)
    return table


def summarize_servers(look: RunLook) -> Text:
    """One line: how many, and which are silent."""
    count = f"{len(look.servers)} server{'s' if len(look.servers) > 1 else ''}"
    if not (silent := find_silent(look.servers)):
        last = max(one.last_answer_age_s for one in look.servers)
        return Text(f"{count}; last answers {format_duration(last)} ago or less")
    names = ", ".join(f"{name_server(one)} for {format_duration(one.last_answer_age_s)}" for one in silent)
    return Text(f"{count}; no answer from {names}", style="yellow")


def _describe_tokens(one: DatasetProgress) -> str:
    """Of the budget, where there is one."""
    if one.budget_tokens is None:
        return shorten(one.completion_tokens)
    return f"{shorten(one.completion_tokens)}/{shorten(one.budget_tokens)}"
