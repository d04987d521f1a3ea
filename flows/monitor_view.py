"""A look at a run as a terminal shows it, cut to the terminal's width and height.

Knows rich and what one look found; does not know files. Invariant: how far, how fast, when done and what
went wrong are shown first, and nothing that is less takes their place.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasks.core.log_watch import RunLook
from tasks.core.pace import SILENT_S, WINDOW_S
from tasks.core.recent_answers import WINDOW_S as RECENT_S
from tasks.core.run_progress import DatasetProgress, State
from tasks.core.stats import parse_time
from tasks.core.stats_views import describe_status, format_counts, format_percent, shorten
from tasks.core.times import format_ago, format_duration, format_end

WAITING = "no run.json yet: the run is being checked, or its server is starting"
_COLOURS: dict[State, str] = {
    "generating": "cyan",
    "waiting": "dim",
    "stopped": "bold red",
    "complete": "green",
    "exhausted": "yellow",
}
_SHORT_AGE_S = 60.0  # a newer answer is not worth a word
_BAR_WIDTH, _TOTAL_BAR_WIDTH, _NAME_WIDTH = 20, 60, 8  # the first two at most, the last at least
_TABLE_LINES = 5  # what many problems leave of the table at least
_SPEED = "tok/s (5 min)"
_DROPPED = ("answers", "not used", "cut off", _SPEED, "done in")  # when it is narrow, in this order
_FIRST: tuple[State, ...] = ("generating", "stopped", "waiting", "exhausted", "complete")  # when it is low


@dataclass(frozen=True, slots=True)
class LookView:
    """One look; with `is_cut` no line more than the terminal has."""

    output_dir: Path
    look: RunLook | None
    is_cut: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What rich asks for."""
        title = Text(f"{self.output_dir.resolve()}", style="dim", overflow="ellipsis", no_wrap=True)
        if self.look is None:
            yield from (title, Text(WAITING))
            return
        page = _Page(console, options, (console.height - 1) if self.is_cut else None)
        page.add(title, _render_total(self.look, options.max_width))
        page.add(*page.cut(_list_trouble(self.look), leave=_TABLE_LINES, least=1))
        page.add(_render_datasets(self.look, width=options.max_width, lines=page.left))
        if self.look.servers and not self.look.progress.total.is_done:
            page.add_one_of(_render_servers(self.look), _summarize_servers(self.look))
        page.add(*page.cut([_render_counts(self.look.progress.total), *_list_notes(self.look)], leave=0))
        yield from page.render()


class _Page:
    """Blocks below one another, empty lines between them where these fit; `left` lines are free."""

    def __init__(self, console: Console, options: ConsoleOptions, lines: int | None) -> None:
        self._console, self._options = console, options
        self._blocks: list[RenderableType] = []
        self.left = 10**6 if lines is None else lines

    def measure(self, part: RenderableType) -> int:
        """The lines it takes, wrapped ones included."""
        return len(self._console.render_lines(part, self._options, pad=False))

    def add(self, *parts: RenderableType) -> None:
        """A block, if there is anything in it."""
        if parts:
            self._blocks.append(Group(*parts))
            self.left -= self.measure(self._blocks[-1])

    def add_one_of(self, *parts: RenderableType) -> None:
        """The first that fits, or none."""
        self.add(*[part for part in parts if self.measure(part) <= self.left][:1])

    def cut(self, texts: Sequence[Text], *, leave: int, least: int = 0) -> list[Text]:
        """Those that fit, and `least` of them always; a last line counts the others."""
        heights = list(map(self.measure, texts))
        shown = len(texts)
        while shown > least and sum(heights[:shown]) + (shown < len(texts)) > self.left - leave:
            shown -= 1
        more = len(texts) - shown
        if not more or not shown:
            return list(texts[:shown])
        return [*texts[:shown], Text(f"  and {more} more, in --json", style=texts[0].style)]

    def render(self) -> Iterable[RenderableType]:
        """All of it."""
        for number, block in enumerate(self._blocks):
            if number and self.left > 0:
                self.left -= 1
                yield Text()
            yield block


