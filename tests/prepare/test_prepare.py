"""From source rows to prompts.jsonl: nothing lost, nothing doubled, the same bytes each time."""

import dataclasses
import errno
import itertools
import json
import random
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.prepare import parallel_draft
from tasks.prepare import preparation as prepare
from tasks.prepare.adapters import Conversation, content_id, hash_content, make_prompt
from tasks.prepare.preparation import (
    EmptyDatasetError,
    PrepareOptions,
    open_prompts,
    prepare_prompts,
    read_report,
)
from tasks.prepare.prompt_draft import PromptDraft
from tasks.prepare.sources import SourceError, SourceRow, hash_source
from tasks.records.files import remove_stale_temps
from tasks.records.prompt_file import index_path
from tasks.records.response_log import REJECTED
from tasks.records.rows import RecordError, Rejected

OPTIONS = PrepareOptions(name="B2_code", adapter="messages", seed=7)
FILES = ("prompts.jsonl", "prompts.index", "rejected.jsonl", "prepare.json")
BAD_ROWS = ['{"messages": []}', '{"other": 1}', "[1]", "{", '{"messages": "x"}']


def make_row(text, row_id=None):
    row = {"messages": [{"role": "user", "content": text}]}
    return json.dumps({"id": row_id, **row} if row_id is not None else row)


# Few ids and texts: most lists of rows have repeated ids, repeated contents and both.
ROWS = st.lists(
    st.builds(make_row, st.sampled_from("abcde"), st.sampled_from([None, "1", "2", 3]))
    | st.sampled_from(BAD_ROWS),
    max_size=14,
)


