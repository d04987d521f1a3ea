"""`draftmill monitor`: how far a run is, looked at from outside.

Knows a terminal and JSON; what there is to see comes from `tasks.core.log_watch`. Invariant: the run notices
nothing: only files are read, and no lock is taken.
"""

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasks.core.folder_lock import RUN_LOCK
from tasks.core.log_watch import RunLogWatch, RunLook
from tasks.core.run_file import RUN_FILE, RunFolderError
from tasks.core.run_progress import DatasetProgress, format_duration
from tasks.core.stats_views import format_counts

WAITING = "no run.json yet: the run is being checked, or its server is starting"
_BEGUN = (RUN_LOCK, "prefect.log", "server.log")  # what a run leaves before its run.json
_COLOURS = {
    "generating": "cyan",
    "waiting": "dim",
    "stopped": "bold red",
    "complete": "green",
    "exhausted": "yellow",
}
_SHORT_AGE_S = 60.0  # a newer row is not worth a word
_BAR_WIDTH, _TOTAL_BAR_WIDTH = 10, 60
_PROBLEMS = 8  # lines; more than fit on a screen are read in --json


def check_watchable(output_dir: Path) -> None:
    """Refuse a folder that no run has written to; an empty one may be that of a run to come.

    Raises:
        RunFolderError: says why.
    """
    if not output_dir.is_dir():
        raise RunFolderError(f"{str(output_dir)!r} is not the folder of a run: it is not there")
    if any((output_dir / name).exists() for name in (RUN_FILE, *_BEGUN)) or not any(output_dir.iterdir()):
        return
    raise RunFolderError(f"{str(output_dir)!r} is not the folder of a run: it has no {RUN_FILE}")


def watch_run(output_dir: Path, *, every_s: float, once: bool) -> Iterator[RunLook | None]:
    """A look every few seconds until everything is done; None while there is no run.json.

    Raises:
        RunFolderError: the folder is not one of a run, or its run.json is damaged.
    """
    check_watchable(output_dir)
    watch = RunLogWatch(output_dir)
    while True:
        look = watch.look(time.time())
        yield look
        if once or (look is not None and look.progress.total.is_done):
            return
        time.sleep(every_s)


def print_json(output_dir: Path, out: TextIO, *, every_s: float, once: bool) -> None:
    """One JSON object a line for each look."""
    for look in watch_run(output_dir, every_s=every_s, once=once):
        out.write(json.dumps({"output_dir": str(output_dir.resolve()), **look_to_json(look)}) + "\n")
        out.flush()


def show_live(output_dir: Path, console: Console, *, every_s: float, once: bool) -> None:
    """The same picture again and again in a terminal; a line for each look where there is none."""
    looks = watch_run(output_dir, every_s=every_s, once=once)
    if once:
        console.print(*(render_look(output_dir, look) for look in looks))
    elif not console.is_terminal:
        for look in looks:
            console.print(WAITING if look is None else look.progress.to_line(), markup=False, highlight=False)
    else:
        with Live(Text("reading the logs"), console=console, auto_refresh=False) as live:
            for look in looks:
                live.update(render_look(output_dir, look), refresh=True)


def look_to_json(look: RunLook | None) -> dict[str, Any]:
    """A look as JSON-able values; without datasets while there is no run.json."""
    if look is None:
        return {"at": _to_iso(time.time()), "total": None, "datasets": [], "servers": [], "problems": []}
    return {
        "at": _to_iso(look.at_s),
        "total": {"percent": look.progress.percent, **_to_json(look.progress.total, None)},
        "datasets": [
            _to_json(one, idle) for one, idle in zip(look.progress.datasets, look.idle_s, strict=True)
        ],
        "servers": [
            {
                "server": one.server,
                "answers": one.answers,
                "tokens_per_s": one.tokens_per_s,
                "last_answer_age_s": one.last_answer_age_s,
            }
            for one in look.servers
        ],
        "problems": list(look.problems),
    }


def _to_json(one: DatasetProgress, idle_s: float | None) -> dict[str, Any]:
    return {
        "name": one.name,
        "state": one.state,
        "rows": one.rows,
        "prompts": one.prompts,
        "completion_tokens": one.completion_tokens,
        "budget_tokens": one.budget_tokens,
        "share": one.share,
        "tokens_per_s": one.tokens_per_s,
        "eta_s": one.eta_s,
        "idle_s": idle_s,
        "finish_reasons": one.finish_reasons,
        "rejected": one.rejected,
    }


