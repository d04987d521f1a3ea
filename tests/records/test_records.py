"""Records: what is written as a line is read back, and older shapes are understood."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.records.rows import Prompt, RecordError, Rejected, Response

TEXT = st.text(max_size=20)
COUNT = st.integers(0, 2**31)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
IDS = st.none() | st.lists(st.integers(0, 200_000), max_size=20)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
EXTRA = st.dictionaries(TEXT.map("x_{}".format), JSON, max_size=3)

PROMPTS = st.builds(
    Prompt,
    id=TEXT,
    messages=st.lists(OBJECT, max_size=3),
    tools=st.none() | st.lists(OBJECT, min_size=1, max_size=2),
    chat_template_kwargs=OBJECT,
    meta=OBJECT,
)
RESPONSES = st.builds(
    Response,
    id=TEXT,
    turn=st.integers(0, 50),
    input_ids=IDS,
    output_ids=IDS,
    text=TEXT,
    finish_reason=st.sampled_from(["stop", "length"]),
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    cached_tokens=COUNT,
    attempt=st.integers(1, 9),
    lane=st.sampled_from(["short", "long"]),
    server=TEXT,
    latency_s=st.floats(0, 1e6),
    finished_at=TEXT,
    extra=EXTRA,
)
REJECTIONS = st.builds(
    Rejected,
    id=TEXT,
    reason=TEXT,
    detail=TEXT,
    permanent=st.booleans(),
    stage=st.sampled_from(["prepare", "generate"]),
    attempts=COUNT,
    status=st.none() | st.integers(100, 599),
    where=TEXT,
)


@given(record=PROMPTS | RESPONSES | REJECTIONS)
def test_a_record_survives_its_own_line(record):
    """Reading a written line gives an equal record, and the line is one line."""
    line = record.to_line()
    assert type(record).from_line(line) == record
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")


def test_empty_fields_of_a_prompt_are_left_out():
    """A plain prompt is an id and messages."""
    line = Prompt(id="a", messages=[{"role": "user", "content": "hi"}], tools=[]).to_line()
    assert orjson.loads(line) == {"id": "a", "messages": [{"role": "user", "content": "hi"}]}


def test_counts_under_usage_are_read():
    """The OpenAI-compatible shape of older files keeps its counts, and has no ids."""
    row = {"id": "a", "text": "hi", "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    response = Response.from_line(orjson.dumps(row))
    assert (response.prompt_tokens, response.completion_tokens) == (7, 3)
    assert response.input_ids is response.output_ids is None
    assert (response.turn, response.attempt, response.finish_reason) == (0, 1, "stop")
    assert b"input_ids" not in response.to_line()


def test_counts_at_the_top_win_over_usage():
    """A row that has both shapes is a row of today's shape."""
    row = {"id": 5, "prompt_tokens": 1, "completion_tokens": 2, "usage": {"completion_tokens": 9}}
    response = Response.from_row(row)
    assert (response.id, response.completion_tokens) == ("5", 2)
    assert response.extra == {"usage": {"completion_tokens": 9}}


def test_nulls_of_older_rows_become_defaults():
    """A null is read like an absent field."""
    row = {"id": "a", "turn": None, "text": None, "attempt": None, "lane": None, "latency_s": None}
    response = Response.from_row({**row, "prompt_tokens": 1, "completion_tokens": 2})
    assert (response.turn, response.text, response.attempt) == (0, "", 1)
    assert (response.lane, response.latency_s) == ("short", 0.0)


def test_extra_keys_cannot_hide_a_field():
    """A key in extra that has a field's name does not replace the field on disk."""
    response = Response.from_row({"id": "a", "prompt_tokens": 1, "completion_tokens": 2, "note": "x"})
    assert response.extra == {"note": "x"}
    response.extra["id"] = "other"
    assert orjson.loads(response.to_line())["id"] == "a"


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        (Prompt, b'{"id": "a"}', "prompt line has no field 'messages'"),
        (Prompt, b'{"messages": []}', "prompt line has no field 'id'"),
        (Prompt, b'{"id": ', "not a JSON line"),
        (Prompt, b"[]", "a JSON object was expected, not list"),
        (Response, b'{"prompt_tokens": 1, "completion_tokens": 2}', "response row has no field 'id'"),
        (Response, b'{"id": "a", "prompt_tokens": 1}', "response row has no field 'completion_tokens'"),
        (Response, b'{"id": "a", "usage": {}}', "response row has no field 'prompt_tokens'"),
        (Response, b'{"id": "a", "prompt_tokens": "x", "completion_tokens": 2}', "wrong type"),
        (Response, b'{"id": "a", "prompt_tokens": null, "completion_tokens": 2}', "wrong type"),
        (Rejected, b'{"id": "a", "reason": "x"}', "rejected line has no field 'detail'"),
        (Response, b'{"id": "a", "prompt_tokens": 1, "completion_tokens": 1e300}', "token count of 1000"),
        (Response, b'{"id": "a", "prompt_tokens": -1e40, "completion_tokens": 2}', "token count of -1"),
        (Response, b'{"id": "a", "turn": 1e20, "prompt_tokens": 1, "completion_tokens": 2}', "a turn or"),
        (Response, b'{"id": "a", "prompt_tokens": "inf", "completion_tokens": 2}', "wrong type"),
        (Rejected, b"null", "a JSON object was expected, not NoneType"),
    ],
)
def test_a_wrong_line_is_named(kind, line, message):
    """The message says which field is missing or wrong."""
    with pytest.raises(RecordError, match=message):
        kind.from_line(line)


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in ("id", "reason", "where", "detail", "stage") for value in ([1], 5, None)),
        *({"turn": value} for value in ("x", None, [])),
        *({"permanent": value} for value in ("no", None, 1)),
    ],
)
def test_a_rejected_line_with_an_odd_field_is_named(change):
    """Nothing but a whole line says which prompt is not asked again, or why."""
    line = orjson.loads(Rejected("a", "http_400", "why", permanent=True, stage="generate").to_line())
    [name] = change
    with pytest.raises(RecordError, match=f"wrong type: {name} is "):
        Rejected.from_line(orjson.dumps(line | change))
