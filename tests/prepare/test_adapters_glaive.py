"""The glaive adapter: two strings become turns, tools and calls."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prepare.adapters import RowRejected, content_id, get_adapter, make_prompt
from tasks.prepare.adapters.glaive import parse_call, split_chat, split_system

INTRODUCTION = (
    "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
)
TIDE = {"name": "tide", "description": "Next tide {sea}", "parameters": {"type": "object", "properties": {}}}
MOON = {"name": "moon", "description": "Phase", "parameters": {}}
CALL = """<functioncall> {"name": "tide", "arguments": '{"at": "Larkhaven"}'} <|endoftext|>"""
PLAIN = "SYSTEM: You are a helpful assistant, with no access to external functions.\n"


def adapt(row):
    return make_prompt(get_adapter("glaive")(row))


def make_chat(*turns: str) -> str:
    return "\n\n\n".join(turns) + "\n\n"


def make_row(*turns: str, system: str = INTRODUCTION + json.dumps(TIDE, indent=4)) -> dict:
    return {"system": system, "chat": make_chat(*turns)}


def test_a_call_and_its_response_stay_in_the_prompt():
    """The prompt ends with the function's response when only an answer follows it."""
    prompt = adapt(
        make_row(
            "USER: When?",
            f"ASSISTANT: {CALL}",
            'FUNCTION RESPONSE: {"t": 1}',
            "ASSISTANT: At one. <|endoftext|>",
        )
    )
    arguments = {"at": "Larkhaven"}
    call = {
        "id": "functions.tide:0",
        "type": "function",
        "function": {"name": "tide", "arguments": arguments},
    }
    assert prompt.messages == [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"t": 1}', "tool_call_id": "functions.tide:0", "name": "tide"},
    ]
    assert prompt.tools == [{"type": "function", "function": TIDE}]
    assert prompt.id == ""


def test_a_later_user_turn_is_the_one_to_answer():
    """Answers before the last user turn are history, the one after it is dropped."""
    prompt = adapt(
        make_row(
            "USER: Hi", "ASSISTANT: Hello! <|endoftext|>", "USER: Thanks", "ASSISTANT: Bye <|endoftext|>"
        )
    )
    assert [turn["content"] for turn in prompt.messages] == ["Hi", "Hello!", "Thanks"]


def test_a_call_without_a_response_is_dropped_with_the_answer():
    """A row that ends with a call asks the target for that call."""
    prompt = adapt(make_row("USER: When?", f"ASSISTANT: {CALL}"))
    assert prompt.messages == [{"role": "user", "content": "When?"}]


def test_text_before_a_call_is_kept():
    """The assistant may say something and then call."""
    made = split_chat(make_chat("USER: When?", f"ASSISTANT: Let me look. {CALL}", "FUNCTION RESPONSE: 1"))[1]
    assert made["content"] == "Let me look."
    assert len(made["tool_calls"]) == 1


def test_calls_are_numbered_over_the_conversation():
    """Each response carries the id of its own call, also when two calls share a turn."""
    turns = split_chat(
        make_chat("USER: q", f"ASSISTANT: {CALL} {CALL}", "FUNCTION RESPONSE: 1", "FUNCTION RESPONSE: 2",
                  f"ASSISTANT: {CALL}", "FUNCTION RESPONSE: 3", "FUNCTION RESPONSE: stray")
    )  # fmt: skip
    ids = [turn.get("tool_call_id") for turn in turns if turn["role"] == "tool"]
    assert ids == ["functions.tide:0", "functions.tide:1", "functions.tide:2", None]


@pytest.mark.parametrize("gap", ["\n", "\n\n", ", ", ""])
def test_schemas_follow_one_another(gap):
    """Concatenated objects are tools whatever stands between them; nested braces are no tools."""
    text, tools = split_system(INTRODUCTION + json.dumps(TIDE, indent=4) + gap + json.dumps(MOON) + "\n")
    assert text == ""
    assert [tool["function"] for tool in tools] == [TIDE, MOON]


@pytest.mark.parametrize(
    ("system", "text"),
    [
        (PLAIN, "You are a helpful assistant, with no access to external functions."),
        ("You sail.", "You sail."),
        ("SYSTEM: ", ""),
    ],
)
def test_a_system_text_without_functions_is_kept(system, text):
    """The prefix goes, the text stays, and there are no tools."""
    prompt = adapt(make_row("USER: Hi", system=system))
    assert prompt.messages[:-1] == ([{"role": "system", "content": text}] if text else [])
    assert prompt.tools is None


def test_a_schema_may_hold_a_raw_newline():
    """Some descriptions break their line, which strict JSON forbids."""
    (tool,) = split_system(INTRODUCTION + '{"name": "f", "description": "one\ntwo"}')[1]
    assert tool["function"]["description"] == "one\ntwo"


