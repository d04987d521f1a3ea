"""The Arrow folder, the draft vocabulary and the trainers' settings of an export."""

import json
import resource
import shlex
import subprocess
import sys

import datasets
import numpy as np
import pytest
import yaml
from export_support import dataset, export, hashes, manifest, read_jsonl, read_parquet, response
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.export.configs import Target
from tasks.export.files import ExportInputError, FileEntry, HashedFile
from tasks.export.formats import jsonl as export_jsonl
from tasks.export.formats.arrow import ArrowSink
from tasks.tokens.draft_vocab import build_vocab_map

TARGET = Target("org/model", vocab_size=20)
ALL = {"formats": ("parquet", "jsonl", "arrow", "vocab"), "draft_vocab_size": 6, "target": TARGET}


def load_arrow(root, split):
    """What `datasets` reads; it wants torch only to hand out tensors, so it is asked for arrays."""
    folder = root / "export" / "arrow" / split
    state = json.loads((folder / "state.json").read_text())
    assert state["_format_type"] == "torch"
    (folder / "state.json").write_text(json.dumps({**state, "_format_type": None}))
    return datasets.load_from_disk(str(folder)).with_format("numpy")


@pytest.mark.parametrize("tokens_per_shard", [1_000_000, 60, 1])
def test_datasets_reads_every_row_of_the_arrow_folder(tmp_path, tokens_per_shard):
    """As Parquet has them: in order, exact, with the types of the design; also in many shards."""
    rows = [response(f"r{n}", output=range(2, 4 + n % 5)) for n in range(60)]
    options = {"eval_fraction": 0.3, "tokens_per_group": 30, "tokens_per_shard": tokens_per_shard}
    export(tmp_path, [dataset(tmp_path, rows)], formats=("parquet", "arrow"), **options)
    for split in ("train", "eval"):
        wanted, found = read_parquet(tmp_path, split), load_arrow(tmp_path, split)
        assert len(found) == len(wanted) > 5
        assert {name: str(kind.feature.dtype) for name, kind in list(found.features.items())[:2]} == {
            "input_ids": "int32",
            "loss_mask": "uint8",
        }
        for row, got in zip(wanted, found, strict=True):
            assert got["input_ids"].tolist() == row["input_ids"]
            assert got["loss_mask"].tolist() == row["loss_mask"]
            assert got["seq_len"] == row["n_tokens"]
    shards = sorted(p.name for p in (tmp_path / "export" / "arrow" / "train").glob("*.arrow"))
    assert shards == [f"data-{n:05d}-of-{len(shards):05d}.arrow" for n in range(len(shards))]
    assert (len(shards) == 1) == (tokens_per_shard == 1_000_000)


def test_the_fingerprint_of_the_arrow_folder_is_its_content(tmp_path):
    """`datasets` caches by it: other rows have another, the same rows the same on any day."""
    prints = []
    for folder, output in (("a", (3, 4)), ("b", (3, 4)), ("c", (3, 5))):
        root = tmp_path / folder
        export(root, [dataset(root, [response("r", output=output)])], formats=["arrow"])
        state = json.loads((root / "export" / "arrow" / "train" / "state.json").read_text())
        prints.append(state["_fingerprint"])
    assert prints[0] == prints[1] != prints[2]


def test_an_arrow_folder_in_the_making_is_let_go(tmp_path):
    """Closing a sink that was never finished, or never written to, says nothing."""
    ArrowSink(tmp_path).close()


def read_vocab(root, size):
    folder = root / "export" / "vocab"
    return {name: np.load(folder / f"{name}.npy") for name in (f"d2t-{size}", f"t2d-{size}", "token_freq")}


