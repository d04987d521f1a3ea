"""An export holds every exact row once, checks itself, and replaces the old one whole."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from export_support import dataset, export, hashes, manifest, read_jsonl, read_parquet, response
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.export import rows as export_rows
from tasks.export.export_run import FORMATS
from tasks.export.files import ExportError, ExportInputError
from tasks.export.formats import parquet as export_parquet
from tasks.export.formats.parquet import SCHEMA, check_parquet
from tasks.export.rows import ExportDataset
from tasks.export.split.assign import assign_split
from tasks.records.folders import hold_folder

generations = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12),
        st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=12),
        st.integers(0, 3),
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(
    generations=generations,
    eval_fraction=st.sampled_from([0.0, 0.3, 0.9]),
    rows_per_file=st.sampled_from([None, 1, 4]),
    tokens_per_group=st.integers(1, 60),
)
def test_round_trip(generations, eval_fraction, rows_per_file, tokens_per_group):
    """Every row is there once, its masked ids are its output_ids, and a second export has the same bytes."""
    responses = [
        response(f"r{n}", prompt, output, conversation_id=f"c{conversation}", meta={"n": n})
        for n, (prompt, output, conversation) in enumerate(generations)
    ]
    options = {"rows_per_file": rows_per_file, "tokens_per_group": tokens_per_group}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source = dataset(root, responses)
        report = export(root, [source], eval_fraction=eval_fraction, **options)
        splits = {split: read_parquet(root, split) for split in ("train", "eval")}
        lines = {split: read_jsonl(root, split) for split in ("train", "eval")}
        first = hashes(root / "export")
        export(root, [source], eval_fraction=eval_fraction, **options)
        assert hashes(root / "export") == first
    rows = [row for split in splits.values() for row in split]
    masked = {
        row["id"]: [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m] for row in rows
    }
    assert masked == {r.id: r.output_ids for r in responses}
    assert {row["id"]: row["input_ids"] for row in rows} == {
        r.id: r.input_ids + r.output_ids for r in responses
    }
    assert sum(row["n_loss"] for row in rows) == sum(r.completion_tokens for r in responses)
    assert (report.total.rows, report.total.loss_tokens) == (len(rows), sum(row["n_loss"] for row in rows))
    for split, found in splits.items():
        wanted = ("id", "input_ids", "loss_mask")
        assert lines[split] == [{key: row[key] for key in wanted} for row in found]
    together = [{row["conversation_id"] for row in split} for split in splits.values()]
    assert not together[0] & together[1]


def test_columns_are_those_of_the_design(tmp_path):
    """Names, order and types are the contract with the trainers."""
    later = response("a", turn=2, conversation_id="c", meta={"z": 1, "a": "é"}, finish_reason="length")
    export(tmp_path, [dataset(tmp_path, [later])])
    table = pq.read_table(tmp_path / "export" / "data" / "train-00000.parquet")
    assert table.schema == SCHEMA
    assert table.schema.field("input_ids").type == pa.list_(pa.int32())
    assert table.schema.field("loss_mask").type == pa.list_(pa.uint8())
    assert table.to_pylist() == [
        {
            "id": "a#2",
            "input_ids": [1, 2, 3, 4, 5],
            "loss_mask": [0, 0, 1, 1, 1],
            "n_tokens": 5,
            "n_loss": 3,
            "finish_reason": "length",
            "dataset": "d",
            "conversation_id": "c",
            "turn": 2,
            "meta": '{"a":"é","z":1}',
        }
    ]


def test_what_is_not_exported_is_counted(tmp_path):
    """Rows + duplicates + skipped is every line of the log."""
    source = dataset(
        tmp_path,
        [
            response("a"),
            response("a", output=(9, 9)),
            response("a", turn=1),
            response("b", input_ids=None),
            response("c", completion_tokens=4),
            response("e", prompt_tokens=1),
            response("f", output=(7,)),
            response("g", output=(7,), finish_reason="length"),
            response("h", output=(2**31, 1)),
        ],
        tail=b'garbage\n{"id":"torn',
    )
    export(tmp_path, [source])
    counted = manifest(tmp_path)["datasets"][0]
    assert counted["skipped"] == {
        "no_ids": 1,
        "completion_tokens_differ": 1,
        "prompt_tokens_differ": 1,
        "empty_answer": 1,
        "not_token_ids": 1,
        "unreadable": 1,
        "torn_last_line": 1,
    }
    assert (counted["rows"], counted["duplicates"]) == (3, 1)
    assert [row["id"] for row in read_parquet(tmp_path, "train")] == ["a", "a#1", "g"]
    assert read_parquet(tmp_path, "train")[0]["input_ids"] == [1, 2, 3, 4, 5]


def test_an_id_that_looks_like_a_turn_is_no_other_rows_id(tmp_path):
    """A conversation's second turn and another conversation of that name are two rows with two ids."""
    rows = [response("c", turn=1), response("c#1"), response("c#x")]
    export(tmp_path, [dataset(tmp_path, rows)])
    assert [row["id"] for row in read_parquet(tmp_path, "train")] == ["c#1", "c#1#0", "c#x"]


