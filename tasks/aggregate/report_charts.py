"""The geometry of the report's charts: where each bar and each tick stands.

Knows numbers and coordinates (x to the right, y downwards, in units of an SVG's viewBox); does not know
colours or words around a chart. Invariant: every bar carries the text that says the same in words.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tasks.aggregate.stats import PAUSE_S, TIME_BUCKET_S, find_gaps
from tasks.records.times import format_duration, format_time

MINUTE, HOUR, DAY = 60, 3600, 86_400
_BARS = 120  # of the throughput, at most
_MAX_CUTS, _CUT_WIDTH = 6, 26.0
_CUT_SHARE = 0.1  # of the time in which answers came; shorter pauses are holes
_WIDTHS_S = (
    *(TIME_BUCKET_S, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE),
    *(HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY),
)
_SLIVER = 0.25  # of a bucket
_DATE_WIDTH, _TIME_WIDTH = 100.0, 64.0  # of a label on the axis of time, with some space
_SIZE_WIDTH = 34.0
_SHARE_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)  # five of them down from 100%
_BINS_PER_OCTAVE = 2


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle that stands on the chart's floor, the part `cut` of its height at the top marked."""

    x: float
    width: float
    height: float
    text: str
    cut: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis with its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Cut:
    """A time that is left out of a chart: where, how long, and the text that says from when to when."""

    x: float
    width: float
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars or points between two axes; `mark` is an x that matters, if there is one."""

    width: float
    height: float
    bars: Sequence[Bar]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick] = ()
    mark: float | None = None
    cuts: Sequence[Cut] = ()


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Stretches of buckets of `step_s` seconds, numbered since 1970, with a cut between two of them."""

    step_s: int
    stretches: Sequence[range]
    per_bar: float

    def place(self) -> list[tuple[int, float]]:
        """Every bucket and its x."""
        found, x = [], 0.0
        for stretch in self.stretches:
            found += [(at, x + number * self.per_bar) for number, at in enumerate(stretch)]
            x += len(stretch) * self.per_bar + _CUT_WIDTH
        return found

    def find_cuts(self, times: Sequence[int]) -> list[Cut]:
        """What is left out, from the answer before it to the one after it, of all times in order."""
        cuts, x = [], 0.0
        for before, after in itertools.pairwise(self.stretches):
            x += len(before) * self.per_bar
            start_s = times[bisect_left(times, (before[-1] + 1) * self.step_s) - 1] + TIME_BUCKET_S
            end_s = times[bisect_left(times, after[0] * self.step_s)]
            lasted = format_duration(end_s - start_s)
            text = f"No answer for {lasted}, from {format_time(start_s)} to {format_time(end_s)} UTC"
            cuts.append(Cut(x, _CUT_WIDTH, f"{lasted} pause", text))
            x += _CUT_WIDTH
        return cuts


