"""`draftmill monitor`: how far a run is, looked at from outside.

Knows a terminal and JSON; what there is to see comes from `log_watch`. Invariant: the run
notices nothing: only files are read, and no lock is taken.
"""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flows.monitor.view import WAITING, LookView
from tasks.aggregate.log_watch import RunLogWatch, RunLook
from tasks.aggregate.run_progress import DatasetProgress
from tasks.records.folder_lock import RUN_LOCK
from tasks.records.run_file import RUN_FILE, RunFolderError

_NO_PROBLEMS: dict[str, list[str]] = {"problems": [], "notes": [], "stuck": []}
_BEGUN = (RUN_LOCK, "prefect.log", "server.log")  # what a run leaves before its run.json


class FolderGoneError(Exception):
    """The folder that is watched is there no more."""


def check_watchable(output_dir: Path) -> None:
    """Refuse a folder that no run has written to; an empty one may be that of a run to come.

    Raises:
        RunFolderError: says why.
    """
    if not output_dir.is_dir():
        why = "is a file" if output_dir.exists() else "is not there"
        raise RunFolderError(f"{str(output_dir)!r} is not the folder of a run: it {why}")
    if any((output_dir / name).exists() for name in (RUN_FILE, *_BEGUN)) or not any(output_dir.iterdir()):
        return
    raise RunFolderError(f"{str(output_dir)!r} is not the folder of a run: it has no {RUN_FILE}")


def watch_run(output_dir: Path, *, every_s: float, once: bool) -> Iterator[RunLook | None]:
    """A look every few seconds until everything is done; None while there is no run.json.

    Raises:
        RunFolderError: the folder is not one of a run, or its run.json is damaged.
        FolderGoneError: it was removed.
    """
    check_watchable(output_dir)
    watch = RunLogWatch(output_dir)
    while True:
        look = _look(watch, output_dir)
        yield look
        if once or (look is not None and look.progress.total.is_done):
            return
        time.sleep(every_s)


def _look(watch: RunLogWatch, output_dir: Path) -> RunLook | None:
    try:
        look = watch.look(time.time())
    except (OSError, RunFolderError):
        if (output_dir / RUN_FILE).exists():
            raise
        look = None  # it is being removed
    if look is None and not output_dir.is_dir():
        raise FolderGoneError(f"{str(output_dir)!r} is gone: it was removed or renamed while it was watched")
    return look


def print_json(output_dir: Path, out: TextIO, *, every_s: float, once: bool) -> None:
    """One JSON object a line for each look."""
    for look in watch_run(output_dir, every_s=every_s, once=once):
        out.write(json.dumps({"output_dir": str(output_dir.resolve()), **look_to_json(look)}) + "\n")
        out.flush()


def show_live(output_dir: Path, console: Console, *, every_s: float, once: bool) -> None:
    """The same picture again and again in a terminal; a line for each look where there is none."""
    looks = watch_run(output_dir, every_s=every_s, once=once)
    if once:
        console.print(*(LookView(output_dir, look) for look in looks))
    elif not console.is_terminal:
        for look in looks:
            console.print(WAITING if look is None else look.progress.to_line(), markup=False, highlight=False)
    else:
        with Live(Text("reading the logs"), console=console, auto_refresh=False) as live:
            for look in looks:
                live.update(LookView(output_dir, look, is_cut=True), refresh=True)


def look_to_json(look: RunLook | None) -> dict[str, Any]:
    """A look as JSON-able values; without datasets while there is no run.json.

    `eta_s` of a dataset is at its own pace, but never later than the whole's.
    """
    if look is None:
        return {"at": _to_iso(time.time()), "total": None, "datasets": [], "servers": [], **_NO_PROBLEMS}
    return {
        "at": _to_iso(look.at_s),
        "total": _to_json(look.progress.total, look.progress.eta_s, None),
        "datasets": [
            _to_json(one, look.progress.measure_end(one), idle)
            for one, idle in zip(look.progress.datasets, look.idle_s, strict=True)
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
        "problems": look.problems.trouble,
        "notes": look.problems.notes,
        "stuck": list(look.progress.stuck),
    }


def _to_json(one: DatasetProgress, eta_s: float | None, idle_s: float | None) -> dict[str, Any]:
    return {
        "name": one.name,
        "state": one.state,
        "rows": one.rows,
        "prompts": one.prompts,
        "completion_tokens": one.completion_tokens,
        "budget_tokens": one.budget_tokens,
        "reached_percent": one.reached_percent,
        "tokens_per_s": one.tokens_per_s,
        "eta_s": eta_s,
        "idle_s": idle_s,
        "finish_reasons": one.finish_reasons,
        "rejected": one.rejected,
    }


def _to_iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