def write_source(folder, rows, name="source.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def run(folder, source, **changes):
    options = dataclasses.replace(OPTIONS, **changes)
    return prepare_prompts(folder / "B2", [source], options=options, source_sha256=hash_source([source]))


def read_prompts(folder):
    """The prompts in dispatch order, each of which is found by its id."""
    with closing(open_prompts(folder / "B2")) as prompts:
        found = list(prompts)
        assert [prompts.find(prompt.id) for prompt in found] == list(range(len(prompts)))
    return found


def read_texts(folder):
    return [prompt.messages[-1]["content"] for prompt in read_prompts(folder)]


def read_rejected(folder):
    return [Rejected.from_line(line) for line in (folder / "B2" / REJECTED).read_bytes().splitlines()]


def read_files(folder):
    """What preparation left; the index starts with a time."""
    return {name: (folder / "B2" / name).read_bytes()[24 * name.endswith("index") :] for name in FILES}


def set_aside(folder, prompt_id):
    """Add what generation writes when it gives a prompt up; returns the line."""
    line = Rejected(prompt_id, "http_400", "no", permanent=True, stage="generate").to_line()
    with (folder / "B2" / REJECTED).open("ab") as file:
        file.write(line)
    return line


@settings(max_examples=60)
@given(rows=ROWS)
def test_every_row_becomes_one_prompt_a_duplicate_or_a_rejected_row(rows):
    """The report, the prompts and rejected.jsonl account for every row; ids and contents are unique."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            report = run(folder, write_source(folder, [*rows, make_row("always there")]))
        except SourceError:  # the first lines are no JSON at all
            return
        prompts, rejected = read_prompts(folder), read_rejected(folder)
        assert report.rows_read == len(rows) + 1
        assert report.rows_read == report.conversations + report.duplicates + sum(report.rejected.values())
        assert report.prompts == len(prompts) == len({prompt.id for prompt in prompts})
        assert report.rejected == Counter(row.reason for row in rejected)
        good = [json.loads(row)["messages"][0]["content"] for row in rows if row not in BAD_ROWS]
        assert sorted(read_texts(folder)) == sorted({*good, "always there"})
        assert len({row.where for row in rejected}) == len(rejected)


@settings(max_examples=30)
@given(
    rows=st.dictionaries(
        st.text("abcdef", min_size=1, max_size=4), st.sampled_from([None, "1", "2"]), min_size=1, max_size=12
    ),
    seed=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
)
def test_the_order_of_the_rows_decides_nothing(rows, seed, order):
    """Rows of distinct content give the same ids in the same dispatch order, repeated ids included."""
    lines = [make_row(text, row_id) for text, row_id in rows.items()]
    with tempfile.TemporaryDirectory() as name:
        one, other = Path(name) / "one", Path(name) / "other"
        run(one, write_source(one, lines), seed=seed)
        order.shuffle(lines)
        run(other, write_source(other, lines), seed=seed)
        assert read_prompts(one) == read_prompts(other)


def test_a_second_run_elsewhere_gives_the_same_bytes(tmp_path):
    """Nothing of the place, the time or the process is in the files."""
    rows = [make_row(str(n), n % 5) for n in range(50)] + BAD_ROWS
    for name in ("one", "other"):
        run(tmp_path / name, write_source(tmp_path / name, rows))
    assert read_files(tmp_path / "one") == read_files(tmp_path / "other")


def test_repeated_ids_are_told_apart_by_content(tmp_path):
    """One prompt keeps the id, the others add their content's; a repeated content is a duplicate."""
    source = write_source(tmp_path, [make_row("a", 1), make_row("b", 1), make_row("a", 1), make_row("c", 1)])
    report = run(tmp_path, source)
    assert (report.prompts, report.duplicates) == (3, 1)
    prompts = read_prompts(tmp_path)
    ids = {prompt.id for prompt in prompts}
    assert "B2-1" in ids
    assert ids - {"B2-1"} < {f"B2-1-{content_id(prompt)}" for prompt in prompts}


def test_a_source_with_one_id_for_all_is_shuffled(tmp_path):
    """A budget uses a prefix of the order: it must not be the order of the file."""
    texts = [f"{n:03}" for n in range(100)]
    run(tmp_path, write_source(tmp_path, [make_row(text, "same") for text in texts]))
    found = read_texts(tmp_path)
    assert sorted(found) == texts
    in_order = sum(one < other for one, other in itertools.pairwise(found))
    assert 30 < in_order < 70


def test_the_seed_decides_the_order_and_nothing_else(tmp_path):
    """Another seed gives the same prompts in another order."""
    source = write_source(tmp_path, [make_row(str(n)) for n in range(30)])
    run(tmp_path, source)
    before = read_prompts(tmp_path)
    assert not run(tmp_path, source, seed=8).reused
    after = read_prompts(tmp_path)
    assert before != after
    assert sorted(before, key=lambda prompt: prompt.id) == sorted(after, key=lambda prompt: prompt.id)


def test_new_rows_do_not_reorder_the_old_ones(tmp_path):
    """The order of a prompt among others is its own."""
    rows = [make_row(str(n), n) for n in range(40)]
    run(tmp_path / "old", write_source(tmp_path / "old", rows[:20]))
    random.Random(1).shuffle(rows)
    run(tmp_path / "new", write_source(tmp_path / "new", rows))
    old = read_prompts(tmp_path / "old")
    assert [prompt for prompt in read_prompts(tmp_path / "new") if prompt in old] == old


def test_what_is_up_to_date_is_reused(tmp_path, monkeypatch):
    """Nothing is read or written; the report is the first one's."""
    source = write_source(tmp_path, [make_row("a"), make_row("a"), *BAD_ROWS])
    first = run(tmp_path, source)
    before = read_files(tmp_path)
    monkeypatch.setattr(prepare, "draft_source", lambda *args: pytest.fail("the source is read again"))
    assert run(tmp_path, source) == dataclasses.replace(first, reused=True)
    assert not first.reused
    assert read_files(tmp_path) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "B3_code"},
        {"adapter": "ultrachat"},
        {"seed": 8},
        {"system_prompt": "Be kind."},
        {"chat_template_kwargs": {"thinking": False}},
        {"max_prompts": 5},
    ],
)
def test_every_option_is_part_of_the_key(changes):
    """Prompts made with other options are not taken for these."""
    assert dataclasses.replace(OPTIONS, **changes).key("sha") != OPTIONS.key("sha")
    assert OPTIONS.key("sha") == dataclasses.replace(OPTIONS).key("sha")
    assert OPTIONS.key("other") != OPTIONS.key("sha")


