"""Rows that are left out of an export because somebody asked for it, each counted."""

from export_support import dataset, export, hashes, manifest, read_parquet, response
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.export_duplicates import ExactDuplicates
from tasks.core.masks import sample_from_response

ids = st.lists(st.integers(0, 3), min_size=2, max_size=3)


@settings(max_examples=50)
@given(rows=st.lists(st.tuples(ids, ids), max_size=20))
def test_the_first_of_equal_rows_is_kept(rows):
    """Equal are those with the same ids and the same mask, also where only the mask tells them apart."""
    exact = ExactDuplicates()
    samples = [sample_from_response(response(f"r{n}", *row)) for n, row in enumerate(rows)]
    kept = [row for row, sample in zip(rows, samples, strict=True) if exact.is_new(sample)]
    assert kept == [row for n, row in enumerate(rows) if row not in rows[:n]]


def test_equal_rows_of_all_datasets_are_dropped_and_counted(tmp_path):
    """Where that is asked for; each dataset says how many it lost."""
    first = dataset(tmp_path, [response("a"), response("b"), response("c", output=(3, 4))], "first")
    second = dataset(tmp_path, [response("x"), response("y", (1, 2, 3), (4, 5))], "second")
    assert export(tmp_path, [first, second]).total.rows == 5
    report = export(tmp_path, [first, second], drop_duplicates=True)
    assert [(one.exported.rows, one.exact_duplicates) for one in report.datasets] == [(2, 1), (1, 1)]
    assert [row["id"] for row in read_parquet(tmp_path, "train")] == ["a", "c", "y"]
    assert [one["exact_duplicates"] for one in manifest(tmp_path)["datasets"]] == [1, 1]
    before = hashes(tmp_path / "export")
    assert export(tmp_path, [first, second], drop_duplicates=True).unchanged
    export(tmp_path, [first, second])
    export(tmp_path, [first, second], drop_duplicates=True)
    assert hashes(tmp_path / "export") == before
