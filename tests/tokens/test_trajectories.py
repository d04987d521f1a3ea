"""A recorded conversation is marked exactly where the target spoke, or refused with a reason."""

import json
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_styles import (
    ADDED,
    CHATML,
    KIMI,
    KINDS,
    LLAMA3,
    SPECIAL,
    STOPS,
    STYLES,
    THINKING,
    as_shown,
    expected_answer,
    make_target,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.prepare.preparation import PrepareOptions, open_prompts, prepare_prompts
from tasks.records.rows import Prompt, Response
from tasks.tokens.masks import sample_from_response
from tasks.tokens.rendering import Renderer, RenderError
from tasks.tokens.tokenizer import load_tokenizer
from tasks.tokens.trajectories import TrajectoryRenderer

REASONS = {
    "answer_not_reversible",
    "arguments_rewritten",
    "bad_tool_call",
    "prompt_not_prefix",
    "special_token_in_answer",
    "template_error",
    "thought_missing",
    "thought_not_rendered",
    "tool_calls_not_rendered",
    "turn_not_rendered",
}
TOOL = {"type": "function", "function": {"name": "tide", "description": "", "parameters": {}}}


def user(content):
    return {"role": "user", "content": content}


def target_turn(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def call(arguments):
    function = {"name": "tide", "arguments": arguments}
    return {"id": "functions.tide:0", "type": "function", "function": function}


class Made:
    """A tokenizer with a template, and what renders with it."""

    def __init__(self, target):
        self.target = target
        self.tokenizer = target.tokenizer
        self.renderer = Renderer(target)
        self.trajectories = TrajectoryRenderer(target, self.renderer)

    def rows(self, *messages, **fields):
        return self.trajectories.render(Prompt("x", list(messages), **fields))

    def texts(self, row):
        """What is marked in a row, behind another token: some decoders drop a blank at the beginning."""
        [first] = self.renderer.encode(["<|im_end|>"])
        spans = [self.renderer.decode([*first, *row.input_ids[start:end]]) for start, end in row.loss_spans]
        return [text.removeprefix("<|im_end|>") for text in spans]

    def refusal(self, *messages, **fields):
        with pytest.raises(RenderError) as caught:
            self.rows(*messages, **fields)
        return caught.value


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes each kind of tokenizer with each template once."""
    made = {}

    def make(template=CHATML, kind="digits"):
        if (kind, template) not in made:
            folder = tmp_path_factory.mktemp("target") / "t"
            made[kind, template] = Made(make_target(folder, kind, template))
        return made[kind, template]

    return make


def check_rows(made, style, messages, rows, **fields):
    """Every turn is marked once, whole, behind the very ids of its prompt, and nothing else is."""
    prompts, expected = {}, {}
    messages = [as_shown(style, one) for one in messages]
    for index in [n for n, one in enumerate(messages) if one["role"] == "assistant"]:
        ids = tuple(made.renderer.render(Prompt("x", messages[:index], **fields)))
        prompts[ids] = number = len(prompts)
        expected[number] = expected_answer(style, messages[index])
    marked = {}
    for row in rows:
        turns = [prompts[tuple(row.input_ids[:start])] for start, _ in row.loss_spans]
        assert turns == sorted(turns)
        assert turns[0] == row.turn
        assert row.loss_spans[-1][1] == len(row.input_ids)
        assert not marked.keys() & set(turns)
        marked |= dict(zip(turns, made.texts(row), strict=True))
    assert marked == expected
    assert [row.turn for row in rows] == sorted(row.turn for row in rows)


pieces = st.one_of(
    st.sampled_from(
        ["", " ", "\n", "\n\n", "  ", "\r\n", "a", "12345", "the quick", "add two", "日本", "🎣"]
    ),
    st.sampled_from([*SPECIAL, *ADDED, "<|im_start|>assistant\nhi<|im_end|>", "<|im_", "end|>", "▁"]),
    st.text(max_size=6),
)
texts = st.lists(pieces, max_size=4).map("".join)
clean_texts = st.lists(
    st.sampled_from([" ", "\n", "a", "123", "4", "the quick", " brown", "fox.", "Grüße", "\n\n"]), max_size=5
).map("".join)


def calls(said):
    """Up to two calls a turn, with arguments as an object, as its text in any spelling, or as any text."""
    values = st.recursive(
        st.one_of(said, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none()),
        lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(said, inner, max_size=2)),
        max_leaves=4,
    )
    objects = st.dictionaries(st.one_of(st.sampled_from(["at", "name"]), said), values, max_size=2)
    spellings = st.builds(
        lambda value, escaped, indent: json.dumps(value, ensure_ascii=escaped, indent=indent),
        objects,
        st.booleans(),
        st.sampled_from([None, 1]),
    )
    return st.lists(st.one_of(objects, spellings, said).map(call), max_size=2)


def conversations(said, heard=texts, calls=calls):
    """Any order of turns that ends with one of the target."""
    fields = {"reasoning_content": st.one_of(st.none(), said), "tool_calls": calls(said)}
    targets = st.builds(
        lambda content, **fields: target_turn(content, **{name: one for name, one in fields.items() if one}),
        st.one_of(st.none(), said),
        **fields,
    )
    others = st.builds(
        lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), heard
    )
    system = st.lists(heard.map(lambda content: {"role": "system", "content": content}), max_size=1)
    body = st.lists(st.one_of(others, targets), max_size=6)
    return st.tuples(system, heard.map(user), body, targets).map(
        lambda parts: [*parts[0], parts[1], *parts[2], parts[3]]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=150)
@given(data=st.data())
def test_exactly_the_targets_turns_are_marked_or_the_conversation_is_refused(make, style, kind, data):
    """Whatever is said, by whom and in which order, on each template and tokenizer."""
    made = make(STYLES[style], kind)
    messages = data.draw(conversations(data.draw(st.sampled_from([texts, clean_texts]))))
    try:
        rows = made.rows(*messages)
    except RenderError as exc:
        assert exc.reason in REASONS  # noqa: PT017  either outcome is right
        return
    check_rows(made, style, messages, rows)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", ["gpt2", "digits"])
@given(data=st.data())
def test_a_conversation_without_special_tokens_is_not_refused(make, style, kind, data):
    """Whatever others say: refusing everything would be no rendering."""
    made = make(STYLES[style], kind)
    plain = st.dictionaries(st.sampled_from(["at", "name"]), clean_texts | st.integers(), max_size=2)
    messages = data.draw(conversations(clean_texts, calls=lambda _: st.lists(plain.map(call), max_size=2)))
    unshown = [] if style == "thinking" else ["reasoning_content"]
    unshown += ["tool_calls"] if style == "llama3" else []
    messages = [{k: v for k, v in one.items() if k not in unshown} for one in messages]
    check_rows(made, style, messages, made.rows(*messages))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("at_start", "at_end"), [(1, 0), (-1, 0), (0, -1), (1, 1), (-1, -1)])
def test_a_span_that_is_off_by_one_would_be_noticed(make, style, at_start, at_end):
    """The check of these tests can fail."""
    made = make(STYLES[style])
    messages = [user("add two"), target_turn("It is 12345."), user("so"), target_turn("the quick")]
    rows = made.rows(*messages)
    check_rows(made, style, messages, rows)
    row = rows[0]
    start, end = row.loss_spans[0]
    row.loss_spans[0] = (start + at_start, end + at_end)
    with pytest.raises((AssertionError, KeyError)):
        check_rows(made, style, messages, rows)


def test_turns_share_a_row(make):
    """Each turn's prompt and answer begin the next one's prompt, so one sequence holds them all."""
    made = make()
    [row] = made.rows(user("add two"), target_turn("It is"), user("so"), target_turn(""), target_turn("fox"))
    assert row.turn == 0
    assert made.texts(row) == ["It is<|im_end|>", "<|im_end|>", "fox<|im_end|>"]
    response = Response.from_row(
        {
            "id": "x",
            "input_ids": row.input_ids,
            "output_ids": [],
            "loss_spans": [list(span) for span in row.loss_spans],
            "completion_tokens": (marked := sum(end - start for start, end in row.loss_spans)),
            "prompt_tokens": len(row.input_ids) - marked,
        }
    )
    assert made.renderer.decode(sample_from_response(response).output_ids.tolist()) == "".join(
        made.texts(row)
    )


def test_what_others_quote_is_not_marked(make):
    """A user or a tool may write what looks like a turn of the target."""
    made = make()
    quote = "<|im_end|>\n<|im_start|>assistant\nI said so<|im_end|>"
    [row] = made.rows(
        user(quote), target_turn("It is"), {"role": "tool", "content": quote}, target_turn("fox")
    )
    assert made.texts(row) == ["It is<|im_end|>", "fox<|im_end|>"]


def test_a_template_that_drops_thoughts_makes_rows_of_turns_with_one_history(make):
    """Thoughts since the user's last turn are kept, so the turns between two of them share a row."""
    made = make(THINKING)
    messages = [
        user("q"),
        target_turn("a", reasoning_content="hm"),
        {"role": "tool", "content": "12"},
        target_turn("b", reasoning_content="oh"),
        user("so"),
        target_turn("c", reasoning_content="add"),
    ]
    first, second = made.rows(*messages)
    assert (first.turn, second.turn) == (0, 2)
    assert len(made.texts(first)) == 2
    assert "hm" not in made.renderer.decode(second.input_ids)
    check_rows(made, "thinking", messages, [first, second])


def test_a_token_across_the_start_of_an_answer_gives_the_turn_its_own_row(make):
    """Read again, the line breaks around the start are one token, which the target did not generate."""
    made = make()
    messages = [
        user("q"),
        target_turn("\n\nIt is"),
        user("so"),
        target_turn("fox"),
        user("a"),
        target_turn("b"),
    ]
    first, second = made.rows(*messages)
    assert (first.turn, second.turn) == (0, 1)
    assert made.texts(first) == ["\n\nIt is<|im_end|>"]
    assert made.texts(second) == ["fox<|im_end|>", "b<|im_end|>"]
    check_rows(made, "chatml", messages, [first, second])


def test_turns_that_a_template_shows_in_the_same_place_have_their_own_rows(make):
    """A template that forgets what was said renders the same text for two turns that say the same."""
    forgets = (
        "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n"
        "{% if not add_generation_prompt %}{{ messages[-1].content }}<|im_end|>{% endif %}"
    )
    first, second = make(forgets).rows(user("q"), target_turn("a"), user("q"), target_turn("a"))
    assert (first.turn, second.turn) == (0, 1)
    assert first.input_ids == second.input_ids


@pytest.mark.parametrize("where", ["content", "reasoning_content", "tool_calls"])
@pytest.mark.parametrize("token", ["<|im_end|>", "<|endoftext|>", "<|start_header_id|>"])
def test_a_special_token_in_the_targets_own_words_is_refused(make, where, token):
    """Decoding drops special tokens: one that is there was spelled out with other ids."""
    value = [call({"at": [f"a {token}"]})] if where == "tool_calls" else f"a {token} b"
    refused = make(THINKING).refusal(
        user("q"), target_turn("a") | {where: value}, user("q"), target_turn("b")
    )
    assert refused.reason == "special_token_in_answer"
    assert token in refused.detail
    assert "turn 0" in refused.detail


def test_added_tokens_that_survive_decoding_may_be_recorded(make):
    """A recorded text holds `<think>` as the target wrote it."""
    made = make()
    [row] = made.rows(user("q"), target_turn("<think>\nhm\n</think>\n\nIt is"))
    assert made.texts(row) == ["<think>\nhm\n</think>\n\nIt is<|im_end|>"]


OPENS_THOUGHT = THINKING.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
EMPTY_THOUGHT = CHATML.replace(
    "{{ m.content }}", "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}"
)
NO_END = CHATML.replace("<|im_end|>\n{% endfor %}\n{%- if add", "\n{% endfor %}\n{%- if add")
TWO_ENDS = CHATML.replace("{% endif %}", "{% else %}<|endoftext|>{% endif %}").replace(
    "<|im_end|>", "<|end_header_id|>"
)
END_IN_CALL = CHATML.replace("<tool_call>", "<|im_end|><tool_call>")
SAME_ENDS = CHATML.replace("<|im_end|>", "<|end_header_id|>").replace("</tool_call>", "<|end_header_id|>")
NEW_THOUGHTS = THINKING.replace(
    "m.role == 'assistant' and m.r", "m.role == 'assistant' and m.reasoning_content != m.content and m.r"
)
DROPS_CONTENT = CHATML.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")


@pytest.mark.parametrize(
    ("template", "turn", "reason"),
    [
        (OPENS_THOUGHT, target_turn("a"), "prompt_not_prefix"),
        (EMPTY_THOUGHT, target_turn("a"), "thought_missing"),
        (CHATML, target_turn("a", reasoning_content="hm"), "thought_not_rendered"),
        (NO_END, target_turn("a"), "no_end_of_turn"),
        (TWO_ENDS, target_turn("a"), "no_end_of_turn"),
        (END_IN_CALL, target_turn("", tool_calls=[call({})]), "special_token_in_answer"),
        (SAME_ENDS, target_turn("", tool_calls=[call({})]), "special_token_in_answer"),
        (NEW_THOUGHTS, target_turn("fox", reasoning_content="fox"), "turn_not_rendered"),
        (DROPS_CONTENT, target_turn("fox", tool_calls=[call({"at": 1})]), "turn_not_rendered"),
        (THINKING, target_turn("hm</think>fox"), "turn_not_rendered"),
        (LLAMA3, target_turn("", tool_calls=[call({})]), "tool_calls_not_rendered"),
        (CHATML, target_turn("", tool_calls=[call("no JSON")]), "bad_tool_call"),
        (CHATML, target_turn("", tool_calls=[call("[1]")]), "bad_tool_call"),
        (CHATML, target_turn("", tool_calls=[call(None)]), "bad_tool_call"),
        (CHATML, target_turn("", tool_calls=["tide"]), "bad_tool_call"),
        (KIMI, target_turn("", tool_calls=[{**call({}), "id": None}]), "bad_tool_call"),
        (KIMI, target_turn("", tool_calls=[{**call({}), "id": "call_7"}]), "tool_calls_not_rendered"),
        (CHATML, target_turn([{"type": "text", "text": "a"}]), "content_not_text"),
        (CHATML, target_turn("u\u0308ber"), "answer_not_reversible"),
        (CHATML, user("a"), "no_final_answer"),
        (CHATML + "{{ 1 + 'x' }}", target_turn("a"), "template_error"),
    ],
)
def test_what_cannot_be_exact_is_refused(make, template, turn, reason):
    """Each with its own reason."""
    assert make(template).refusal(user("q"), turn).reason == reason


def test_tools_that_the_template_does_not_show_are_refused(make):
    """What the target saw of them is not known."""
    messages = [user("q"), target_turn("a")]
    assert make(LLAMA3).refusal(*messages, tools=[TOOL]).reason == "tools_not_rendered"
    [row] = make(CHATML).rows(*messages, tools=[TOOL])
    assert '"tide"' in make().renderer.decode(row.input_ids)


@pytest.mark.parametrize("messages", [[], [user("q")]])
def test_a_conversation_without_a_last_answer_is_refused(make, messages):
    """There is nothing to train on behind the last turn of the target."""
    assert make().refusal(*messages).reason == "no_final_answer"


def test_template_arguments_reach_every_prompt(make):
    """Thinking that was off closes the thought in the prompt, which is not marked."""
    made = make(THINKING.replace("'\\n' }}", "'\\n' }}{{ off if m.role == 'assistant' and loop.last }}", 1))
    off = {"enable_thinking": False, "off": "<think>\n\n</think>\n\n"}
    first, second = made.rows(
        user("q"), target_turn("a"), user("q"), target_turn("b"), chat_template_kwargs=off
    )
    assert [made.texts(first), made.texts(second)] == [["a<|im_end|>"], ["b<|im_end|>"]]
    assert made.renderer.decode(first.input_ids).endswith("assistant\n<think>\n\n</think>\n\na<|im_end|>")


TEXT_ONLY = THINKING.replace(
    "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson",
    "call.function.arguments",
)
REPR = THINKING.replace(
    "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson",
    "call.function.arguments ~ ''",
)


@pytest.mark.parametrize(
    ("template", "arguments", "shown"),
    [
        (CHATML, '{"at": "Husum"}', '{"at": "Husum"}'),
        (CHATML, {"at": "Husum"}, '{"at": "Husum"}'),
        (THINKING, '{"at":  "Husum"}', '{"at":  "Husum"}'),
        (THINKING, {"at": "Köln"}, '{"at": "Köln"}'),
        (TEXT_ONLY, '{"at":  1', '{"at":  1'),
        (TEXT_ONLY, {"at": "Köln"}, '{"at": "Köln"}'),
        (REPR, {"at": "Köln"}, '{"at": "Köln"}'),
    ],
)
def test_arguments_of_calls_are_as_recorded_where_the_template_can_show_it(make, template, arguments, shown):
    """A text stays the text that the target wrote; JSON is parsed or written only where it has to be."""
    made = make(template)
    messages = [user("q"), target_turn(None, tool_calls=[call(arguments)])]
    before = json.dumps(messages)
    [row] = made.rows(*messages, {"role": "tool", "content": "1:00"}, target_turn("done"))
    one, two = made.texts(row)
    assert one.endswith(f'<tool_call>\n{{"name": "tide", "arguments": {shown}}}\n</tool_call><|im_end|>')
    assert "None" not in one
    assert two == "done<|im_end|>"
    assert json.dumps(messages) == before


@pytest.mark.parametrize("arguments", ['{"at":  "Husum"}', {"at": "Husum"}])
def test_a_kimi_trajectory_with_calls_is_marked_whole(make, arguments):
    """Its template opens the thought in the prompt and shows a call by its id alone."""
    template = KIMI.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}").replace(
        "{{ m.content }}",
        "{{ '<think>' ~ m.reasoning_content ~ '</think>' if m.role == 'assistant' }}{{ m.content }}",
    )
    made = make(template)
    messages = [
        user("tide?"),
        target_turn("", reasoning_content="look", tool_calls=[call(arguments)]),
        {"role": "tool", "content": "1:00", "tool_call_id": "functions.tide:0"},
        target_turn("At one.", reasoning_content="told"),
    ]
    [row] = made.rows(*messages)
    text = arguments if isinstance(arguments, str) else '{"at": "Husum"}'
    assert made.texts(row) == [
        f"look</think><tool_call>functions.tide:0<args>{text}</tool_call><|im_end|>",
        "told</think>At one.<|im_end|>",
    ]
    assert "## Return of functions.tide:0\n1:00<|im_end|>" in made.renderer.decode(row.input_ids)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"n": 92233720368547760001}, '{"n": 92233720368547760001}'),
        ('{"n": 92233720368547760001}', '{"n": 92233720368547760001}'),
        ({"n": -0.0, "m": 1e-7, "k": 0.1}, '{"n": -0.0, "m": 1e-07, "k": 0.1}'),
    ],
)
@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_numbers_in_arguments_are_trained_on_as_recorded(make, tmp_path, template, arguments, shown):
    """From the source's line over prompts.jsonl; an object's are written as Python's json writes them."""
    turns = [user("q"), target_turn("", tool_calls=[call(arguments)])]
    source = tmp_path / "source.jsonl"
    source.write_text(json.dumps({"id": "a", "messages": turns}))
    options = PrepareOptions(name="B2", adapter="messages", seed=0, shape="trajectory")
    prepare_prompts(tmp_path / "B2", [source], options=options, source_sha256="")
    with closing(open_prompts(tmp_path / "B2")) as prompts:
        [prompt] = prompts
    [row] = make(template).rows(*prompt.messages)
    [said] = make(template).texts(row)
    assert f'"arguments": {shown}}}' in said


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_arguments_that_parquet_padded_are_trained_on_as_recorded(make, tmp_path, template):
    """Each call has the fields of the others in its struct, with nulls that nobody wrote."""
    every = [{"a": "x"}, {"b": 2}, {}]
    turns = [[user("q"), target_turn("", tool_calls=[call(arguments)])] for arguments in every]
    pq.write_table(pa.Table.from_pylist([{"messages": one} for one in turns]), tmp_path / "a.parquet")
    options = PrepareOptions(name="B2", adapter="messages", seed=0, shape="trajectory")
    prepare_prompts(tmp_path / "B2", [tmp_path / "a.parquet"], options=options, source_sha256="")
    with closing(open_prompts(tmp_path / "B2")) as prompts:
        said = [make(template).texts(row) for one in prompts for row in make(template).rows(*one.messages)]
    shown = [text.partition('"arguments": ')[2].partition("}\n</tool_call>")[0] for [text] in said]
    assert sorted(shown) == ['{"a": "x"}', '{"b": 2}', "{}"]


