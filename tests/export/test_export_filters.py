"""Rows that are left out of an export because somebody asked for it, each counted."""

import json

import pytest
from export_support import dataset, export, hashes, manifest, read_parquet, response, write_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.export.contamination import NGRAM_WORDS, hash_ngrams
from tasks.export.duplicates import ExactDuplicates
from tasks.export.files import ExportInputError
from tasks.export.texts import ConversationReader
from tasks.records.rows import Prompt
from tasks.tokens.masks import sample_from_response

WORDS = "One two, three four five six seven eight nine ten eleven-twelve thirteen"

ids = st.lists(st.integers(0, 3), min_size=2, max_size=3)


@settings(max_examples=50)
@given(rows=st.lists(st.tuples(ids, ids), max_size=20))
def test_the_first_of_equal_rows_is_kept(rows):
    """Equal are those with the same ids and the same mask, also where only the mask tells them apart."""
    exact = ExactDuplicates()
    samples = [sample_from_response(response(f"r{n}", *row)) for n, row in enumerate(rows)]
    kept = [row for row, sample in zip(rows, samples, strict=True) if exact.is_new(sample)]
    assert kept == [row for n, row in enumerate(rows) if row not in rows[:n]]


def test_equal_rows_of_all_datasets_are_dropped_and_counted(tmp_path):
    """Where that is asked for; each dataset says how many it lost."""
    first = dataset(tmp_path, [response("a"), response("b"), response("c", output=(3, 4))], "first")
    second = dataset(tmp_path, [response("x"), response("y", (1, 2, 3), (4, 5))], "second")
    assert export(tmp_path, [first, second]).total.rows == 5
    report = export(tmp_path, [first, second], drop_duplicates=True)
    assert [(one.exported.rows, one.exact_duplicates) for one in report.datasets] == [(2, 1), (1, 1)]
    assert [row["id"] for row in read_parquet(tmp_path, "train")] == ["a", "c", "y"]
    assert [one["exact_duplicates"] for one in manifest(tmp_path)["datasets"]] == [1, 1]
    before = hashes(tmp_path / "export")
    assert export(tmp_path, [first, second], drop_duplicates=True).unchanged
    export(tmp_path, [first, second])
    export(tmp_path, [first, second], drop_duplicates=True)
    assert hashes(tmp_path / "export") == before


def user(*texts):
    return [{"role": "user", "content": text} for text in texts]


word = st.sampled_from(["a", "b", "C", "d9", "é"])


@given(ours=st.lists(word, max_size=40), theirs=st.lists(word, max_size=40))
def test_texts_share_a_hash_where_they_share_thirteen_words(ours, theirs):
    """Whatever their case and what is between the words."""

    def runs(words):
        lower = [one.lower() for one in words]
        return {tuple(lower[n : n + NGRAM_WORDS]) for n in range(len(words) - NGRAM_WORDS + 1)}

    found = set(hash_ngrams(", ".join(ours)).tolist()) & set(hash_ngrams(" ".join(theirs).upper()).tolist())
    assert bool(found) == bool(runs(ours) & runs(theirs))
    assert len(hash_ngrams(" ".join(ours))) == max(0, len(ours) - NGRAM_WORDS + 1)


@pytest.fixture
def asked(tmp_path):
    """Three rows: clean, with words of a set in the prompt, with words of a set in the answer."""
    source = dataset(tmp_path, [response("clean"), response("prompt"), response("answer", text=WORDS)])
    write_prompts(
        source,
        [
            Prompt("clean", user("one two three four five six seven eight nine ten eleven twelve")),
            Prompt("prompt", user("x", f"so: {WORDS.upper()}!")),
            Prompt("answer", user("count")),
        ],
    )
    return source


