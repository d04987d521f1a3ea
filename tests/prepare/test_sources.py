"""Sources: files are found, read row by row, and hashed."""

import gzip
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prepare.sources import (
    SUPPORTED,
    MalformedRow,
    SourceError,
    SourceRow,
    hash_source,
    iter_rows,
    read_exactly,
    readers,
    resolve_source,
)

ROWS = [{"id": "a", "n": 1}, {"id": "b", "n": None}, {"id": "ö", "n": [1, {"x": 2}]}]


def write_lines(path: Path, *lines: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def write_as(path: Path, rows: list[dict]) -> Path:
    lines = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    array = orjson.dumps(rows, option=orjson.OPT_INDENT_2)
    text = array if path.name.startswith("array") else lines
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text))
    elif path.name.endswith(".zst"):
        path.write_bytes(compress_zstd(text))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(text)
    return path


def compress_zstd(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


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
    assert all(f".{part}" in message for suffix in SUPPORTED for part in suffix.split(".")[1:])
    assert str(tmp_path) in message or not source.strip()


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.JSONL",
        "a.ndjson",
        "a.parquet",
        "a.jsonl.gz",
        "a.jsonl.zst",
        "a.ndjson.gz",
        "a.ndjson.zst",
        "lines.json",
        "lines.json.gz",
        "lines.json.zst",
        "array.json",
        "array.json.gz",
        "array.json.zst",
    ],
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
        (b'{"id": "\xff"}', "not UTF-8"),
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


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path):
    """A row's place is the path below the folder that all files have in common, as is its file's format."""
    files = [write_lines(tmp_path / f"in/{folder}/x.jsonl", b"{}", b"no") for folder in "ab"]
    assert [one.where for one in iter_rows(files)] == [f"{f}/x.jsonl:{n}" for f in "ab" for n in (1, 2)]
    assert [one.where for one in iter_rows(files[:1])] == ["x.jsonl:1", "x.jsonl:2"]


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
        ("cut.json", b'[{"id": 1}, {"text": "a'),
        ("two.json", b'[{"id": 1}] [{"id": 2}]'),
        ("bracket.json", b'[{"id": 1]}, {"id": 2}]'),
        ("fake.parquet", b"PAR1 but no parquet"),
        ("fake.jsonl.gz", b'{"id": 1}\n'),
        ("cut.jsonl.gz", gzip.compress(b'{"id": 1}\n' * 1000, mtime=0)[:-12]),
        ("fake.jsonl.zst", b'{"id": 1}\n'),
        ("cut.jsonl.zst", compress_zstd(b'{"id": 1}\n' * 1000)[:-1]),
        ("cut.json.zst", compress_zstd(b"[" + b'{"id": 1},\n' * 1000 + b"{}]")[:-1]),
    ],
)
def test_a_file_of_another_format_is_refused_by_name(tmp_path, name, content):
    """A file without a usable row, or damaged as a whole, raises with its name."""
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(SourceError, match=name):
        list(iter_rows([file]))