def test_long_integers_reach_the_prompts_whole(tmp_path):
    """In a schema, in arguments given as an object or as text, in ids and labels; others keep their ids."""
    long = 92233720368547760001
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": long}}}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"n": -long}}}]
    as_text = [{"type": "function", "function": {"name": "f", "arguments": f'{{"n": {long}}}'}}]
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    history.append({"role": "assistant", "content": "", "tool_calls": as_text})
    row = {"id": long, "meta": {"seed": long}, "tools": [tool], "messages": [*history, *history[:1]]}
    plain = {**row, "id": 2**64 - 1, "tools": json.dumps([tool]), "chat_template_kwargs": {"n": long}}
    options = {"adapter": "messages", "chat_template_kwargs": {}}
    report = run(tmp_path, write_source(tmp_path, [json.dumps(row), json.dumps(plain)]), **options)
    assert (report.prompts, report.rejected) == (2, {})
    prompts = {prompt.id: prompt for prompt in read_prompts(tmp_path)}
    one, other = prompts[f"B2-{long}"], prompts[f"B2-{2**64 - 1}"]
    assert one.tools == other.tools == [tool]
    assert other.chat_template_kwargs == {"n": long}
    arguments = [call["function"]["arguments"] for m in one.messages for call in m.get("tool_calls", ())]
    assert repr(arguments) == repr([{"n": -long}, {"n": long}])
    assert one.meta == {"seed": str(long)}


def test_rows_that_are_nested_too_deep_are_rejected(tmp_path):
    """Whichever part of us that is too deep for, beside a long integer or an id or not; the others go on."""
    rows = [make_row("fine")]
    for depth in (300, 400, 600, 900, 990, 1010, 1100):
        deep = "[" * depth + "1" + "]" * depth
        for n in (1, 2**70):
            call = f'{{"function": {{"name": "f", "arguments": {{"n": {n}, "deep": {deep}}}}}}}'
            beside = f'{{"function": {{"name": "f", "arguments": {{"n": {n}, "depth": {depth}}}}}}}'
            for one, other in ((call, "0"), (beside, deep)):
                turn = f'{{"role": "assistant", "content": "", "tool_calls": [{one}]}}'
                question = '{"role": "user", "content": "q"}'
                rows.append(f'{{"messages": [{question}, {turn}, {question}], "other": {other}}}')
    report = run(tmp_path, write_source(tmp_path, rows))
    assert report.rows_read == len(rows)
    assert report.rejected.keys() == {"bad_field", "malformed_row"}
    assert report.prompts == len(rows) - sum(report.rejected.values()) > 10
    for prompt in read_prompts(tmp_path)[1:]:
        calls = [call for message in prompt.messages for call in message.get("tool_calls", ())]
        assert all(type(call["function"]["arguments"]["n"]) is int for call in calls)


def test_rows_are_the_same_prompts_from_parquet(tmp_path):
    """Tools, calls and template arguments without the nulls that pad them, which are counted."""
    tools = [{"type": "function", "function": {"name": n, "parameters": {n: {"x": 1}}}} for n in "fg"]
    calls = [[{"id": "c", "type": "function", "function": {"name": n, "arguments": {n: 1}}}] for n in "fg"]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": calls[at]},
                {"role": "user", "content": None},
                {"role": "tool", "content": f"result {at}", "tool_call_id": "c"},
            ],
            "tools": tools[: at + 1],
            "chat_template_kwargs": {("thinking", "enable_thinking")[at]: False},
        }
        for at in (0, 1)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines, table = tmp_path / "lines", tmp_path / "table"
    assert run(lines, write_source(lines, map(json.dumps, rows))).nulls_removed == 0
    report = run(table, tmp_path / "a.parquet")
    assert report.nulls_removed == 3 + 2 + 2  # of three schemas, two calls, two rows
    assert f"{report.nulls_removed} null fields" in report.to_line()
    assert read_prompts(table) == read_prompts(lines)
    assert run(table, tmp_path / "a.parquet") == dataclasses.replace(report, reused=True)