def _render_total(look: RunLook, width: int) -> RenderableType:
    progress, total = look.progress, look.progress.total
    percent = format_percent(total.reached_percent)
    line = Table.grid(padding=(0, 2, 0, 0))
    bar_width = max(1, min(_TOTAL_BAR_WIDTH, width - len(percent) - 2))
    bar = ProgressBar(total=100, completed=min(100.0, total.reached_percent), width=bar_width)
    line.add_row(Text(percent, style="bold"), bar)
    return Group(line, Text(progress.describe_reached(), style="bold"), _describe_pace(look))


def _describe_pace(look: RunLook) -> Text:
    """How fast, and when done; or that nothing moves, or since when all is done."""
    total, idle = look.progress.total, [one for one in look.idle_s if one is not None]
    if total.is_done:
        return _describe_finish(look)
    if not idle:
        return Text("no answer yet", style="bold")
    if total.state != "generating" and min(idle) >= SILENT_S:
        return Text(f"not running{_describe_work(total)}", style="bold red")
    return Text(f"{_describe_speed(total)}; {_describe_end(look)}", style="bold")


def _describe_finish(look: RunLook) -> Text:
    lasts = [parse_time(one.last_finished_at) for one in look.stats if one.last_finished_at is not None]
    when = f" {format_ago(max(lasts), now_s=look.at_s, zone=None)}" if lasts else ""
    if look.progress.total.state == "complete":
        return Text(f"everything is done, finished{when}", style="bold green")
    return Text(f"finished{when}, short of the budget: there are no more prompts", style="bold yellow")


def _describe_work(total: DatasetProgress) -> str:
    """What is left, and how long that takes once it goes on."""
    if not total.left_tokens:
        return ""
    left_s = None if total.pace is None else total.pace.measure_left(total.left_tokens)
    work = f", {format_duration(left_s)} of work" if left_s else ""
    return f"; {shorten(int(total.left_tokens))} tokens left{work}"


def _describe_speed(total: DatasetProgress) -> str:
    """Over the last hour of work, and besides over the last minutes, each with the time it is of."""
    recent = f"{total.tokens_per_s:,.0f} (5 min)"
    if total.pace is None:
        return f"tokens/s: {recent}"
    if total.pace.measured_s <= RECENT_S:
        return f"{total.pace.tokens_per_s:,.0f} tokens/s"
    over = "1 h" if total.pace.measured_s >= WINDOW_S else format_duration(total.pace.measured_s)
    return f"{total.pace.tokens_per_s:,.0f} tokens/s ({over}), {recent}"


def _describe_end(look: RunLook) -> str:
    total = look.progress.total
    if total.eta_s is None:
        is_early = total.pace is not None and total.pace.is_too_early
        return "too early to tell when done" if is_early else "end not known yet"
    guess = ", a first guess" if total.pace is not None and total.pace.is_guess else ""
    return f"done {format_end(total.eta_s, now_s=look.at_s, zone=None)}{guess}"


def _render_datasets(look: RunLook, *, width: int, lines: int) -> RenderableType:
    """A line each; where they are too many, those that are done are counted only."""
    found = list(zip(look.progress.datasets, look.idle_s, strict=True))
    shown = found
    if len(found) + 1 > lines:
        by_need = sorted(range(len(found)), key=lambda at: _FIRST.index(found[at][0].state))
        shown = [found[at] for at in sorted(by_need[: max(1, lines - 2)])]
    hidden = Counter(one.state for one, _ in found) - Counter(one.state for one, _ in shown)
    table = _render_rows([one for one, _ in shown], [_to_cells(*one) for one in shown], width=width)
    if not hidden:
        return table
    more = format_counts({describe_status(state): hidden[state] for state in _FIRST if hidden[state]})
    return Group(table, Text(f"and {hidden.total()} more: {more}", style="dim"))


def _to_cells(one: DatasetProgress, idle_s: float | None) -> dict[str, str]:
    return {
        "dataset": one.name,
        "state": _describe_state(one, idle_s),
        "reached": format_percent(one.reached_percent),
        "tokens": _describe_tokens(one),
        _SPEED: f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else "",
        "done in": "" if one.is_done or one.eta_s is None else format_duration(one.eta_s),
        "answers": f"{one.rows:,}",
        "cut off": f"{one.finish_reasons.get('length', 0) / one.rows:.0%}" if one.rows else "",
        "not used": f"{sum(one.rejected.values()):,}",
    }


