"""A look at a run as a terminal shows it, cut to the terminal's width and height.

Knows rich and what one look found; does not know files. Invariant: how far, how fast, when done and what
went wrong are shown first, and nothing that is less takes their place.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flows.monitor.layout import Layout, Sizes, fit, list_hidden
from flows.monitor.tables import BY_NEED, render_datasets, render_servers, summarize_servers
from tasks.aggregate.dataset_problems import split_rejected
from tasks.aggregate.log_watch import RunLook
from tasks.aggregate.outlook import describe_end, describe_mean, describe_needs, describe_work
from tasks.aggregate.pace import SILENT_S, WINDOW_S
from tasks.aggregate.problems import is_running
from tasks.aggregate.recent_answers import WINDOW_S as RECENT_S
from tasks.aggregate.run_progress import DatasetProgress
from tasks.aggregate.stats import parse_time
from tasks.aggregate.stats_views import format_counts, format_percent
from tasks.records.times import format_ago, format_duration, format_time

WAITING = "no run.json yet: the run is being checked, or its server is starting"
_TOTAL_BAR_WIDTH, _MIN_PATH = 60, 8  # at most, at least
_FOLDED = ("complete", "waiting")  # nobody has to see them


@dataclass(frozen=True, slots=True)
class LookView:
    """One look; with `is_cut` no line more than the terminal has."""

    output_dir: Path
    look: RunLook | None
    is_cut: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What rich asks for."""
        if self.look is None:
            yield from (_render_title(self.output_dir, None, options.max_width), Text(WAITING))
            return
        view = _View(self.output_dir, self.look, console, options)
        yield from view.render((console.height - 1) if self.is_cut else None)


class _View:
    """The parts of a look, from which those are put together that fit."""

    def __init__(self, folder: Path, look: RunLook, console: Console, options: ConsoleOptions) -> None:
        self._console, self._options = console, options
        self._look, self._width = look, options.max_width
        self._head = Group(_render_title(folder, look, self._width), _render_total(look, self._width))
        self._trouble, self._notes = _list_trouble(look), _list_notes(look)
        self._order = _sort_by_need(look)
        self._counts = _render_counts(look)
        self._servers: list[RenderableType] = []
        if look.servers and is_running(look.idle_s) and not look.progress.total.is_done:
            self._servers = [render_servers(look), summarize_servers(look)]

    def render(self, lines: int | None) -> Iterable[RenderableType]:
        """What fits, with empty lines between where these do."""
        sizes = self._measure_all()
        layout, spare = fit(sizes, lines)
        blocks = [block for block in self._make_blocks(layout) if block]
        for number, block in enumerate(blocks):
            if 0 < number <= spare:
                yield Text()
            yield from block
        if words := list_hidden(sizes, layout):
            hidden = f"in a larger window, or with --once: {', '.join(words)}"
            yield Text(hidden, style="dim", no_wrap=True, overflow="ellipsis")

    def _measure_all(self) -> Sizes:
        return Sizes(
            head=self._measure(self._head),
            trouble=list(map(self._measure, self._trouble)),
            datasets=len(self._order),
            folded=sum(self._is_folded(at) for at in self._order),
            servers=list(map(self._measure, self._servers)),
            counts=self._measure(self._counts) if self._counts else 0,
            notes=list(map(self._measure, self._notes)),
        )

    def _measure(self, part: RenderableType) -> int:
        """The lines it takes, wrapped ones included."""
        return len(self._console.render_lines(part, self._options, pad=False))

    def _is_folded(self, at: int) -> bool:
        one = self._look.progress.datasets[at]
        return one.state in _FOLDED and one.name not in self._look.problems.names

    def _make_blocks(self, layout: Layout) -> list[Sequence[RenderableType]]:
        full = layout.full_trouble
        trouble = [*self._trouble[:full], *map(_shorten_line, self._trouble[full : layout.trouble])]
        notes = self._notes[: layout.notes]
        if not layout.has_full_notes:
            notes = [_shorten_line(note) for note in notes]
        counts = [self._counts] if self._counts and layout.has_counts else []
        shown = sorted(self._order[: layout.rows])
        return [
            [self._head],
            trouble,
            [render_datasets(self._look, shown, width=self._width)],
            self._servers[layout.servers : layout.servers + 1],
            [*counts, *notes],
        ]


def _sort_by_need(look: RunLook) -> list[int]:
    """The places of the datasets, those first that somebody has to see."""
    found = look.progress.datasets
    in_trouble = {name: place for place, name in enumerate(look.problems.names)}

    def find_need(at: int) -> tuple[int, int]:
        one = found[at]
        return in_trouble.get(one.name, len(in_trouble)), BY_NEED.index(one.state)

    return sorted(range(len(found)), key=find_need)