def test_manifest_agrees_with_the_files(tmp_path):
    """Hashes, sizes and sums are those of the files on disk."""
    sources = [dataset(tmp_path, [response(f"{d}{n}") for n in range(40)], d) for d in ("x", "y")]
    export(tmp_path, sources, eval_fraction=0.3, rows_per_file=7, provenance={"b": 1, "a": [2]})
    found = manifest(tmp_path)
    on_disk = hashes(tmp_path / "export")
    described = {f["path"]: f["sha256"] for f in found["files"]}
    assert described == {p: h for p, h in on_disk.items() if p != "manifest.json"}
    for file in found["files"]:
        path = tmp_path / "export" / file["path"]
        assert file["bytes"] == path.stat().st_size
        if file["format"] == "parquet":
            assert file["rows"] == pq.read_metadata(path).num_rows <= 7
    assert found["provenance"] == {"a": [2], "b": 1}
    assert found["splits"]["train"]["rows"] + found["splits"]["eval"]["rows"] == 80
    assert [d["rows"] for d in found["datasets"]] == [40, 40]
    assert list(found) == sorted(found)


def test_an_empty_eval_split_has_no_file_and_zero_rows(tmp_path):
    """Hashing may leave eval empty: the manifest says so."""
    export(tmp_path, [dataset(tmp_path, [response("a")])], eval_fraction=1e-9)
    assert manifest(tmp_path)["splits"]["eval"] == {"rows": 0, "tokens": 0, "loss_tokens": 0}
    assert [p.name for p in (tmp_path / "export" / "data").iterdir()] == ["train-00000.parquet"]


def test_nothing_to_export_is_an_export_without_files(tmp_path):
    """A dataset without a log is named in the manifest and stops nothing."""
    export(tmp_path, [ExportDataset("d", tmp_path / "missing", "exhausted")])
    assert manifest(tmp_path)["datasets"][0]["source_bytes"] is None
    assert {file["format"] for file in manifest(tmp_path)["files"]} == {"configs", "card"}


