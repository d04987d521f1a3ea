"""Train and eval share no first user turn, whatever datasets overlap in whatever way."""

import math
import os
import random
import tempfile
from pathlib import Path

import pytest
from export_support import dataset, export, hashes, manifest, read_parquet, response, write_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.export.files import ExportInputError
from tasks.export.rows import ExportDataset
from tasks.export.split import keys as export_split_keys
from tasks.export.split.assign import make_split_key
from tasks.export.split.keys import SplitKeys
from tasks.export.split.problems import find_split_problems
from tasks.prepare import worker_process
from tasks.prepare.sources import hash_cache
from tasks.records.rows import Prompt


def user(text):
    return {"role": "user", "content": text}


def make_source(root, name, texts, **row):
    """A dataset with an answer to each text, in a row with its number as id."""
    asked = [Prompt(f"{name}-{n}", [user(text)]) for n, text in enumerate(texts)]
    rows = [response(one.id, output=(3, 4 + n, 5), **row) for n, one in enumerate(asked)]
    source = dataset(root, rows, name)
    write_prompts(source, asked)
    return source


def read_first_turns(root, datasets):
    """The first user turns of each split's rows."""
    texts = {}
    for source in datasets:
        for line in (source.folder / "prompts.jsonl").read_bytes().splitlines():
            prompt = Prompt.from_line(line)
            [first, *_] = [one["content"] for one in prompt.messages if one["role"] == "user"]
            texts[source.name, prompt.id] = first.strip()
    return [
        {texts[row["dataset"], row["id"].split("#")[0]] for row in read_parquet(root, split)}
        for split in ("train", "eval")
    ]


@pytest.mark.parametrize("drop_duplicates", [False, True])
def test_two_datasets_with_the_same_prompts_share_a_side(tmp_path, drop_duplicates):
    """Of each prompt; how many conversations have theirs in another dataset too is in manifest and card."""
    same = [f"same prompt {n}" for n in range(100)]
    first = make_source(tmp_path, "a", same)
    second = make_source(tmp_path, "b", [*same, *(f"other content {n}" for n in range(50))])
    report = export(tmp_path, [first, second], eval_fraction=0.3, drop_duplicates=drop_duplicates)
    train, held_out = read_first_turns(tmp_path, [first, second])
    assert not train & held_out
    assert len(train) + len(held_out) == 150
    assert held_out & set(same)
    shared = 0 if drop_duplicates else 100  # of equal rows the second dataset has none left
    assert [one.exact_duplicates for one in report.datasets] == [0, 100 - shared]
    assert [one["shared_conversations"] for one in manifest(tmp_path)["datasets"]] == [shared, shared]
    said = "200 conversations have a first user turn that another dataset has too: a 100, b 100."
    assert (said in (tmp_path / "export" / "README.md").read_text()) == bool(shared)
    assert list(find_split_problems(report)) == []


texts = st.sampled_from(["a", " a\n", "b", "b\t", "c", "a b", "é", "\u3000c"])
systems = st.sampled_from([None, "be brief", "a"])
conversations = st.tuples(texts, systems, st.integers(1, 3), st.sampled_from(["each", "trajectory"]))


def make_overlap(root, name, drawn, draw):
    """Conversations of some turns, the prompts and the answers in orders of their own, one not answered."""
    asked, rows = [Prompt("nobody", [user("a")])], []
    for n, (text, system, turns, kind) in enumerate(drawn):
        messages = [{"role": "system", "content": system}] if system else []
        messages += [user(text), {"role": "assistant", "content": "x"}] * turns
        asked.append(Prompt(f"c{n}", messages))
        spans = [{"turn": t, "input_ids": [1, n, t], "loss_spans": [[1, 3]]} for t in range(turns)]
        whole = {"input_ids": [], "output_ids": [], "sequences": spans, "completion_tokens": 2 * turns}
        rows += (
            [response(f"c{n}", **whole)]
            if kind == "trajectory"
            else [response(f"c{n}", turn=t) for t in range(turns)]
        )
    draw.shuffle(asked)
    draw.shuffle(rows)
    source = dataset(root, rows, name)
    write_prompts(source, asked)
    return source


