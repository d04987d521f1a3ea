"""A row read for its ids is the row that everybody else reads."""

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasks.records.fast_responses import ResponseReader
from tasks.records.rows import RecordError, Response
from tasks.tokens.masks import NotTokenExact, samples_from_response

odd = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False)
)
token = st.integers(-3, 2**31 + 1) | st.integers(-(2**63), 2**64 - 1)
ids = st.lists(st.integers(0, 9), max_size=6) | st.lists(token | odd, max_size=4) | odd
ids |= st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=2)
spans = st.just([[0, 1]]) | st.lists(st.lists(st.integers(0, 6), max_size=3), max_size=2)
sequences = st.lists(
    st.fixed_dictionaries({"turn": st.integers(0, 2)}, optional={"input_ids": ids, "loss_spans": spans})
    | odd,
    max_size=3,
)
lines = st.fixed_dictionaries(
    {"id": st.text(max_size=4), "prompt_tokens": st.integers(0, 6), "completion_tokens": st.integers(0, 6)},
    optional={
        "turn": st.integers(0, 3), "input_ids": ids, "output_ids": ids, "text": st.text(max_size=4) | odd,
        "sequences": sequences | odd, "loss_spans": spans, "finish_reason": st.text(max_size=4) | odd,
        "meta": st.dictionaries(st.text(max_size=3), odd | st.lists(odd, max_size=2), max_size=3),
        "usage": st.just({"prompt_tokens": 1}), "conversation_id": odd,
    },
)  # fmt: skip


def describe(read, line):
    """Everything that an export takes from a line, or what it counts instead."""
    try:
        response = read(line)
    except RecordError as exc:
        return str(exc)
    try:
        samples = samples_from_response(response)
    except NotTokenExact as exc:
        return exc.reason
    shared = (response.id, response.turn, response.extra.get("meta"), response.extra.get("conversation_id"))
    return [
        (
            shared,
            one.id,
            one.turn,
            one.input_ids.tolist(),
            one.loss_mask.tolist(),
            one.n_loss,
            one.finish_reason,
        )
        for one in samples
    ]


@given(lines)
@example({"id": "", "prompt_tokens": 0, "completion_tokens": 0, "input_ids": [], "output_ids": False})
def test_a_row_gives_the_same_samples_either_way(row):
    """Whole, odd or refused: the same rows, or the same reason."""
    line = orjson.dumps(row) + b"\n"
    assert describe(ResponseReader().read, line) == describe(Response.from_line, line)


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"1", b'{"id":1', b"\xff", b'{"id":NaN}', b'{"id":"\\ud800"}', b"{}"]
)
def test_a_line_that_is_no_row_is_refused_in_the_same_words(line):
    """And the next one is read."""
    reader = ResponseReader()
    assert describe(reader.read, line) == describe(Response.from_line, line)
    row = {"id": "a", "input_ids": [1], "output_ids": [2, 3], "prompt_tokens": 1, "completion_tokens": 2}
    response = reader.read(orjson.dumps(row))
    assert response.output_ids.tolist() == [2, 3]
    assert response.output_ids.dtype == np.int64


@pytest.mark.parametrize("odd", [b"true", b"false", b" true ", b"\t" * 20 + b"true" + b" " * 20])
@pytest.mark.parametrize("before", [b"", b"7,", b"0,7,"])
@pytest.mark.parametrize("behind", [b"", b",1"])
def test_true_is_no_token_id(odd, before, behind):
    """However it is spaced, and wherever it stands."""
    ids = before + odd + behind
    line = b'{"id":"a","input_ids":[5],"output_ids":[%s],"prompt_tokens":1,"completion_tokens":%d}'
    line %= (ids, ids.count(b",") + 1)
    assert describe(ResponseReader().read, line) == describe(Response.from_line, line) == "not_token_ids"


def test_a_text_that_says_true_costs_nothing():
    """Its row is read the fast way."""
    row = {"id": "a", "input_ids": [1], "output_ids": [0], "prompt_tokens": 1, "completion_tokens": 1}
    text = "true or false, x=true; f(true) is False, null"
    response = ResponseReader().read(orjson.dumps(row | {"text": text, "meta": {"kept": True}}))
    assert isinstance(response.output_ids, np.ndarray)


def test_a_line_with_a_byte_order_mark_is_damaged():
    """As it is to the run and to the statistics."""
    row = {"id": "a", "input_ids": [1], "output_ids": [2], "prompt_tokens": 1, "completion_tokens": 1}
    with pytest.raises(RecordError, match="BOM"):
        ResponseReader().read(b"\xef\xbb\xbf" + orjson.dumps(row))


def test_of_a_name_that_is_there_twice_both_take_the_last():
    """As every reader of ours does."""
    line = (
        b'{"id":"a","input_ids":[1],"input_ids":[4],"output_ids":[2],"prompt_tokens":1,"completion_tokens":1}'
    )
    found = describe(ResponseReader().read, line)
    assert found == describe(Response.from_line, line)
    assert found[0][3] == [4, 2]