def test_formats_can_be_chosen(tmp_path):
    """Only what was asked for is written, and the card does not speak of the rest."""
    export(tmp_path, [dataset(tmp_path, [response("a")])], formats={"jsonl"})
    names = {p.name for p in (tmp_path / "export").iterdir()}
    assert names == {"jsonl", "configs", "manifest.json", "README.md"}
    assert "parquet" not in (tmp_path / "export" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ["parquet", "csv"]}, "csv"),
        ({"formats": []}, "format"),
        ({"formats": "parquet"}, "format"),
        ({"eval_fraction": 1.0}, "eval_fraction"),
        ({"eval_fraction": -0.1}, "eval_fraction"),
        ({"rows_per_file": 0}, "rows_per_file"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(tmp_path, options, message):
    """The error says which argument, and there is no folder."""
    with pytest.raises(ValueError, match=message):
        export(tmp_path, [dataset(tmp_path, [response("a")])], **options)
    assert not (tmp_path / "export").exists()


def test_two_datasets_of_one_name_are_refused(tmp_path):
    """The dataset column has to tell them apart."""
    source = dataset(tmp_path, [])
    with pytest.raises(ValueError, match="more than once: d"):
        export(tmp_path, [source, source])


def test_row_groups_are_bounded_by_tokens(tmp_path):
    """No group holds more than the bound unless one row does."""
    rows = [response(f"r{n}", output=range(n % 7 + 2)) for n in range(50)]
    export(tmp_path, [dataset(tmp_path, [*rows, response("long", output=range(100))])], tokens_per_group=30)
    with pq.ParquetFile(tmp_path / "export" / "data" / "train-00000.parquet") as file:
        groups = [
            file.read_row_group(n, ["n_tokens"])["n_tokens"].to_pylist() for n in range(file.num_row_groups)
        ]
    assert len(groups) > 5
    assert all(sum(group) <= 30 or len(group) == 1 for group in groups)


def test_max_length_report_counts_what_a_trainer_cuts(tmp_path):
    """Loss tokens beyond max_length are lost, and a row whose prompt fills it has none left."""
    rows = [
        response("fits", prompt=range(1000), output=range(1048)),
        response("cut", prompt=range(1000), output=range(1049)),
        response("all", prompt=range(2048), output=range(10)),
    ]
    export(tmp_path, [dataset(tmp_path, rows)])
    report = {entry.pop("max_length"): entry for entry in manifest(tmp_path)["max_length"]}
    assert list(report) == [2048, 4096, 8192, 16384, 32768]
    assert report[2048] == {"rows_cut": 2, "rows_without_loss": 1, "loss_tokens_lost": 11}
    assert report[4096] == {"rows_cut": 0, "rows_without_loss": 0, "loss_tokens_lost": 0}


def test_an_error_in_the_middle_leaves_the_old_export(tmp_path, monkeypatch):
    """The old files are there byte for byte and nothing half-made is."""
    source = dataset(tmp_path, [response(f"r{n}") for n in range(20)])
    export(tmp_path, [source])
    before = hashes(tmp_path / "export")
    real, calls = export_rows.samples_from_response, []

    def fail_late(row):
        calls.append(row)
        if len(calls) == 15:
            raise OSError("disk gone")
        return real(row)

    monkeypatch.setattr(export_rows, "samples_from_response", fail_late)
    with pytest.raises(OSError, match="disk gone"):
        export(tmp_path, [source], seed=1, tokens_per_group=10)
    assert hashes(tmp_path / "export") == before
    assert not (tmp_path / ".export.new").exists()


KILLED = """
import os, sys
from pathlib import Path
from tasks.export import rows as module
from tasks.export.export_run import export_run
real, calls = module.samples_from_response, []
def kill(row):
    calls.append(row)
    if len(calls) == 15:
        os._exit(9)
    return real(row)
module.samples_from_response = kill
root = Path(sys.argv[1])
export_run(
    datasets=[module.ExportDataset("d", root / "d", "complete")], out_dir=root / "export", eval_fraction=0.5,
    seed=1, formats=("parquet", "jsonl"), provenance={}, tokens_per_group=10,
)
"""


def test_a_kill_in_the_middle_leaves_the_old_export_and_the_next_cleans_up(tmp_path):
    """A dead process runs no cleanup: the old export stays valid and the next one works."""
    source = dataset(tmp_path, [response(f"r{n}") for n in range(20)])
    export(tmp_path, [source])
    before = hashes(tmp_path / "export")
    repository = Path(export_rows.__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=repository, check=False)
    assert done.returncode == 9
    assert (tmp_path / ".export.new").exists()
    assert hashes(tmp_path / "export") == before
    export(tmp_path, [source])
    assert hashes(tmp_path / "export") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [".export.lock", "d", "export"]


def test_a_new_export_removes_files_of_the_old_one(tmp_path):
    """Fewer shards than before leave no stale shard."""
    source = dataset(tmp_path, [response(f"r{n}") for n in range(9)])
    export(tmp_path, [source], rows_per_file=2)
    export(tmp_path, [source])
    assert len(read_parquet(tmp_path, "train")) == 9


@pytest.mark.parametrize("place", ["export", "export/d", ".export.new", ".export.old/d"])
def test_an_export_that_would_remove_its_own_source_is_refused(tmp_path, place):
    """A response log is never inside a folder that is replaced."""
    source = dataset(tmp_path, [response("a")], place)
    with pytest.raises(ExportError, match="would replace"):
        export(tmp_path, [source])
    assert (source.folder / "raw_responses.jsonl").exists()


def test_a_foreign_folder_or_a_link_is_refused(tmp_path):
    """Neither somebody's files nor what a link points to is replaced."""
    source = dataset(tmp_path, [response("a")])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "notes.txt").touch()
    (tmp_path / "export").symlink_to(elsewhere)
    with pytest.raises(ExportInputError, match=r"symlink.* remove it"):
        export(tmp_path, [source])
    (tmp_path / "export").unlink()
    elsewhere.rename(tmp_path / "export")
    with pytest.raises(ExportInputError, match=r"holds 'notes\.txt', which no export has"):
        export(tmp_path, [source])
    assert (tmp_path / "export" / "notes.txt").exists()
    (tmp_path / "export").rename(elsewhere)
    (tmp_path / "export").touch()
    with pytest.raises(ExportInputError, match=r"is not a folder; move it elsewhere"):
        export(tmp_path, [source])


