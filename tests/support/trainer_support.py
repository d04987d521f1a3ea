"""A run's folder with every kind of row, the truth about it, and a comparison that is exact.

The truth is read from the raw responses here, without the code that exports them.
"""

import json
import random
from collections import Counter

from tiny_tokenizer import make_tokenizer
from transformers import AutoTokenizer

TARGET_VOCAB_SIZE = 163_840
TEXTS = [
    "the quick brown fox",
    "write a function",
    "naïve café — 東京 🦜",
    "jumps over\u2028the dog\t\\u0000",
]


def write_run(folder):
    """Two datasets of prompts and raw responses, and the target's tokenizer; the names of the datasets."""
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(folder / "model"))
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": TARGET_VOCAB_SIZE}))
    datasets = {"B2_generated": _make_generated(tokenizer), "B10_trajectories": _make_trajectories()}
    for name, rows in datasets.items():
        (folder / name).mkdir()
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name / "raw_responses.jsonl").write_text(lines, encoding="utf-8")
        prompts = {row["id"]: _make_prompt(row["id"]) for row in rows}
        lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts.values())
        (folder / name / "prompts.jsonl").write_text(lines, encoding="utf-8")
    return list(datasets)


def _make_prompt(name):
    """Its words are no part of what is compared; each has its own, for these decide the split."""
    return {"id": name, "messages": [{"role": "user", "content": f"what is asked of {name}"}]}


def read_truth(folder):
    """Every row that is to be exported: id, ids and mask, from the raw responses alone."""
    rows = []
    for path in sorted(folder.glob("*/raw_responses.jsonl")):
        for line in path.read_bytes().splitlines():
            row = json.loads(line)
            for part in row.get("sequences", [row]):
                turn = part.get("turn")
                rows.append({"id": f"{row['id']}#{turn}" if turn else row["id"], **_mask(part)})
    return rows


def read_export(folder, split):
    """The rows of an export's JSONL."""
    lines = (folder / "export" / "jsonl" / f"{split}.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def write_changed(folder, tokenizer):
    """All rows in files of their own: as they are, with one mask shifted, with one text tokenized again."""
    rows = read_export(folder, "train") + read_export(folder, "eval")
    at = next(n for n, row in enumerate(rows) if _tokenize_again(row, tokenizer) != row)
    mask = rows[at]["loss_mask"]
    changed = {
        "unchanged": rows[at],
        "shifted": rows[at] | {"loss_mask": mask[1:] + mask[:1]},
        "retokenized": _tokenize_again(rows[at], tokenizer),
    }
    files = {name: folder / f"{name}.jsonl" for name in changed}
    for name, path in files.items():
        path.write_text(
            "".join(json.dumps(row) + "\n" for row in [*rows[:at], changed[name], *rows[at + 1 :]])
        )
    return files


def check_rows(found, truth, *, key=("id", "input_ids", "loss_mask")):
    """Hold all rows against the truth, whatever their order.

    Raises:
        AssertionError: one is missing, too many, or differs in one id or one place of its mask.
    """
    counted, wanted = ([_freeze(row, key) for row in rows] for rows in (found, truth))
    missing, extra = Counter(wanted) - Counter(counted), Counter(counted) - Counter(wanted)
    if missing or extra:
        raise AssertionError(
            f"{missing.total()} of {len(wanted)} rows are missing, {extra.total()} are none of them; "
            f"the first: {[str(row)[:200] for row in [*list(missing)[:1], *list(extra)[:1]]]}"
        )


def count_trained(rows):
    """How often each id is under a mask."""
    return Counter(i for row in rows for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m)


def _tokenize_again(row, tokenizer):
    """What comes of saving an answer as text."""
    start = row["loss_mask"].index(1)
    output = tokenizer.encode(tokenizer.decode(row["input_ids"][start:]))
    ids = row["input_ids"][:start] + output
    return row | {"input_ids": ids, "loss_mask": [0] * start + [1] * len(output)}


def _freeze(row, key):
    return tuple(tuple(row[name]) if isinstance(row[name], list) else row[name] for name in key)


def _mask(row):
    if "loss_spans" not in row:
        prompt, output = row["input_ids"], row["output_ids"]
        return {"input_ids": prompt + output, "loss_mask": [0] * len(prompt) + [1] * len(output)}
    trained = {place for start, end in row["loss_spans"] for place in range(start, end)}
    ids = row["input_ids"]
    return {"input_ids": ids, "loss_mask": [int(place in trained) for place in range(len(ids))]}


def _make_generated(tokenizer):
    draw = random.Random(7)
    stop = tokenizer.eos_token_id
    rows = []
    for number in range(24):
        text = " ".join(draw.choices(TEXTS, k=draw.randint(1, 4)))
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{number} {text}"}], add_generation_prompt=True, return_dict=False
        )
        cut = number % 5 == 4
        answer = _sample_ids(tokenizer, text, draw) + ([] if cut else [stop])
        # Later rows have a meta of another shape: what must not reach a column of its own.
        extra = {"meta": {"n": [number]} if number > 9 else None, "conversation_id": f"c{number // 2}"}
        rows.append(_row(f"B2-東-{number}", prompt, answer, "length" if cut else "stop", text=text, **extra))
    for turn in range(3):
        prompt = [5, 6, *range(7, 9 + 9 * turn)]
        rows.append(_row("chat", prompt, [40 + turn, 41, stop], turn=turn, conversation_id="chat"))
    rows.append(_row("largest-ids", [TARGET_VOCAB_SIZE - 1, 0], [TARGET_VOCAB_SIZE - 1, 163_000, 0]))
    rows.append(_row("long", [9] * 20_000, draw.choices(range(300), k=12_000), "length"))
    rows.append(_row("one-token", [1, 2, 3], [4], "length"))
    return rows


def _sample_ids(tokenizer, text, draw):
    """The text as a model may say it: not always in the tokens that the tokenizer would choose."""
    ids = []
    for token in tokenizer.encode(text):
        piece = tokenizer.convert_ids_to_tokens(token)
        ids += tokenizer.convert_tokens_to_ids(list(piece)) if draw.random() < 0.5 else [token]
    return ids


def _make_trajectories():
    draw = random.Random(8)
    spans = [[4, 9], [9, 10], [20, 31]]
    rows = [_trajectory(f"t-{n}", draw.choices(range(300), k=40 - n), spans) for n in range(6)]
    parts = [
        {"turn": turn, "input_ids": draw.choices(range(300), k=50), "loss_spans": [[3, 8], [30 + turn, 50]]}
        for turn in range(3)
    ]
    trained = sum(end - start for part in parts for start, end in part["loss_spans"])
    whole = _row("several", [], [], sequences=parts) | {"completion_tokens": trained}
    return [*rows, whole]


def _trajectory(name, ids, spans):
    trained = sum(end - start for start, end in spans)
    counts = {"prompt_tokens": len(ids) - trained, "completion_tokens": trained}
    return _row(name, ids, [], loss_spans=spans) | counts


def _row(name, prompt, output, finish_reason="stop", **extra):
    return {
        "id": name,
        "turn": 0,
        "input_ids": list(prompt),
        "output_ids": list(output),
        "text": "",
        "finish_reason": finish_reason,
        "prompt_tokens": len(prompt),
        "completion_tokens": len(output),
    } | extra
