"""The ten datasets of the catalog, from rows in their published schemas to training data.

The rows are in tests/fixtures, a file a dataset, odd ones among them; sets that are published as parquet are
read as parquet. EXPECTED says what becomes of each row, and why.
"""

import json
import os
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_support import Runner
from transformers import AutoTokenizer

from flows.catalog import CATALOG
from serving.embedded.model import resolve_model

pytestmark = [pytest.mark.prefect, pytest.mark.embedded]

FIXTURES = Path(__file__).parents[1] / "fixtures"
AS_PARQUET = {"B2_opencodeinstruct", "B4_mixturethoughts", "B5_openthoughts", "B6_ultrachat", "B8_sweagent"}
ON_THE_HUB = {"source", "subset", "split", "revision"}
PROMPT_BEGIN, END = "<|im_start|>assistant\n", "<|im_end|>"


@dataclass(frozen=True)
class Fate:
    """What becomes of a set's rows: the numbers of those that are no prompt by reason, the rest by count.

    `prompts` counts answers, of which a conversation may get several; `set_aside` those that cannot be asked
    for, or that this model cannot be shown to have given.
    """

    rows: int
    duplicates: int
    rejected: dict[str, list[int]]
    prompts: int
    set_aside: dict[str, int] = field(default_factory=dict)


EXPECTED = {
    # Row 5 begins with the target, before which SmolLM2's template cannot write a prompt.
    "A1_deepswekimi": Fate(
        13, 1, {"no_assistant_turn": [8], "missing_field": [9], "unknown_role": [10], "not_text": [13]},
        8, {"special_token_in_answer": 1, "template_error": 1},
    ),
    # SmolLM2's template shows no tools, no calls and no thoughts: what a target saw would be guessed.
    "A2_kimik25": Fate(
        15, 1, {"several_parts": [5], "bad_tool_call": [8], "not_text": [9], "missing_field": [6, 14]},
        9, {"tool_calls_not_rendered": 1, "tools_not_rendered": 1, "thought_not_rendered": 1},
    ),
    # The second turn of row 12 comes after a long function response; the first one is asked.
    "B1_glaive": Fate(
        13, 1,
        {"bad_tool_call": [4], "bad_tools": [5], "bad_chat": [6], "missing_field": [7], "no_user_turn": [8]},
        10, {"prompt_too_long": 1},
    ),
    "B2_opencodeinstruct": Fate(
        12, 1, {"no_user_turn": [3, 5], "missing_field": [4]}, 8, {"prompt_too_long": 1}
    ),
    "B3_magicoder": Fate(
        13, 1, {"malformed_row": [5, 8, 10], "bad_field": [6], "missing_field": [7], "no_user_turn": [9]},
        6, {"prompt_too_long": 1},
    ),
    "B4_mixturethoughts": Fate(
        12, 1, {"no_user_turn": [6, 8], "missing_field": [7], "unknown_role": [9]}, 7, {"prompt_too_long": 1}
    ),
    # The duplicate has another system prompt, which is dropped.
    "B5_openthoughts": Fate(
        12, 1, {"no_user_turn": [6, 7], "missing_field": [8], "unknown_role": [9]}, 7, {"prompt_too_long": 1}
    ),
    "B6_ultrachat": Fate(
        13, 1, {"no_user_turn": [7, 8], "unknown_role": [9], "missing_field": [13]},
        13, {"prompt_too_long": 1},
    ),
    "B7_sharegpt": Fate(
        17, 1,
        {
            "tool_turns": [7, 8], "bad_json": [10], "no_user_turn": [11], "missing_field": [12],
            "malformed_row": [13], "unknown_role": [14],
        },
        13, {"prompt_too_long": 1},
    ),
    "B8_sweagent": Fate(
        14, 1,
        {
            "no_user_turn": [6], "missing_field": [7], "unknown_role": [8], "bad_json": [13],
            "bad_tool_call": [14],
        },
        14, {"prompt_too_long": 1},
    ),
}  # fmt: skip
TRAJECTORIES = ("A1_deepswekimi", "A2_kimik25")
CHATS = ("B6_ultrachat", "B7_sharegpt")