def test_an_export_that_another_process_writes_may_be_made_later(tmp_path):
    """Nothing has to be changed: it only has to end."""
    source = dataset(tmp_path, [response("a")])
    held = hold_folder(tmp_path / "export")
    with held, pytest.raises(ExportError, match="is being written by another process") as caught:
        export(tmp_path, [source])
    assert not isinstance(caught.value, ExportInputError)


@pytest.mark.parametrize("name", ["NOTES.txt", "data/mine.parquet", "vocab/sub/t2d-4.npy", ".git/config"])
def test_a_file_of_ones_own_in_an_export_is_not_lost(tmp_path, name):
    """It is named; nothing is replaced until it has been moved."""
    source = dataset(tmp_path, [response("a")])
    export(tmp_path, [source])
    (tmp_path / "export" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "export" / name).write_text("mine")
    assert export(tmp_path, [source]).unchanged
    before = hashes(tmp_path / "export")
    with pytest.raises(ExportError, match=f"holds '{re.escape(name)}'"):
        export(tmp_path, [source], seed=5)
    assert hashes(tmp_path / "export") == before
    (tmp_path / "export" / name).unlink()
    assert not export(tmp_path, [source], seed=5).unchanged


@pytest.mark.parametrize(
    ("manifest", "error"), [('{"name": "app", "version": 3}', "not of an export"), (None, "no manifest.json")]
)
def test_the_manifest_of_something_else_makes_no_export(tmp_path, manifest, error):
    """Nor has a folder one that has a card alone."""
    source = dataset(tmp_path, [response("a")])
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "README.md").write_text("mine")
    if manifest:
        (tmp_path / "export" / "manifest.json").write_text(manifest)
    with pytest.raises(ExportError, match=error):
        export(tmp_path, [source])
    assert (tmp_path / "export" / "README.md").read_text() == "mine"


def test_what_others_make_of_an_export_is_in_nobodys_way(tmp_path):
    """Caches of datasets and of the Hub, and the arrays as torch files."""
    source = dataset(tmp_path, [response("a")])
    export(tmp_path, [source], formats=FORMATS[:3])
    for name in (
        "arrow/train/cache-12ab.arrow",
        "vocab/vocab_mapping.pt",
        ".cache/huggingface/x",
        ".DS_Store",
    ):
        (tmp_path / "export" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "export" / name).touch()
    assert export(tmp_path, [source], seed=5).total.rows == 1


