"""The checks before a run, one by one, without a server."""

from pathlib import Path

import pytest
from tiny_tokenizer import make_tokenizer

from tasks.prepare.lane import Lane
from tasks.records.dataset_plan import DatasetPlan
from tasks.tokens.special_tokens import ThinkTokens, find_special_tokens, find_think_tokens
from tasks.tokens.template_names import TemplateNames, find_template_names
from tasks.tokens.tokenizer import load_tokenizer
from tasks.warm_up.preflight import (
    Finding,
    LaneRules,
    PreflightError,
    SampledDataset,
    check_context,
    check_ids,
    check_kv_tokens,
    check_load,
    check_model,
    check_prompts,
    check_router,
    check_special_tokens,
    check_thinking,
    find_thinkers,
)
from tasks.warm_up.run_plan import OnDisk, PlannedDataset, RunPlan
from tasks.warm_up.server_facts import ServerFacts
from tasks.warm_up.template_checks import check_refused, check_template_kwargs, check_tool_calls, check_tools

URL = "http://s"
LANES = LaneRules([Lane("short", 150, 10240), Lane("long", 32, 16384)], 4096)
THINK = ThinkTokens("<think>", 3, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny tokenizer with think tokens."""
    folder = make_tokenizer(tmp_path_factory.mktemp("tok"), extra_tokens=("<think>", "</think>"))
    return load_tokenizer(str(folder))


def _facts(name="m", **info):
    return ServerFacts(URL, {"model_path": name}, info)


def _levels(findings):
    return [one.level for one in findings]


@pytest.mark.parametrize(
    ("asked", "served", "is_same"),
    [
        ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.5", True),
        ("moonshotai/Kimi-K2.5", "moonshotai/kimi-k2.5/", True),
        ("moonshotai/Kimi-K2.5", "/models/Kimi-K2.5", True),
        ("moonshotai/Kimi-K2.5", "/cache/models--moonshotai--Kimi-K2.5/snapshots/0a1b", True),
        ("moonshotai/Kimi-K2.5", "Kimi-K2.5", True),
        ("moonshotai/Kimi-K2.5", "someone/Kimi-K2.5", False),
        ("moonshotai/Kimi-K2.5", "/models/Kimi-K2", False),
        ("moonshotai/Kimi-K2.5", "/cache/models--moonshotai--Kimi-K2/snapshots/0a1b", False),
    ],
)
def test_a_model_is_the_same_by_its_id_or_the_end_of_its_path(asked, served, is_same):
    """Machines mount models where they like."""
    assert (check_model(_facts(served), asked).level == "note") is is_same


def test_a_served_name_that_was_asked_for_is_enough():
    """It may stand for any path."""
    facts = ServerFacts(URL, {"model_path": "/x", "served_model_name": "kimi"}, {})
    assert check_model(facts, "kimi").level == "note"
    refusal = check_model(facts, "other")
    assert refusal.level == "refusal"
    assert all(name in refusal.text for name in ("'/x'", "'kimi'", "'other'"))


def test_special_tokens_are_those_of_the_template(target):
    """What looks like one and is none in the tokenizer is asked of the server, not refused."""
    assert find_special_tokens(target.tokenizer) == ["<|begin|>", "<|end|>"]
    assert check_special_tokens(target).level == "note"


def test_a_special_token_in_pieces_is_refused(target, monkeypatch):
    """The corrupted <think> of a tokenizer that AutoTokenizer half understood."""
    monkeypatch.setattr("tasks.tokens.special_tokens.encode_plain", lambda _, text: list(range(len(text))))
    refusal = check_special_tokens(target)
    assert refusal.level == "refusal"
    assert "'<|begin|>' is 9 ids" in refusal.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"prompt_token_ids": None}, None),
        ({"prompt_token_ids": [1, 9]}, "the server saw"),
        ({"meta_info": {"prompt_tokens": 3, "completion_tokens": 1}}, "the server saw 3"),
        ({"output_ids": None}, "no output_ids"),
        ({"output_ids": []}, "0 output_ids"),
        ({"output_ids": [1, 2]}, "2 output_ids for 1"),
        ({"meta_info": None}, "the server saw None"),
    ],
)
def test_ids_go_in_and_come_out(change, words):
    """As many as are counted, and the very ones that were sent."""
    reply = {
        "prompt_token_ids": [1, 2],
        "output_ids": [7],
        "meta_info": {"prompt_tokens": 2, "completion_tokens": 1},
    }
    found = check_ids(URL, sent=[1, 2], reply={**reply, **change})
    assert (found.level == "refusal") is (words is not None)
    assert (words or "") in found.text


def test_think_tokens_are_found_only_where_they_are_ids(target, tmp_path):
    """A tokenizer that splits them belongs to a model that does not think."""
    assert find_think_tokens(target.tokenizer) == THINK
    plain = load_tokenizer(str(make_tokenizer(tmp_path / "plain")))
    assert find_think_tokens(plain.tokenizer) is None


@pytest.mark.parametrize(
    ("prompt", "answer", "thinks"),
    [
        ([1], [3, 9], True),
        ([1, 3], [9, 9, 9], True),
        ([1, 3], [4, 9], False),
        ([1, 3, 4], [9], False),
        ([1], [9, 9], False),
    ],
)
def test_a_thought_is_opened_and_not_closed_at_once(prompt, answer, thinks):
    """By the template or by the model."""
    found = check_thinking(URL, "a", THINK, sent=prompt, reply={"output_ids": answer})
    assert (found.level == "note") is thinks


def test_who_is_to_think():
    """Who asks for it by any of the switches, and by default whoever does not refuse it."""
    datasets = [
        SampledDataset(name="on", chat_template_kwargs={"enable_thinking": True}),
        SampledDataset(name="off", chat_template_kwargs={"thinking": False}),
        SampledDataset(name="silent"),
    ]
    for by_default, names in ((False, ["on"]), (True, ["on", "silent"])):
        assert [one.name for one in find_thinkers(datasets, opens_by_default=by_default)] == names


@pytest.mark.parametrize(
    ("context", "levels"),
    [
        (262144, ["note"]),
        (16000, ["warning", "note"]),
        (8000, ["warning", "warning"]),
        (4096, ["warning", "note"]),
        (257, ["refusal", "note"]),
        (None, ["warning"]),
    ],
)
def test_a_context_suffices_cuts_or_is_too_small(context, levels):
    """A long lane that no prompt of the model can reach is no reason to refuse."""
    assert sorted(_levels(check_context(context, LANES))) == sorted(levels)


def test_prompts_beyond_the_context_are_said():
    """All of them is a problem of the dataset, some are a warning; of conversations it never stops a run."""
    datasets = [
        SampledDataset(name="all", prompt_tokens=[5000]),
        SampledDataset(name="some", prompt_tokens=[10, 5000]),
        SampledDataset(name="none", prompt_tokens=[10]),
        SampledDataset(name="bad", problem="unreadable"),
        SampledDataset(name="said", prompt_tokens=[4096, 4097], is_generated=False),
        SampledDataset(name="fits", prompt_tokens=[4096], is_generated=False),
    ]
    found = list(check_prompts(datasets, 4096))
    assert _levels(found) == ["problem", "warning", "problem", "warning"]
    assert (
        "'said': 1 of the first 2 conversations exceed the context of 4,096 tokens (up to 4,097)"
        in found[3].text
    )
    assert "exported whole" in found[3].text
    assert not _levels(check_prompts(datasets[4:], None))


@pytest.mark.parametrize(
    ("kv", "context", "level"),
    [(4578, 262144, "refusal"), (20480, 262144, "note"), (4578, 4096, "note"), (None, 4096, "note")],
)
def test_kv_memory_holds_the_longest_request(kv, context, level):
    """A server that kept 4,578 tokens with 20 GB a GPU idle is found here; a short context needs no more."""
    assert check_kv_tokens(_facts(max_total_num_tokens=kv), LANES, context).level == level


def _plan(**changes):
    return RunPlan(
        (
            PlannedDataset(
                goal=DatasetPlan("a", 10**7), on_disk=OnDisk(), prompts=None, prompt_tokens=300,
                answer_tokens=3000, **changes,
            ),
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kv", "max_running", "warns"), [(100_000, None, True), (400_000, None, False), (100_000, 32, False)]
)
def test_windows_far_above_the_kv_memory_are_said(kv, max_running, warns):
    """150 answers of 3,000 tokens; a server that works on 32 at once lets the others wait."""
    facts = _facts(max_total_num_tokens=kv, max_running_requests=max_running)
    datasets = [SampledDataset(name="a", prompt_tokens=[300])]
    assert bool(list(check_load([facts], LANES, datasets, _plan()))) is warns


def test_a_routers_memory_is_no_measure_of_its_load():
    """It tells of one server of several: nothing is said of the windows but that it is not checked."""
    facts = ServerFacts(URL, {}, {"max_total_num_tokens": 500}, is_router=True)
    assert list(check_load([facts], LANES, [], _plan())) == []
    assert _levels(check_router(facts)) == ["warning"]
    assert list(check_router(_facts())) == []


def test_ignored_tools_are_said_where_there_are_some():
    """A run without tools does not need to know; finished conversations are rejected, which is said."""
    datasets = [
        SampledDataset(name="a", hides_tools=True),
        SampledDataset(name="b"),
        SampledDataset(name="c", hides_tools=True, is_generated=False, refused=2, refusal="no tools"),
    ]
    [finding] = check_tools(datasets)
    assert finding.level == "warning"
    assert "'a' has" in finding.text
    assert not list(check_tools(datasets[1:]))
    [finding] = check_refused(datasets)
    assert finding.level == "warning"
    assert "'c': 2 of the first 2 conversations would be rejected (no tools)" in finding.text


def test_calls_that_the_template_cannot_show_are_refused():
    """Once, by name and with the option that accepts a foreign form."""
    datasets = [
        SampledDataset(name="a", loses_calls=True, refused=2, refusal="calls"),
        SampledDataset(name="b"),
    ]
    [finding] = check_tool_calls(datasets)
    assert finding.level == "refusal"
    assert all(part in finding.text for part in ("'a' have", "target.tool_calls_as_text: true"))
    assert not list(check_tool_calls(datasets[1:]))
    assert not list(check_refused(datasets))


def test_a_dataset_without_any_prompt_is_said_once():
    """As a problem, not as refused prompts too."""
    assert not list(check_refused([SampledDataset(name="a", refused=2, refusal="x", problem="none")]))


SWITCH = (
    "{% macro end(m) %}{% generation %}{{ m['content'] ~ (tail or '') }}{% endgeneration %}{% endmacro %}"
    "{% set shown = true %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ end(m) }}"
    "{% endfor %}{% if enable_thinking is defined and shown %}{{ bos_token }}<think>{% endif %}"
)


def test_the_names_that_a_template_reads_are_found(target):
    """In macros, tags of transformers and tests; not what it sets itself, nor what is always handed over."""
    target.tokenizer.chat_template, before = SWITCH, target.tokenizer.chat_template
    try:
        assert find_template_names(target.tokenizer) == TemplateNames(
            frozenset({"tail", "enable_thinking"}), is_sure=True
        )
        target.tokenizer.chat_template = {"default": before, "tool_use": SWITCH}
        assert find_template_names(target.tokenizer).names == {"tail", "enable_thinking"}
        target.tokenizer.chat_template = "{% odd %}"
        assert not find_template_names(target.tokenizer).is_sure
    finally:
        target.tokenizer.chat_template = before


def test_a_tokenizers_own_code_may_read_more_than_its_template(target, monkeypatch):
    """Its parameters are known, what else it does is not (Kimi's is such a one)."""

    class Own(type(target.tokenizer)):
        def apply_chat_template(self, conversation, tools=None, thinking=True, **kwargs):
            return super().apply_chat_template(conversation, tools=tools, **kwargs)

    monkeypatch.setattr(target.tokenizer, "__class__", Own)
    assert find_template_names(target.tokenizer) == TemplateNames(frozenset({"thinking"}), is_sure=False)


def test_arguments_that_the_template_never_reads_are_refused():
    """By name, with those that it reads; a warning where that is not sure, or rows are there already."""
    sure, unsure = (TemplateNames(frozenset({"enable_thinking"}), is_sure=known) for known in (True, False))
    wrong = SampledDataset(name="a", own_kwargs={"enable_thinkng": False, "enable_thinking": True})
    [refusal] = check_template_kwargs(sure, [wrong], begun=[])
    assert refusal.level == "refusal"
    assert "'a'" in refusal.text
    assert "'enable_thinkng', which" in refusal.text
    assert "reads enable_thinking)" in refusal.text
    assert _levels(check_template_kwargs(sure, [wrong], begun=["a"])) == ["warning"]
    assert _levels(check_template_kwargs(unsure, [wrong], begun=[])) == ["warning"]
    right = SampledDataset(name="a", own_kwargs={"enable_thinking": True})
    assert not list(check_template_kwargs(sure, [right, SampledDataset(name="b")], begun=[]))
    rows = SampledDataset(name="a", rows_kwargs={"enable_thinking": True, "depth": 1})
    assert _levels(check_template_kwargs(sure, [rows], begun=[])) == ["warning"]


def test_an_error_has_all_refusals_and_each_once():
    """What is no refusal is kept aside."""
    error = PreflightError(
        [
            Finding("refusal", "one"),
            Finding("warning", "w"),
            Finding("refusal", "one"),
            Finding("refusal", "two"),
        ]
    )
    assert str(error) == "one\ntwo"
    assert len(error.findings) == 4


def test_preflight_needs_no_prefect():
    """The checks are plain functions."""
    assert "prefect" not in (Path(__file__).parents[2] / "tasks" / "warm_up" / "preflight.py").read_text()
