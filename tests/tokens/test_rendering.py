"""The ids that the model sees, and what is done where a template or a tokenizer falls short."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import TEMPLATE, VOCAB_SIZE, make_tokenizer

from tasks.records.rows import Prompt
from tasks.tokens.call_style import CallStyle
from tasks.tokens.rendering import Renderer, RenderError, fit_max_new_tokens
from tasks.tokens.tokenizer import TokenizerError, load_tokenizer

TOOL = {"type": "function", "function": {"name": "tide", "description": "Nächste Flut", "parameters": {}}}
CALL = {"id": "c0", "type": "function", "function": {"name": "tide", "arguments": {"at": "Husum"}}}
USER = {"role": "user", "content": "add two numbers"}
SYSTEM = {"role": "system", "content": "be kind"}

WITH_TOOLS = "{% for t in tools or [] %}<tools>{{ t | tojson }}</tools>{% endfor %}" + TEMPLATE
WITH_CALLS = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{{ m['content'] }}{% for c in m.get('tool_calls') or [] %}<call>{{ c.function.name }}"
    "({{ c.function.arguments | tojson }}){% endfor %}",
)
KIMI_CALLS = WITH_CALLS.replace("c.function.name", "c.id").replace(
    "{{ m['content'] }}", "{{ '## Return of ' ~ m.tool_call_id ~ ' ' if m.role == 'tool' }}{{ m['content'] }}"
)
ITERATING = WITH_CALLS.replace(
    "({{ c.function.arguments | tojson }})",
    "{% for key, value in c.function.arguments.items() %}<{{ key }}>{{ value }}{% endfor %}",
)
MISTRAL_CALLS = WITH_CALLS.replace(
    "<call>", "{% if c.id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}<call>"
)
TEXT_CALLS = WITH_CALLS.replace(
    "({{ c.function.arguments | tojson }})", "{{ '(' + c.function.arguments + ')' }}"
)
NAME_ONLY = WITH_CALLS.replace("({{ c.function.arguments | tojson }})", "")
ARGUMENTS_ONLY = WITH_CALLS.replace("{{ c.function.name }}", "")
PRINTED = WITH_CALLS.replace(" | tojson", "")
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
)
NO_TOOLS = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer folder, made once; templates differ by one file."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny")


@pytest.fixture
def load(made, tmp_path):
    """Loads a copy of the tokenizer with another template or model config."""

    def load(template=TEMPLATE, **config):
        folder = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(made, folder)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**known, **config}))
        return load_tokenizer(str(folder))

    return load


def render_text(target, *messages, **fields):
    """What the ids of a prompt say."""
    prompt = Prompt(id="x", messages=list(messages), **fields)
    return target.tokenizer.decode(Renderer(target).render(prompt))


def test_a_prompt_ends_where_the_answer_begins(load):
    """The whole conversation and the generation prompt, as plain ids of the vocabulary."""
    target = load()
    ids = Renderer(target).render(Prompt(id="x", messages=[SYSTEM, USER]))
    assert type(ids) is list
    assert all(type(one) is int and 0 <= one < VOCAB_SIZE for one in ids)
    text = "<|begin|>system\nbe kind<|end|><|begin|>user\nadd two numbers<|end|><|begin|>assistant\n"
    assert target.tokenizer.decode(ids) == text


def test_rendering_leaves_the_prompt_as_it_is(load):
    """Rendering twice gives the same ids: nothing was added to the messages."""
    prompt = Prompt("x", [SYSTEM, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}], [TOOL])
    before, renderer = prompt.to_line(), Renderer(load(), calls_as_text=True)
    assert renderer.render(prompt) == renderer.render(prompt)
    assert prompt.to_line() == before


@pytest.mark.parametrize("template", [TEMPLATE, NO_TOOLS])
@pytest.mark.parametrize(
    ("messages", "beginning"),
    [([USER], "<|begin|>system\nYou may call"), ([SYSTEM, USER], "<|begin|>system\nbe kind\n\nYou may call")],
)
def test_tools_that_the_template_drops_go_into_the_system_text(load, template, messages, beginning):
    """Without a word or with an exception: the model sees the tools, once, before the user's turn."""
    target = load(template)
    assert not Renderer(target).shows_tools(messages)
    text = render_text(target, *messages, tools=[TOOL, TOOL])
    assert text.startswith(beginning)
    assert text.count(json.dumps(TOOL, ensure_ascii=False)) == 2
    assert text.count("<|begin|>system") == 1
    assert text.index("Flut") < text.index("<|begin|>user")


