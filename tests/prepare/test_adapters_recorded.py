"""A finished conversation is taken as it was said: nothing dropped, merged or guessed."""

import pytest

from flows.catalog import InputError, build_parameters
from tasks.prepare.adapters import Conversation, RowRejected, make_prompt

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def record(*turns):
    return make_prompt(Conversation(turns), "trajectory").messages


def test_every_turn_stays_as_it_was():
    """Greetings, empty turns, neighbours of one role and thoughts; only what nobody answered goes."""
    turns = [
        {"role": "system", "content": ""},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": " \n"},
        {"role": "assistant", "content": "<think>x</think>y"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "b"},
    ]
    assert record(*turns, {"role": "user", "content": "and?"}) == turns


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_beside_the_answer_stays(field):
    """Under the name that templates read."""
    said = record({"role": "user", "content": "a"}, {"role": "gpt", "content": "b", field: "hm"})
    assert said[1] == {"role": "assistant", "content": "b", "reasoning_content": "hm"}


def test_a_thought_among_the_parts_stays():
    """A list of a thought and one text is both."""
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]
    said = record({"role": "user", "content": ["a"]}, {"role": "assistant", "content": parts})
    assert said == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize("arguments", ['{"x":"1"}', '{"x": 1e5}', '{"x": "K\\u00f6ln"}', "", {"x": 1}])
def test_the_arguments_of_a_call_stay_to_the_letter(arguments):
    """They are text that the target wrote; JSON read and written again is another one."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = record(
        {"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}
    )
    assert said[1]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([{"role": "user", "content": "a"}], "no_assistant_turn"),
        ([], "no_assistant_turn"),
        ([3], "bad_field"),
        ([{"role": "bard", "content": "a"}], "unknown_role"),
        ([{"role": "user", "content": ["a", "b"]}, {"role": "assistant", "content": "c"}], "several_parts"),
        (
            [{"role": "assistant", "content": "c", "reasoning": "x", "reasoning_content": "y"}],
            "several_parts",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "not_text"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], "not_text"),
        ([{"role": "user", "text": "lost"}, {"role": "assistant", "content": "b"}], "missing_field"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "text": "lost"}], "missing_field"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], "missing_field"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "refusal": "no"}], "not_text"),
    ],
)
def test_what_would_have_to_be_guessed_is_rejected(turns, reason):
    """How parts were joined, or which of two thoughts was written, is known to nobody."""
    with pytest.raises(RowRejected) as caught:
        record(*turns)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("name", "value"),
    [("turns", "each"), ("budget_tokens", 9), ("system_prompt", "be kind"), ("keep_system_prompts", False)],
)
def test_settings_that_would_change_a_trajectory_are_refused(name, value):
    """With the dataset, the setting and its value."""
    dataset = {"name": "a", "source": "a.jsonl", "adapter": "messages", "kind": "trajectory", name: value}
    with pytest.raises(InputError, match=rf"dataset 'a': {name}: kind 'trajectory' .*{value!r}"):
        build_parameters({"datasets": [dataset]})