@settings(max_examples=40, deadline=None)
@given(
    drawn=st.lists(st.lists(conversations, max_size=8), min_size=1, max_size=3),
    fractions=st.tuples(st.sampled_from([0.0, 0.2, 0.5]), st.sampled_from([0.5, 0.8])),
    seed=st.integers(0, 5),
    order=st.integers(0, 9),
)
def test_no_first_user_turn_is_on_both_sides(drawn, fractions, seed, order):
    """Nor are two turns of a conversation, and a larger eval_fraction only moves conversations to eval."""
    held_out_before = set()
    with tempfile.TemporaryDirectory() as name:
        root, draw = Path(name), random.Random(order)
        sources = [make_overlap(root, f"d{n}", one, draw) for n, one in enumerate(drawn)]
        for eval_fraction in fractions:
            report = export(root, sources, eval_fraction=eval_fraction, seed=seed)
            train, held_out = read_first_turns(root, sources)
            assert not train & held_out
            assert held_out_before <= held_out
            held_out_before = held_out
            sides = [
                {(row["dataset"], row["conversation_id"]) for row in read_parquet(root, split)}
                for split in ("train", "eval")
            ]
            assert not sides[0] & sides[1]
            assert len(sides[0] | sides[1]) == sum(map(len, drawn))
    first_turns = [[text.strip() for text, *_ in one] for one in drawn]
    for n, count in enumerate(report.datasets):
        others = {text for m, one in enumerate(first_turns) for text in one if m != n}
        assert count.shared_conversations == sum(text in others for text in first_turns[n])
        assert count.split_by_id == 0
    assert report.split_by["different_keys"] == len({text for one in first_turns for text in one})


def test_only_the_first_user_turn_is_in_the_key():
    """Neither a system prompt nor a later turn; of a conversation without one it is all messages."""
    key = make_split_key([user("do this")])
    assert key == make_split_key([{"role": "system", "content": "s"}, user(" do this\n"), user("and that")])
    assert key != make_split_key([user("do that")])
    without = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "do this"}]
    assert make_split_key(without) == make_split_key([dict(reversed(one.items())) for one in without])
    assert make_split_key(without) not in {key, make_split_key(without[1:])}


def test_rows_whose_prompt_is_not_there_are_split_by_their_conversation(tmp_path):
    """They are counted and said by dataset, in the manifest, in the card and in a warning."""
    older = dataset(tmp_path, [response(f"r{n}", conversation_id=f"c{n // 4}") for n in range(40)], "older")
    changed = make_source(tmp_path, "changed", ["p", "q", "r"])
    write_prompts(changed, [Prompt("changed-1", [user("q")]), Prompt("changed-9", [user("p")])])
    whole = make_source(tmp_path, "whole", ["q", "s"])
    report = export(tmp_path, [older, changed, whole], eval_fraction=0.5)
    sides = [{row["conversation_id"] for row in read_parquet(tmp_path, split)} for split in ("train", "eval")]
    assert all(any(name.startswith("c") for name in side) for side in sides)
    assert not sides[0] & sides[1]
    found = manifest(tmp_path)
    assert [one["split_by_id"] for one in found["datasets"]] == [40, 2, 0]
    assert [one["shared_conversations"] for one in found["datasets"]] == [0, 1, 1]
    assert found["split_by"] == {
        "key": "first_user_turn",
        "key_without_prompt": "conversation_id",
        "seed": 0,
        "eval_fraction": 0.5,
        "different_keys": 10 + 2 + 2,
    }
    [problem] = find_split_problems(report)
    for text in (problem, (tmp_path / "export" / "README.md").read_text()):
        assert "42 rows" in text
        assert "older 40, changed 2" in text
    again = export(tmp_path, [older, changed, whole], eval_fraction=0.5)
    assert again.unchanged
    assert list(find_split_problems(again)) == [problem]


@pytest.mark.parametrize(
    "line",
    [b"{", b"[1]", b'{"id":"d-1"}', b'{"id":"d-1","messages":5}', b'{"id":"d-1","messages":["x"]}', b""],
)
def test_a_damaged_prompt_costs_only_its_own_rows_their_key(tmp_path, line):
    """Every row is exported; the last prompt counts also where its line has no end."""
    source = make_source(tmp_path, "d", ["p", "q", "r"])
    path = source.folder / "prompts.jsonl"
    first, _, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + b"\n" + last.rstrip())
    report = export(tmp_path, [source])
    assert (report.total.rows, report.datasets[0].split_by_id) == (3, 1)


def test_prompts_that_cannot_be_read_stop_the_export(tmp_path):
    """They are there, so the rows are not split without them."""
    source = dataset(tmp_path, [response("a")])
    (source.folder / "prompts.jsonl").mkdir()
    with pytest.raises(ExportInputError, match=r"prompts\.jsonl cannot be read .*split by conversation id"):
        export(tmp_path, [source])
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("change", ["changed", "removed"])
def test_other_prompts_are_another_export(tmp_path, change):
    """What rows are split by is in the key."""
    source = make_source(tmp_path, "d", ["p", "q"])
    first = export(tmp_path, [source])
    path = source.folder / "prompts.jsonl"
    if change == "changed":
        path.write_bytes(path.read_bytes().replace(b'"p"', b'"x"'))
    else:
        path.unlink()
    second = export(tmp_path, [source])
    assert not second.unchanged
    assert second.key != first.key


