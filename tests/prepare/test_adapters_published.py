"""The adapters of the published sets, on rows in their schemas, and their odd ones."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prepare.adapters import ADAPTERS, RowRejected, get_adapter, make_prompt

CALL = {"name": "tide", "arguments": {"at": "Larkhaven"}}
TOOL = {"name": "tide", "description": "Next tide", "parameters": {"type": "object", "properties": {}}}


def adapt(name, row):
    return make_prompt(get_adapter(name)(row))


def contents(prompt):
    return [(message["role"], message["content"]) for message in prompt.messages]


def reason_of(name, row):
    with pytest.raises(RowRejected) as caught:
        adapt(name, row)
    return caught.value.reason


@pytest.mark.parametrize(
    ("name", "row", "expected", "row_id", "meta"),
    [
        (
            "magicoder",
            {"lang": "python", "raw_index": 9, "index": 3, "problem": "Sort it.", "solution": "s"},
            [("user", "Sort it.")], "3", {"lang": "python"},
        ),
        ("magicoder", {"instruction": "Add two.", "response": "a + b"}, [("user", "Add two.")], "", {}),
        (
            "mixturethoughts",
            {
                "messages": [
                    {"role": "user", "content": "2+2?"},
                    {"role": "assistant", "content": "<think>four</think>4"},
                    {"role": "user", "content": "sure?"},
                    {"role": "assistant", "content": "<think>hm"},
                ],
                "num_tokens": 12,
                "source": "math",
            },
            [("user", "2+2?"), ("assistant", "4"), ("user", "sure?")], "", {"source": "math"},
        ),
        (
            "openthoughts",
            {
                "system": "Think.",
                "conversations": [
                    {"from": "user", "value": "Why?"},
                    {"from": "assistant", "value": "<|begin_of_thought|>"},
                ],
            },
            [("system", "Think."), ("user", "Why?")], "", {},
        ),
        (
            "openthoughts",
            {
                "difficulty": 7, "source": "stackexchange", "domain": "code",
                "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}],
            },
            [("user", "Why?")], "", {"source": "stackexchange", "domain": "code", "difficulty": 7},
        ),
        (
            "sharegpt",
            {
                "id": "QWJhYvA_0",
                "conversations": [
                    {"from": "gpt", "value": "Hello!"},
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": ""},
                    {"from": "human", "value": "There?"},
                    {"from": "gpt", "value": "Yes"},
                ],
            },
            [("user", "Hi\n\nThere?")], "QWJhYvA_0", {},
        ),
        (
            "sweagent",
            {
                "instance_id": "repo__1", "model_name": "m", "target": True, "exit_status": "submitted",
                "trajectory": [
                    {"role": "system", "text": None, "system_prompt": "Be an agent.", "mask": False},
                    {"role": "user", "text": "Fix it.", "system_prompt": None, "mask": False},
                    {"role": "ai", "text": "ls", "system_prompt": None, "mask": True},
                    {"role": "user", "text": "a.py", "system_prompt": None, "mask": False},
                    {"role": "ai", "text": "submit", "system_prompt": None, "mask": True},
                ],
            },
            [("system", "Be an agent."), ("user", "Fix it."), ("assistant", "ls"), ("user", "a.py")],
            "repo__1",
            {"instance_id": "repo__1", "model_name": "m", "exit_status": "submitted", "target": True},
        ),
        (
            "sweagent",
            {
                "instance_id": "smith__2", "traj_id": "smith__2.run", "resolved": False,
                "messages": json.dumps([
                    {"role": "system", "content": "Be an agent."},
                    {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
                    {"role": "assistant", "content": "look", "tool_calls": [
                        {"id": "c1", "type": "function",
                         "function": {"name": "bash", "arguments": "{\"command\": \"ls\"}"}}]},
                    {"role": "tool", "content": "a.py", "tool_call_ids": ["c1"]},
                ]),
            },
            [("system", "Be an agent."), ("user", "Fix it."), ("assistant", "look"), ("tool", "a.py")],
            "smith__2.run", {"instance_id": "smith__2", "resolved": False},
        ),
        ("prompt", {"id": 4, "prompt": "Hi", "completion": "Ho"}, [("user", "Hi")], "4", {}),
        (
            "prompt",
            {"system": "Be kind.", "prompt": [{"role": "user", "content": "Hi"}], "chosen": []},
            [("system", "Be kind."), ("user", "Hi")], "", {},
        ),
        ("text", {"text": "Tell me of tides.", "source": "web"}, [("user", "Tell me of tides.")], "",
         {"source": "web"}),
    ],
)  # fmt: skip
def test_a_row_becomes_its_question(name, row, expected, row_id, meta):
    """What is asked, the row's own id, and the labels that are carried to the export."""
    before = copy.deepcopy(row)
    prompt = adapt(name, row)
    assert contents(prompt) == expected
    assert (prompt.id, prompt.meta) == (row_id, meta)
    assert row == before