def _render_rows(datasets: Sequence[DatasetProgress], rows: list[dict[str, str]], *, width: int) -> Table:
    """The columns that a width has room for, and a bar in what is left of it."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(cell_len(text) for text in (name, *(row[name] for row in rows))) for name in names}
    for name in _DROPPED:
        if name in widths and sum(widths.values()) + len(widths) - 1 > width:
            del widths[name]
    spare = width - sum(widths.values()) - len(widths) + 1
    name_width = max(_NAME_WIDTH, widths["dataset"] + min(0, spare))
    bar_width = min(_BAR_WIDTH, spare - 1)
    columns = [*widths]
    if bar_width > 2:
        columns.insert(2, "")
    table = _make_table(columns)
    for one, row in zip(datasets, rows, strict=True):
        cells: dict[str, RenderableType] = {**row, "state": Text(row["state"], style=_COLOURS[one.state])}
        cells[""] = ProgressBar(total=100, completed=min(100.0, one.reached_percent), width=max(1, bar_width))
        if cell_len(one.name) > name_width:
            cells["dataset"] = Text(set_cell_size(one.name, name_width - 1) + "…")
        table.add_row(*(Text(cell) if isinstance(cell := cells[name], str) else cell for name in columns))
    return table


def _render_counts(total: DatasetProgress) -> Text:
    """The two breakdowns that the columns "cut off" and "not used" are short for."""
    cut = " (cut off at max_new_tokens)" if "length" in total.finish_reasons else ""
    ended = {reason: count for reason, count in total.finish_reasons.items() if reason != "length"}
    ended |= {reason: count for reason, count in total.finish_reasons.items() if reason == "length"}
    where = " (see rejected.jsonl)" if total.rejected else ""
    return Text(
        f"answers ended: {format_counts(ended) or 'none yet'}{cut}"
        f"; not used: {format_counts(total.rejected) or 'none'}{where}",
        style="dim",
    )


def _make_table(columns: Sequence[str]) -> Table:
    """Words to the left, numbers to the right, one space between."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        is_text = name in ("dataset", "state", "", "server")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
    return table


def _render_servers(look: RunLook) -> Table:
    table = _make_table(("server", "answers (5 min)", _SPEED, "last answer"))
    for one in look.servers:
        table.add_row(
            Text(one.server or "(not named)"),
            f"{one.answers:,}",
            f"{one.tokens_per_s:,.0f}",
            f"{format_duration(one.last_answer_age_s)} ago",
        )
    return table


def _summarize_servers(look: RunLook) -> Text:
    """One line: how many, and the one that has been silent for longest."""
    last = max(look.servers, key=lambda one: one.last_answer_age_s)
    count = f"{len(look.servers)} server{'s' if len(look.servers) > 1 else ''}"
    age = format_duration(last.last_answer_age_s)
    return Text(f"{count}; longest without an answer: {last.server or '(not named)'}, {age}")


def _list_trouble(look: RunLook) -> list[Text]:
    if not look.problems.trouble:
        return [Text("nothing is wrong", style="green")]
    return [Text(f"! {one}", style="yellow") for one in look.problems.trouble]


def _list_notes(look: RunLook) -> list[Text]:
    return [Text(f"note: {one}", style="dim") for one in look.problems.notes]


def _describe_state(one: DatasetProgress, idle_s: float | None) -> str:
    if idle_s is None or one.is_done or idle_s < _SHORT_AGE_S:
        return describe_status(one.state)
    word = "stopped" if one.state == "stopped" else "quiet"
    return f"{word} {format_duration(idle_s, units=1)}"


def _describe_tokens(one: DatasetProgress) -> str:
    """Of the budget, where there is one."""
    if one.budget_tokens is None:
        return shorten(one.completion_tokens)
    return f"{shorten(one.completion_tokens)}/{shorten(one.budget_tokens)}"
