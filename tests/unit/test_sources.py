"""Sources: files are found, read row by row, and hashed."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.sources import (
    SUPPORTED,
    MalformedRow,
    SourceError,
    SourceRow,
    hash_source,
    iter_rows,
    resolve_source,
)

ROWS = [{"id": "a", "n": 1}, {"id": "b", "n": None}, {"id": "ö", "n": [1, {"x": 2}]}]


def write_lines(path: Path, *lines: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def write_as(path: Path, rows: list[dict]) -> Path:
    lines = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.name == "array.json":
        path.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2))
    else:
        path.write_bytes(lines)
    return path


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def read_good(*paths: Path) -> list[dict]:
    return [item.row for item in iter_rows(paths) if isinstance(item, SourceRow)]


def test_a_relative_file_is_found_from_the_base(tmp_path):
    """A relative source starts from base, an absolute one does not need it."""
    file = write_lines(tmp_path / "in" / "a.jsonl", b"{}")
    assert resolve_source("in/a.jsonl", base=tmp_path) == [file]
    assert resolve_source(str(file), base=Path("/nowhere")) == [file]


def test_a_folder_gives_its_supported_files_sorted(tmp_path):
    """A folder is searched recursively; other and hidden files are passed over."""
    for name in ("b.jsonl", "sub/a.parquet", "README.md", ".cache/c.jsonl", "d.jsonl.gz"):
        write_lines(tmp_path / name, b"{}")
    assert names(resolve_source(".", base=tmp_path)) == ["b.jsonl", "d.jsonl.gz", "a.parquet"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("su?", ["b.jsonl"]),
        ("*/[ab].*", ["b.jsonl"]),
    ],
)
def test_a_glob_gives_the_files_it_matches(tmp_path, pattern, expected):
    """Globs work relative to base and absolute, and a matched folder stands for its files."""
    write_lines(tmp_path / "a.jsonl", b"{}")
    write_lines(tmp_path / "sub" / "b.jsonl", b"{}")
    assert names(resolve_source(pattern, base=tmp_path)) == expected
    assert names(resolve_source(str(tmp_path / pattern), base=Path("/nowhere"))) == expected


def test_a_file_whose_name_looks_like_a_glob_is_taken_as_a_file(tmp_path):
    """An existing path wins over its reading as a pattern."""
    file = write_lines(tmp_path / "a[1].jsonl", b"{}")
    assert resolve_source("a[1].jsonl", base=tmp_path) == [file]


@pytest.mark.parametrize("source", ["absent.jsonl", "no/*.jsonl", "empty", "notes.txt", " ", "*.txt"])
def test_an_unusable_source_is_refused_by_name(tmp_path, source):
    """The message names the source, where it was looked for and what is supported."""
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "notes.txt", b"hello")
    with pytest.raises(SourceError) as caught:
        resolve_source(source, base=tmp_path)
    message = str(caught.value)
    assert repr(source) in message
    assert all(suffix in message for suffix in SUPPORTED)
    assert str(tmp_path) in message or not source.strip()


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.jsonl.gz", "lines.json", "array.json", "a.parquet"]
)
def test_every_format_gives_the_same_rows(tmp_path, name):
    """Rows are equal whatever the container, and each knows its place from 1."""
    rows = [{"id": "a", "n": [1, 2]}, {"id": "ö", "n": None}]
    items = list(iter_rows([write_as(tmp_path / name, rows)]))
    assert [item.row for item in items] == rows
    assert [item.where for item in items] == [f"{name}:1", f"{name}:2"]


def test_blank_lines_and_a_byte_order_mark_are_skipped_but_counted(tmp_path):
    """Line numbers are the file's own, so that an editor finds the row."""
    file = write_lines(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"id": 1}\r', b"", b"   ", b'{"id": 2}\r')
    assert [(item.where, item.row) for item in iter_rows([file])] == [
        ("a.jsonl:1", {"id": 1}),
        ("a.jsonl:4", {"id": 2}),
    ]


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (b'{"id": 1', "not JSON"),
        (b"[1, 2]", "not list"),
        (b'"text"', "not str"),
        (b'{"id": "\xff"}', "not JSON"),
    ],
)
def test_a_bad_line_is_reported_in_its_place(tmp_path, line, detail):
    """A malformed line neither stops the file nor goes missing."""
    file = write_lines(tmp_path / "a.jsonl", b'{"id": 1}', line, b'{"id": 2}')
    first, bad, last = iter_rows([file])
    assert (first.row, last.row) == ({"id": 1}, {"id": 2})
    assert isinstance(bad, MalformedRow)
    assert bad.where == "a.jsonl:2"
    assert detail in bad.detail
    assert bad.text_head.startswith(line[:5].decode())


