"""report.html: one file that says how far a run is, how fast, when it is done and what went wrong.

Knows statistics, run.json, the export's manifest and the template; does not know Prefect or servers.
Invariant: the file asks nothing of anybody and runs nothing, and everything in it is escaped.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from tasks.aggregate.dataset_problems import measure_cut
from tasks.aggregate.log_watch import DatasetLook, RunLook, describe_progress, find_model, to_run_look
from tasks.aggregate.outlook import describe_left, describe_mean, describe_needs, describe_work
from tasks.aggregate.pace import Pace, find_idle, select_generated
from tasks.aggregate.problems import describe_pauses, is_running, split_problem
from tasks.aggregate.recent_answers import WINDOW_S
from tasks.aggregate.report_charts import (
    Chart,
    draw_coverage,
    draw_lengths,
    draw_throughput,
)
from tasks.aggregate.run_progress import RunProgress, State, describe_state
from tasks.aggregate.stats import PAUSE_S, TIME_BUCKET_S, DatasetStats, parse_time, total_stats
from tasks.aggregate.stats_views import count_of, describe_status, format_percent
from tasks.records.files import write_bytes_atomically
from tasks.records.run_file import read_run_file
from tasks.records.times import format_duration, format_moment, format_time

REPORT_FILE = "report.html"
_MANIFEST = Path("export") / "manifest.json"
_WIDE, _NARROW, _PHONE, _TALL, _LOW = 900.0, 400.0, 290.0, 200.0, 90.0  # in units of a chart, pixels or less
_ASIDE_ROWS = 40
_OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)")
_ENDINGS = {"stop": "By themselves", "length": "Cut off", "abort": "Ended by the server"}


@dataclass(frozen=True, slots=True)
class Tile:
    """One of the questions that everybody has, with its answer; `tone` is good, bad, warn or plain."""

    question: str
    answer: str
    detail: str
    tone: str = "plain"


@dataclass(frozen=True, slots=True)
class Row:
    """A dataset in the tables, or the total: its figures, and its state in a word of the monitor's."""

    stats: DatasetStats
    state: State
    word: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the trained tokens a draft vocabulary has; the curve is by its size."""

    chosen: int
    curve: list[tuple[int, float]]
    datasets: list[tuple[str, float]]


def write_report(
    output_dir: Path, stats: Sequence[DatasetStats], *, ended: bool = False, now: datetime | None = None
) -> Path:
    """Replace report.html in the folder of a run; returns where it is.

    Args:
        output_dir: the folder.
        stats: of its datasets.
        ended: nothing generates any more; otherwise a run is at work while answers come.
        now: when that is so.

    Raises:
        RunFolderError: run.json is damaged.
    """
    html = render_report(
        stats,
        run=read_run_file(output_dir),
        manifest=_read_manifest(output_dir),
        folder=str(output_dir.resolve()),
        ended=ended,
        now=now or datetime.now(UTC),
    )
    path = output_dir / REPORT_FILE
    write_bytes_atomically(path, html.encode())
    return path


def render_report(
    stats: Sequence[DatasetStats],
    *,
    run: Mapping[str, Any],
    manifest: Any,
    folder: str,
    now: datetime,
    ended: bool = False,
) -> str:
    """The page as text; `run` is the content of run.json, `manifest` that of the export's, if any."""
    look = build_snapshot(stats, now_s=now.timestamp(), ended=ended, model=find_model(run))
    running = is_running(look.idle_s, ended=ended)
    rows = [_to_row(look, at) for at in range(len(stats))]
    asked = [row for row in rows if row.stats.budget_tokens is not None]
    generated = total_stats(select_generated(stats))
    coverage = read_coverage(manifest)
    return _load_template().render(
        title=look.model or Path(folder).name,
        folder=folder,
        written=f"{now.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
        tiles=make_tiles(look, running=running),
        problems=look.problems,
        trouble=list(map(split_problem, look.problems.trouble)),
        asked=[*asked, _sum_up(look, generated, running=running)] if asked else [],
        conversations=[row for row in rows if row.stats.budget_tokens is None],
        throughput=_draw_throughput(generated, until_s=_find_silence(look, generated, running=running)),
        throughput_text=_describe_throughput(generated, look, running=running),
        lengths=_draw_lengths(stats),
        reasons=sorted(generated.finish_reasons, key=lambda reason: -generated.finish_reasons[reason]),
        endings=_ENDINGS,
        cut_share=measure_cut,
        set_aside=list(_list_rejected(stats)),
        coverage=coverage,
        coverage_charts=_draw_coverage(coverage),
        provenance=_list_provenance(run),
        settings=_list_settings(run),
    )


