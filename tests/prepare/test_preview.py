"""A preview shows what the model sees, with exactly what is trained on between its marks."""

import re
from dataclasses import replace

import numpy as np
import pytest
from chat_styles import STYLES, expected_answer, make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import make_tokenizer

from tasks.prepare.lane import Lane
from tasks.prepare.preview import PROMPT, TRAINED, Previewer, Shown, show_response
from tasks.prepare.preview_view import TokenView
from tasks.records.rows import Prompt, Response
from tasks.tokens.tokenizer import load_tokenizer

LANES = [Lane("short", 8, 200), Lane("long", 2, 400)]


class Viewed:
    """A tokenizer with what previews are made with."""

    def __init__(self, target, *, context_length=2048):
        self.target = target
        self.previewer = Previewer(target, lanes=LANES, long_prompt_tokens=100, context_length=context_length)
        self.renderer = self.previewer.renderer

    def text(self, shown, *, whole=True):
        return TokenView(self.target.tokenizer, self.renderer.decode, whole=whole).to_text(shown)

    def body(self, shown, **options):
        """What is shown of the ids, without title and notes."""
        return self.text(shown, **options).plain.split("\n", 1 + len(shown.notes))[-1]

    def response(self, question, answer, **fields):
        """A finished row."""
        ids = self.renderer.render(make_prompt(question))
        [output] = self.renderer.encode([answer])
        counts = {"prompt_tokens": len(ids), "completion_tokens": len(output)}
        return Response("x", 0, ids, output, answer, "stop", **counts, **fields)


def make_prompt(*contents, **fields):
    """A conversation that begins with the user."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return Prompt("x", messages, **fields)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny tokenizer, where each character outside ASCII is several ids."""
    return Viewed(load_tokenizer(str(make_tokenizer(tmp_path_factory.mktemp("tiny")))))


@pytest.fixture(scope="module")
def styled(tmp_path_factory):
    """Makes each template style with each kind of tokenizer once."""
    made = {}

    def make(style, kind):
        if (style, kind) not in made:
            folder = tmp_path_factory.mktemp("styled")
            made[style, kind] = Viewed(make_target(folder, kind, STYLES[style]))
        return made[style, kind]

    return make


def marked(text):
    """What stands between the marks."""
    return re.findall(r"⟦(.*?)⟧", text, re.DOTALL)


def test_a_finished_row_shows_its_answer_between_the_marks(tiny):
    """The stop token included, and the prompt before it as the model saw it."""
    [shown] = show_response(tiny.response("a question", "an answer 😀<|end|>"))
    expected = "<|begin|>user\na question<|end|><|begin|>assistant\n⟦an answer 😀<|end|>⟧"
    assert tiny.body(shown) == expected
    for words in ("x · turn 0", "short lane", f"{len(shown.ids)} tokens", "trained on", "finish_reason stop"):
        assert words in shown.title


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_shifted_by_one_is_seen(tiny, shift):
    """One id more or less before the answer moves the mark."""
    row = tiny.response("a question", "an answer<|end|>")
    ids, at = [*row.input_ids, *row.output_ids], len(row.input_ids) + shift
    counts = {"prompt_tokens": at, "completion_tokens": len(ids) - at}
    wrong = replace(row, input_ids=ids[:at], output_ids=ids[at:], **counts)
    [[right_text], [wrong_text]] = [marked(tiny.body(show_response(one)[0])) for one in (row, wrong)]
    assert right_text == "an answer<|end|>"
    assert wrong_text == tiny.renderer.decode(ids[at:]) != right_text


@given(
    question=st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="⟦⟧⟨⟩"), min_size=1),
    answer=st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="⟦⟧⟨⟩"), min_size=1),
)
def test_the_marks_add_and_lose_nothing(tiny, question, answer):
    """Whatever the text, without its marks it is what all ids say together."""
    row = tiny.response(question, f"{answer}<|end|>")
    body = tiny.body(show_response(row)[0])
    assert re.sub("[⟦⟧]", "", body) == tiny.renderer.decode([*row.input_ids, *row.output_ids])
    assert marked(body) == [f"{answer}<|end|>"]