@pytest.mark.parametrize("digits", [1_000, 10_000])
def test_arguments_beyond_what_python_reads_are_refused(make, digits):
    """Where the template needs an object: by the reason of a call that cannot be read, not by a traceback."""
    arguments = f'{{"n": {"1" * digits}}}'
    made, messages = make(CHATML), [user("q"), target_turn("", tool_calls=[call(arguments)])]
    if digits == 10_000:
        assert made.refusal(*messages).reason == "bad_tool_call"
    else:
        assert arguments in made.texts(made.rows(*messages)[0])[0]


@pytest.mark.parametrize(
    "arguments", ['{"at":  "Husum"}', '{"at":"Husum"}', '{"at": 1e5}', '{"at": 1, "at": 2}']
)
def test_arguments_that_the_template_writes_otherwise_are_refused(make, arguments):
    """The text is what the target wrote; one that a template makes of the parsed JSON is a guess."""
    refused = make(CHATML).refusal(user("q"), target_turn(None, tool_calls=[call(arguments)]))
    assert refused.reason == "arguments_rewritten"


def test_ids_that_the_model_does_not_have_are_refused(make, tmp_path):
    """In an answer as in a prompt."""
    make_target(tmp_path / "t", "digits", CHATML)
    (tmp_path / "t" / "config.json").write_text('{"model_type": "llama", "vocab_size": 4}')
    made = Made(load_tokenizer(str(tmp_path / "t")))
    assert made.refusal(user("q"), target_turn("a")).reason == "id_outside_vocabulary"


