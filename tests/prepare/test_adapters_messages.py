"""The adapters of OpenAI-style rows: messages and ultrachat."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prepare.adapters import RowRejected, content_id, get_adapter, make_prompt

CHAT = [
    {"role": "user", "content": "Name a sailing dog."},
    {"role": "assistant", "content": "Rigger."},
    {"role": "user", "content": "And a cat?"},
    {"role": "assistant", "content": "Bosun."},
]
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}


def adapt(row: dict):
    return make_prompt(get_adapter("messages")(row))


def adapt_ultrachat(row: dict):
    return make_prompt(get_adapter("ultrachat")(row))


def reason_of(row: dict) -> str:
    with pytest.raises(RowRejected) as caught:
        adapt(row)
    return caught.value.reason


@pytest.mark.parametrize("messages", [CHAT, json.dumps(CHAT)])
def test_messages_may_be_a_list_or_json_text(messages):
    """Both forms give the history up to the last user turn."""
    assert adapt({"messages": messages}).messages == CHAT[:3]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"id": "x7"}, "x7"),
        ({"id": 12}, "12"),
        ({"uuid": "u-1", "id": ""}, "u-1"),
        ({"conversation_id": "c"}, "c"),
        ({"id": None}, ""),
        ({"id": True}, ""),
        ({}, ""),
    ],
)
def test_the_id_is_the_rows_own_or_empty(fields, expected):
    """Without an id of its own the row leaves it to the content hash."""
    assert adapt({"messages": CHAT, **fields}).id == expected


@pytest.mark.parametrize("row", [{"prompt": "hi", "id": "1"}, {"messages": None, "id": "1", "prompt": "hi"}])
def test_missing_messages_are_named(row):
    """Another field is not taken for messages; the detail lists what there is."""
    with pytest.raises(RowRejected) as caught:
        adapt(row)
    assert caught.value.reason == "missing_field"
    assert "'messages'" in caught.value.detail
    assert "id, " in caught.value.detail


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": "[{"}, "bad_json"),
        ({"messages": '{"role": "user"}'}, "bad_field"),
        ({"messages": ["hi"]}, "bad_field"),
        ({"messages": []}, "no_user_turn"),
        ({"messages": CHAT, "system": 4}, "bad_field"),
        ({"messages": CHAT, "tools": "[{"}, "bad_tools"),
        ({"messages": CHAT, "tools": [{"description": "no name"}]}, "bad_tools"),
        ({"messages": CHAT, "chat_template_kwargs": [1]}, "bad_field"),
        ({"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "bad_tool_call"),
        ({"messages": [*CHAT, {"role": "assistant", "tool_calls": "f()"}]}, "bad_tool_call"),
    ],
)
def test_odd_rows_are_rejected_with_a_reason(row, reason):
    """Each oddity has its own code."""
    assert reason_of(row) == reason


def test_a_system_field_goes_first():
    """It joins a system turn that is there, and is not repeated."""
    first = {"role": "system", "content": "Be brief."}
    assert adapt({"messages": CHAT, "system": "Be brief."}).messages[0] == first
    assert adapt({"messages": [first, *CHAT], "system": "Be brief."}).messages[0] == first
    assert (
        adapt({"messages": [first, *CHAT], "system": "You sail."}).messages[0]["content"]
        == "You sail.\n\nBe brief."
    )
    assert adapt({"messages": CHAT, "system": " "}).messages[0] == CHAT[0]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]]])
def test_tools_come_out_in_the_openai_shape(tools):
    """Whole schemas, JSON text and bare functions are the same tools."""
    assert adapt({"messages": CHAT, "tools": tools}).tools == [TOOL]


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools_are_none(tools):
    """An empty list is not a list of tools."""
    assert adapt({"messages": CHAT, "tools": tools}).tools is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"at": "Larkhaven"}', {"at": "Larkhaven"}),
        ({"at": "Larkhaven"}, {"at": "Larkhaven"}),
        ("{broken", "{broken"),
        ("[1]", "[1]"),
        ("", {}),
        (None, {}),
    ],
)
def test_arguments_become_an_object_where_they_are_one(arguments, expected):
    """Templates iterate over arguments; text that is no object stays as it is."""
    call = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": arguments}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "c1", "name": "tide", "content": "14:20", "extra": 1}
    _, made, result = adapt({"messages": [CHAT[0], calling, answer]}).messages
    assert made["content"] == ""
    assert made["tool_calls"] == [{**call, "function": {"name": "tide", "arguments": expected}}]
    assert result == {key: answer[key] for key in ("role", "tool_call_id", "name", "content")}


def test_the_older_function_call_becomes_a_tool_call():
    """Rows of 2023 have one function_call and a function role."""
    calling = {"role": "assistant", "content": "", "function_call": {"name": "tide", "arguments": "{}"}}
    turns = [CHAT[0], calling, {"role": "function", "name": "tide", "content": "14:20"}]
    _, made, result = adapt({"messages": turns}).messages
    assert made["tool_calls"] == [{"type": "function", "function": {"name": "tide", "arguments": {}}}]
    assert result["role"] == "tool"


def test_meta_keeps_small_values_only():
    """Labels and numbers are kept; texts, lists and answers are not."""
    meta = {"score": 0.5, "ok": True, "answer": "x" * 500, "list": [1], "none": None, "bad": float("nan")}
    prompt = adapt(
        {"messages": CHAT, "source": "set-1", "answer": "42", "meta": json.dumps({**meta, "bad": None})}
    )
    assert prompt.meta == {"source": "set-1", "score": 0.5, "ok": True}
    assert adapt({"messages": CHAT, "meta": meta}).meta == {"score": 0.5, "ok": True}


def test_template_arguments_are_kept():
    """They are part of what the template sees."""
    row = {"messages": CHAT, "chat_template_kwargs": {"thinking": False}}
    assert adapt(row).chat_template_kwargs == {"thinking": False}


@given(
    messages=st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=8)}
        ),
        max_size=6,
    ),
    as_text=st.booleans(),
)
def test_a_row_gives_one_prompt_and_stays_as_it_was(messages, as_text):
    """The same row has the same prompt and id, ends on a user turn, and is never changed."""
    row = {"messages": json.dumps(messages) if as_text else messages, "meta": {"n": 1}}
    before = copy.deepcopy(row)
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        assert reason_of(row) == "no_user_turn"
        return
    one, two = adapt(row), adapt(copy.deepcopy(row))
    assert one == two
    assert content_id(one) == content_id(two)
    assert one.messages[-1]["role"] == "user"
    assert row == before


def test_ultrachat_answers_the_last_user_turn():
    """The id is prompt_id, the first message is not doubled by prompt, and no meta is made up."""
    prompt = adapt_ultrachat({"prompt": "Name a sailing dog.", "prompt_id": "9a1b", "messages": CHAT})
    assert (prompt.id, prompt.messages, prompt.meta) == ("9a1b", CHAT[:3], {})


def test_ultrachat_does_not_fall_back_to_prompt():
    """A row without messages is rejected although it has a prompt."""
    with pytest.raises(RowRejected, match=r"missing_field: field 'messages' .* prompt, prompt_id"):
        adapt_ultrachat({"prompt": "hi", "prompt_id": "9a1b"})