def test_a_dataset_name_makes_no_path(tmp_path):
    """A hostile name is text in a column and in a table cell."""
    folder = dataset(tmp_path, [response("a")]).folder
    export(tmp_path, [ExportDataset("../../e|vil\n# x", folder, "complete")])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".export.lock", "d", "export"]
    assert read_parquet(tmp_path, "train")[0]["dataset"] == "../../e|vil\n# x"
    assert "| ../../e\\|vil # x |" in (tmp_path / "export" / "README.md").read_text()


def test_card_names_the_counts_and_loads(tmp_path):
    """The card's figures are the manifest's and its Python runs."""
    export(tmp_path, [dataset(tmp_path, [response(f"r{n}") for n in range(1234)])])
    card = (tmp_path / "export" / "README.md").read_text()
    assert "| total |  | 1,234 | 6,170 | 3,702 |" in card
    assert "path: data/train-*.parquet" in card
    assert "path: data/eval-*.parquet" not in card
    code = card.split("```python\n")[1].split("```")[0]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "export", check=True)


def rewrite(path, change):
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[1]["loss_mask"].__setitem__(0, 1),
        lambda rows: rows[1]["loss_mask"].__setitem__(slice(None), [0, 0, 2, 1, 0]),
        lambda rows: rows[1]["input_ids"].append(7),
        lambda rows: rows[1]["input_ids"].__setitem__(0, 99),
        lambda rows: rows[1].update(n_loss=2, loss_mask=[0, 0, 0, 1, 1]),
        lambda rows: rows.pop(),
    ],
)
def test_the_self_check_finds_a_damaged_file(tmp_path, change):
    """A mask, an id, a length or a row that is not what was written is an error."""
    report = export(tmp_path, [dataset(tmp_path, [response(f"r{n}") for n in range(3)])], formats=["parquet"])
    entry = report.files[0]
    check_parquet(tmp_path / "export", entry)
    rewrite(tmp_path / "export" / entry.path, change)
    with pytest.raises(ExportError, match=r"train-00000\.parquet"):
        check_parquet(tmp_path / "export", entry)


def test_a_failed_self_check_keeps_the_old_export(tmp_path, monkeypatch):
    """What does not check is never swapped in."""
    source = dataset(tmp_path, [response("a")])
    export(tmp_path, [source])
    before = hashes(tmp_path / "export")
    real = export_parquet._to_record_batch

    def drop_mask(rows):
        batch = real(rows)
        ids = batch.column("input_ids")
        zeros = pa.ListArray.from_arrays(ids.offsets, pa.array([0] * len(ids.values), pa.uint8()))
        return batch.set_column(2, SCHEMA.field("loss_mask"), zeros)

    monkeypatch.setattr(export_parquet, "_to_record_batch", drop_mask)
    with pytest.raises(ExportError, match="n_loss"):
        export(tmp_path, [source], seed=5)
    assert hashes(tmp_path / "export") == before


@given(key=st.integers(0, 2**64 - 1), seed=st.integers(0, 9), low=st.floats(0, 0.5), more=st.floats(0, 0.5))
def test_a_larger_fraction_only_adds_to_eval(key, seed, low, more):
    """Raising eval_fraction moves no conversation back to train."""
    if assign_split(key, seed=seed, eval_fraction=low) == "eval":
        assert assign_split(key, seed=seed, eval_fraction=low + more) == "eval"


def test_split_follows_the_fraction_and_the_seed():
    """About the asked share is in eval, and another seed takes others."""
    keys = range(4000)
    chosen = [{n for n in keys if assign_split(n, seed=seed, eval_fraction=0.1) == "eval"} for seed in (0, 1)]
    assert all(330 < len(split) < 470 for split in chosen)
    assert len(chosen[0] & chosen[1]) < 100
