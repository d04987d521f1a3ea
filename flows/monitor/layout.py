"""What of a look fits into a terminal: which parts are shortened, and which are left out.

Knows how many lines each part takes; does not know what is in it. Invariant: what is left out is counted, and
nothing is left out while something that matters less is still there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_MIN_ROWS = 4  # what many problems leave of the datasets at least


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lines that the parts take; `folded` datasets are those that nobody has to see."""

    head: int
    trouble: Sequence[int]
    datasets: int
    folded: int
    servers: Sequence[int]
    counts: int
    notes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """How many of each part are shown, the first ones; `full` are those that keep all of their lines.

    `servers` is the place of the form that is shown, the shortest ones last; none where it is past them.
    """

    trouble: int
    full_trouble: int
    rows: int
    servers: int
    has_counts: bool
    notes: int
    has_full_notes: bool = True


def fit(sizes: Sizes, lines: int | None) -> tuple[Layout, int]:
    """The first layout that fits, and how many lines are left over; without a limit, all of it."""
    whole = _make_whole(sizes)
    if lines is None:
        return whole, len(sizes.notes) + 10
    layout = next((one for one in _shrink(sizes, whole) if _measure(sizes, one) <= lines), None)
    layout = layout or Layout(min(1, len(sizes.trouble)), 0, 1, len(sizes.servers), False, 0, False)
    return layout, lines - _measure(sizes, layout)


def list_hidden(sizes: Sizes, layout: Layout) -> list[str]:
    """What is not shown, or not in full, but for the datasets, which are counted in their place."""
    cut = sum(lines > 1 for lines in sizes.trouble[layout.full_trouble : layout.trouble])
    more = len(sizes.trouble) - layout.trouble
    words = [_count(more, "more problem")] if more else []
    words += [f"the rest of {_count(cut, 'problem')}"] if cut else []
    notes = len(sizes.notes) - layout.notes
    words += [_count(notes, "more note")] if notes else []
    words += [] if layout.has_counts or not sizes.counts else ["how answers ended"]
    return words + (["servers"] if sizes.servers and layout.servers == len(sizes.servers) else [])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _make_whole(sizes: Sizes) -> Layout:
    count = len(sizes.trouble)
    return Layout(count, count, sizes.datasets, 0, sizes.counts > 0, len(sizes.notes))


def _shrink(sizes: Sizes, layout: Layout) -> Iterator[Layout]:
    """Ever shorter: what is only worth knowing goes before what went wrong, and words before datasets."""
    yield layout
    layout = replace(layout, servers=min(1, len(sizes.servers)), has_full_notes=False)
    yield layout
    needed = max(1, sizes.datasets - sizes.folded)
    for rows in range(sizes.datasets - 1, needed - 1, -1):
        layout = replace(layout, rows=rows)
        yield layout
    layout = replace(layout, has_counts=False)
    yield layout
    for notes in range(layout.notes - 1, -1, -1):
        layout = replace(layout, notes=notes)
        yield layout
    for full in range(layout.full_trouble - 1, -1, -1):
        layout = replace(layout, full_trouble=full)
        yield layout
    layout = replace(layout, servers=len(sizes.servers))
    yield layout
    for rows in range(layout.rows - 1, _MIN_ROWS - 1, -1):
        layout = replace(layout, rows=rows)
        yield layout
    for trouble in range(layout.trouble - 1, 0, -1):
        layout = replace(layout, trouble=trouble)
        yield layout
    for rows in range(layout.rows - 1, 0, -1):
        layout = replace(layout, rows=rows)
        yield layout


def _measure(sizes: Sizes, layout: Layout) -> int:
    trouble = sum(sizes.trouble[: layout.full_trouble]) + layout.trouble - layout.full_trouble
    notes = sum(sizes.notes[: layout.notes]) if layout.has_full_notes else layout.notes
    table = 1 + layout.rows + (layout.rows < sizes.datasets)
    servers = sum(sizes.servers[layout.servers : layout.servers + 1])
    counts = sizes.counts if layout.has_counts else 0
    return sizes.head + trouble + table + servers + counts + notes + bool(list_hidden(sizes, layout))
