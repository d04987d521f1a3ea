"""What does not fit into a terminal is shortened or left out by what it is worth, and is counted."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from flows.monitor.layout import Layout, Sizes, fit, list_hidden

heights = st.lists(st.integers(1, 4), max_size=8)
sizes = st.builds(
    Sizes,
    head=st.integers(3, 6),
    trouble=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    datasets=st.integers(1, 12),
    folded=st.integers(0, 12),
    servers=st.sampled_from([(), (3, 1), (9, 2)]),
    counts=st.integers(0, 2),
    notes=heights,
).map(lambda one: dataclasses.replace(one, folded=min(one.folded, one.datasets)))


@given(sizes, st.integers(12, 60))
def test_a_layout_fits_and_hides_what_matters_least_first(found, lines):
    """Whatever there is: the first problem and a dataset are seen, and notes go before problems."""
    layout, spare = fit(found, lines)
    assert spare >= 0
    assert layout.trouble >= 1 <= layout.rows
    if layout.full_trouble < len(found.trouble):
        assert (layout.notes, layout.has_counts) == (0, False)
        assert layout.rows <= max(1, found.datasets - found.folded)
    if layout.trouble < len(found.trouble):
        assert layout.rows <= 4
    assert bool(list_hidden(found, layout)) is (
        layout.trouble < len(found.trouble)
        or any(height > 1 for height in found.trouble[layout.full_trouble :])
        or layout.notes < len(found.notes)
        or (found.counts > 0 and not layout.has_counts)
        or (len(found.servers) > 0 and layout.servers == len(found.servers))
    )


@given(sizes)
def test_without_a_limit_all_is_there(found):
    """As for --once and for a file."""
    layout, _ = fit(found, None)
    everything = (len(found.trouble), found.datasets, len(found.notes))
    assert (layout.full_trouble, layout.rows, layout.notes) == everything
    assert list_hidden(found, layout) == []


def test_what_is_hidden_is_said_in_words():
    """By its kind."""
    found = Sizes(5, (1, 3, 2), 4, 0, (3, 1), 1, (1, 1))
    assert list_hidden(found, Layout(2, 1, 4, 2, False, 1)) == [
        "1 more problem",
        "the rest of 1 problem",
        "1 more note",
        "how answers ended",
        "servers",
    ]