def test_numbers_of_schemas_and_calls_keep_their_digits():
    """Those of a long integer; a number that would be infinity makes the schema unreadable."""
    schema = '{"name": "f", "parameters": {"maximum": 92233720368547760001}}'
    (tool,) = split_system(INTRODUCTION + schema)[1]
    assert repr(tool["function"]["parameters"]) == "{'maximum': 92233720368547760001}"
    for arguments in ("'{\"n\": 92233720368547760001}'", '{"n": 92233720368547760001}'):
        call = parse_call(f'{{"name": "f", "arguments": {arguments}}}')
        assert repr(call["function"]["arguments"]) == "{'n': 92233720368547760001}"
    for bad in ('{"name": "f", "maximum": 1e400}', '{"name": "f", "a": ' + "[" * 3000):
        with pytest.raises(RowRejected, match="bad_tools"):
            split_system(INTRODUCTION + bad)


def test_an_unusual_text_before_the_functions_is_kept():
    """Only the stock introduction is left to the template."""
    assert split_system(f"SYSTEM: You sail.\n{json.dumps(MOON)}")[0] == "You sail."


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("""{"name": "f", "arguments": '{"a": 1}'}""", {"a": 1}),
        ("""{"name": "f", "arguments": '{"a": "it's"}'}""", {"a": "it's"}),
        ("""{"name": "f", "arguments": '{"a": "it\\'s"}'}""", {"a": "it's"}),
        ("""{"name": "f", "arguments": '{"a": "say \\"x\\""}'}""", {"a": 'say "x"'}),
        ("""{"name": "f", "arguments": '{\n"a": [1,\n2]}'\n}""", {"a": [1, 2]}),
        ("""{"name": "f", "arguments": {"a": 1}}""", {"a": 1}),
        ("""{"name": "f", "arguments": "{\\"a\\": 1}"}""", {"a": 1}),
        ("""{"name": "f", "arguments": '{}'}""", {}),
        ("""{"name": "f"}""", {}),
    ],
)
def test_calls_are_read_as_they_are_written(written, arguments):
    """Single-quoted arguments are no JSON but are read; so are the proper forms."""
    function = parse_call(f" {written} ")["function"]
    assert function == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    "written",
    [
        """{"name": "f", "arguments": '{"a": }'}""",
        """{"name": "f", "arguments": '{"a": 1}}""",
        """{"name": "f", "arguments": '[1]'}""",
        """{"name": "f", "arguments": [1]}""",
        """{"arguments": '{}'}""",
        """{"name": "", "arguments": {}}""",
        "f(1)",
        "",
        "[1]",
    ],
)
def test_an_unreadable_call_rejects_the_row(written):
    """A broken call is never passed on as text."""
    with pytest.raises(RowRejected) as caught:
        adapt(
            make_row("USER: q", f"ASSISTANT: <functioncall> {written} <|endoftext|>", "FUNCTION RESPONSE: 1")
        )
    assert caught.value.reason == "bad_tool_call"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (make_row("USER: q", system=INTRODUCTION + '{"name": "f", '), "bad_tools"),
        (make_row("USER: q", system=INTRODUCTION + '{"description": "no name"}'), "bad_tools"),
        (make_row("USER: q", system=INTRODUCTION + json.dumps(MOON) + " and more"), "bad_tools"),
        (make_row("Hello there", "USER: q"), "bad_chat"),
        (make_row("USER: ", "ASSISTANT: Hello <|endoftext|>"), "no_user_turn"),
        ({"system": PLAIN, "chat": ""}, "no_user_turn"),
        ({"system": PLAIN}, "missing_field"),
        ({"chat": "USER: q"}, "missing_field"),
        ({"system": PLAIN, "chat": ["USER: q"]}, "bad_field"),
    ],
)
def test_odd_rows_are_rejected_with_a_reason(row, reason):
    """Each oddity has its own code."""
    with pytest.raises(RowRejected) as caught:
        adapt(row)
    assert caught.value.reason == reason


def test_a_marker_inside_a_line_is_text():
    """Only a marker that opens a line starts a turn."""
    assert split_chat("USER: say ASSISTANT: twice") == [{"role": "user", "content": "say ASSISTANT: twice"}]


PIECES = st.sampled_from(
    [
        "USER: q",
        "USER: ",
        "ASSISTANT: a <|endoftext|>",
        f"ASSISTANT: {CALL}",
        "FUNCTION RESPONSE: 1",
        "ASSISTANT:",
    ]
)


@given(turns=st.lists(PIECES, max_size=8))
def test_any_order_of_turns_gives_a_prompt_or_a_reason(turns):
    """The end of messages is a user or tool turn, the row is untouched, the id depends on it alone."""
    row = make_row(*turns)
    before = copy.deepcopy(row)
    if not any(piece == "USER: q" for piece in turns):
        with pytest.raises(RowRejected, match="no_user_turn"):
            adapt(row)
        return
    prompt = adapt(row)
    assert prompt.messages[-1]["role"] in ("user", "tool")
    assert content_id(prompt) == content_id(adapt(before))
    assert row == before