def test_a_parquet_value_that_cannot_be_read_rejects_its_row(tmp_path):
    """With its place and reason; the other rows are prompts."""
    texts = pa.array([b"a", b"he\xfflo", b"c"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "a.parquet")
    report = run(tmp_path, tmp_path / "a.parquet", adapter="prompt")
    assert (report.rows_read, report.prompts, report.rejected) == (3, 2, {"malformed_row": 1})
    assert sorted(read_texts(tmp_path)) == ["a", "c"]
    [rejected] = read_rejected(tmp_path)
    assert (rejected.where, "'prompt'" in rejected.detail) == ("a.parquet:2", True)


def test_a_changed_source_is_prepared_again(tmp_path):
    """The bytes of the source decide, not its name."""
    run(tmp_path, write_source(tmp_path, [make_row("a")]))
    assert not run(tmp_path, write_source(tmp_path, [make_row("b")])).reused
    assert read_texts(tmp_path) == ["b"]


def test_what_was_prepared_before_there_was_max_prompts_is_reused(tmp_path):
    """Its key is the same without, and its report counts nothing left over."""
    source = write_source(tmp_path, [make_row("a")])
    first = run(tmp_path, source)
    report = json.loads((tmp_path / "B2" / "prepare.json").read_text())
    assert report.pop("left_over") == report.pop("nulls_removed") == 0
    (tmp_path / "B2" / "prepare.json").write_text(json.dumps(report))
    assert run(tmp_path, source) == dataclasses.replace(first, reused=True)
    assert OPTIONS.key("sha") == "c0e6a51d88057e0fdf091087826b3ed381d22fcc381859dc77ac4d939fd72427"


@settings(max_examples=30)
@given(
    turns=st.lists(st.integers(1, 4), min_size=1, max_size=9), limits=st.lists(st.integers(1, 30), max_size=3)
)
def test_raising_max_prompts_adds_prompts_behind_those_that_are_there(turns, limits):
    """Each smaller limit keeps a beginning of the same order, in whole conversations, and counts the rest."""
    rows = [
        json.dumps(
            {
                "id": n,
                "messages": [
                    {"role": "user" if at % 2 == 0 else "assistant", "content": f"{n} {at}"}
                    for at in range(2 * count)
                ],
            }
        )
        for n, count in enumerate(turns)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_source(folder, [*rows, rows[0], BAD_ROWS[0]])
        run(folder, source, shape="each")
        everything = (folder / "B2" / "prompts.jsonl").read_bytes()
        for limit in limits:
            report = run(folder, source, shape="each", max_prompts=limit)
            assert report.prompts <= limit or report.conversations == 1
            assert report.rows_read == report.conversations + report.left_over + 2
            assert (report.left_over > 0) == (report.prompts < sum(turns))
            assert not report.left_over or report.prompts + max(turns) > limit
            with closing(open_prompts(folder / "B2")) as prompts:
                assert len(prompts) == report.prompts
            lines = (folder / "B2" / "prompts.jsonl").read_bytes()
            assert everything.startswith(lines)
            assert lines.count(b"\n") == report.conversations


@pytest.mark.parametrize("lost", ["prompts.jsonl", "prompts.index", "prepare.json"])
def test_a_lost_file_comes_back(tmp_path, lost):
    """Each of the three can be deleted; the next run has it again, as it was."""
    source = write_source(tmp_path, [make_row(str(n)) for n in range(9)])
    run(tmp_path, source)
    before = read_files(tmp_path)
    (tmp_path / "B2" / lost).unlink()
    run(tmp_path, source)
    read_prompts(tmp_path)
    assert read_files(tmp_path) == before


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"key": 1}', "\x00"])
def test_a_damaged_report_means_preparing_again(tmp_path, content):
    """A report that cannot be read is no report."""
    source = write_source(tmp_path, [make_row("a")])
    report = run(tmp_path, source)
    (tmp_path / "B2" / "prepare.json").write_text(content)
    assert read_report(tmp_path / "B2") is None
    assert run(tmp_path, source) == report
    assert read_report(tmp_path / "B2") == report


def test_what_generation_set_aside_survives_a_new_preparation(tmp_path):
    """Only the lines about source rows are replaced, by those of the new source; a torn line goes."""
    run(tmp_path, write_source(tmp_path, [make_row("a"), *BAD_ROWS]))
    lines = [set_aside(tmp_path, f"B2-{n}") for n in range(3)]
    with (tmp_path / "B2" / REJECTED).open("ab") as file:
        file.write(b'{"id": "torn')
    report = run(tmp_path, write_source(tmp_path, [make_row("b"), '{"messages": []}']))
    found = (tmp_path / "B2" / REJECTED).read_bytes().splitlines(keepends=True)
    assert found[1:] == lines
    assert Rejected.from_line(found[0]).where == "source.jsonl:2"
    assert report.rejected == {"no_user_turn": 1}


def test_a_damaged_rejected_line_is_named_and_nothing_is_changed(tmp_path):
    """Preparation does not go on over what it cannot read, and can be run again."""
    run(tmp_path, write_source(tmp_path, [make_row("a")]))
    (tmp_path / "B2" / REJECTED).write_bytes(b"{}\n" + set_aside(tmp_path, "x"))
    before = read_files(tmp_path)
    with pytest.raises(RecordError, match=r"B2/rejected\.jsonl: the line ending at byte 3 is damaged"):
        run(tmp_path, write_source(tmp_path, [make_row("b")]))
    assert read_files(tmp_path) == before


@pytest.mark.parametrize("next_seed", [7, 8])
@pytest.mark.parametrize(
    "where", ["draft_source", "write_entries", "PromptDraft.settle", "write_json_atomically"]
)
def test_a_crash_leaves_prompts_that_can_be_used_and_is_repaired(tmp_path, monkeypatch, where, next_seed):
    """Reading, ordering, indexing or reporting fails: the prompts are the old ones or the new ones, whole."""
    rows = [make_row(str(n)) for n in range(20)]
    source = write_source(tmp_path, rows)
    run(tmp_path, source)
    line, old = set_aside(tmp_path, "B2-x"), read_prompts(tmp_path)

    def crash(*args, **kwargs):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(f"{prepare.__name__}.{where}", crash)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, source, seed=8)  # the same prompts in another order: the same size
    left = read_prompts(tmp_path)
    new = run(tmp_path / "fresh", source, seed=8) and read_prompts(tmp_path / "fresh")
    assert left == (new if where in ("write_entries", "write_json_atomically") else old)
    assert not [path for path in (tmp_path / "B2").iterdir() if path.name.startswith(".")]
    run(tmp_path, source, seed=next_seed)
    assert read_prompts(tmp_path) == (new if next_seed == 8 else old)
    assert (tmp_path / "B2" / REJECTED).read_bytes() == line