def read_fixture(path):
    """Its rows, in order."""
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_parquet(path, rows):
    """A column for each field that a row has, nulls where it has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)


def to_dataset(name, settings, folder):
    """The catalog's dataset, over its fixture."""
    [path] = FIXTURES.glob(f"{name}.*")
    if name in AS_PARQUET:
        rows, path = read_fixture(path), folder / f"{name}.parquet"
        write_parquet(path, rows)
    kept = {key: value for key, value in settings.items() if key not in ON_THE_HUB}
    return {"name": name, "source": str(path), **kept}


@pytest.fixture(scope="module")
def run(tmp_path_factory, prefect_url, tokenizer_dir):
    """One run of all ten, greedy and with short answers; every prompt is asked."""
    folder = tmp_path_factory.mktemp("ten")
    runner = Runner(folder, tokenizer_dir, env={**os.environ, "PREFECT_API_URL": prefect_url})
    catalog = tomllib.loads(CATALOG.read_text())
    lane = {"concurrency": 4, "max_new_tokens": 24}
    runner.raw |= {
        "target": {"tool_calls_as_text": True},  # the model's template shows no calls
        "server": {"mode": "embedded", "slots": 4, "context_length": 1024},
        "lanes": {"long_prompt_tokens": 400, "short": lane, "long": lane},
        "sampling": {"temperature": 0.0},
        "datasets": [to_dataset(name, settings, folder) for name, settings in catalog.items()],
    }
    done = runner.run(timeout=800)
    assert done.returncode == 0, done.stderr
    return runner


@pytest.fixture(scope="module")
def tokenizer():
    """The embedded model's own."""
    return AutoTokenizer.from_pretrained(resolve_model("demo").tokenizer_dir)


@pytest.fixture(scope="module")
def exported(run):
    """The rows of the export by dataset, and there by id."""
    rows = {name: {} for name in EXPECTED}
    for file in (run.output_dir / "export" / "data").glob("*.parquet"):
        for row in pq.read_table(file).to_pylist():
            rows[row["dataset"]][row["id"]] = row
    return rows


def read_lines(run, name, file):
    """The lines of one of a dataset's files."""
    text = (run.output_dir / name / file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_table_has_every_dataset_of_the_catalog():
    """In its order."""
    assert list(EXPECTED) == list(tomllib.loads(CATALOG.read_text()))


@pytest.mark.parametrize("name", EXPECTED)
def test_what_becomes_of_each_row_is_counted(run, exported, name):
    """A row is a prompt, a duplicate or rejected with its place; a prompt is answered or rejected."""
    fate = EXPECTED[name]
    report = json.loads((run.output_dir / name / "prepare.json").read_text())
    aside = read_lines(run, name, "rejected.jsonl")
    rejected = {}
    for one in aside:
        if one["stage"] == "prepare":
            rejected.setdefault(one["reason"], []).append(int(one["where"].rpartition(":")[2]))
            assert one["where"].startswith(f"{name}.")
    assert rejected == fate.rejected
    assert report["rows_read"] == fate.rows
    assert report["duplicates"] == fate.duplicates
    assert report["rejected"] == {reason: len(rows) for reason, rows in fate.rejected.items()}
    n_rejected = sum(report["rejected"].values())
    assert report["conversations"] == fate.rows - fate.duplicates - n_rejected
    assert report["prompts"] == fate.prompts

    set_aside = Counter(one["reason"] for one in aside if one["stage"] == "generate")
    # A turn of a chat is asked only if the one before was answered whole, which is up to the model.
    unasked = set_aside.pop("no_history") if name in CHATS else 0
    assert set_aside == fate.set_aside
    answers = run.rows(name)
    assert len(answers) == fate.prompts - set_aside.total() - unasked
    assert len(exported[name]) == len(answers)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in TRAJECTORIES])
