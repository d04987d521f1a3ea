"""The cleaning that all adapters share, and the table of adapters."""

import copy
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prepare.adapters import ADAPTERS, Conversation, RowRejected, content_id, get_adapter, make_prompt
from tasks.prepare.adapters.common import drop_thoughts
from tasks.prepare.adapters.roles import ROLES, to_role
from tasks.records.rows import Prompt

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
INITIALS = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}


def clean_turns(turns: list) -> list[dict]:
    """The messages of the prompt that these turns make."""
    return make_prompt(Conversation(turns)).messages


def turn(spec: str) -> dict:
    """A turn from its initial and content: "u:hello"; "c" is an assistant turn that calls a tool."""
    initial, _, content = spec.partition(":")
    made = {"role": INITIALS[initial], "content": content}
    return {**made, "tool_calls": [CALL]} if initial == "c" else made


def clean(*specs: str) -> list[str]:
    back = {role: initial for initial, role in reversed(INITIALS.items())}
    return [
        f"{'c' if 'tool_calls' in t else back[t['role']]}:{t['content']}"
        for t in clean_turns([turn(spec) for spec in specs])
    ]


ANY_TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "human", "gpt", "assistant", "system", "tool", "observation"]),
        "content": st.sampled_from(["", " \n", "hi", "<think>x</think>", "<think>x</think>y", None])
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=3),
    },
    optional={"tool_calls": st.sampled_from([[CALL], [], None])},
)


def has_text(turn: dict) -> bool:
    """Whether this is a user turn that says something."""
    content = turn["content"] or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return turn["role"] in ("user", "human") and bool(text.strip())


@pytest.mark.parametrize(
    ("given_turns", "kept"),
    [
        (["u:q", "a:x"], ["u:q"]),
        (["u:q", "a:x", "u:r", "a:y", "a:z"], ["u:q", "a:x", "u:r"]),
        (["s:be kind", "a:hello", "u:q"], ["s:be kind", "u:q"]),
        (["a:hello", "t:stray", "u:q"], ["u:q"]),
        (["u:q", "a:x", "u: "], ["u:q"]),
        (["u:q", "u:", "u:r"], ["u:q\n\nr"]),
        (["u:q", "a:x", "u:", "a:y", "u:r"], ["u:q", "a:x\n\ny", "u:r"]),
        (["s:a", "s:b", "u:q", "s:late"], ["s:a\n\nb", "u:q"]),
        (["u:q", "c:", "t:1", "t:2"], ["u:q", "c:", "t:1", "t:2"]),
        (["u:q", "c:", "t:", "a:done"], ["u:q", "c:", "t:"]),
        (["u:q", "a:let me see", "c:", "t:1"], ["u:q", "a:let me see", "c:", "t:1"]),
        (["u:q", "c:", "c:", "t:1"], ["u:q", "c:", "c:", "t:1"]),
        (["u:q", "c:"], ["u:q"]),
    ],
)
def test_turns_are_cleaned_by_the_rules(given_turns, kept):
    """A prompt is what comes before the answer, without empty turns, with neighbours merged."""
    assert clean(*given_turns) == kept


@pytest.mark.parametrize("turns", [[], ["s:only"], ["u:"], ["a:hi", "u: \n"], ["t:1"]])
def test_turns_without_a_user_are_rejected(turns):
    """Without a user turn there is nothing to answer."""
    with pytest.raises(RowRejected) as caught:
        clean(*turns)
    assert caught.value.reason == "no_user_turn"
    assert str(len(turns)) in caught.value.detail


@given(turns=st.lists(ANY_TURN, max_size=8))
def test_a_prompt_always_ends_where_the_target_answers(turns):
    """Whatever the turns: the last is user or tool, contents are text, the input is untouched."""
    before = copy.deepcopy(turns)
    if not any(has_text(turn) for turn in turns):
        with pytest.raises(RowRejected, match="no_user_turn"):
            clean_turns(turns)
        return
    messages = clean_turns(turns)
    assert messages[-1]["role"] in ("user", "tool")
    assert all(isinstance(message["content"], str) for message in messages)
    plain = ["" if m["role"] == "tool" or "tool_calls" in m else m["role"] for m in messages]
    assert all(a != b or not a for a, b in pairwise(plain))
    assert turns == before