def test_a_source_that_breaks_off_leaves_everything_as_it_was(tmp_path):
    """An unreadable file in the middle: the old prompts stay, the report stays, no draft is left."""
    good = write_source(tmp_path, [make_row("a"), *BAD_ROWS])
    run(tmp_path, good)
    before = read_files(tmp_path)
    bad = write_source(tmp_path, ["no json"] * 9, "bad.jsonl")
    with pytest.raises(SourceError):
        prepare_prompts(tmp_path / "B2", [good, bad], options=OPTIONS, source_sha256="other")
    assert read_files(tmp_path) == before
    assert sorted(path.name for path in (tmp_path / "B2").iterdir()) == sorted(FILES)


@pytest.mark.parametrize("rows", [[], ['{"messages": []}'] * 3, ['{"other": 1}', "[1]"]])
def test_a_source_without_prompts_says_what_became_of_its_rows(tmp_path, rows):
    """The message counts the rows and names the dataset and the adapter; each is in rejected.jsonl."""
    run(tmp_path, write_source(tmp_path, [make_row("a")]))
    before = read_files(tmp_path)
    with pytest.raises(EmptyDatasetError, match=f"'B2_code': {len(rows)} rows read, none .*'messages'"):
        run(tmp_path, write_source(tmp_path, rows))
    assert len(read_rejected(tmp_path)) == len(rows)
    kept = {name: content for name, content in read_files(tmp_path).items() if name != REJECTED}
    assert kept == {name: content for name, content in before.items() if name != REJECTED}