def build_snapshot(
    stats: Sequence[DatasetStats], *, now_s: float, ended: bool = False, model: str = ""
) -> RunLook:
    """What a monitor would find, from statistics alone: which server did what is not in them."""
    looks = []
    for one, idle in zip(stats, find_idle(stats, now_s=now_s), strict=True):
        speed = 0.0 if ended else _measure_recent(one, now_s=now_s)
        looks.append(DatasetLook(describe_progress(one, idle, speed, ended=ended), one, idle, now_s))
    return to_run_look(looks, (), at_s=now_s, model=model, ended=ended)


def _measure_recent(stats: DatasetStats, *, now_s: float) -> float:
    """Tokens a second of the last minutes."""
    recent = (n for at_s, n in stats.tokens_by_time.items() if at_s > now_s - WINDOW_S - TIME_BUCKET_S)
    return sum(recent) / WINDOW_S


def _to_row(look: RunLook, at: int) -> Row:
    one = look.progress.datasets[at]
    return Row(look.stats[at], one.state, describe_state(one, look.idle_s[at]))


def _sum_up(look: RunLook, total: DatasetStats, *, running: bool) -> Row:
    """The total of the datasets with a budget: it is at work, or stopped, or done."""
    progress = RunProgress(tuple(one for one in look.progress.datasets if one.budget_tokens is not None))
    state = progress.total.state
    if state == "waiting" and total.rows and not running:
        state = "stopped"
    waits = [one.state for one in progress.datasets if one.name in progress.stuck]
    if state == "generating" and waits:
        counts = (f"{waits.count(word)} {word}" for word in dict.fromkeys(waits))
        return Row(total, waits[0], f"{state}, {', '.join(counts)}")
    return Row(total, state, describe_status(state))


def make_tiles(look: RunLook, *, running: bool) -> list[Tile]:
    """How far, how fast, when done, what went wrong."""
    progress, problems = look.progress, look.problems
    notes = f"{count_of(len(problems.notes), 'note')} below" if problems.notes else "no dataset needs a look"
    wrong = Tile("What went wrong?", "Nothing", notes, "good")
    if problems.trouble:
        things = count_of(len(problems.trouble), "thing")
        wrong = Tile("What went wrong?", things, split_problem(problems.trouble[0])[0], "bad")
    total = progress.total
    return [
        Tile(
            "How far?",
            format_percent(total.reached_percent),
            progress.describe_reached(),
            "good" if total.state == "complete" else "plain",
        ),
        _make_speed_tile(total_stats(select_generated(look.stats)), progress, running=running),
        _make_end_tile(look, running=running),
        wrong,
    ]


def _make_speed_tile(total: DatasetStats, progress: RunProgress, *, running: bool) -> Tile:
    """Of the last hour while there is more to do, of all of the work afterwards; none where it stopped."""
    pace = progress.pace
    if pace is None or total.last_finished_at is None:
        return Tile("How fast?", "not known", "no answer names its time" if total.rows else "no answer yet")
    what = "last conversation" if total.budget_tokens is None else "last answer"
    last = f"{what} {format_moment(parse_time(total.last_finished_at))}"
    if progress.total.is_done:
        answer, _, over = describe_mean(pace).partition(" on average ")
        return Tile("How fast?", answer, f"on average {over}; {last}")
    over = f"over the {format_duration(pace.worked_s)} of work so far"
    if pace.worked_s > pace.measured_s:
        over = "over the last hour of work" if running else "in its last hour"
    average = f" ({pace.mean_tokens_per_s:,.0f} on average)" if pace.has_changed else ""
    if not running:
        return Tile("How fast?", "stopped", f"{pace.tokens_per_s:,.0f} tokens/s {over}{average}; {last}")
    return Tile("How fast?", f"{pace.tokens_per_s:,.0f} tokens/s", f"{over}{average}; {last}")


