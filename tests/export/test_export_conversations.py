"""The lossy format: who said what, as text, and how much of the ids that loses."""

import json

import pytest
from chat_styles import STYLES, expected_answer, make_target
from export_support import dataset, export, hashes, manifest, response, write_prompts

from tasks.export.files import ExportInputError
from tasks.export.formats.conversations import SAMPLE_ROWS, to_plain
from tasks.records.rows import Prompt
from tasks.tokens.rendering import Renderer

ONLY = {"formats": ["conversations"]}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def read_lines(root, split="train"):
    path = root / "export" / "conversations" / f"{split}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_what_was_asked_and_the_answer(tmp_path):
    """Two keys and no other; what is no role or content is lost, but thoughts and calls are text."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    asked = [say("system", "s"), say("user", "q"), say("assistant", "", tool_calls=[call])]
    asked.append(say("tool", "42", name="f"))
    source = dataset(tmp_path, [response("a", text="<think>hm</think>é")])
    write_prompts(source, [Prompt("a", asked, tools=[{"type": "function"}], meta={"m": 1})])
    export(tmp_path, [source], **ONLY)
    [line] = read_lines(tmp_path)
    assert list(line) == ["id", "conversations"]
    assert {key for one in line["conversations"] for key in one} == {"role", "content"}
    assert [one["content"] for one in line["conversations"]] == [
        "s", "q", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "42", "<think>hm</think>é",
    ]  # fmt: skip
    assert to_plain([say("assistant", "a", reasoning_content="t")])[0]["content"] == "<think>t</think>a"


def test_turns_have_the_answers_of_the_run_before_them(tmp_path):
    """Not the source's own; each turn is a line."""
    messages = [say("user", "1"), say("assistant", "row"), say("user", "2")]
    source = dataset(tmp_path, [response("c", text="mine"), response("c", turn=1, text="and mine")])
    write_prompts(source, [Prompt("c", messages, answer_after=[1, 3], own_history=True)])
    export(tmp_path, [source], **ONLY)
    lines = read_lines(tmp_path)
    assert [line["id"] for line in lines] == ["c", "c#1"]
    assert [one["content"] for one in lines[1]["conversations"]] == ["1", "mine", "2", "and mine"]


def test_a_trajectory_is_one_line_whatever_its_rows(tmp_path):
    """Up to its last answer; rows without known texts are counted."""
    spans = [{"turn": n, "input_ids": [1, 2, 3 + n], "loss_spans": [[2, 3]]} for n in range(2)]
    row = response("t", input_ids=[], output_ids=[], sequences=spans, prompt_tokens=4, completion_tokens=2,
                   finish_reason="length")  # fmt: skip
    source = dataset(tmp_path, [row, response("unknown")])
    write_prompts(source, [Prompt("t", [say("user", "q"), say("assistant", "a"), say("user", "left")])])
    report = export(tmp_path, [source], **ONLY)
    assert read_lines(tmp_path) == [{"id": "t", "conversations": [say("user", "q"), say("assistant", "a")]}]
    assert (report.total.rows, report.datasets[0].texts_unknown) == (3, 1)
    assert "Of 1 rows the texts were not found" in (tmp_path / "export" / "README.md").read_text()


@pytest.mark.parametrize("style", STYLES)
def test_the_rate_counts_rows_that_become_other_ids(tmp_path, style):
    """One that the tokenizer would write so, one in other tokens, one that was cut."""
    target = make_target(tmp_path / "tokenizer", "digits", STYLES[style])
    renderer = Renderer(target)
    asked, answer = [say("user", "hello")], "the quick brown fox"
    prompt = renderer.render(Prompt("p", asked))
    same = renderer.encode([expected_answer(style, say("assistant", answer))])[0]
    split = [one for letter in answer for one in renderer.encode([letter])[0]] + same[-1:]
    rows = [
        response("same", prompt, same, text=answer),
        response("split", prompt, split, text=answer),
        response("cut", prompt, same[:-1], text=answer, finish_reason="length"),
    ]
    source = dataset(tmp_path, rows)
    write_prompts(source, [Prompt(row.id, asked) for row in rows])
    report = export(tmp_path, [source], **ONLY, retokenizer=target)
    assert report.conversations == {
        "rows": 3, "measured_rows": 3, "rows_that_differ": 2, "mismatch_rate": pytest.approx(2 / 3),
        "differ_from": {"answer": 1, "end": 1},
    }  # fmt: skip
    card = (tmp_path / "export" / "README.md").read_text()
    assert "2 of 3 rows (66.67%) are other ids" in card
    assert "where that begins: answer 1, end 1." in card
    assert export(tmp_path, [source], **ONLY, retokenizer=target).conversations == report.conversations


def test_where_nothing_is_measured_the_reason_is_there(tmp_path):
    """In the manifest and in the card; another reason is another export."""
    source = dataset(tmp_path, [response("a")])
    write_prompts(source, [Prompt("a", [say("user", "q")])])
    first = export(tmp_path, [source], **ONLY, retokenizer="it is away")
    assert manifest(tmp_path)["conversations"] == {"rows": 1, "not_measured": "it is away"}
    card = (tmp_path / "export" / "README.md").read_text()
    assert "lossy" in card
    assert "not measured: it is away." in card
    assert export(tmp_path, [source], **ONLY, retokenizer="it is gone").key != first.key
    assert export(tmp_path, [source], formats=["jsonl"], retokenizer="x").conversations == {}


def test_without_prompts_there_are_no_conversations(tmp_path):
    """The file that is missing is named; nothing is written."""
    with pytest.raises(ExportInputError, match=r"prompts.jsonl cannot be read"):
        export(tmp_path, [dataset(tmp_path, [response("a")])], **ONLY)
    assert not (tmp_path / "export").exists()


def test_a_large_export_measures_a_part_and_has_the_same_bytes_twice(tmp_path):
    """Whatever threads and batches did."""
    target = make_target(tmp_path / "tokenizer", "gpt2", STYLES["chatml"])
    rows = [response(f"r{n}") for n in range(SAMPLE_ROWS + 20)]
    source = dataset(tmp_path, rows)
    write_prompts(source, [Prompt(row.id, [say("user", row.id)]) for row in rows])
    options = {"formats": ["jsonl", "conversations"], "eval_fraction": 0.2, "retokenizer": target}
    report = export(tmp_path, [source], **options)
    assert (report.conversations["rows"], report.conversations["measured_rows"]) == (len(rows), SAMPLE_ROWS)
    assert len(read_lines(tmp_path)) + len(read_lines(tmp_path, "eval")) == len(rows)
    before = hashes(tmp_path / "export")
    export(tmp_path, [source], formats=["jsonl"])
    export(tmp_path, [source], **options)
    assert hashes(tmp_path / "export") == before