@settings(max_examples=20, deadline=None)
@given(answers=st.lists(st.lists(st.integers(0, 19), min_size=2, max_size=9), max_size=12), data=st.data())
def test_the_vocabulary_is_counted_on_the_answers_of_the_train_split(tmp_path_factory, answers, data):
    """Not on prompts and not on eval; the files are the map of those counts."""
    root = tmp_path_factory.mktemp("vocab")
    size = data.draw(st.integers(1, 20))
    rows = [response(f"r{n}", prompt=(19, 18), output=answer) for n, answer in enumerate(answers)]
    sources = [dataset(root, rows[:5], "x"), dataset(root, rows[5:], "y")]
    export(root, sources, **ALL | {"draft_vocab_size": size, "tokens_per_group": 10}, eval_fraction=0.3)
    train = {row["id"] for row in read_parquet(root, "train")}
    counts = np.zeros(20, np.int64)
    for row in rows:
        if row.id in train:
            np.add.at(counts, row.output_ids, 1)
    wanted = build_vocab_map(counts, draft_vocab_size=size, target_vocab_size=20)
    found = read_vocab(root, size)
    assert found["token_freq"].tolist() == counts.tolist()
    assert (found[f"d2t-{size}"].dtype, found[f"t2d-{size}"].dtype) == (np.int64, np.bool_)
    assert np.array_equal(found[f"d2t-{size}"], wanted.d2t)
    assert np.array_equal(found[f"t2d-{size}"], wanted.t2d)


def test_the_manifest_has_the_coverage_of_each_dataset(tmp_path):
    """Share of loss tokens in the draft vocabulary, and a curve; the card says the same."""
    sources = [
        dataset(tmp_path, [response("a", output=[1, 1, 1, 2])], "x"),
        dataset(tmp_path, [response("b", output=[1, 3, 3, 3])], "y"),
    ]
    export(tmp_path, sources, **ALL | {"draft_vocab_size": 2})
    found = manifest(tmp_path)["vocab"]
    assert [(one["name"], one["coverage"]) for one in found["datasets"]] == [("x", 0.75), ("y", 1.0)]
    assert found["total"] == {"loss_tokens": 8, "ids": 3, "coverage": 0.875}
    assert found["curve"] == [{"draft_vocab_size": 20, "coverage": 1.0}]
    assert "| x | 4 | 2 | 75.00% |" in (tmp_path / "export" / "README.md").read_text()


def test_without_torch_there_is_a_script_and_the_manifest_says_so(tmp_path):
    """It is Python that makes both files where torch is."""
    export(tmp_path, [dataset(tmp_path, [response("a")])], **ALL)
    names = {p.name for p in (tmp_path / "export" / "vocab").iterdir()}
    assert names == {"d2t-6.npy", "t2d-6.npy", "token_freq.npy", "to_pt.py"}
    assert "to_pt.py" in manifest(tmp_path)["vocab"]["pt_files"]


FAKE_TORCH = """
import pickle
def from_numpy(array): return array
def save(value, path): path.write_bytes(pickle.dumps(value))
"""


def test_the_script_makes_what_trainers_load(tmp_path):
    """SpecForge takes d2t and t2d, speculators a dict of the ids that were seen."""
    export(tmp_path, [dataset(tmp_path, [response("a", output=(3, 4, 4))])], **ALL)
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    script = tmp_path / "export" / "vocab" / "to_pt.py"
    subprocess.run([sys.executable, str(script)], check=True, env={"PYTHONPATH": str(tmp_path)})
    mapping = np.load(script.parent / "vocab_mapping.pt", allow_pickle=True)
    assert mapping["t2d"].tolist() == np.load(script.parent / "t2d-6.npy").tolist()
    assert mapping["d2t"].tolist() == np.load(script.parent / "d2t-6.npy").tolist()
    assert np.load(script.parent / "token_freq.pt", allow_pickle=True) == {3: 1, 4: 2}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"formats": ["jsonl"]}, "not one of the formats"),
        ({"draft_vocab_size": None}, "none was asked for (draft_vocab_size is 0)"),
        ({"target": None}, "details.target_vocab_size"),
        ({"target": Target(vocab_size=0)}, "details.target_vocab_size in run.json is 0"),
    ],
)
def test_a_vocabulary_that_is_left_out_is_explained(tmp_path, options, reason):
    """Without the format, a size, or the number of the target's ids; the rest is exported."""
    report = export(tmp_path, [dataset(tmp_path, [response("a")])], **ALL | options)
    assert not (tmp_path / "export" / "vocab").exists()
    assert reason in manifest(tmp_path)["vocab"]["left_out"]
    assert report.total.rows == 1


def test_a_vocabulary_larger_than_the_targets_is_refused(tmp_path):
    """Before anything is written, with both sizes."""
    with pytest.raises(ValueError, match="draft_vocab_size is 21, but the target has 20 ids"):
        export(tmp_path, [dataset(tmp_path, [response("a")])], **ALL | {"draft_vocab_size": 21})
    assert not (tmp_path / "export").exists()


