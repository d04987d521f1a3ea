"""The loss mask is 1 exactly on the answer, or the row is refused with a reason."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.records.rows import Response, is_empty_answer
from tasks.tokens.masks import NotTokenExact, sample_from_response

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def make(prompt, output, **changes):
    row = {
        "id": "a",
        "turn": 0,
        "input_ids": prompt,
        "output_ids": output,
        "finish_reason": "stop",
        "prompt_tokens": len(prompt or []),
        "completion_tokens": len(output or []),
    }
    return Response.from_row(row | changes)


@given(prompt=ids, output=ids)
def test_mask_is_one_exactly_on_the_output_ids(prompt, output):
    """Ids are prompt + answer, the mask selects the answer and nothing else, nothing is shifted or cut."""
    sample = sample_from_response(make(prompt, output))
    assert sample.input_ids.tolist() == prompt + output
    assert sample.loss_mask.tolist() == [0] * len(prompt) + [1] * len(output)
    assert sample.output_ids.tolist() == output
    assert (sample.n_tokens, sample.n_loss) == (len(prompt) + len(output), len(output))
    assert (sample.input_ids.dtype, sample.loss_mask.dtype) == (np.int32, np.uint8)


@given(
    prompt=ids, output=ids, off=st.sampled_from([-1, 1, 7]), field=st.sampled_from(["prompt", "completion"])
)
def test_a_count_that_differs_from_the_ids_is_refused(prompt, output, off, field):
    """A row is exact only when the server counted as many tokens as there are ids."""
    counts = {"prompt": len(prompt), "completion": len(output)}
    response = make(prompt, output, **{f"{field}_tokens": counts[field] + off})
    with pytest.raises(NotTokenExact) as caught:
        sample_from_response(response)
    assert caught.value.reason == f"{field}_tokens_differ"


@pytest.mark.parametrize("missing", ["input_ids", "output_ids"])
def test_missing_ids_are_refused(missing):
    """Rows of older files without ids are not token-exact."""
    with pytest.raises(NotTokenExact, match="'a'") as caught:
        sample_from_response(make([1], [2], **{missing: None}))
    assert caught.value.reason == "no_ids"


@pytest.mark.parametrize("bad", [2**31, -1, 1.5, "7", None, True, False])
@pytest.mark.parametrize("field", ["input_ids", "output_ids"])
def test_what_is_no_token_id_is_refused(bad, field):
    """Nothing is rounded, wrapped or parsed into an id."""
    with pytest.raises(NotTokenExact) as caught:
        sample_from_response(make([1], [2], **{field: [bad]}))
    assert caught.value.reason == "not_token_ids"


def test_a_cut_answer_keeps_its_reason_and_gets_no_end_token():
    """finish_reason "length" passes through and no id is added."""
    sample = sample_from_response(make([1, 2], [3], finish_reason="length"))
    assert sample.finish_reason == "length"
    assert sample.input_ids.tolist() == [1, 2, 3]


@st.composite
def conversations(draw):
    """Ids with some parts of them marked."""
    sequence = draw(ids)
    cuts = sorted(draw(st.sets(st.integers(0, len(sequence)), max_size=8)))
    spans = [[start, end] for start, end in zip(cuts[::2], cuts[1::2], strict=False)]
    return sequence, spans


def make_conversation(sequence, spans, **changes):
    generated = sum(end - start for start, end in spans)
    counts = {"completion_tokens": generated, "prompt_tokens": len(sequence) - generated}
    return make(sequence, [], **{"loss_spans": spans} | counts | changes)


@given(conversations())
def test_mask_is_one_exactly_on_the_spans(conversation):
    """A recorded conversation's sequence is kept whole, and its spans alone are marked."""
    sequence, spans = conversation
    sample = sample_from_response(make_conversation(sequence, spans))
    marked = [any(start <= place < end for start, end in spans) for place in range(len(sequence))]
    assert sample.input_ids.tolist() == sequence
    assert sample.loss_mask.tolist() == marked
    assert sample.n_loss == sum(marked)
    assert sample.output_ids.tolist() == [one for start, end in spans for one in sequence[start:end]]


@pytest.mark.parametrize(
    "spans",
    [
        [[0, 2], [1, 3]],
        [[2, 3], [0, 1]],
        [[1, 1]],
        [[2, 1]],
        [[-1, 2]],
        [[1, 5]],
        [[1]],
        [[0, 1, 2]],
        [[0, 1.0]],
        [[False, 1]],
        [["0", "1"]],
        [0, 1],
        "ab",
        None,
        {"start": 0},
    ],
)
def test_spans_that_are_no_ascending_parts_are_refused(spans):
    """Overlapping, turned round, empty, outside or malformed: the row is not repaired."""
    row = make([1, 2, 3, 4], [], loss_spans=spans, prompt_tokens=2, completion_tokens=2)
    with pytest.raises(NotTokenExact, match="'a'") as caught:
        sample_from_response(row)
    assert caught.value.reason == "bad_loss_spans"


def test_spans_and_output_ids_exclude_each_other():
    """Which of the two is marked would be a guess."""
    row = make([1, 2], [3], loss_spans=[[0, 1]])
    with pytest.raises(NotTokenExact) as caught:
        sample_from_response(row)
    assert caught.value.reason == "bad_loss_spans"


@pytest.mark.parametrize("field", ["prompt", "completion"])
def test_spans_that_differ_from_the_counts_are_refused(field):
    """The counts say how many ids are marked and how many are not."""
    row = make_conversation([1, 2, 3, 4, 5], [[1, 3]], **{f"{field}_tokens": 4})
    with pytest.raises(NotTokenExact) as caught:
        sample_from_response(row)
    assert caught.value.reason == f"{field}_tokens_differ"


@pytest.mark.parametrize(
    ("tokens", "reason", "empty"),
    [(0, "stop", True), (1, "stop", True), (2, "stop", False), (0, "length", True), (1, "length", False)],
)
def test_only_a_stop_token_is_an_empty_answer(tokens, reason, empty):
    """One token is an answer when it was cut there, and nothing when it is the stop token."""
    assert is_empty_answer(tokens, reason) is empty
