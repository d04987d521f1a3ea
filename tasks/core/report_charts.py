"""The geometry of the report's charts: where each bar and each tick stands.

Knows numbers and coordinates (x to the right, y downwards, in units of an SVG's viewBox); does not know
colours or words around a chart. Invariant: every bar carries the text that says the same in words.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tasks.core.stats import TIME_BUCKET_S

MINUTE, HOUR, DAY = 60, 3600, 86_400
_BARS = 120  # of the throughput, at most
_WIDTHS_S = (
    *(TIME_BUCKET_S, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE),
    *(HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY),
)
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
class Chart:
    """Bars or points between two axes; `mark` is an x that matters, if there is one."""

    width: float
    height: float
    bars: Sequence[Bar]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick] = ()
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without answers, in seconds since 1970."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end_s - self.start_s


def draw_throughput(tokens: Mapping[int, int], *, width: float, height: float) -> Chart:
    """Tokens per second over the time of a run; a time without answers is a hole.

    Args:
        tokens: by the second since 1970 at which a bucket of TIME_BUCKET_S begins.
        width: of the chart.
        height: of the chart.
    """
    step = choose_bucket_s(min(tokens), max(tokens))
    buckets: dict[int, int] = {}
    for at, count in tokens.items():
        buckets[at // step] = buckets.get(at // step, 0) + count
    first, last = min(buckets), max(buckets)
    per_bar = width / (last - first + 1)
    y_ticks = nice_ticks(max(buckets.values()) / step)
    top = y_ticks[-1]
    with_date = (last - first + 1) * step > DAY
    bars = [
        Bar(
            x=(at - first) * per_bar,
            width=per_bar,
            height=height * count / step / top,
            text=f"{format_time(at * step)} to {format_time((at + 1) * step, with_date=False)} UTC: "
            f"{count / step:,.0f} tokens/s ({count:,} tokens)",
        )
        for at, count in sorted(buckets.items())
    ]
    shown = range(first, last + 2, max(1, -(-(last - first + 1) // 6)))
    return Chart(
        width=width,
        height=height,
        bars=bars,
        x_ticks=[
            Tick((at - first) * per_bar, format_time(at * step, with_date=with_date, seconds=step < MINUTE))
            for at in shown
        ],
        y_ticks=[Tick(height * (1 - value / top), f"{value:,g}") for value in y_ticks],
    )


def choose_bucket_s(first_s: int, last_s: int) -> int:
    """A length of time that people know, of which a span has at most 120."""
    for width in _WIDTHS_S:
        if last_s // width - first_s // width < _BARS:
            return width
    return DAY * -(-(last_s - first_s) // ((_BARS - 2) * DAY))


def find_gaps(tokens: Iterable[int], *, longer_than_s: float) -> list[Gap]:
    """Times between two buckets of answers, the longest first."""
    ordered = sorted(tokens)
    gaps = (Gap(a + TIME_BUCKET_S, b) for a, b in itertools.pairwise(ordered))
    return sorted((gap for gap in gaps if gap.seconds > longer_than_s), key=lambda gap: -gap.seconds)


def draw_lengths(
    counts: Mapping[int, int],
    cut: Mapping[int, int],
    *,
    longest: int,
    median: int,
    width: float,
    height: float,
) -> Chart:
    """A histogram of lengths in bins of half an octave, from one token to the longest of all datasets."""
    bins = _to_bin(longest) + 1
    per_bar = width / bins
    rows, cut_rows = [0] * bins, [0] * bins
    for into, lengths in ((rows, counts), (cut_rows, cut)):
        for length, count in lengths.items():
            into[_to_bin(length)] += count
    scale = height / max(*rows, 1)
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
        mark=_to_bin_place(median) * per_bar,
    )


def draw_coverage(curve: Sequence[tuple[int, float]], *, chosen: int, width: float, height: float) -> Chart:
    """The share of tokens over the size of the draft vocabulary, on a logarithmic axis; bars are points."""
    low, high = math.log(curve[0][0]), math.log(curve[-1][0])
    floor = min(0.9, math.floor(min(share for _, share in curve) * 10) / 10)

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
    shares = [floor + (1 - floor) * part / 4 for part in range(5)]
    return Chart(
        width=width,
        height=height,
        bars=points,
        x_ticks=[Tick(place(size), shorten_size(size)) for size, _ in curve],
        y_ticks=[Tick(height * (1 - part / 4), f"{share:.0%}") for part, share in enumerate(shares)],
        mark=place(chosen) if curve[0][0] <= chosen <= curve[-1][0] else None,
    )


def nice_ticks(highest: float) -> list[float]:
    """Round numbers from 0 to one that is not below `highest`, three to six of them."""
    power = 10.0 ** math.floor(math.log10(highest)) if highest > 0 else 1.0
    step = next(step * power for step in (0.2, 0.5, 1.0, 2.0, 5.0) if highest <= 5 * step * power)
    return [step * number for number in range(max(1, math.ceil(highest / step)) + 1)]


def format_time(at_s: float, *, with_date: bool = True, seconds: bool = False) -> str:
    """A moment for people, UTC."""
    shown = "%H:%M:%S" if seconds else "%H:%M"
    return datetime.fromtimestamp(at_s, UTC).strftime(f"%b %d {shown}" if with_date else shown)


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