def test_a_function_call_of_a_sharegpt_dump_is_a_tool_call():
    """One call or a list of them, as JSON text; the observation is the tool's turn."""
    row = {
        "tools": json.dumps([TOOL]),
        "conversations": [
            {"from": "human", "value": "When is high water?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "14:10"},
            {"from": "function_call", "value": json.dumps([CALL, CALL])},
            {"from": "observation", "value": "14:11"},
            {"from": "gpt", "value": "At 14:11."},
        ],
    }
    prompt = adapt("sharegpt", row)
    assert [message["role"] for message in prompt.messages] == [
        "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip
    assert [len(m["tool_calls"]) for m in prompt.messages if "tool_calls" in m] == [1, 2]
    assert prompt.messages[1]["tool_calls"][0]["function"] == CALL
    assert prompt.tools == [{"type": "function", "function": TOOL}]


def test_a_sharegpt_dump_that_mixes_shapes_is_read_from_parquet_too():
    """Where each turn has the fields of both, null in one or the other."""
    turns = [
        {"from": None, "value": None, "role": "user", "content": "Hi"},
        {"from": "gpt", "value": "Ho", "role": None, "content": None},
        {"from": None, "value": None, "role": "user", "content": "Bye"},
    ]
    prompt = adapt("sharegpt", {"conversations": turns})
    assert contents(prompt) == [("user", "Hi"), ("assistant", "Ho"), ("user", "Bye")]


def test_a_tool_turn_of_swe_smith_names_its_call():
    """Its list of one id becomes the id that a template prints."""
    turns = [{"role": "user", "content": "go"}, {"role": "tool", "content": "ok", "tool_call_ids": ["c9"]}]
    assert adapt("sweagent", {"messages": turns}).messages[1]["tool_call_id"] == "c9"


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("magicoder", {"solution": "s"}, "missing_field"),
        ("magicoder", {"problem": 3}, "bad_field"),
        ("magicoder", {"problem": "  "}, "no_user_turn"),
        ("mixturethoughts", {"messages": []}, "no_user_turn"),
        ("openthoughts", {"conversations": "no"}, "bad_json"),
        ("openthoughts", {"system": 3, "conversations": []}, "bad_field"),
        ("sharegpt", {"id": "1"}, "missing_field"),
        ("sharegpt", {"conversations": ["hi"]}, "bad_field"),
        ("sharegpt", {"conversations": [{"from": "bard", "value": "hi"}]}, "unknown_role"),
        ("sharegpt", {"conversations": [{"from": "human", "value": 3}]}, "bad_field"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "hi"}]}, "no_user_turn"),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "{oops"}]},
            "bad_tool_call",
        ),
        ("sweagent", {"instance_id": "x"}, "missing_field"),
        ("sweagent", {"trajectory": [3]}, "bad_field"),
        ("sweagent", {"messages": "[{"}, "bad_json"),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "value": "b"}]},
            "missing_field",
        ),
        ("messages", {"messages": [], "chat_template_kwargs": {"tokenize": False}}, "bad_field"),
        ("sharegpt", {"conversations": [{"from": "human"}]}, "missing_field"),
        ("prompt", {"text": "x"}, "missing_field"),
        ("prompt", {"prompt": {"a": 1}}, "bad_field"),
        ("text", {"text": ["x"]}, "bad_field"),
    ],
)
def test_a_row_that_is_no_question_is_rejected(name, row, reason):
    """With a stable reason; nothing is guessed."""
    assert reason_of(name, row) == reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ["messages", "conversations", "trajectory", "prompt", "text", "problem", "instruction", "system",
          "tools", "chat", "input", "id"]  # fmt: skip


@pytest.mark.parametrize("name", sorted(ADAPTERS))
@given(row=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5))
def test_whatever_a_row_holds_it_is_a_prompt_or_rejected(name, row):
    """No other error: one odd row must not end the preparation of a million."""
    before = copy.deepcopy(row)
    try:
        prompt = adapt(name, row)
    except RowRejected:
        pass
    else:
        assert prompt.messages[-1]["role"] in ("user", "tool")
    assert row == before