def _make_end_tile(look: RunLook, *, running: bool) -> Tile:
    question, progress = "When done?", look.progress
    pace, total, left = progress.pace, progress.total, describe_left(progress)
    if total.is_done:
        answer, took = _describe_end(total_stats(select_generated(look.stats)), pace, now_s=look.at_s)
        if total.state == "exhausted":
            return Tile(question, answer, f"finished short of the budget, for want of prompts{took}")
        return Tile(question, answer, f"finished{took}", "good")
    if pace is not None and not running:
        return Tile(question, "not running", describe_work(progress), "bad")
    if pace is None or not total.left_tokens:
        return Tile(question, "not known", "nothing to reckon from yet")
    if progress.eta_s is None and pace.is_too_early:
        worked = format_duration(pace.worked_s)
        return Tile(question, "too early to tell", f"{left}, after {worked} of work")
    needs = describe_needs(progress)
    tone = "warn" if needs or total.short_tokens else "plain"
    if progress.eta_s is None:
        return Tile(question, "not known", f"{needs}; {left}" if needs else left, tone)
    guess = "a first guess: " if pace.is_guess else ""
    now = format_time(look.at_s, with_date=False)
    left_s = f"in {format_duration(progress.eta_s)} as of {now}, at that speed"
    detail = f"{guess}{'the others, ' if needs else ''}{left_s}; {f'{needs}; ' if needs else ''}{left}"
    return Tile(question, format_moment(look.at_s + progress.eta_s), detail, tone)


def _describe_end(total: DatasetStats, pace: Pace | None, *, now_s: float) -> tuple[str, str]:
    """The moment, which stays true whenever the page is opened; how long before the page, and after what."""
    if pace is None or total.started_at is None or total.last_finished_at is None:
        return "done", ": the answers name no times"
    end_s = parse_time(total.last_finished_at)
    ago = f" {format_duration(now_s - end_s)} before this report" if now_s - end_s >= 60 else ""
    took = format_duration(end_s - parse_time(total.started_at))
    pauses = sum(pause.seconds for pause in pace.pauses)
    within = f", of which {format_duration(pauses)} were pauses" if pauses else ""
    return format_moment(end_s), f"{ago}, after {took}{within}"


def read_coverage(manifest: Any) -> Coverage | None:
    """What an export's manifest says of its draft vocabulary; None where it says nothing that is known."""
    try:
        vocab = manifest["vocab"]
        curve = [
            (int(point["draft_vocab_size"]), float(point["coverage"]))
            for point in vocab["curve"]
            if point["coverage"] is not None and int(point["draft_vocab_size"]) > 0
        ]
        datasets = [
            (str(one["name"]), float(one["coverage"]))
            for one in (*vocab["datasets"], {"name": "total", **vocab["total"]})
            if one["coverage"] is not None
        ]
        chosen = int(vocab["draft_vocab_size"])
    except (KeyError, TypeError, ValueError):
        return None
    return Coverage(chosen, sorted(curve), datasets) if curve else None


