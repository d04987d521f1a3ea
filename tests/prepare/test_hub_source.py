"""Sources on the Hub: what is read, what it is called, and what is said when it cannot be read."""

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import COMMIT, serve_dataset

from tasks.prepare.sources import (
    HubDataset,
    SourceError,
    hash_source,
    make_absolute,
    resolve_source,
    spell_hub_source,
)

ROWS = [{"id": i, "messages": [{"role": "user", "content": f"q{i}"}]} for i in range(700)]
TEST_ROWS = [{"id": 1, "tools": [{"a": 1}]}, {"id": "2", "tools": [{"b": {"c": None}}]}]
BAD_LINE = 7431
CARD = b"""---
configs:
- config_name: default
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
- config_name: broken
  data_files: [{split: train, path: broken.jsonl}]
- config_name: cut
  data_files: [{split: train, path: cut.jsonl.gz}]
---
"""
READ = """
import json, sys, time
from pathlib import Path
from tasks.prepare.sources import SourceError, hash_source, iter_rows, resolve_source

for text in sys.argv[1:]:
    started, found = time.monotonic(), {"rows": []}
    try:
        source = resolve_source(text, base=Path())
        found["hash"] = hash_source(source)
        for item in iter_rows(source):
            found["rows"].append([item.where, getattr(item, "row", None)])
    except SourceError as exc:
        found["error"] = str(exc)
    print(json.dumps(found))
"""


def write_parquet(rows: list[dict]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def write_lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_broken_lines() -> bytes:
    lines = [json.dumps({"id": number, "text": "x" * 100}).encode() for number in range(10_000)]
    lines[BAD_LINE - 1] = b'{"id": 1, "text": "cut'
    return b"\n".join(lines)


def read_with(endpoint: str, home: Path, *sources: str, **env: str) -> list[dict]:
    """Read in a process of its own: the Hub's libraries look at their settings once."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": str(Path.cwd()), **env}
    done = subprocess.run(
        [sys.executable, "-c", READ, *sources],
        env={**os.environ, **settings}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """What became of each source, read from one Hub."""
    sources = [
        "hub:org/name",
        f"hub:org/name?revision={COMMIT}&split=test",
        "hub:org/name?subset=broken",
        "hub:org/name?subset=cut",
        "hub:org/name?subset=absent",
        "hub:org/name?split=absent",
        "hub:org/name?revision=absent",
        "hub:org/absent",
        "hub:no/id/at/all",
        "hub:org/name?splits=train",
    ]
    files = {
        "README.md": CARD,
        "train.jsonl": write_lines(ROWS),
        "cut.jsonl.gz": gzip.compress(write_broken_lines())[:-1000],
        "test.jsonl": write_lines(TEST_ROWS),
        "broken.jsonl": write_broken_lines(),
    }
    with serve_dataset(files) as endpoint:
        read = read_with(endpoint, tmp_path_factory.mktemp("hf"), *sources)
    return dict(zip(sources, read, strict=True))


def test_a_dataset_is_read_from_the_hub(found):
    """Every row in order, named by dataset, split and number."""
    one = found["hub:org/name"]
    assert "error" not in one
    assert [row for _, row in one["rows"]] == ROWS
    assert [where for where, _ in one["rows"]][::699] == ["name:train:1", "name:train:700"]


def test_parquet_is_read_from_the_hub(tmp_path):
    """As most datasets there are; without a card that lists the files."""
    with serve_dataset({"train-00000-of-00001.parquet": write_parquet(ROWS)}) as endpoint:
        (one,) = read_with(endpoint, tmp_path, "hub:org/name")
    assert "error" not in one
    assert [row for _, row in one["rows"]] == ROWS


def test_a_split_of_a_revision_is_read(found):
    """The settings pick the rows, which come out as they are; a hash tells the splits apart."""
    one = found[f"hub:org/name?revision={COMMIT}&split=test"]
    assert one["rows"] == [["name:test:1", TEST_ROWS[0]], ["name:test:2", TEST_ROWS[1]]]
    assert one["hash"] != found["hub:org/name"]["hash"]


def test_a_malformed_row_on_the_hub_is_named_and_the_rest_is_read(found):
    """As in a file."""
    one = found["hub:org/name?subset=broken"]
    assert "error" not in one
    assert len(one["rows"]) == 10_000
    assert [where for where, row in one["rows"] if row is None] == [f"name:train:{BAD_LINE}"]


def test_a_file_on_the_hub_that_breaks_off_says_after_which_row(found):
    """The rows before come out; the message names dataset and file."""
    one = found["hub:org/name?subset=cut"]
    assert len(one["rows"]) > 0
    assert f"after {len(one['rows'])} rows of name:train" in one["error"]
    assert "'org/name'" in one["error"]
    assert "cut.jsonl.gz" in one["error"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("hub:org/name?subset=absent", "absent"),
        ("hub:org/name?split=absent", "absent"),
        ("hub:org/name?revision=absent", "no revision 'absent'"),
        ("hub:org/absent", "HF_TOKEN"),
        ("hub:no/id/at/all", "hub:ORG/NAME"),
        ("hub:org/name?splits=train", "unknown splits"),
    ],
)
def test_what_the_hub_has_not_is_said_in_a_line(found, source, said):
    """No row comes out, and the message names what was asked for."""
    assert found[source]["rows"] == []
    assert said in found[source]["error"]
    assert "\n" not in found[source]["error"]


@pytest.mark.parametrize("env", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_without_network_the_dataset_and_the_way_out_are_named(tmp_path, env):
    """One line, before anything is read."""
    (one,) = read_with("http://127.0.0.1:9", tmp_path, "hub:org/name", **env)
    assert "'org/name'" in one["error"]
    assert "point `source` at them" in one["error"]
    assert "\n" not in one["error"]
    assert "hash" not in one


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch):
    """Nothing is asked of the network."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceError, match="make hub"):
        resolve_source("hub:org/name", base=Path())


def test_the_settings_of_a_hub_source_are_one_text():
    """Whatever characters they have; a source on the Hub has no folder."""
    source = spell_hub_source("hub:org/name", revision="refs/pr/1", subset="a&b", split=None)
    assert source == "hub:org/name?revision=refs%2Fpr%2F1&subset=a%26b"
    assert make_absolute(source, base=Path("/nowhere")) == source


def test_the_hash_of_a_hub_source_knows_all_that_picks_its_rows():
    """The commit, the subset and the split, each by itself."""
    picked = [
        HubDataset("org/name", COMMIT, None, "train"),
        HubDataset("org/name", "b" * 40, None, "train"),
        HubDataset("org/name", COMMIT, "train", "train"),
        HubDataset("org/name", COMMIT, None, "test"),
        HubDataset("org/other", COMMIT, None, "train"),
    ]
    assert len({hash_source(one) for one in picked}) == len(picked)