def test_prompts_are_hashed_again_only_when_they_changed(tmp_path, monkeypatch):
    """They may be gigabytes, of which an export needs little."""
    monkeypatch.setattr(hash_cache, "_WORTH_BYTES", 0)
    monkeypatch.setattr(hash_cache, "_SETTLED_NS", -(10**15))
    really, read = hash_cache.hash_file, []
    monkeypatch.setattr(hash_cache, "hash_file", lambda path: (read.append(path), really(path))[1])
    sources = [make_source(tmp_path, name, ["p"]) for name in ("a", "b")]
    keys = [export(tmp_path, sources).key for _ in range(2)]
    assert len(read) == 2
    write_prompts(sources[0], [Prompt("a-0", [user("longer")])])
    keys.append(export(tmp_path, sources).key)
    assert read[2:] == [sources[0].folder / "prompts.jsonl"]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("eval_fraction", "asked", "words"),
    [
        (0.5, ["the same"] * 9, ["9 rows", "more prompts"]),
        (1e-9, ["p", "q", "r", "r"], ["eval has no row", "4 rows are 3 such groups", "1e-09", "seed"]),
        (1 - 1e-9, ["p", "q"], ["train has no row", "2 rows are 2 such groups"]),
        (0.0, ["the same"] * 9, []),
    ],
)
def test_a_split_that_is_asked_for_and_empty_is_said(tmp_path, eval_fraction, asked, words):
    """With the reason, which may be that there is nothing to be split."""
    report = export(tmp_path, [make_source(tmp_path, "d", asked)], eval_fraction=eval_fraction)
    problems = list(find_split_problems(report))
    assert len(problems) == bool(words)
    assert all(word in problems[0] for word in words)


@pytest.mark.parametrize("tokens_per_group", [1, 1000])
def test_the_split_is_the_same_whoever_reads(tmp_path, monkeypatch, tokens_per_group):
    """This process or one of its own, to the byte; with prompts that others have too, or nobody."""
    sources = [
        dataset(tmp_path, [response(f"r{n}") for n in range(30)], "older"),
        make_source(tmp_path, "a", [f"prompt {n}" for n in range(40)]),
        make_source(tmp_path, "b", [f"prompt {n}" for n in range(20, 60)]),
    ]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    reports = []
    for folder, least_bytes in (("here", 1 << 60), ("apart", 0)):
        monkeypatch.setattr(worker_process, "MIN_BYTES", least_bytes)
        options = {"eval_fraction": 0.4, "tokens_per_group": tokens_per_group}
        reports.append(export(tmp_path / folder, sources, **options))
    assert hashes(tmp_path / "here") == hashes(tmp_path / "apart")
    assert reports[0].datasets == reports[1].datasets
    assert [one.shared_conversations for one in reports[1].datasets] == [0, 20, 20]
    assert [one.split_by_id for one in reports[1].datasets] == [30, 0, 0]


@given(
    order=st.permutations(range(40)),
    answered=st.integers(1, 40),
    seen_twice=st.booleans(),
    at_once=st.integers(1, 9),
)
def test_a_key_is_the_same_in_whatever_order_it_is_asked_for(order, answered, seen_twice, at_once):
    """The file is read once, and little further than the last prompt that is asked for."""
    asked = [Prompt(f"p{n}", [user(f"text {n % 30}")]) for n in range(40)]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        path, read = Path(name) / "prompts.jsonl", []
        path.write_bytes(b"".join(one.to_line() for one in asked + asked[:1]))
        really = export_split_keys._read_prompt
        patch.setattr(export_split_keys, "_MIN_PROMPTS", at_once)
        patch.setattr(export_split_keys, "_read_prompt", lambda line: (read.append(line), really(line))[1])
        keys = SplitKeys(path)
        wanted = [n for n in order if n < answered]
        for n in wanted * (1 + seen_twice):
            assert keys.find(f"p{n}") == make_split_key(asked[n].messages)
        assert len(read) <= max(math.ceil(answered * 1.25), answered + at_once)
        assert keys.find("none") is keys.find("nobody") is None
        assert len(read) == len(asked) + 1
        keys.close()
    assert sorted(keys.used.tolist()) == sorted(make_split_key(asked[n].messages) for n in wanted)


def test_a_dataset_without_a_log_has_no_keys(tmp_path):
    """It stops nothing."""
    source = make_source(tmp_path, "d", ["p"])
    report = export(tmp_path, [ExportDataset("gone", tmp_path / "gone", "exhausted"), source])
    assert [one.shared_conversations for one in report.datasets] == [0, 0]
    assert report.total.rows == 1