def render_look(output_dir: Path, look: RunLook | None) -> RenderableType:
    """What a terminal shows, for 100 columns or more."""
    title = Text(f"{output_dir.resolve()}", style="dim", overflow="ellipsis", no_wrap=True)
    if look is None:
        return Group(title, Text(WAITING))
    parts: list[RenderableType] = [title, _render_total(look), Text(), _render_datasets(look)]
    if look.servers:
        parts += [Text(), _render_servers(look)]
    return Group(*parts, Text(), _render_counts(look.progress.total), _render_problems(look))


def _render_total(look: RunLook) -> RenderableType:
    progress, total = look.progress, look.progress.total
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(
        Text(f"{progress.percent:.1f}%", style="bold"),
        ProgressBar(total=100, completed=min(100.0, progress.percent), width=_TOTAL_BAR_WIDTH),
    )
    end = "" if total.is_done or total.eta_s is None else f", at {_to_clock(look.at_s + total.eta_s)}"
    return Group(line, Text(progress.to_line() + end, style="bold"))


def _render_datasets(look: RunLook) -> Table:
    table = _make_table(("dataset", "state", "", "reached", "tokens", "tok/s", "ETA", "rows", "cut", "aside"))
    for one, idle_s in zip(look.progress.datasets, look.idle_s, strict=True):
        table.add_row(
            one.name,
            Text(_describe_state(one, idle_s), style=_COLOURS[one.state]),
            ProgressBar(total=1.0, completed=min(1.0, one.share), width=_BAR_WIDTH),
            f"{one.share:.1%}",
            _describe_tokens(one),
            f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else "",
            "" if one.is_done or one.eta_s is None else format_duration(one.eta_s),
            f"{one.rows:,}",
            f"{one.finish_reasons.get('length', 0) / one.rows:.0%}" if one.rows else "",
            f"{sum(one.rejected.values()):,}",
        )
    return table


def _render_counts(total: DatasetProgress) -> RenderableType:
    """The two breakdowns that the columns "cut" and "aside" are short for."""
    return Text(
        f"finish reasons: {format_counts(total.finish_reasons) or 'none'}"
        f"; set aside: {format_counts(total.rejected) or 'none'}"
    )


def _make_table(columns: Sequence[str]) -> Table:
    """Words to the left, numbers to the right, one space between."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        is_text = name in ("dataset", "state", "", "server")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
    return table


def _render_servers(look: RunLook) -> Table:
    table = _make_table(("server", "answers in 5 min", "tok/s", "last answer"))
    for one in look.servers:
        table.add_row(
            one.server or "(not named)",
            f"{one.answers:,}",
            f"{one.tokens_per_s:,.0f}",
            f"{format_duration(one.last_answer_age_s)} ago",
        )
    return table


def _render_problems(look: RunLook) -> RenderableType:
    if not look.problems:
        return Text("nothing is wrong", style="green")
    shown = [Text(f"! {one}", style="yellow") for one in look.problems[:_PROBLEMS]]
    more = len(look.problems) - len(shown)
    return Group(*shown, *([Text(f"  and {more} more", style="yellow")] if more else []))


def _describe_state(one: DatasetProgress, idle_s: float | None) -> str:
    if idle_s is None or one.is_done or idle_s < _SHORT_AGE_S:
        return one.state
    return (
        f"{one.state} {format_duration(idle_s)}"
        if one.state == "stopped"
        else f"quiet {format_duration(idle_s)}"
    )


def _describe_tokens(one: DatasetProgress) -> str:
    """Of the budget; where nothing is generated, conversations done of all."""
    if one.budget_tokens is None:
        return f"{shorten(one.rows)}/{'?' if one.prompts is None else shorten(one.prompts)} conv."
    return f"{shorten(one.completion_tokens)}/{shorten(one.budget_tokens)}"


def shorten(count: int) -> str:
    """A count in three digits: 12,345 is 12.3k."""
    for unit, suffix in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if count >= unit:
            value = count / unit
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{suffix}"
    return str(count)


def _to_clock(at_s: float) -> str:
    at = datetime.fromtimestamp(at_s).astimezone()
    return f"{at:%H:%M}" if at_s - time.time() < 20 * 3600 else f"{at:%a %H:%M}"


def _to_iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