def test_the_models_stop_tokens_are_read_from_its_files(tmp_path):
    """The tokenizer's own, those of generation_config.json and of config.json, one or a list."""
    folder = tmp_path / "t"
    target = make_target(folder, "digits", CHATML)
    ids = target.tokenizer.convert_tokens_to_ids
    assert target.stop_ids == frozenset(ids(STOPS))
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": ids("<|endoftext|>")})
    )
    assert load_tokenizer(str(folder)).stop_ids == frozenset(ids(["<|im_end|>", "<|endoftext|>"]))


def test_what_the_template_writes_behind_the_end_is_not_marked(make):
    """The first stop token ends the turn, whatever follows it."""
    made = make(CHATML.replace("{% endif %}", "{% else %}<|endoftext|>{% endif %}"))
    rows = made.rows(user("q"), target_turn("a"), user("q"), target_turn("b"))
    assert [made.texts(row) for row in rows] == [["a<|im_end|>", "b<|im_end|>"]]


def test_a_turn_may_end_with_a_special_token_that_no_file_names(make):
    """The tokenizer's stop token is a base model's, the template closes turns with another."""
    made = make(CHATML.replace("<|im_end|>", "<|end_header_id|>"))
    [row] = made.rows(user("q"), target_turn("a"), user("q"), target_turn("b"))
    assert made.texts(row) == ["a<|end_header_id|>", "b<|end_header_id|>"]


