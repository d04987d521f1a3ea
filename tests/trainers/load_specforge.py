"""Runs in the export's folder with SpecForge's interpreter: what its own code makes of the files, as JSON.

python load_specforge.py OUT JSONL... (further prompt files, to be loaded the same way)
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from datasets import load_dataset
from specforge.config import load_config
from specforge.core.compact_teacher import validate_vocab_mapping_consistency
from specforge.data.preprocessing import process_token_dict_to_mappings
from specforge.data.prompt_builder import prepare_prompt_tasks
from specforge.modeling.draft.base import Eagle3DraftModel

MAX_LENGTH = 1 << 20  # nothing is cut here
MORE_THAN_SEEN = 1000  # a draft vocabulary that the seen ids do not fill


class Buffers(torch.nn.Module):
    """As much of a draft model as load_vocab_mapping fills."""

    def __init__(self, draft_size, target_size):
        super().__init__()
        self.register_buffer("d2t", torch.zeros(draft_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(target_size, dtype=torch.bool))


def load_prompts(path, data):
    """The rows as online training takes them from data.prompts_path."""
    tasks = prepare_prompt_tasks(
        path,
        tokenizer=None,
        chat_template=data.chat_template,
        max_length=MAX_LENGTH,
        is_preformatted=data.is_preformatted,
        train_only_last_turn=data.train_only_last_turn,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
    )
    return [task["payload"] for task in tasks]


def load_with_datasets(kind, pattern):
    """The rows of both splits, with their names, as `datasets` reads the files."""
    files = {split: pattern.format(split) for split in ("train", "eval")}
    return [
        {key: row[key] for key in ("id", "input_ids", "loss_mask")}
        for rows in load_dataset(kind, data_files=files).values()
        for row in rows
    ]


def load_vocab(path):
    """The map as a draft model gets it; copy_ would cast, so the types are told."""
    saved = torch.load(path, weights_only=True)
    validate_vocab_mapping_consistency(saved["t2d"], saved["d2t"])
    model = Buffers(len(saved["d2t"]), len(saved["t2d"]))
    Eagle3DraftModel.load_vocab_mapping(model, path)
    return {
        "types": {name: str(tensor.dtype) for name, tensor in saved.items()},
        "d2t": model.d2t.tolist(),
        "ids": model.t2d.nonzero().flatten().tolist(),
        "target_vocab_size": len(model.t2d),
    }


def build_map(counts, draft_size, target_size):
    """The ids that SpecForge itself chooses."""
    d2t, t2d = process_token_dict_to_mappings(counts, draft_size, target_size)
    validate_vocab_mapping_consistency(t2d, d2t)
    return t2d.nonzero().flatten().tolist()


def main(out, more):
    config = load_config("configs/specforge.yaml")
    train = load_prompts(config.data.prompts_path, config.data)
    vocab = load_vocab(config.model.vocab_mapping_path)
    seen = Counter()
    for row in train:
        seen.update(i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m)
    by_id = Counter(dict(sorted(seen.items())))
    sizes = len(vocab["d2t"]), vocab["target_vocab_size"]
    found = {
        "prompts": train + load_prompts("jsonl/eval.jsonl", config.data),
        "more": [load_prompts(path, config.data) for path in more],
        "json": load_with_datasets("json", "jsonl/{}.jsonl"),
        "parquet": load_with_datasets("parquet", "data/{}-*.parquet"),
        "vocab": vocab,
        "own_vocab": build_map(Counter(seen), *sizes),
        "own_vocab_by_id": build_map(Counter(by_id), *sizes),
        "own_vocab_filled": build_map(Counter(by_id), MORE_THAN_SEEN, sizes[1]),
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