def test_tools_that_the_template_shows_are_left_to_it(load):
    """The model's own format is the one it was trained with."""
    target = load(WITH_TOOLS)
    assert Renderer(target).shows_tools([USER])
    text = render_text(target, USER, tools=[TOOL])
    assert text.startswith("<tools>{")
    assert text.count("tide") == 1
    assert "You may call" not in text


def test_a_template_may_show_tools_only_in_a_system_message(load):
    """Where there is one, they are left to it; where there is none, they make one."""
    target = load(
        "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}<|end|>{% endfor %}"
    )
    assert [Renderer(target).shows_tools(one) for one in ([USER], [SYSTEM, USER])] == [False, True]
    assert "You may call" not in render_text(target, SYSTEM, USER, tools=[TOOL])
    assert "You may call" in render_text(target, USER, tools=[TOOL])
    for messages in ([USER], [SYSTEM, USER]):
        assert render_text(target, *messages, tools=[TOOL]).count("tide") == 1


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_nothing_is_added(load, tools):
    """A prompt without tools is the template's business alone."""
    assert render_text(load(), USER, tools=tools).startswith("<|begin|>user")


@pytest.mark.parametrize("template", [TEMPLATE, NAME_ONLY, ARGUMENTS_ONLY])
def test_calls_that_the_template_drops_are_refused(load, template):
    """One that leaves out the name or the arguments does not show a call; the reason says what to do."""
    target = load(template)
    assert Renderer(target).refuses_calls
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    with pytest.raises(RenderError, match=r"target\.tool_calls_as_text") as caught:
        render_text(target, USER, turn, USER)
    assert caught.value.reason == "tool_calls_not_rendered"
    assert render_text(target, USER)


@pytest.mark.parametrize(
    ("content", "shown"), [("", "<tool_call>"), (None, "<tool_call>"), ("I look.", "I look.\n<tool_call>")]
)
def test_calls_that_the_template_drops_go_into_the_text_when_asked(load, content, shown):
    """Each call as its function's JSON, behind what the assistant said."""
    target = load()
    turn = {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]}
    renderer = Renderer(target, calls_as_text=True)
    prompt = Prompt("x", [USER, turn, {"role": "tool", "content": "1:00"}])
    text = renderer.decode(renderer.render(prompt))
    assert f"<|begin|>assistant\n{shown}" in text
    function = json.dumps(CALL["function"])
    assert f"<tool_call>{function}</tool_call>\n<tool_call>{function}</tool_call><|end|>" in text


ARGUMENTS = '{"at": "Husum"}'