def test_the_cost_does_not_grow_with_the_square_of_the_turns(make, monkeypatch):
    """Behind the last prompt itself, every part is tokenized once or twice, however many turns there are."""
    made = make()
    seen = []
    encode = made.renderer.encode
    monkeypatch.setattr(made.renderer, "encode", lambda texts: seen.extend(map(len, texts)) or encode(texts))
    messages = [one for n in range(40) for one in (user(f"add {n} " * 20), target_turn("the quick " * 20))]
    [row] = made.rows(*messages)
    assert len(row.loss_spans) == 40
    assert sum(seen) <= 2 * len(made.renderer.decode(row.input_ids))


@pytest.mark.parametrize(("before", "behind", "rows"), [([7], [], 1), ([], [7], 2)])
def test_a_tokenizers_own_template_code_is_followed(tmp_path, before, behind, rows):
    """Where a tokenizer brings its own apply_chat_template (Kimi's does), the prompt's ids are its."""
    target = make_target(tmp_path / "t", "digits", CHATML)

    class Own(type(target.tokenizer)):
        def apply_chat_template(self, conversation, **options):
            ids = super().apply_chat_template(conversation, **options)
            return [*before, *ids, *behind] if options.get("tokenize") else ids

    target.tokenizer.__class__ = Own
    made = Made(target)
    messages = [user("q"), target_turn("fox"), user("so"), target_turn("add")]
    made_rows = made.rows(*messages)
    assert len(made_rows) == rows
    check_rows(made, "chatml", messages, made_rows)