def _shorten_line(text: Text) -> Text:
    short = text.copy()
    short.no_wrap, short.overflow = True, "ellipsis"
    return short


def _render_title(folder: Path, look: RunLook | None, width: int) -> Text:
    """When, which model and where; of a path that is too long the end, which tells it from others."""
    clock = [f"{format_time(look.at_s, seconds=True)} UTC", look.model] if look else []
    words, path = "  ".join(filter(None, clock)), str(folder.resolve())
    room = max(_MIN_PATH, width - cell_len(words) - 2)
    if cell_len(path) > room:
        path = f"…{path[-room + 1 :]}"
    return Text(f"{words}  {path}".strip(), style="dim", overflow="ellipsis", no_wrap=True)


def _render_total(look: RunLook, width: int) -> RenderableType:
    progress, total = look.progress, look.progress.total
    percent = format_percent(total.reached_percent)
    line = Table.grid(padding=(0, 2, 0, 0))
    bar_width = max(1, min(_TOTAL_BAR_WIDTH, width - len(percent) - 2))
    bar = ProgressBar(total=100, completed=min(100.0, total.reached_percent), width=bar_width)
    line.add_row(Text(percent, style="bold"), bar)
    return Group(line, Text(progress.describe_reached(), style="bold"), *_describe_pace(look))


def _describe_pace(look: RunLook) -> list[Text]:
    """How fast, and when done; or that nothing moves, or since when all is done."""
    progress, idle = look.progress, [one for one in look.idle_s if one is not None]
    total = progress.total
    if total.is_done:
        return [_describe_finish(look)]
    if not idle:
        return [Text("no answer yet", style="bold")]
    if total.state != "generating" and min(idle) >= SILENT_S:
        return [Text(f"not running; {describe_work(progress)}", style="bold red")]
    line = Text(f"{_describe_speed(total)}; {describe_end(progress, now_s=look.at_s)}", style="bold")
    if needs := describe_needs(progress):
        line.append(f"; {needs}", style="yellow")
    return [line]


def _describe_finish(look: RunLook) -> Text:
    lasts = [parse_time(one.last_finished_at) for one in look.stats if one.last_finished_at is not None]
    when = f" {format_ago(max(lasts), now_s=look.at_s)}" if lasts else ""
    speed = f"; {describe_mean(look.progress.pace)}" if look.progress.pace else ""
    if look.progress.total.state == "complete":
        return Text(f"everything is done, finished{when}{speed}", style="bold green")
    end = "short of the budget: there are no more prompts"
    return Text(f"finished{when}, {end}{speed}", style="bold yellow")


def _describe_speed(total: DatasetProgress) -> str:
    """Over the last hour of work, and besides over the last minutes, each with the time it is of."""
    recent = f"{total.tokens_per_s:,.0f} (5 min)"
    if total.pace is None:
        return f"tokens/s: {recent}"
    if total.pace.measured_s <= RECENT_S:
        return f"{total.pace.tokens_per_s:,.0f} tokens/s"
    over = "1 h" if total.pace.measured_s >= WINDOW_S else format_duration(total.pace.measured_s)
    return f"{total.pace.tokens_per_s:,.0f} tokens/s ({over}), {recent}"


def _render_counts(look: RunLook) -> Text | None:
    """What three of the columns are short for; None where there is nothing."""
    ended: Counter[str] = Counter()
    for one in look.progress.datasets:
        ended.update(one.finish_reasons if one.budget_tokens is not None else {})
    in_order = dict(sorted(ended.items(), key=lambda item: item[0] == "length"))
    failed, skipped = split_rejected(look.progress.total.rejected)
    cut = " (cut off at max_new_tokens)" if "length" in ended else ""
    parts = [f"answers ended: {format_counts(in_order)}{cut}"] if ended else []
    converted = [
        f"{one.name} {one.rows:,} of {one.prompts:,}"
        for one in look.progress.datasets
        if one.budget_tokens is None and one.prompts and not one.is_done
    ]
    parts += [f"conversations converted: {', '.join(converted)}"] if converted else []
    parts += [f"unanswered: {format_counts(failed)}"] if failed else []
    parts += [f"rows skipped: {format_counts(skipped)}"] if skipped else []
    if not parts:
        return None
    where = " (see rejected.jsonl)" if failed or skipped else ""
    return Text(f"{'; '.join(parts)}{where}", style="dim")


def _list_trouble(look: RunLook) -> list[Text]:
    if not look.problems.trouble:
        return [Text("nothing is wrong", style="green")]
    return [Text(f"! {one}", style="yellow") for one in look.problems.trouble]


def _list_notes(look: RunLook) -> list[Text]:
    return [Text(f"note: {one}", style="dim") for one in look.problems.notes]