@settings(max_examples=20)
@given(style=st.sampled_from(["chatml", "llama3"]), kind=st.sampled_from(["digits", "first", "always"]))
def test_a_trajectory_shows_each_turn_between_marks(styled, style, kind):
    """Also where a tokenizer drops the blank at the beginning of a text."""
    viewed = styled(style, kind)
    prompt = make_prompt("hello", "the quick fox", "and then", " a lazy dog")
    [shown] = viewed.previewer.show_trajectory(prompt)
    assert marked(viewed.body(shown)) == [expected_answer(style, one) for one in prompt.messages[1::2]]
    assert f"{(shown.kinds == TRAINED).sum()} trained on" in shown.title


def test_a_conversation_that_is_refused_shows_the_reason(tiny):
    """A special token in a recorded text, say."""
    [shown] = tiny.previewer.show_trajectory(make_prompt("hello", "one<|end|>two"))
    assert "rejected: special_token_in_answer: " in tiny.text(shown).plain


def test_a_prompt_ends_where_the_answer_starts(tiny):
    """With its lane and the max_new_tokens that fit."""
    [shown] = tiny.previewer.show_prompt(make_prompt("a question"))
    assert tiny.body(shown).endswith("<|begin|>assistant\n▌the target answers here")
    assert "short lane" in shown.title
    assert "max_new_tokens 200" in shown.title
    [shown] = tiny.previewer.show_prompt(make_prompt("a question " * 60))
    assert "long lane" in shown.title
    assert "max_new_tokens 400" in shown.title


def test_a_prompt_that_fills_the_context_is_said(tiny):
    """The answer is shortened, or the prompt rejected."""
    narrow = Viewed(tiny.target, context_length=100)
    [shown] = narrow.previewer.show_prompt(make_prompt("a question"))
    assert "(the lane's 200 do not fit)" in shown.title
    [shown] = narrow.previewer.show_prompt(make_prompt("a question " * 60))
    assert "rejected: prompt_too_long" in narrow.text(shown).plain
    assert not shown.awaits_answer


def test_answers_that_the_run_will_replace_are_marked(tiny):
    """Of turns: each, where the history is the target's own later; not of independent turns."""
    prompt = make_prompt("q1", "a1 here", "q2", answer_after=[1, 3], own_history=True)
    first, second = tiny.previewer.show_prompt(prompt)
    assert "⟨" not in tiny.text(first).plain
    assert "assistant\n⟨a1 here⟩<|end|>" in tiny.body(second)
    assert "the run has the target's there" in tiny.text(second).plain
    _, second = tiny.previewer.show_prompt(replace(prompt, own_history=False))
    assert "⟨" not in tiny.text(second).plain


@pytest.mark.parametrize("shift", range(6))
def test_a_long_stretch_loses_its_middle(tiny, shift):
    """How many tokens is said, no character is cut, and what is trained on is not touched by it."""
    row = tiny.response("😀ä" * 300 + "x" * shift, "an answer<|end|>")
    [shown] = show_response(row)
    body = tiny.body(shown, whole=False)
    [left_out] = re.findall(r"… ([\d,]+) tokens …", body)
    assert 0 < len(row.input_ids) - int(left_out.replace(",", "")) <= 300
    assert "\ufffd" not in body
    assert marked(body) == ["an answer<|end|>"]
    assert "tokens …" not in tiny.body(shown, whole=True)


def test_special_tokens_have_a_style_of_their_own(tiny):
    """In the prompt and where they are trained on."""
    text = tiny.text(show_response(tiny.response("a", "b<|end|>"))[0])
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles["b"] == "bold green"
    assert styles["user\na"] == "dim"
    assert len({styles["<|end|>"], styles["<|begin|>"], styles["b"], styles["user\na"]}) == 4


def test_a_row_commands_no_terminal(tiny):
    """Escape sequences and carriage returns are spelled out."""
    [shown] = tiny.previewer.show_prompt(make_prompt("\x1b[31mred\r\n\ttab"))
    assert "\\x1b[31mred\\x0d\n\ttab" in tiny.body(shown)


def test_a_row_that_is_not_exported_says_why(tiny):
    """One without ids, for example."""
    row = replace(tiny.response("a", "b<|end|>"), output_ids=None)
    [shown] = show_response(row)
    assert "not exported: no_ids: " in tiny.text(shown).plain


def test_nothing_to_show_is_no_error(tiny):
    """No ids at all, and ids without a trained one."""
    assert tiny.body(Shown("x")) == ""
    ids = tiny.renderer.render(make_prompt("a"))
    assert marked(tiny.body(Shown("x", ids, np.full(len(ids), PROMPT, np.uint8)))) == []
