"""The draft vocabulary is the most frequent ids, and both maps tell the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.tokens.draft_vocab import VocabCounts, build_vocab_map, measure_coverage, measure_curve

sizes = st.integers(1, 40)


@given(st.data(), sizes)
def test_the_map_is_the_most_frequent_ids_by_count_then_id(data, size):
    """As a plain sort says it; unseen ids fill it from the lowest, and the two maps agree."""
    seen = data.draw(st.dictionaries(st.integers(0, size - 1), st.integers(1, 4)))
    wanted = data.draw(st.integers(1, size))
    found = build_vocab_map(seen, draft_vocab_size=wanted, target_vocab_size=size)
    order = sorted(seen, key=lambda one: (-seen[one], one)) + [n for n in range(size) if n not in seen]
    assert sorted(order[:wanted]) == np.flatnonzero(found.t2d).tolist()
    assert np.array_equal(np.flatnonzero(found.t2d), found.d2t + np.arange(wanted))
    assert (found.t2d.dtype, found.d2t.dtype) == (np.bool_, np.int64)
    assert (found.t2d.shape, found.d2t.shape) == ((size,), (wanted,))


@given(st.data(), sizes)
def test_an_array_of_counts_gives_the_map_of_a_mapping(data, size):
    """Zeros are ids that were not seen."""
    counts = np.array(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)), np.int64)
    seen = {one: int(count) for one, count in enumerate(counts) if count}
    maps = [
        build_vocab_map(c, draft_vocab_size=1 + size // 2, target_vocab_size=size) for c in (counts, seen)
    ]
    assert np.array_equal(maps[0].t2d, maps[1].t2d)
    assert np.array_equal(maps[0].d2t, maps[1].d2t)


@pytest.mark.parametrize("size", [0, -1, 11])
def test_a_draft_vocabulary_that_cannot_be_is_refused(size):
    """With both sizes and what to do."""
    with pytest.raises(ValueError, match=f"draft_vocab_size is {size}, but the target has 10 ids"):
        build_vocab_map({}, draft_vocab_size=size, target_vocab_size=10)


@pytest.mark.parametrize("seen", [{10: 1}, {-1: 1}, np.ones(11, np.int64)])
def test_counts_of_ids_that_the_target_lacks_are_refused(seen):
    """A map of them would leave them out silently."""
    with pytest.raises(ValueError, match="the target has 10 ids"):
        build_vocab_map(seen, draft_vocab_size=1, target_vocab_size=10)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 9)))))
def test_counts_add_up_however_they_come(parts):
    """Each dataset's and their total."""
    counts = VocabCounts(10)
    for dataset, ids in parts:
        counts.add(dataset, np.array(ids, np.int32))
    every = [one for _, ids in parts for one in ids]
    assert counts.total.tolist() == [every.count(one) for one in range(10)]
    for dataset, found in counts.datasets.items():
        own = [one for name, ids in parts for one in ids if name == dataset]
        assert found.tolist() == [own.count(one) for one in range(10)]
        assert found.dtype == np.int64


def test_an_id_past_the_target_is_named_with_its_dataset():
    """So that one finds the rows."""
    with pytest.raises(ValueError, match="dataset 'd' has the id 10, but the target has 10 ids"):
        VocabCounts(10).add("d", np.array([3, 10], np.int32))


def test_coverage_is_the_share_of_tokens():
    """Of a map, and of the best map of each size."""
    counts = np.zeros(4500, np.int64)
    counts[[7, 4000, 4400]] = (6, 3, 1)
    found = build_vocab_map(counts, draft_vocab_size=2, target_vocab_size=4500)
    assert measure_coverage(counts, found.t2d) == 0.9
    assert measure_curve(counts) == [(1000, 1.0), (2000, 1.0), (4000, 1.0), (4500, 1.0)]
    assert measure_curve(np.arange(2000)[::-1] * 0 + 1)[0] == (1000, 0.5)
    assert measure_curve(np.zeros(5, np.int64)) == [(5, None)]
    assert measure_coverage(np.zeros(4500, np.int64), found.t2d) is None