@pytest.mark.parametrize(
    ("template", "style", "shown"),
    [
        (WITH_CALLS, CallStyle("object", shows_name=True, shows_id=False), f"<call>tide({ARGUMENTS})"),
        (ITERATING, CallStyle("object", shows_name=True, shows_id=False), "<call>tide<at>Husum"),
        (MISTRAL_CALLS, CallStyle("object", shows_name=True, shows_id=False), f"<call>tide({ARGUMENTS})"),
        (TEXT_CALLS, CallStyle("text", shows_name=True, shows_id=False), f"<call>tide({ARGUMENTS})"),
        (PRINTED, CallStyle("text", shows_name=True, shows_id=False), f"<call>tide({ARGUMENTS})"),
        (KIMI_CALLS, CallStyle("object", shows_name=False, shows_id=True), f"<call>call00001({ARGUMENTS})"),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_that_the_template_shows_are_left_to_it(load, template, style, shown, as_text):
    """In the form of arguments that it takes, by name or by id; the option changes nothing then."""
    renderer = Renderer(load(template), calls_as_text=as_text)
    assert renderer.call_style == style
    assert not renderer.refuses_calls
    turn = {"role": "assistant", "content": "hm", "tool_calls": [{**CALL, "id": "call00001"}]}
    text = renderer.decode(renderer.render(Prompt("x", [USER, turn, USER])))
    assert f"<|begin|>assistant\nhm{shown}<|end|>" in text
    assert "<tool_call>" not in text


def test_missing_ids_of_calls_are_made_where_the_template_shows_only_ids(load):
    """As Kimi's are: the function's name and the call's number; each result gets that of its call."""
    renderer = Renderer(load(KIMI_CALLS))
    calls = [{key: value for key, value in CALL.items() if key != "id"}, {**CALL, "id": "own"}]
    result = {"role": "tool", "content": "1:00"}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        result,
        result,
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {**result, "tool_call_id": "functions.tide:2"},
    ]
    before = json.dumps(messages)
    text = renderer.decode(renderer.render(Prompt("x", messages)))
    shown = re.findall(r"(?:<call>|Return of )([\w.:]+)", text)
    assert shown == [
        "functions.tide:0",
        "own",
        "functions.tide:0",
        "own",
        "functions.tide:2",
        "functions.tide:2",
    ]
    assert json.dumps(messages) == before


def test_template_arguments_reach_the_template(load):
    """Thinking on or off is one of them."""
    target = load(TEMPLATE + "{% if thinking is defined and not thinking %}calm{% endif %}")
    assert render_text(target, USER, chat_template_kwargs={"thinking": False}).endswith("calm")
    assert not render_text(target, USER).endswith("calm")


@pytest.mark.parametrize(
    ("template", "fields", "said"),
    [
        (NO_SYSTEM, {}, "no system role"),
        (TEMPLATE + "{{ 1 + 'x' }}", {}, "unsupported operand"),
        (TEMPLATE + "{{ messages[0].a.b }}", {}, "has no attribute"),
        (TEMPLATE, {"chat_template_kwargs": {"tokenize": False}}, "multiple values"),
    ],
)
def test_a_template_that_raises_sets_the_prompt_aside(load, template, fields, said):
    """Whatever a template raises becomes one reason, with its words."""
    with pytest.raises(RenderError) as caught:
        render_text(load(template), SYSTEM, USER, **fields)
    assert caught.value.reason == "template_error"
    assert said in caught.value.detail == str(caught.value)


def test_an_empty_rendering_is_refused(load):
    """A prompt of no ids kills a server."""
    with pytest.raises(RenderError) as caught:
        render_text(load("{% if false %}{% endif %}"), USER)
    assert caught.value.reason == "empty_prompt"


@pytest.mark.parametrize("vocab_size", [1, 5, 50])
def test_an_id_that_the_model_does_not_have_is_refused(load, vocab_size):
    """The tokenizer can know more ids than the model has rows: such an id kills a server."""
    target = load(vocab_size=vocab_size)
    assert target.vocab_size == vocab_size < len(target.tokenizer)
    with pytest.raises(RenderError, match=f"the model has {vocab_size} ids") as caught:
        render_text(target, USER)
    assert caught.value.reason == "id_outside_vocabulary"


def test_the_last_id_of_the_vocabulary_is_allowed(load):
    """The bound is the number of ids."""
    highest = max(Renderer(load()).render(Prompt("x", [USER])))
    assert render_text(load(vocab_size=highest + 1), USER)
    with pytest.raises(RenderError):
        render_text(load(vocab_size=highest), USER)


def outcome(rendered):
    """Ids, or the reason and detail of an error."""
    return (rendered.reason, rendered.detail) if isinstance(rendered, RenderError) else rendered


def render_alone(renderer, prompt):
    """What `render` makes of one prompt."""
    try:
        return renderer.render(prompt)
    except RenderError as exc:
        return outcome(exc)


@pytest.mark.parametrize(
    "contents",
    [
        [],
        ["one"],
        [
            "one",
            "two three",
            "",
            "naïve 🎣 text\r\n",
            "<|end|> <|begin|>system",
            " lead",
            "\x00",
            "same",
            "same",
        ],
        ["good", None, "also good"],  # the template cannot join text and None
        ["good", "a lone \ud800 surrogate", "also good"],
    ],
)
def test_prompts_rendered_together_are_what_each_is_alone(load, contents):
    """The same ids for each, and the same error where one cannot be rendered."""
    renderer = Renderer(load(TEMPLATE.replace("m['content']", "m['content'] + ''")))
    prompts = [Prompt(str(n), [{"role": "user", "content": content}]) for n, content in enumerate(contents)]
    together = [outcome(one) for one in renderer.render_all(prompts)]
    assert together == [render_alone(renderer, prompt) for prompt in prompts]


def test_one_bad_prompt_spoils_no_other(load):
    """A template that refuses one, ids that the model lacks in another: the rest has its ids."""
    target = load(NO_SYSTEM)
    highest = max(Renderer(target).render(Prompt("x", [USER])))
    foreign = {"role": "user", "content": target.tokenizer.decode([highest + 1])}
    renderer = Renderer(load(NO_SYSTEM, vocab_size=highest + 1))
    prompts = [Prompt("a", [USER]), Prompt("b", [SYSTEM, USER]), Prompt("c", [foreign])]
    first, second, third = renderer.render_all(prompts)
    assert first == renderer.render(prompts[0])
    assert (second.reason, third.reason) == ("template_error", "id_outside_vocabulary")


def test_a_tokenizers_own_template_code_is_used(load):
    """A tokenizer that brings its own apply_chat_template (Kimi's does) is asked for each prompt."""
    target = load()

    class Own(type(target.tokenizer)):
        def apply_chat_template(self, conversation, **options):
            ids = super().apply_chat_template(conversation, **options)
            return [*ids, 7] if options.get("tokenize") else ids

    target.tokenizer.__class__ = Own
    renderer, prompt = Renderer(target), Prompt("x", [USER])
    assert renderer.render_all([prompt, prompt]) == [renderer.render(prompt)] * 2
    assert renderer.render(prompt)[-1] == 7


def test_threads_render_the_same(load):
    """Several threads share one renderer."""
    renderer = Renderer(load())
    prompts = [Prompt("x", [{"role": "user", "content": f"{n} jumps " * 200}]) for n in range(40)]
    alone = [renderer.render(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(renderer.render, prompts)) == alone
        batches = threads.map(renderer.render_all, [prompts[n : n + 8] for n in range(0, 40, 8)])
        assert [ids for batch in batches for ids in batch] == alone


@pytest.mark.parametrize(
    ("prompt_tokens", "context_length", "fits"),
    [(10, None, 100), (10, 1000, 100), (10, 111, 100), (10, 110, 99), (10, 12, 1), (1, 3, 1)],
)
def test_an_answer_fits_behind_its_prompt(prompt_tokens, context_length, fits):
    """The lane's limit, or what the context leaves with one position kept free."""
    assert fit_max_new_tokens(prompt_tokens, max_new_tokens=100, context_length=context_length) == fits


@pytest.mark.parametrize("context_length", [0, 1, 9, 10, 11])
def test_a_prompt_that_leaves_no_room_is_refused(context_length):
    """Prompt and one token and the free position do not fit."""
    with pytest.raises(RenderError, match=f"10 tokens, the context {context_length}") as caught:
        fit_max_new_tokens(10, max_new_tokens=100, context_length=context_length)
    assert caught.value.reason == "prompt_too_long"


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_what_fits_is_never_more_than_context_or_lane_allow(prompt_tokens, max_new_tokens, context_length):
    """It is the most that keeps within both, and a refusal means that not one token fits."""
    limits = {"max_new_tokens": max_new_tokens, "context_length": context_length}
    try:
        fits = fit_max_new_tokens(prompt_tokens, **limits)
    except RenderError:
        assert prompt_tokens + 2 > context_length
        return
    assert fits >= 1
    assert prompt_tokens + fits < context_length
    assert fits == max_new_tokens or prompt_tokens + fits == context_length - 1


def test_the_models_own_limits_are_read_from_its_config(load):
    """Rows of the embedding and positions; those of the text model where there are several."""
    target = load()
    assert (target.vocab_size, target.context_length) == (VOCAB_SIZE, 2048)
    assert target.vocab_size > len(target.tokenizer)
    target = load(text_config={"vocab_size": 4000, "max_position_embeddings": 64})
    assert (target.vocab_size, target.context_length) == (4000, 64)


def test_without_a_config_the_tokenizer_decides(made, tmp_path):
    """Its own ids are the vocabulary; the context is unknown."""
    shutil.copytree(made, tmp_path / "bare", ignore=shutil.ignore_patterns("config.json"))
    target = load_tokenizer(str(tmp_path / "bare"))
    assert (target.vocab_size, target.context_length) == (len(target.tokenizer), None)


def test_the_identity_follows_the_files_and_the_template(load):
    """It is the same for a copy, and each half changes with what it covers."""
    one, copy, other = load(), load(), load(WITH_TOOLS)
    assert one.identity == copy.identity
    assert one.identity.files_sha256 == other.identity.files_sha256
    assert one.identity.chat_template_sha256 != other.identity.chat_template_sha256


def test_the_identity_follows_the_vocabulary(made, tmp_path):
    """Another tokenizer.json is another tokenizer, though its template is the same."""
    folder = tmp_path / "other"
    shutil.copytree(made, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    one, other = load_tokenizer(str(made)).identity, load_tokenizer(str(folder)).identity
    assert one.files_sha256 != other.files_sha256
    assert one.chat_template_sha256 == other.chat_template_sha256


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_damaged_tokenizer_is_named(made, tmp_path, file, content):
    """Whatever transformers makes of it, the message says which tokenizer and what is needed."""
    folder = tmp_path / "damaged"
    shutil.copytree(made, folder)
    (folder / file).write_text(content)
    with pytest.raises(
        TokenizerError, match=rf"target\.tokenizer '{folder}' cannot be loaded .*give a folder"
    ):
        load_tokenizer(str(folder))


def test_a_missing_tokenizer_is_named(tmp_path):
    """A folder without files says so, without asking the Hub for it."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path / "empty"))


def test_a_tokenizer_without_a_template_is_refused(made, tmp_path):
    """A base model's tokenizer cannot render a conversation."""
    shutil.copytree(made, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match="has no chat template; use the instruct"):
        load_tokenizer(str(tmp_path / "base"))
