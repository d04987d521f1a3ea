"""The OpenCodeInstruct adapter: a coding task becomes a single-turn prompt."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prepare.adapters import RowRejected, get_adapter, make_prompt

ROW = {
    "id": "0f3c",
    "input": "Return the second largest number of a list.",
    "output": "def second(xs): ...",
    "domain": "algorithmic",
    "generation_algorithm": "self-instruct",
    "llm_judgement": '{"logical_correctness": {"score": 5}}',
    "unit_tests": '["assert second([1, 2]) == 1"]',
    "tests_execution_status": '["pass"]',
    "average_test_score": "0.9",
}


def adapt(row):
    return make_prompt(get_adapter("opencodeinstruct")(row))


def test_the_input_is_the_prompt():
    """The task is the only turn; labels go to meta and the other model's answer nowhere."""
    prompt = adapt(ROW)
    assert prompt.id == "0f3c"
    assert prompt.messages == [{"role": "user", "content": ROW["input"]}]
    assert prompt.meta == {
        "domain": "algorithmic",
        "generation_algorithm": "self-instruct",
        "average_test_score": 0.9,
    }
    assert b"def second" not in prompt.to_line()


@pytest.mark.parametrize(
    ("score", "meta"),
    [("1", 1.0), (0.5, 0.5), (1, 1.0), ("n/a", "n/a"), ("nan", "nan"), (None, None), ("", None)],
)
def test_scores_become_numbers_where_they_are(score, meta):
    """A score may be text; what is no number stays as it is, what is absent stays absent."""
    assert adapt({**ROW, "average_test_score": score}).meta.get("average_test_score") == meta


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**ROW, "input": " \n"}, "no_user_turn"),
        ({**ROW, "input": None}, "missing_field"),
        ({"id": "1", "problem": "x"}, "missing_field"),
        ({**ROW, "input": ["x"]}, "bad_field"),
    ],
)
def test_a_row_without_a_task_is_rejected(row, reason):
    """Each oddity has its own code."""
    with pytest.raises(RowRejected) as caught:
        adapt(row)
    assert caught.value.reason == reason


@given(text=st.text(min_size=1).filter(str.strip))
def test_the_task_is_passed_on_unchanged(text):
    """Spaces and newlines of a task are part of it, and the row is not changed."""
    row = {**ROW, "input": text}
    before = copy.deepcopy(row)
    assert adapt(row).messages[-1] == {"role": "user", "content": text}
    assert row == before