def test_a_source_of_empty_files_is_called_so(tmp_path):
    """By its files' names: a download that came to nothing, say."""
    (tmp_path / "source.jsonl").touch()
    with pytest.raises(EmptyDatasetError, match=rf"\({tmp_path / 'source.jsonl'} is empty\); check"):
        run(tmp_path, tmp_path / "source.jsonl")
    (tmp_path / "source.jsonl").write_text("\n\n")
    with pytest.raises(EmptyDatasetError, match="its files have no rows"):
        run(tmp_path, tmp_path / "source.jsonl")


def test_options_reach_the_prompts(tmp_path):
    """A system prompt goes where there is none; the dataset's template arguments win over the row's."""
    own = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]}
    kwargs = {"chat_template_kwargs": {"thinking": True, "depth": 1}}
    source = write_source(tmp_path, [make_row("a", 1), json.dumps({"id": 2, **own, **kwargs})])
    run(tmp_path, source, system_prompt="ours", chat_template_kwargs={"thinking": False})
    one, other = sorted(read_prompts(tmp_path), key=lambda prompt: prompt.id)
    assert [turn["content"] for turn in one.messages] == ["ours", "a"]
    assert [turn["content"] for turn in other.messages] == ["own", "b"]
    assert one.chat_template_kwargs == {"thinking": False}
    assert other.chat_template_kwargs == {"thinking": False, "depth": 1}


def test_rows_that_the_options_make_equal_are_duplicates(tmp_path):
    """What the template sees decides: a system prompt of the row or ours, ids and labels do not."""
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "id": 1, "meta": {"n": 1}},
        {"messages": [{"role": "system", "content": "ours"}, {"role": "user", "content": "a"}], "id": 2},
    ]
    report = run(tmp_path, write_source(tmp_path, map(json.dumps, rows)), system_prompt="ours")
    assert (report.prompts, report.duplicates) == (1, 1)
    assert [prompt.id for prompt in read_prompts(tmp_path)] == ["B2-1"]


def test_rejected_rows_say_where_and_why(tmp_path):
    """File and line, reason and sentence; they are never asked again."""
    run(tmp_path, write_source(tmp_path, [make_row("a"), '{"other": 1}', "{"]))
    first, second = read_rejected(tmp_path)
    assert (first.where, first.reason, first.permanent, first.stage) == (
        "source.jsonl:2", "missing_field", True, "prepare",
    )  # fmt: skip
    assert "'messages'" in first.detail
    assert (second.where, second.reason, second.id) == (
        "source.jsonl:3",
        "malformed_row",
        "B2-source.jsonl:3",
    )


def test_a_malformed_line_far_into_a_source_costs_that_line_only(tmp_path):
    """It is named by file and line; all others are prompts."""
    rows = [make_row(f"question {n}") for n in range(1, 8001)]
    rows[7_430] = rows[7_430][:-9]
    report = run(tmp_path, write_source(tmp_path, rows))
    assert (report.rows_read, report.prompts, report.rejected) == (8000, 7999, {"malformed_row": 1})
    [rejected] = read_rejected(tmp_path)
    assert (rejected.where, rejected.reason) == ("source.jsonl:7431", "malformed_row")
    assert rejected.detail.startswith("not JSON: ")