def test_an_id_that_the_target_lacks_stops_the_export(tmp_path):
    """Named with its dataset: the map would be wrong, and a trainer would fail on it."""
    message = "dataset 'd' has the id 20, but the target has 20 ids; if details.target_vocab_size in run.json"
    with pytest.raises(ExportInputError, match=message):
        export(tmp_path, [dataset(tmp_path, [response("a", output=(20, 1))])], **ALL)
    assert not (tmp_path / "export").exists()


def test_the_settings_of_the_trainers_name_files_that_are_there(tmp_path):
    """From the export's folder."""
    export(tmp_path, [dataset(tmp_path, [response("a")])], **ALL)
    folder = tmp_path / "export"
    config = yaml.safe_load((folder / "configs" / "specforge.yaml").read_text())
    assert config["model"]["target_model_path"] == "org/model"
    assert config["model"]["vocab_mapping_path"] == "vocab/vocab_mapping.pt"
    assert (folder / config["data"]["prompts_path"]).exists()
    commands = (folder / "configs" / "speculators.md").read_text()
    for path in ("arrow/train", "jsonl/train.jsonl", "vocab/d2t-6.npy", "vocab/t2d-6.npy"):
        assert path in commands
        assert (folder / path).exists()


@pytest.mark.parametrize("formats", [["arrow"], ["arrow", "vocab"]])
def test_the_drafter_is_trained_as_sglang_computes_it(tmp_path, formats):
    """The train command turns off the two defaults of speculators that SGLang's EAGLE-3 does not have."""
    export(tmp_path, [dataset(tmp_path, [response("a")])], **ALL | {"formats": formats})
    text = (tmp_path / "export" / "configs" / "speculators.md").read_text().replace("\\\n", " ")
    [command] = [shlex.split(line) for line in text.splitlines() if line.startswith("speculators train ")]
    assert "--no-norm-before-residual" in command
    assert command[command.index("--full-attention-indices") + 1 :][:1] == ["0"]
    assert ("--d2t-path" in command) == ("vocab" in formats)


def test_settings_speak_of_no_format_that_is_not_there(tmp_path):
    """Arrow alone is for speculators; without a vocabulary there are no flags for it."""
    export(tmp_path, [dataset(tmp_path, [response("a")])], formats=["arrow"])
    assert [p.name for p in (tmp_path / "export" / "configs").iterdir()] == ["speculators.md"]
    assert "d2t" not in (tmp_path / "export" / "configs" / "speculators.md").read_text()
    assert "prepare-data" not in (tmp_path / "export" / "configs" / "speculators.md").read_text()


def test_all_formats_are_the_same_bytes_twice(tmp_path):
    """Whatever the threads did meanwhile."""
    found = []
    for folder in ("a", "b"):
        rows = [response(f"r{n}", output=range(2, 4 + n % 9)) for n in range(200)]
        source = dataset(tmp_path / folder, rows)
        export(tmp_path / folder, [source], **ALL, eval_fraction=0.2, tokens_per_group=50, rows_per_file=30)
        found.append(hashes(tmp_path / folder / "export"))
    assert found[0] == found[1]


@given(st.lists(st.integers(2, 9), min_size=1, max_size=12), st.integers(1, 12))
@settings(max_examples=40)
def test_rows_of_any_length_are_whole_lines(tmp_path_factory, lengths, tokens_per_write):
    """However many of them are written at once."""
    root = tmp_path_factory.mktemp("lines")
    rows = [response(f"r{n}", range(n % 3), range(length)) for n, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_jsonl, "_TOKENS_PER_WRITE", tokens_per_write)
        export(root, [dataset(root, rows)])
    wanted = [
        {name: row[name] for name in ("id", "input_ids", "loss_mask")} for row in read_parquet(root, "train")
    ]
    assert read_jsonl(root, "train") == wanted
    assert [sum(row["loss_mask"]) for row in wanted] == lengths


@pytest.mark.parametrize("size", [1 << 21, 99])
def test_a_full_disk_names_the_file(tmp_path, size):
    """At the write, or when the rest is written out."""
    file, limits = HashedFile(tmp_path, FileEntry("data", "jsonl")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*/data'"), file:
            file.write(bytes(size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