def test_bad_lines_at_the_start_are_given_once_a_good_one_follows(tmp_path):
    """A few broken first lines do not condemn the file, and keep their order."""
    file = write_lines(tmp_path / "a.jsonl", *[b"# exported"] * 4, b'{"id": 1}', b"oops")
    assert [item.where for item in iter_rows([file])] == [f"a.jsonl:{n}" for n in range(1, 7)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("table.jsonl", b"id,text\n" * 5 + b'{"id": 1}\n'),
        ("short.jsonl", b"version https://git-lfs.github.com/spec/v1\n"),
        ("pretty.jsonl", b'[\n  {"id": 1},\n  {"id": 2}\n]\n'),
        ("numbers.jsonl", b"1\n2\n"),
        ("strings.json", b'["a", "b"]'),
        ("cut.json", b'[{"id": 1}, {'),
        ("fake.parquet", b"PAR1 but no parquet"),
        ("fake.jsonl.gz", b'{"id": 1}\n'),
        ("cut.jsonl.gz", gzip.compress(b'{"id": 1}\n' * 1000, mtime=0)[:-12]),
    ],
)
def test_a_file_of_another_format_is_refused_by_name(tmp_path, name, content):
    """A file without a usable row, or damaged as a whole, raises with its name."""
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(SourceError, match=name):
        list(iter_rows([file]))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_empty_file_has_no_rows(tmp_path, name):
    """Nothing in it is not an error of format."""
    assert list(iter_rows([write_lines(tmp_path / name, b"")])) == []


def test_the_nan_of_other_writers_becomes_null(tmp_path):
    """Python's json writes NaN, which is not JSON; the row is kept."""
    file = write_lines(tmp_path / "a.jsonl", b'{"score": NaN, "text": "NaN"}')
    assert read_good(file) == [{"score": None, "text": "NaN"}]


def test_reading_starts_before_the_end_is_read(tmp_path):
    """Rows are streamed: the first comes out although the file is damaged further on."""
    whole = gzip.compress(b"".join(b'{"id": %d}\n' % i for i in range(200_000)))
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(whole[: len(whole) // 2])
    rows: Iterator = iter_rows([file])
    assert next(rows).row == {"id": 0}
    with pytest.raises(SourceError, match="cannot be read to its end"):
        list(rows)


def test_parquet_columns_become_plain_python(tmp_path):
    """Nested parquet columns come out as lists and dictionaries, over several batches."""
    rows = [{"id": i, "messages": [{"role": "user", "content": f"q{i}"}]} for i in range(700)]
    file = write_as(tmp_path / "a.parquet", rows)
    items = list(iter_rows([file]))
    assert [item.row for item in items] == rows
    assert type(items[0].row["messages"][0]) is dict
    assert items[-1].where == "a.parquet:700"


@given(
    rows=st.lists(
        st.dictionaries(st.text(), st.integers(-(2**53), 2**53) | st.text() | st.none()), max_size=20
    )
)
def test_what_is_written_as_lines_is_read_back(rows, tmp_path_factory):
    """Any JSON objects survive the way through a file, in order."""
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n\n" for row in rows))
    assert read_good(file) == rows


def test_the_hash_knows_names_and_content_only(tmp_path):
    """Moving the files changes nothing; a byte or a name does."""
    one = [
        write_lines(tmp_path / "one" / name, json.dumps(row).encode())
        for name, row in zip("ab", ROWS, strict=False)
    ]
    two = [
        write_lines(tmp_path / "two" / name, json.dumps(row).encode())
        for name, row in zip("ab", ROWS, strict=False)
    ]
    before = hash_source(one)
    assert len(before) == 64
    assert hash_source(reversed(two)) == before
    two[0].write_bytes(two[0].read_bytes() + b"\n")
    assert hash_source(two) != before
    assert hash_source([one[0].rename(tmp_path / "one" / "c"), one[1]]) != before
