"""Runs in the export's folder with speculators' interpreter: what its own code makes of the files, as JSON.

python load_speculators.py OUT WORK (an empty folder)
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
from datasets import load_from_disk
from hs_connectors import FileTransfer
from safetensors.torch import save_file
from speculators.cli import app
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import parse_vocab_mappings
from speculators.train.config import TrainConfig
from speculators.train.data import ArrowDataset, CollateFn

MAX_LENGTH = 1 << 17  # nothing is cut here
HIDDEN_SIZE = 4  # of the pretended hidden states


def read_command(name):
    """The words of a command that configs/speculators.md gives, after `speculators`."""
    lines = Path("configs/speculators.md").read_text().replace("\\\n", " ").splitlines()
    return shlex.split(next(line for line in lines if line.startswith(f"speculators {name} ")))[1:]


def prepare(folder):
    """The given prepare-data, on both splits and without cutting."""
    changes = ["--data", "jsonl/eval.jsonl", "--output", str(folder), "--seq-length", str(MAX_LENGTH)]
    app([*read_command("prepare-data"), *changes], standalone_mode=False)


def open_dataset(folder, hidden):
    """The rows as training gets them: beside the hidden states that a server makes of their ids."""
    hidden.mkdir()
    for number, row in enumerate(load_from_disk(folder)):
        states = torch.zeros(len(row["input_ids"]), 2, HIDDEN_SIZE, dtype=torch.bfloat16)
        content = {"token_ids": row["input_ids"], "hidden_states": states}
        save_file(content, hidden / f"hs_{number}.safetensors")
    return ArrowDataset(MAX_LENGTH, folder, transfer=FileTransfer(hidden), on_missing="raise")


def list_rows(dataset):
    rows = [dataset[number] for number in range(len(dataset))]
    assert dataset.approx_lengths == [len(row["input_ids"]) for row in rows]
    return [{key: row[key].tolist() for key in ("input_ids", "loss_mask")} for row in rows]


def list_shifted_rows(dataset):
    """The same rows out of one packed EAGLE-3 batch, which has them without their first place."""
    collate = CollateFn(MAX_LENGTH, HIDDEN_SIZE, num_target_layers=1, preprocess=shift_batch)
    batch = collate([dataset[number] for number in range(len(dataset))])
    places = [batch["document_ids"][0] == number for number in range(len(dataset))]
    return [{key: batch[key][0][here].tolist() for key in ("input_ids", "loss_mask")} for here in places]


def load_vocab(args, **changes):
    """The map as training gets it."""
    d2t, t2d, size = parse_vocab_mappings(argparse.Namespace(**vars(args) | changes))
    assert size == len(d2t)
    return {"d2t": d2t.tolist(), "ids": t2d.nonzero().flatten().tolist(), "target_vocab_size": len(t2d)}


def load_vocabs(work):
    """From the arrays, from the counts that are beside them, and from those that prepare-data makes."""
    args = argparse.Namespace(**TrainConfig.resolve(read_command("train")[1:]).flatten())
    found = {"arrays": load_vocab(args)}
    for name, counts in (("counts", Path("vocab")), ("prepared", work / "prepared")):
        (work / name).mkdir(exist_ok=True)
        paths = {"d2t_path": None, "t2d_path": None, "token_freq_path": str(counts / "token_freq.pt")}
        found[name] = load_vocab(args, data_path=str(work / name), **paths)
    return found


def main(out, work):
    prepare(work / "prepared")
    prepared = open_dataset(work / "prepared", work / "hidden")
    arrow = [open_dataset(f"arrow/{split}", work / f"hidden-{split}") for split in ("train", "eval")]
    found = {
        "prepared": list_rows(prepared),
        "arrow": [row for dataset in arrow for row in list_rows(dataset)],
        "shifted": [row for dataset in arrow for row in list_shifted_rows(dataset)],
        "vocab": load_vocabs(work),
        "counts": torch.load("vocab/token_freq.pt", weights_only=True),
        "prepared_counts": torch.load(work / "prepared" / "token_freq.pt", weights_only=True),
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