PRETTY = b'{\n  "messages": [\n    {\n      "role": "user"\n    }\n  ]\n}\n'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.jsonl",
            PRETTY,
            "one JSON object over several lines: one row per line is needed",
        ),
        ("a.json", PRETTY, "one JSON object over several lines"),
        ("a.json", b'{"tools": [\n"a"\n]\n}\n', "one JSON object over several lines"),
        ("a.jsonl", b'{"messages": [\n', "no JSON in its first line (it starts"),
        ("a.jsonl", b'{"text": "Gr\xfc\xdfe"}\n', "a.jsonl: not UTF-8 text (byte 0xfc at place 13)"),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        ("a.json", b'[{"text": "Gr\xfc\xdfe"}]\n', "a.json:1: not UTF-8 text"),
        ("a.jsonl", b"\x89PNG\r\n\x1a\n\0\0", "no JSON in its first"),
    ],
)
def test_what_a_file_is_instead_is_said(tmp_path, name, content, words):
    """The usual ones by name, with what to do."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError) as caught:
        list(iter_rows([tmp_path / name]))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", b""), ("a.json", b""), ("a.json", b"[ ]\n"), ("a.jsonl.zst", compress_zstd(b""))],
)
def test_an_empty_file_has_no_rows(tmp_path, name, content):
    """Nothing in it is not an error of format."""
    (tmp_path / name).write_bytes(content)
    assert list(iter_rows([tmp_path / name])) == []


def test_a_malformed_row_far_into_a_file_is_named_by_its_line(tmp_path):
    """The line that an editor shows, whatever came before it."""
    lines = [b'{"id": %d}' % number for number in range(1, 10_001)]
    lines[7_430] = b'{"id": 7431, "text": "cut'
    items = list(iter_rows([write_lines(tmp_path / "a.jsonl", *lines)]))
    assert [item.where for item in items if isinstance(item, MalformedRow)] == ["a.jsonl:7431"]
    assert len(items) == 10_000


def test_a_bad_record_of_an_array_is_one_malformed_row(tmp_path):
    """The records around it are kept, and read as strictly as lines: floats, long numbers, NaN."""
    file = tmp_path / "a.json"
    records = [
        b'{"n": 1.0}', b'{"n": NaN}', b'{"n": tru}', b"7", b'{"n": 1e400}', b'{"n": "\xff"}',
        b'{"n": 18446744073709551615}', b'{"n": "\\ud800"}', b"",
    ]  # fmt: skip
    file.write_bytes(b"\xef\xbb\xbf [" + b", ".join(records) + b"]")
    items = list(iter_rows([file]))
    assert [item.where for item in items] == [f"a.json:{n}" for n in range(1, 9)]
    good = {item.where[-1]: item.row["n"] for item in items if isinstance(item, SourceRow)}
    assert good == {"1": 1.0, "2": None, "7": 18446744073709551615}
    assert type(good["1"]) is float


def test_an_array_that_breaks_off_says_where(tmp_path):
    """What was whole comes out first; the message names the last whole record."""
    file = tmp_path / "a.json"
    file.write_bytes(b"[" + b'{"id": 1},\n' * 200_000 + b'{"id": ')
    rows = iter_rows([file])
    assert next(rows).row == {"id": 1}
    with pytest.raises(SourceError, match=r"a\.json: .* breaks off after record 200000"):
        list(rows)


def test_the_nan_of_other_writers_becomes_null(tmp_path):
    """Python's json writes NaN, which is not JSON; the row is kept."""
    file = write_lines(tmp_path / "a.jsonl", b'{"score": NaN, "text": "NaN"}')
    assert read_good(file) == [{"score": None, "text": "NaN"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_numbers_keep_their_value_or_cost_the_row(tmp_path, name):
    """Long integers can be had to the digit, also beside a NaN; what would be infinity is malformed."""
    records = [
        b'{"n": [-92233720368547760001, 1.10, NaN]}',
        b'{"n": [92233720368547760001]}',
        b'{"n": [NaN, 1e400]}',
    ]
    file = tmp_path / name
    file.write_bytes(b"[" + b",".join(records) + b"]" if name == "a.json" else b"\n".join(records))
    one, two, bad = iter_rows([file])
    assert repr(read_exactly(one)) == "{'n': [-92233720368547760001, 1.1, None]}"
    assert repr(read_exactly(two)) == "{'n': [92233720368547760001]}"
    assert isinstance(bad, MalformedRow)
    assert (bad.where, "1e400" in bad.detail) == (f"{name}:3", True)


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


def test_parquet_is_read_piece_by_piece(tmp_path):
    """The first row costs a few of the row groups, not the file."""
    path = tmp_path / "a.parquet"
    rows = [{"id": i, "noise": random.Random(i).randbytes(10_000)} for i in range(1000)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)
    read = 0

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            nonlocal read
            data = super().read(size)
            read += len(data)
            return data

    items = readers.read_file(readers.DataFile("a.parquet", "a", lambda: Counting(path)))
    next(items)
    assert read < path.stat().st_size / 2
    assert sum(1 for _ in items) == 999


def as_text(*values: bytes) -> pa.Array:
    """A column of strings whose bytes nobody has looked at."""
    return pa.array(values, pa.binary()).view(pa.string())


BAD_COLUMNS = {
    "text": as_text(b"a", b"he\xfflo", b"c"),
    "day": pa.array([1, 2**30, 3], pa.int32()).view(pa.date32()),
    "time": pa.array([1, 2**60, 3], pa.timestamp("ms")),
    "turns": pa.ListArray.from_arrays(
        [0, 1, 2, 3], pa.StructArray.from_arrays([as_text(b"a", b"\xe4", b"c")], ["content"])
    ),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_a_parquet_value_that_cannot_be_read_costs_its_row(tmp_path, name):
    """It is named by file, row and column; the rows around it come out whole."""
    table = pa.table({"id": [1, 2, 3], name: BAD_COLUMNS[name]})
    many = pa.table({"id": range(400), name: table[name].take(pa.array([0] * 400))})
    pq.write_table(pa.concat_tables([many, table, many]), tmp_path / "a.parquet")
    items = list(iter_rows([tmp_path / "a.parquet"]))
    assert [item.where for item in items] == [f"a.parquet:{n}" for n in range(1, 804)]
    [bad] = [item for item in items if isinstance(item, MalformedRow)]
    assert bad.where == "a.parquet:402"
    assert repr(name) in bad.detail
    assert [item.row["id"] for item in items if item is not bad] == [*range(400), 1, 3, *range(400)]
    assert items[400].row == {"id": 1, name: BAD_COLUMNS[name][0].as_py()}


def test_a_parquet_file_of_unreadable_values_is_refused_by_name(tmp_path):
    """By its first row and column where no row is good; by the file where a column's name is no text."""
    pq.write_table(pa.table({"question": as_text(b"\xff", b"\xfe")}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet: not one usable row; a\.parquet:1: .*'question'"):
        list(iter_rows([tmp_path / "a.parquet"]))
    data = (tmp_path / "a.parquet").read_bytes().replace(b"question", b"quest\xffon")
    (tmp_path / "b.parquet").write_bytes(data)
    with pytest.raises(SourceError, match=r"b\.parquet: .*UnicodeDecodeError"):
        list(iter_rows([tmp_path / "b.parquet"]))


def named(**values: object) -> st.SearchStrategy:
    """An object with any of the fields."""
    return st.fixed_dictionaries({}, optional=values)


WORDS = pa.list_(pa.string())
SCHEMA = pa.struct([("kind", pa.string()), ("words", WORDS), ("inner", pa.struct([("n", pa.int64())]))])
CALLS = pa.list_(pa.struct([("name", pa.string()), ("arguments", SCHEMA)]))
TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", CALLS)]))
COLUMNS = pa.schema([("tools", pa.large_list(SCHEMA)), ("kwargs", SCHEMA), ("messages", TURNS)])
OBJECTS = named(
    kind=st.text(),
    words=st.lists(st.none() | st.text(), max_size=2),
    inner=named(n=st.integers(-(2**63), 2**63 - 1)),
)


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "tools": st.none() | st.lists(OBJECTS, max_size=2),
                "kwargs": st.none() | OBJECTS,
                "messages": st.lists(
                    st.fixed_dictionaries(
                        {
                            "role": st.sampled_from(["user", "assistant"]),
                            "content": st.none() | st.text(),
                            "tool_calls": st.none()
                            | st.lists(named(name=st.text(), arguments=OBJECTS), max_size=2),
                        }
                    ),
                    max_size=2,
                ),
            }
        ),
        min_size=1,
        max_size=5,
    )
)
def test_structs_come_back_without_the_nulls_that_pad_them(rows, tmp_path_factory):
    """Objects as they were, empty ones too; nulls of columns, lists and turns stay."""
    file = tmp_path_factory.getbasetemp() / "padded.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=COLUMNS), file)
    assert read_good(file) == rows


def test_removed_nulls_are_counted_and_only_parquets_are_removed(tmp_path):
    """Of each row; what a line of JSON says is what was recorded."""
    rows = [{"tools": [{"name": "f", "default": None, "p": {"a": 1, "b": None}}]}, {"tools": [{"name": "g"}]}]
    lines, table = write_as(tmp_path / "a.jsonl", rows), write_as(tmp_path / "a.parquet", rows)
    assert [(item.row, item.nulls_removed) for item in iter_rows([lines])] == [(row, 0) for row in rows]
    assert [(item.row, item.nulls_removed) for item in iter_rows([table])] == [
        ({"tools": [{"name": "f", "p": {"a": 1}}]}, 2),
        ({"tools": [{"name": "g"}]}, 2),
    ]


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
ANY_ROWS = st.lists(st.dictionaries(st.text(), ANY_JSON, max_size=4), max_size=20)


@given(rows=ANY_ROWS)
def test_what_is_written_as_lines_is_read_back(rows, tmp_path_factory):
    """Any JSON objects survive the way through a file, in order."""
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n\n" for row in rows))
    assert read_good(file) == rows


@given(rows=ANY_ROWS, chunk=st.integers(1, 40))
def test_an_array_is_cut_into_its_records_wherever_it_is_read(rows, chunk, tmp_path_factory):
    """Brackets, commas and quotes within strings, and the ends of the pieces that are read, cut nothing."""
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_bytes(json.dumps(rows, indent=1).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_CHUNK_BYTES", chunk)
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
    assert hash_source(two[::-1]) == before
    two[0].write_bytes(two[0].read_bytes() + b"\n")
    assert hash_source(two) != before
    assert hash_source([one[0].rename(tmp_path / "one" / "c"), one[1]]) != before