@given(turns=st.lists(ANY_TURN, max_size=8))
def test_cleaning_twice_changes_nothing(turns):
    """A cleaned prompt is clean."""
    try:
        once = clean_turns(turns)
    except RowRejected:
        return
    assert clean_turns(once) == once


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<think>hm</think>\n\nFour.", "Four."),
        ("<think>a</think>One <think>b\nc</think>two", "One two"),
        ("<think>never closed", ""),
        ("opened by the template</think>\nFour.", "Four."),
        ("Use a <think> tag here.", "Use a <think> tag here."),
        ("  spaces stay ", "  spaces stay "),
    ],
)
def test_thoughts_leave_the_history(text, kept):
    """Only the answer of an earlier turn is kept."""
    assert drop_thoughts(text) == kept


def test_turns_to_be_learnt_stay_apart():
    """Merged, answers would have a blank line that nobody generated, and the second one's thought be lost."""
    answers = [{"role": "assistant", "content": text, "reasoning_content": text} for text in ("one", "two")]
    turns = [{"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}, *answers]
    assert make_prompt(Conversation(turns), "trajectory").messages == turns


def test_thoughts_of_a_user_stay():
    """A user may write about the tag."""
    assert clean("u:What is <think>x</think>?") == ["u:What is <think>x</think>?"]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("GPT", "assistant"),
        (" ai ", "assistant"),
        ("bot", "assistant"),
        ("model", "assistant"),
        ("developer", "system"),
        ("function", "tool"),
        ("observation", "tool"),
    ],
)
def test_role_names_are_translated(name, role):
    """The table covers the names of the public datasets."""
    assert to_role(name) == role


@pytest.mark.parametrize("name", ["narrator", "", None, 3, ["user"]])
def test_an_unknown_role_is_rejected(name):
    """A role is never guessed."""
    with pytest.raises(RowRejected) as caught:
        clean_turns([{"role": name, "content": "hi"}])
    assert caught.value.reason == "unknown_role"
    assert repr(name) in caught.value.detail


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}], "not_text"),
        ([{"type": "input_audio", "input_audio": {}}], "not_text"),
        ([{"type": "text", "text": None}], "not_text"),
        ([7], "not_text"),
        ([{"type": ["text"], "text": "x"}], "not_text"),
        ({"text": "hi"}, "bad_field"),
        (7, "bad_field"),
    ],
)
def test_content_that_is_no_text_is_rejected(content, reason):
    """An image or a stray type is not silently dropped from the prompt."""
    with pytest.raises(RowRejected) as caught:
        clean_turns([{"role": "user", "content": content}])
    assert caught.value.reason == reason


def test_text_parts_are_joined():
    """A list of text parts becomes one string."""
    parts = [{"type": "text", "text": "a"}, "b", {"type": "thinking", "thinking": "no"}]
    assert clean_turns([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


@given(st.permutations(["role", "content"]), st.text(max_size=20))
def test_the_content_id_ignores_the_order_of_keys(keys, text):
    """Equal content has one id, in whatever order a file writes its keys."""
    message = {"role": "user", "content": text}
    one = Prompt(id="", messages=[message], tools=None)
    two = Prompt(id="other", messages=[{key: message[key] for key in keys}], tools=[], meta={"x": 1})
    assert content_id(one) == content_id(two)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "hi!"}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"thinking": False}},
    ],
)
def test_the_content_id_sees_all_that_the_template_sees(change):
    """Another text, tool or template argument is another prompt."""
    base = {"id": "x", "messages": [{"role": "user", "content": "hi"}]}
    assert content_id(Prompt(**base)) != content_id(Prompt(**{**base, **change}))


def test_the_content_id_is_stable():
    """The id is 16 hex digits and part of the files on disk: it may not change between versions."""
    assert content_id(Prompt(id="", messages=[{"role": "user", "content": "hi"}])) == "0a6116dd749d6a64"


def test_an_unknown_adapter_is_named_with_the_known_ones():
    """The message says what was asked for and what there is."""
    with pytest.raises(ValueError, match=r"unknown adapter 'glaiv'; known: glaive, magicoder, messages"):
        get_adapter("glaiv")
    assert all(get_adapter(name) is adapter for name, adapter in ADAPTERS.items())


def test_the_page_on_datasets_has_every_adapter_and_role():
    """What is added here has to be said there."""
    page = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text(encoding="utf-8")
    assert [name for name in ADAPTERS if f"`{name}`" not in page] == []
    rows = dict(re.findall(r"^\| ([a-z, ]+) \| ([a-z]+) \|$", page, re.MULTILINE))
    assert {name: role for names, role in rows.items() for name in names.split(", ")} == ROLES
