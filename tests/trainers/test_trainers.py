"""The real trainers load an export with their own code, and every id and mask is the raw response's.

make test-trainers; or, with their interpreters at hand:
SPECFORGE_PYTHON=... SPECULATORS_PYTHON=... pytest tests/trainers -m trainers
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from trainer_support import (
    TARGET_VOCAB_SIZE,
    check_rows,
    count_trained,
    read_export,
    read_truth,
    write_changed,
    write_run,
)
from transformers import AutoTokenizer

from tasks.export.configs import Target
from tasks.export.export_run import FORMATS, export_run
from tasks.export.rows import ExportDataset
from tasks.tokens.draft_vocab import build_vocab_map

pytestmark = pytest.mark.trainers
HERE = Path(__file__).parent
UNNAMED = ("input_ids", "loss_mask")  # trainers drop the id
DRAFT_VOCAB_SIZE = 64


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run's output and its export, with the vocabulary's .pt files made where torch is."""
    folder = tmp_path_factory.mktemp("run")
    export_run(
        datasets=[ExportDataset(name, folder / name, "complete") for name in write_run(folder)],
        out_dir=folder / "export",
        eval_fraction=0.2,
        seed=0,
        formats=FORMATS,
        provenance={},
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        target=Target(model=str(folder / "model"), vocab_size=TARGET_VOCAB_SIZE),
    )
    if (folder / "export/vocab/to_pt.py").exists():
        run_with("SPECFORGE_PYTHON", folder, folder / "export/vocab/to_pt.py")
    return folder


@pytest.fixture(scope="module")
def truth(run_folder):
    """Every row of the raw responses."""
    return read_truth(run_folder)


@pytest.fixture(scope="module")
def specforge(run_folder):
    """What SpecForge made of the export, and of what are no exports: a shifted and a retokenized one."""
    tokenizer = AutoTokenizer.from_pretrained(run_folder / "model")
    files = write_changed(run_folder, tokenizer)
    out = run_folder / "specforge.json"
    run_with("SPECFORGE_PYTHON", run_folder, HERE / "load_specforge.py", out, *files.values())
    found = json.loads(out.read_bytes())
    return found | {"more": dict(zip(files, found["more"], strict=True))}


@pytest.fixture(scope="module")
def speculators(run_folder):
    """What speculators made of it."""
    out, work = run_folder / "speculators.json", run_folder / "work"
    work.mkdir()
    run_with("SPECULATORS_PYTHON", run_folder, HERE / "load_speculators.py", out, work)
    return json.loads(out.read_bytes())


def run_with(variable, run_folder, script, *args):
    """Run a script in the export's folder with a trainer's interpreter."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"needs the interpreter of a trainer: make test-trainers, or give {variable}")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(run_folder / "hf")}
    command = [Path(python).absolute(), script, *args]
    done = subprocess.run(
        command,
        cwd=run_folder / "export",
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_specforge_takes_every_row_of_the_jsonl(specforge, truth):
    """Found by its own reading of configs/specforge.yaml, data.prompts_path gives the exact rows."""
    check_rows(specforge["prompts"], truth, key=UNNAMED)


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_datasets_reads_every_row(specforge, truth, kind):
    """`load_dataset` gives the exact rows with their ids, whatever their meta looks like."""
    check_rows(specforge[kind], truth)


@pytest.mark.parametrize("loaded", ["prepared", "arrow"])
def test_speculators_takes_every_row(speculators, truth, loaded):
    """Its training dataset has the exact rows, from prepare-data on the JSONL and from arrow/ as it is."""
    check_rows(speculators[loaded], truth, key=UNNAMED)


def test_speculators_shifts_by_itself(speculators, truth):
    """Its EAGLE-3 batch has each id with the mask that this id has here: ours must not be shifted before."""
    shifted = [{name: row[name][1:] for name in UNNAMED} for row in truth]
    check_rows(speculators["shifted"], shifted, key=UNNAMED)


def test_a_changed_export_would_not_pass(specforge, truth):
    """A mask that is shifted by one and a text that is tokenized again load as well, and are found."""
    check_rows(specforge["more"]["unchanged"], truth, key=UNNAMED)
    for name in ("shifted", "retokenized"):
        with pytest.raises(AssertionError, match=f"1 of {len(truth)} rows are missing, 1 are none of them"):
            check_rows(specforge["more"][name], truth, key=UNNAMED)


def test_trainers_take_the_vocabulary(run_folder, specforge, speculators):
    """SpecForge from vocab_mapping.pt, speculators from the arrays and from the counts: all the same map."""
    counts = count_trained(read_export(run_folder, "train"))
    ours = build_vocab_map(counts, draft_vocab_size=DRAFT_VOCAB_SIZE, target_vocab_size=TARGET_VOCAB_SIZE)
    expected = {
        "d2t": ours.d2t.tolist(),
        "ids": ours.t2d.nonzero()[0].tolist(),
        "target_vocab_size": TARGET_VOCAB_SIZE,
    }
    assert specforge["vocab"] == expected | {"types": {"d2t": "torch.int64", "t2d": "torch.bool"}}
    assert speculators["vocab"]["arrays"] == speculators["vocab"]["counts"] == expected
    assert {int(token): n for token, n in speculators["counts"].items()} == counts


def test_speculators_counts_the_same(speculators, truth):
    """Its own counts, of both splits here, are those of the raw responses, and so is its own map."""
    counts = count_trained(truth)
    assert {int(token): n for token, n in speculators["prepared_counts"].items()} == counts
    ours = build_vocab_map(counts, draft_vocab_size=DRAFT_VOCAB_SIZE, target_vocab_size=TARGET_VOCAB_SIZE)
    assert speculators["vocab"]["prepared"]["d2t"] == ours.d2t.tolist()


def test_specforge_would_choose_the_same_but_for_ties(run_folder, specforge):
    """Of equally frequent ids SpecForge takes those that its rows had first, we those with the smaller id."""
    counts = count_trained(read_export(run_folder, "train"))
    ours, own = set(specforge["vocab"]["ids"]), set(specforge["own_vocab"])
    assert sum(counts[token] for token in own) == sum(counts[token] for token in ours)
    assert {counts[token] for token in ours ^ own} == {min(counts[token] for token in ours)}
    assert specforge["own_vocab_by_id"] == sorted(ours)
    filled = build_vocab_map(counts, draft_vocab_size=1000, target_vocab_size=TARGET_VOCAB_SIZE)
    assert specforge["own_vocab_filled"] == filled.t2d.nonzero()[0].tolist()