def draw_throughput(
    tokens: Mapping[int, int], *, width: float, height: float, until_s: float | None = None
) -> Chart:
    """Tokens per second over the time of a run; a long time without answers is cut out and marked.

    Args:
        tokens: by the second since 1970 at which a bucket of TIME_BUCKET_S begins.
        width: of the chart.
        height: of the chart.
        until_s: where given, there was no answer from the last one up to this second since 1970.
    """
    inner = width if until_s is None else width - _CUT_WIDTH
    axis = lay_out_time(tokens, width=inner)
    buckets: dict[int, int] = {}
    for at, count in tokens.items():
        buckets[at // axis.step_s] = buckets.get(at // axis.step_s, 0) + count
    spans = _find_spans(tokens, axis.step_s)
    speeds = {at: _measure_speed(at, buckets, spans, least_s=_SLIVER * axis.step_s) for at in buckets}
    y_ticks = nice_ticks(max(speeds.values()))
    bars = [
        Bar(
            x=x,
            width=axis.per_bar,
            height=height * speeds[at] / y_ticks[-1],
            text=f"{format_time(spans[at].start_s)} to {format_time(spans[at].end_s, with_date=False)} UTC: "
            f"{speeds[at]:,.0f} tokens/s ({buckets[at]:,} tokens)",
        )
        for at, x in axis.place()
        if at in buckets
    ]
    return Chart(
        width=width,
        height=height,
        bars=bars,
        x_ticks=_tick_time(axis, inner),
        y_ticks=_tick_height(y_ticks, height),
        cuts=axis.find_cuts(sorted(tokens))
        + ([] if until_s is None else [_cut_end(inner, max(tokens) + TIME_BUCKET_S, until_s)]),
    )


def _cut_end(x: float, last_s: float, until_s: float) -> Cut:
    lasted = format_duration(until_s - last_s)
    text = f"No answer for {lasted}, from {format_time(last_s)} to {format_time(until_s)} UTC, and none since"
    return Cut(x, _CUT_WIDTH, f"none for {lasted}", text)


@dataclass(frozen=True, slots=True)
class _Span:
    """What a bar covers: from the first to the last of its answers, or its whole bucket, pauses left out."""

    start_s: float
    end_s: float
    worked_s: float


def _find_spans(times: Iterable[int], step_s: int) -> dict[int, _Span]:
    """By bucket. The bars at both ends and beside a pause cover less time than the others."""
    ordered = sorted(times)
    pauses = find_gaps(ordered, longer_than_s=PAUSE_S)
    starts = sorted([ordered[0], *(pause.end_s for pause in pauses)])
    ends = sorted([*(pause.start_s for pause in pauses), ordered[-1] + TIME_BUCKET_S])
    spans: dict[int, _Span] = {}
    for start_s, end_s in zip(starts, ends, strict=True):
        for at in range(int(start_s // step_s), int(-(-end_s // step_s))):
            begin_s, stop_s = max(start_s, at * step_s), min(end_s, (at + 1) * step_s)
            known = spans.get(at, _Span(begin_s, begin_s, 0.0))
            spans[at] = _Span(known.start_s, stop_s, known.worked_s + stop_s - begin_s)
    return spans


def _measure_speed(
    at: int, tokens: Mapping[int, int], spans: Mapping[int, _Span], *, least_s: float
) -> float:
    """Tokens a second; of a bucket of hardly any time, where one answer is a peak, with its neighbour."""
    near = [at]
    if spans[at].worked_s < least_s:
        near += [beside for beside in (at - 1, at + 1) if beside in tokens][:1]
    return sum(tokens[one] for one in near) / sum(spans[one].worked_s for one in near)


def lay_out_time(times: Iterable[int], *, width: float) -> "TimeAxis":
    """The finest buckets of which there are at most 120, times that are cut out not counted."""
    seconds = sorted(times)
    for step in itertools.chain(_WIDTHS_S, (DAY * 2**n for n in itertools.count(1))):
        stretches = _find_stretches([at // step for at in seconds], step)
        shown = sum(map(len, stretches))
        if shown <= _BARS:
            return TimeAxis(step, stretches, (width - _CUT_WIDTH * (len(stretches) - 1)) / shown)
    raise AssertionError("the widths never end")


def _find_stretches(buckets: Iterable[int], step_s: int) -> list[range]:
    """What is between the longest holes, if these are pauses that would take much of the chart."""
    ordered = sorted(set(buckets))
    holes = sorted((b - a - 1, a, b) for a, b in itertools.pairwise(ordered))[-_MAX_CUTS:]
    least = max(PAUSE_S / step_s, _CUT_SHARE * len(ordered), 1)
    cut = sorted((a, b) for hole, a, b in holes if hole > least)
    starts = [ordered[0], *(b for _, b in cut)]
    ends = [*(a for a, _ in cut), ordered[-1]]
    return [range(first, last + 1) for first, last in zip(starts, ends, strict=True)]


def _tick_time(axis: "TimeAxis", width: float) -> list[Tick]:
    """Where answers go on after a cut, the end, and some six others, none too near to another."""
    first, last = axis.stretches[0][0] * axis.step_s, (axis.stretches[-1][-1] + 1) * axis.step_s
    with_date = first // DAY != (last - 1) // DAY  # days of UTC
    apart = _DATE_WIDTH if with_date else _TIME_WIDTH
    places = axis.place()
    starts = {stretch[0] for stretch in axis.stretches}
    wanted = [place for place in places if place[0] in starts]
    wanted += [(axis.stretches[-1][-1] + 1, width), *places[:: max(1, -(-len(places) // 6))]]
    ticks: dict[int, float] = {}
    for at, x in wanted:
        if all(abs(x - other) >= apart for other in ticks.values()):
            ticks[at] = x
    seconds = axis.step_s < MINUTE
    return [
        Tick(x, format_time(at * axis.step_s, with_date=with_date, seconds=seconds))
        for at, x in sorted(ticks.items())
    ]


def _tick_height(values: Iterable[float], height: float) -> list[Tick]:
    """Marks of a vertical axis; the last value is at its top."""
    values = list(values)
    return [Tick(height * (1 - value / values[-1]), f"{value:,.10g}") for value in values]


def draw_lengths(
    counts: Mapping[int, int],
    cut: Mapping[int, int],
    *,
    longest: int,
    median: int,
    width: float,
    height: float,
) -> Chart:
    """How many answers are of which length, in bins of half an octave, up to the longest of all datasets."""
    bins = _to_bin(longest) + 1
    per_bar = width / bins
    rows, cut_rows = [0] * bins, [0] * bins
    for into, lengths in ((rows, counts), (cut_rows, cut)):
        for length, count in lengths.items():
            into[_to_bin(length)] += count
    y_ticks = [value for value in nice_ticks(max(*rows, 1)) if value == int(value)]
    scale = height / y_ticks[-1]
    bars = [
        Bar(
            x=at * per_bar,
            width=per_bar,
            height=count * scale,
            text=f"{_describe_bin(at)} tokens: {count:,} answers"
            + (f", {marked:,} of them cut" if marked else ""),
            cut=marked * scale,
        )
        for at, (count, marked) in enumerate(zip(rows, cut_rows, strict=True))
        if count
    ]
    return Chart(
        width=width,
        height=height,
        bars=bars,
        x_ticks=[
            Tick(_to_bin_place(length) * per_bar, f"{length:,}")
            for length in (10**power for power in range(7))
            if length <= longest
        ],
        y_ticks=_tick_height(y_ticks, height),
        mark=_to_bin_place(median) * per_bar,
    )


def draw_coverage(curve: Sequence[tuple[int, float]], *, chosen: int, width: float, height: float) -> Chart:
    """The share of tokens over the size of the draft vocabulary, on a logarithmic axis; bars are points."""
    low, high = math.log(curve[0][0]), math.log(curve[-1][0])
    least = min(share for _, share in curve)
    step = next((step for step in _SHARE_STEPS if 1 - 5 * step <= least), _SHARE_STEPS[-1])
    floor = 1 - 5 * step

    def place(size: int) -> float:
        return width * (math.log(size) - low) / (high - low) if high > low else width / 2

    points = [
        Bar(
            place(size),
            0.0,
            height * (share - floor) / (1 - floor),
            f"{size:,} ids: {share:.2%} of the tokens",
        )
        for size, share in curve
    ]
    return Chart(
        width=width,
        height=height,
        bars=points,
        x_ticks=_thin([Tick(place(size), shorten_size(size)) for size, _ in curve], apart=_SIZE_WIDTH),
        y_ticks=[
            Tick(height * (1 - part / 5), f"{round(100 * (floor + part * step))}%") for part in range(6)
        ],
        mark=place(chosen) if curve[0][0] <= chosen <= curve[-1][0] else None,
    )


def _thin(ticks: Iterable[Tick], *, apart: float) -> list[Tick]:
    """Without those that are too near to the one before."""
    kept: list[Tick] = []
    for tick in ticks:
        if not kept or tick.at - kept[-1].at >= apart:
            kept.append(tick)
    return kept


def nice_ticks(highest: float) -> list[float]:
    """Round numbers from 0 to one that is not below `highest`, three to six of them."""
    power = 10.0 ** math.floor(math.log10(highest)) if highest > 0 else 1.0
    step = next(step * power for step in (0.2, 0.5, 1.0, 2.0, 5.0) if highest <= 5 * step * power)
    return [step * number for number in range(max(1, math.ceil(highest / step)) + 1)]


def shorten_size(size: int) -> str:
    """Thousands for an axis: 32000 is 32k."""
    return f"{size / 1000:.0f}k" if size >= 1000 else str(size)


def _to_bin(length: int) -> int:
    """0 for an empty answer, then half octaves: 1, 2, 3, 4 to 5, 6 to 7, 8 to 11 and so on."""
    return math.floor(_to_bin_place(length) + 1e-9)


def _to_bin_place(length: int) -> float:
    return 0.0 if length < 1 else 1.0 + _BINS_PER_OCTAVE * math.log2(length)


def _describe_bin(at: int) -> str:
    if at == 0:
        return "0"
    low, high = (math.ceil(2 ** ((at - 1 + more) / _BINS_PER_OCTAVE) - 1e-9) for more in (0, 1))
    return f"{low:,}" if high - 1 <= low else f"{low:,} to {high - 1:,}"