@pytest.mark.parametrize("row_id", [None, 1])
@pytest.mark.parametrize("value", ["\ud800", 10**400, b"bytes"])
def test_values_without_a_json_form_are_rejected(tmp_path, monkeypatch, value, row_id):
    """What could not be written to prompts.jsonl is refused with the row still known; the others go on."""
    row = {"messages": [{"role": "user", "content": "hi"}], "id": row_id}
    bad = {**row, "tools": [{"name": "f", "parameters": {"x": value}}]}
    rows = [SourceRow("x:1", bad), SourceRow("x:2", row)]
    monkeypatch.setattr(parallel_draft, "iter_rows", lambda source: iter(rows))
    assert run(tmp_path, write_source(tmp_path, [])).rejected == {"bad_field": 1}
    assert [row.where for row in read_rejected(tmp_path)] == ["x:1"]


def test_a_draft_is_read_back_in_order_with_repeated_ids_in_any_part(tmp_path):
    """Some renamed prompts belong to another part of the order than the id that they share."""
    rows = [make_row(str(n), n % 7) for n in range(2000)]
    assert run(tmp_path, write_source(tmp_path, rows)).prompts == 2000
    found = read_prompts(tmp_path)
    assert Counter(prompt.id.split("-")[1] for prompt in found) == Counter(str(n % 7) for n in range(2000))
    fresh = [make_row(prompt.messages[0]["content"], prompt.id.removeprefix("B2-")) for prompt in found]
    run(tmp_path / "other", write_source(tmp_path / "other", fresh))
    assert read_prompts(tmp_path / "other") == found


@given(text=st.text(max_size=9), key=st.sampled_from("ab"), swap=st.booleans())
def test_the_hash_of_a_content_tells_apart_what_its_id_does(text, key, swap):
    """Also where a call's arguments have their keys in another order, and where a text looks like a call."""

    def make(arguments, content):
        call = {"function": {"name": "f", "arguments": arguments}}
        turns = [{"role": "user", "content": content}, {"role": "assistant", "tool_calls": [call]}]
        return make_prompt(Conversation([*turns, {"role": "user", "content": '"tool_calls":'}]))

    one = make({"a": 1, "b": text}, text)
    other = make({"b": text, "a": 1} if swap else {"a": 1, key: text}, text)
    hashes = [hash_content(prompt, orjson.dumps(prompt.messages)) for prompt in (one, other)]
    assert (hashes[0] == hashes[1]) == (content_id(one) == content_id(other))


def test_the_index_is_written_with_the_prompts(tmp_path):
    """Opening a prepared dataset does not read it."""
    run(tmp_path, write_source(tmp_path, [make_row(str(n)) for n in range(9)]))
    index = index_path(tmp_path / "B2" / "prompts.jsonl")
    before = index.stat().st_ino
    read_prompts(tmp_path)
    assert index.stat().st_ino == before


def test_the_draft_of_a_killed_preparation_is_removed(tmp_path):
    """It may be as large as the source."""
    stale = tmp_path / "B2" / ".prompts.draft" / "63.jsonl"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(make_row("old").encode() * 99)
    run(tmp_path, write_source(tmp_path, [make_row("a")]))
    assert read_texts(tmp_path) == ["a"]
    assert sorted(path.name for path in (tmp_path / "B2").iterdir()) == sorted(FILES)


def test_a_full_disk_is_named_and_leaves_what_was_there(tmp_path, monkeypatch):
    """The error says where; the old prompts stay."""
    run(tmp_path, write_source(tmp_path, [make_row("a")]))
    before = read_files(tmp_path)

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PromptDraft, "extend", lambda *args, **kwargs: fail())
    with pytest.raises(OSError, match=r"No space left on device: .*B2/\.prompts\.draft'"):
        run(tmp_path, write_source(tmp_path, [make_row("b")]))
    assert read_files(tmp_path) == before
    assert sorted(path.name for path in (tmp_path / "B2").iterdir()) == sorted(FILES)


def test_temp_files_of_a_killed_preparation_are_removed(tmp_path):
    """They would otherwise stay for ever, as large as the prompts."""
    stale = tmp_path / ".prompts.jsonl.1-abcd.tmp"
    stale.write_bytes(b"x")
    remove_stale_temps(tmp_path)
    assert list(tmp_path.iterdir()) == []