RECORDS = [{"id": 1, "choices": {"text": ["too short", f"well, {WORDS}"]}}, {"question": "too short"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("set.jsonl", "\n".join(map(json.dumps, RECORDS))),
        ("set.json", json.dumps(RECORDS, indent=1)),
        ("set.txt", f"too short\n\n{WORDS}\n"),
    ],
)
def test_rows_with_words_of_an_evaluation_set_are_left_out(tmp_path, asked, name, text):
    """In the prompt or in the answer; counted for the dataset and for the set, with the set's hash."""
    (tmp_path / name).write_text(text)
    (tmp_path / "other.txt").write_text(" ".join(f"other{n}" for n in range(NGRAM_WORDS)))
    paths = [tmp_path / "other.txt", tmp_path / name]
    report = export(tmp_path, [asked], decontaminate=paths)
    assert [row["id"] for row in read_parquet(tmp_path, "train")] == ["clean"]
    assert report.datasets[0].skipped == {"contaminated": 2}
    other, found = manifest(tmp_path)["decontamination"]["files"]
    assert (other["rows"], found["rows"]) == ({}, {"d": 2})
    assert (found["name"], found["records"], found["too_short"], found["ngrams"]) == (
        name,
        2,
        1,
        1 + (name != "set.txt"),
    )
    assert manifest(tmp_path)["provenance"]["decontaminated_against"][1] == {
        "name": name,
        "sha256": found["sha256"],
    }
    card = (tmp_path / "export" / "README.md").read_text()
    assert f"| {name} | 2 | 1 |" in card
    assert "contaminated 2" in card
    assert export(tmp_path, [asked], decontaminate=paths).decontamination == report.decontamination


def test_a_row_whose_words_are_not_known_is_left_out_and_counted(tmp_path):
    """It could be contaminated."""
    source = dataset(tmp_path, [response("a"), response("b")])
    write_prompts(source, [Prompt("a", user("q"))])
    (tmp_path / "set.txt").write_text(WORDS)
    assert export(tmp_path, [source], decontaminate=[tmp_path / "set.txt"]).datasets[0].skipped == {
        "prompt_unknown": 1
    }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("set.jsonl", "", "protects nothing: it has 0 records"),
        ("set.jsonl", "\n", "protects nothing: it has 0 records"),
        (
            "set.jsonl",
            '{"a": "b"}\n{"a": "c"}\n',
            r"of its records \(2\) none has 13 words in a row in one text",
        ),
        ("set.txt", "\n", "protects nothing: it has 0 records"),
        ("set.csv", WORDS, "is a file of another kind; expected a .txt file"),
        ("set.jsonl", WORDS, "not JSON Lines.*plain text, a record a line, is read from a .txt file"),
        ("set", None, "'.*set' is a folder; name a file in it"),
    ],
)
def test_an_evaluation_set_that_protects_nothing_is_refused(tmp_path, asked, name, text, message):
    """Also beside one that does; its owner believes that the data is clean of it."""
    (tmp_path / "good.txt").write_text(WORDS)
    if text is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(ExportInputError, match=message) as caught:
        export(tmp_path, [asked], decontaminate=[tmp_path / "good.txt", tmp_path / name])
    assert name in str(caught.value)
    assert "glob" not in str(caught.value)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("missing", ["set", "prompts", "record"])
def test_what_decontamination_lacks_is_named_and_nothing_is_written(tmp_path, missing):
    """The set, what was asked, or a record that is none."""
    source, path = dataset(tmp_path, [response("a")]), tmp_path / "set.jsonl"
    if missing != "set":
        path.write_text('{"a":"b"}\n[1]\n' if missing == "record" else "{}\n")
    if missing != "prompts":
        write_prompts(source, [Prompt("a", user("q"))])
    with pytest.raises(ExportInputError, match={"record": "set.jsonl:2"}.get(missing, missing)):
        export(tmp_path, [source], decontaminate=[path])
    assert not (tmp_path / "export").exists()


def test_a_conversation_has_the_targets_own_answers(tmp_path):
    """In the order of the log, without their thoughts; a turn after one that is not there has none."""
    answered = [
        response("c", text="<think>hm</think>first"),
        response("e", turn=1),
        response("c", turn=1, text="second"),
    ]
    source = dataset(tmp_path, answered)
    messages = [*user("1"), {"role": "assistant", "content": "row"}, *user("2")]
    each = {"answer_after": [1, 3], "own_history": True}
    write_prompts(source, [Prompt("c", messages, **each), Prompt("e", messages, **each)])
    with ConversationReader(source.folder) as reader:
        first, unknown, second = map(reader.read, answered)
        assert not reader._answers
    assert [one["content"] for one in first] == ["1", "<think>hm</think>first"]
    assert unknown is None
    assert [one["content"] for one in second] == ["1", "first", "2", "second"]
