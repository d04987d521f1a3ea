"""The demo prompt sets: their schema, and the counts that demo/README.md promises."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tasks.prepare.adapters import RowRejected, content_id, get_adapter, make_prompt
from tasks.prepare.sources import SourceRow, iter_rows, resolve_source
from tasks.records.rows import Prompt

DEMO = Path(__file__).parents[2] / "demo"
SETS = ("glaive", "opencodeinstruct", "ultrachat")
LONGEST_LINE_BYTES = 1800  # below 600 tokens, tools included


def read_rows(name: str) -> list[SourceRow]:
    return list(iter_rows(resolve_source(f"{name}.jsonl", base=DEMO)))


def adapt_all(name: str) -> tuple[list[tuple[str, Prompt]], dict[str, str]]:
    """The prompts with their places, and the reasons of the rejected rows."""
    prompts, reasons = [], {}
    for item in read_rows(name):
        try:
            prompts.append((item.where, make_prompt(get_adapter(name)(item.row))))
        except RowRejected as exc:
            reasons[item.where] = exc.reason
    return prompts, reasons


@pytest.mark.parametrize(
    ("name", "rejected", "duplicates", "n_prompts"),
    [
        (
            "glaive",
            {"glaive.jsonl:10": "no_user_turn", "glaive.jsonl:23": "bad_tool_call"},
            ["glaive.jsonl:34"],
            37,
        ),
        (
            "opencodeinstruct",
            {"opencodeinstruct.jsonl:18": "no_user_turn"},
            ["opencodeinstruct.jsonl:30"],
            38,
        ),
        ("ultrachat", {"ultrachat.jsonl:20": "no_user_turn"}, ["ultrachat.jsonl:32"], 38),
    ],
)
def test_the_counts_are_those_of_the_readme(name, rejected, duplicates, n_prompts):
    """40 rows; the odd ones are where the README says they are."""
    prompts, reasons = adapt_all(name)
    seen: set[str] = set()
    repeated = [where for where, p in prompts if (key := content_id(p)) in seen or seen.add(key)]
    assert len(prompts) + len(reasons) == 40
    assert reasons == rejected
    assert repeated == duplicates
    assert len(seen) == n_prompts
    table_row = rf"`{name}\.jsonl` \|.*\| 40 \| {len(rejected)} \| {len(duplicates)} \| {n_prompts} \|"
    assert re.search(table_row, (DEMO / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SETS)
def test_prompts_are_short_enough_for_a_small_model(name):
    """The demo runs on a CPU with a short context."""
    assert all(len(prompt.to_line()) <= LONGEST_LINE_BYTES for _, prompt in adapt_all(name)[0])


def test_glaive_rows_have_the_schema_of_the_set():
    """Both strings keep the quirks of the original."""
    for row in (item.row for item in read_rows("glaive")):
        assert list(row) == ["system", "chat"]
        assert row["system"].startswith("SYSTEM: ")
        assert row["chat"].startswith("USER: ")
        assert row["chat"].count("<functioncall>") == row["chat"].count('"arguments": \'')
    prompts = [prompt for _, prompt in adapt_all("glaive")[0]]
    assert Counter(prompt.messages[-1]["role"] for prompt in prompts) == {"tool": 20, "user": 18}
    assert sum(len(prompt.tools or []) > 1 for prompt in prompts) == 2
    assert sum(prompt.messages[0]["role"] == "system" and not prompt.tools for prompt in prompts) == 7


def test_opencodeinstruct_rows_have_the_schema_of_the_set():
    """All values are strings, some of them JSON, and the scores are those of the statuses."""
    fields = {"id", "input", "output", "domain", "generation_algorithm", "llm_judgement", "unit_tests"}
    rows = [item.row for item in read_rows("opencodeinstruct")]
    assert all(set(row) == fields | {"tests_execution_status", "average_test_score"} for row in rows)
    assert all(isinstance(value, str) for row in rows for value in row.values())
    assert len({row["id"] for row in rows}) == 40
    for row in rows:
        status = json.loads(row["tests_execution_status"])
        assert len(status) == len(json.loads(row["unit_tests"]))
        assert float(row["average_test_score"]) == status.count("pass") / len(status)
        assert "logical_correctness" in json.loads(row["llm_judgement"])


def test_ultrachat_rows_have_the_schema_of_the_set():
    """Roles alternate from the user, prompt repeats the first message, ids are 64 hex digits."""
    for row in (item.row for item in read_rows("ultrachat")):
        assert set(row) == {"prompt", "prompt_id", "messages"}
        assert row["prompt"] == row["messages"][0]["content"]
        assert re.fullmatch(r"[0-9a-f]{64}", row["prompt_id"])
        assert 2 <= len(row["messages"]) <= 6
        roles = [message["role"] for message in row["messages"]]
        assert roles == [("user", "assistant")[i % 2] for i in range(len(roles))]


def test_an_empty_last_turn_is_answered_one_turn_earlier():
    """ultrachat.jsonl:9 keeps its second question as the last turn."""
    prompt = dict(adapt_all("ultrachat")[0])["ultrachat.jsonl:9"]
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "user"]