def _read_manifest(output_dir: Path) -> Any:
    try:
        return json.loads((output_dir / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _draw_throughput(total: DatasetStats, *, until_s: float | None) -> list[tuple[str, Chart]]:
    """For a screen and for a phone: the class that shows it, and the chart."""
    tokens = total.tokens_by_time
    sizes = (("broad", _WIDE), ("phone", _PHONE)) if tokens else ()
    return [
        (name, draw_throughput(tokens, width=width, height=_TALL, until_s=until_s)) for name, width in sizes
    ]


def _find_silence(look: RunLook, total: DatasetStats, *, running: bool) -> float | None:
    """Now, where a run that is not done has given nothing for long."""
    if running or total.status != "incomplete" or not total.tokens_by_time:
        return None
    return look.at_s if look.at_s - max(total.tokens_by_time) > PAUSE_S else None


def _describe_throughput(total: DatasetStats, look: RunLook, *, running: bool) -> str:
    pace = look.progress.pace
    if pace is None or not total.tokens_by_time:
        return "No answer names the time at which it was there."
    first, last = min(total.tokens_by_time), max(total.tokens_by_time)
    has_stopped = total.status == "incomplete" and not running
    since = f", and none in the {format_duration(look.at_s - last)} since" if has_stopped else ""
    what = "Conversations" if total.budget_tokens is None else "Answers"
    text = f"{what} from {format_time(first)} to {format_moment(last)}{since}."
    if pace.pauses:
        return f"{text} There were {describe_pauses(pace.pauses)}."
    return text if has_stopped else f"{text} No pause was longer than {format_duration(PAUSE_S)}."


def _draw_lengths(stats: Sequence[DatasetStats]) -> list[tuple[DatasetStats, Chart]]:
    longest = max((one.lengths.max for one in stats if one.lengths), default=1)
    return [
        (
            one,
            draw_lengths(
                one.length_counts,
                one.cut_lengths,
                longest=max(1, longest),
                median=one.lengths.p50,
                width=_NARROW,
                height=_LOW,
            ),
        )
        for one in sorted(stats, key=lambda one: one.budget_tokens is None)
        if one.lengths
    ]


def _list_rejected(stats: Sequence[DatasetStats]) -> Iterator[tuple[str, str, int, str]]:
    """Dataset, reason, how many and an example; the most frequent first."""
    rows = [
        (one.name, reason, count, one.rejected_examples.get(reason, ""))
        for one in stats
        for reason, count in one.rejected.items()
    ]
    yield from sorted(rows, key=lambda row: (-row[2], row[0], row[1]))[:_ASIDE_ROWS]


def _draw_coverage(coverage: Coverage | None) -> list[tuple[str, Chart]]:
    sizes = (("broad", _WIDE), ("phone", _PHONE)) if coverage else ()
    return [
        (name, draw_coverage(coverage.curve, chosen=coverage.chosen, width=width, height=_TALL))
        for name, width in sizes
        if coverage
    ]


def _list_provenance(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the rows were made with, but for what each dataset and each server has of its own."""
    fingerprint, details = dict(run.get("fingerprint", {})), dict(run.get("details", {}))
    for part, name in ((fingerprint, "datasets"), *((details, n) for n in ("datasets", "plans", "servers"))):
        part.pop(name, None)
    top = {name: run[name] for name in ("created_at", "updated_at") if name in run}
    return [*_flatten(fingerprint), *_flatten(details), *_flatten(top), *_list_accepted(run)]


def _list_accepted(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for change in run.get("accepted_changes", []):
        yield "accepted change", json.dumps(change, ensure_ascii=False)


def _list_settings(run: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The settings of each dataset and of each server, which are long, by a name for each."""
    fingerprint, details = run.get("fingerprint", {}), run.get("details", {})
    own = {**details.get("datasets", {})}
    found = [
        (f"dataset {name}", [*_flatten(settings), *_flatten(own.get(name) or {})])
        for name, settings in fingerprint.get("datasets", {}).items()
    ]
    servers = details.get("servers") or {}
    return found + [(f"server {url}", list(_flatten(settings))) for url, settings in servers.items()]


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)


def _keep_options_whole(text: str) -> Markup:
    """No line ends within the name of an option."""
    return Markup(_OPTION.sub(r'<span class="option">\1</span>', str(escape(text))))  # noqa: S704


@cache
def _load_template() -> Template:
    folder = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": format_percent, "options": _keep_options_whole}
    return environment.get_template(REPORT_FILE)