def test_answers_are_exported_as_they_were_seen_and_made(run, exported, tokenizer, name):
    """The ids of prompt and answer, the mask on the answer alone."""
    for row in run.rows(name):
        trained = exported[name][f"{row['id']}#{row['turn']}" if row["turn"] else row["id"]]
        assert trained["input_ids"] == row["input_ids"] + row["output_ids"]
        assert trained["loss_mask"] == [0] * len(row["input_ids"]) + [1] * len(row["output_ids"])
        assert tokenizer.decode(row["input_ids"]).endswith(PROMPT_BEGIN)
        assert tokenizer.decode(row["output_ids"], skip_special_tokens=True) == row["text"]


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_trajectories_are_marked_on_the_turns_of_the_target(run, exported, tokenizer, name):
    """Each of its turns with the token that ended it, and nothing else."""
    said = {
        one["id"]: [turn["content"] for turn in one["messages"] if turn["role"] == "assistant"]
        for one in read_lines(run, name, "prompts.jsonl")
    }
    for row in exported[name].values():
        pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
        stretches = [(marked, [one[0] for one in ids]) for marked, ids in groupby(pairs, lambda one: one[1])]
        texts = [tokenizer.decode(ids) for marked, ids in stretches if marked]
        assert texts == [f"{text}{END}" for text in said[row["id"]]]
        assert tokenizer.decode(stretches[0][1]).endswith(PROMPT_BEGIN)


@pytest.mark.parametrize(
    ("name", "number"), [("A1_deepswekimi", 1), ("A1_deepswekimi", 6), ("A2_kimik25", 1), ("A2_kimik25", 10)]
)
def test_a_trajectory_is_the_ids_of_its_row(exported, tokenizer, name, number):
    """As the template writes it: with calls as text, odd characters, two turns of the target in a row."""
    messages = read_fixture(FIXTURES / f"{name}.jsonl")[number - 1]["messages"]
    text = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [row["n_tokens"] for row in exported[name].values() if row["input_ids"] == ids] == [len(ids)]


def find_prompts(run, tokenizer, name, part):
    """The texts of the prompts that have this in them, by turn."""
    texts = [(row["turn"], tokenizer.decode(row["input_ids"])) for row in run.rows(name)]
    return {turn: text for turn, text in texts if part in text}


def test_tools_and_agents_are_asked_on_the_history_of_the_row(run, tokenizer):
    """Its calls and what came of them, whatever the target answered to the turn before."""
    glaive = find_prompts(run, tokenizer, "B1_glaive", "When is high tide in Larkhaven?")
    assert sorted(glaive) == [0, 1, 2]
    assert "02:10" not in glaive[0]
    assert '<tool_call>{"name": "get_tide", "arguments": {"harbour": "Larkhaven"}}</tool_call>' in glaive[1]
    assert "At 02:10." in glaive[2]
    agent = find_prompts(run, tokenizer, "B8_sweagent", "cat table.py")
    assert sorted(agent) == [1]
    assert "SETTING: You are an autonomous programmer." in agent[1]


def test_chats_are_asked_on_the_answers_of_the_target(run, tokenizer):
    """The answer of the row is nowhere; one that was cut is in no later prompt."""
    asked = 0
    for name in CHATS:
        answers = {(row["id"], row["turn"]): row for row in run.rows(name)}
        for (one, number), row in answers.items():
            if number:
                asked += 1
                before = answers[one, number - 1]
                assert before["finish_reason"] == "stop"
                text = tokenizer.decode(row["input_ids"])
                assert f"{PROMPT_BEGIN}{before['text']}{END}" in text
    assert asked >= 2


def test_thoughts_and_formats_of_other_models_are_in_no_prompt(run, tokenizer):
    """Neither in the history nor in a system prompt."""
    for name in ("B4_mixturethoughts", "B5_openthoughts"):
        prompts = [tokenizer.decode(row["input_ids"]) for row in run.rows(name)]
        assert not [text for text in prompts if "think>" in text or "_of_thought" in text]
