"""How long prompts are: measured at the start of the order, exact where there are few."""

import asyncio
from contextlib import closing

import pytest
from generation_support import make_conversations, make_dataset
from tiny_tokenizer import make_tokenizer

from tasks.prepare import measure_lengths as measured
from tasks.prepare import prompt_lengths
from tasks.prepare.measure_lengths import LENGTHS, find_lengths
from tasks.prepare.preparation import open_prompts, read_report
from tasks.tokens.rendering import Renderer
from tasks.tokens.tokenizer import load_tokenizer
from tasks.tokens.trajectories import TrajectoryRenderer


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A small real tokenizer."""
    return load_tokenizer(str(make_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def find(folder, target, *, long=60, context=None):
    """The lengths, in a context of this size."""
    run = {"target": target, "renderer": Renderer(target), "context_length": context}
    return asyncio.run(find_lengths(folder, read_report(folder), long_prompt_tokens=long, **run))


def lengths_of(folder, target):
    """The same by rendering one after the other."""
    with closing(open_prompts(folder)) as prompts:
        return [len(Renderer(target).render(prompt)) for prompt in prompts]


def test_few_prompts_are_all_measured(tmp_path, target):
    """Lanes and quantiles are those of rendering each prompt; what the context cannot hold is in no lane."""
    make_dataset(tmp_path / "d", None, prompts=40, long_every=4)
    lengths = sorted(lengths_of(tmp_path / "d", target))
    found = find(tmp_path / "d", target, long=lengths[20], context=lengths[-3] + 1)
    too_long = sum(length >= lengths[-3] for length in lengths)
    long = sum(length >= lengths[20] for length in lengths) - too_long
    assert (found.measured, found.prompts, found.too_long) == (40, 40, too_long)
    assert found.lanes == {"short": 40 - long - too_long, "long": long}
    assert (found.tokens.p50, found.tokens.max) == (lengths[19], lengths[-1])
    assert "sample" not in found.to_line()
    assert f"{too_long} too long for the context" in found.to_line()


def test_of_many_prompts_a_sample_is_measured(tmp_path, target, monkeypatch):
    """The first ones of the seeded order, and the line says so."""
    monkeypatch.setattr(prompt_lengths, "SAMPLE_PROMPTS", 10)
    make_dataset(tmp_path / "d", None, prompts=40, long_every=4)
    found = find(tmp_path / "d", target)
    assert (found.measured, found.prompts) == (10, 40)
    assert found.tokens.max == max(lengths_of(tmp_path / "d", target)[:10])
    assert found.to_line().endswith("of a sample of 10")


def test_a_history_that_is_not_there_yet_makes_an_estimate(tmp_path, target):
    """Where each turn is answered on the target's own answers, the row's stand for them."""
    make_conversations(tmp_path / "d", None, shape="each")
    assert "in place of the target's" in find(tmp_path / "d", target).to_line()
    make_conversations(tmp_path / "i", None, shape="independent")
    assert not find(tmp_path / "i", target).is_estimate


def test_of_finished_conversations_the_whole_length_counts(tmp_path, target):
    """Nothing is asked, so that there are no lanes; a conversation is as long as its last row.

    No answer has to fit behind it: only what the context cannot hold is too long, and kept all the same.
    """
    make_conversations(tmp_path / "d", None, shape="trajectory")
    found = find(tmp_path / "d", target, long=None, context=None)
    with closing(open_prompts(tmp_path / "d")) as prompts:
        rows = [TrajectoryRenderer(target, Renderer(target)).render(prompt)[-1] for prompt in prompts]
    assert 0 <= found.tokens.max - max(len(row.input_ids) for row in rows) <= 2  # what follows the last stop
    assert (found.lanes, found.too_long) == ({}, 0)
    assert find(tmp_path / "d", target, long=None, context=found.tokens.max).too_long == 0
    found = find(tmp_path / "d", target, long=None, context=found.tokens.max - 1)
    assert 0 < found.too_long < found.measured
    assert "too long for the context (kept whole" in found.to_line()
    assert {"what": "too long for the context", "count": found.too_long} in found.to_rows()


def test_what_was_measured_is_not_measured_again(tmp_path, target, monkeypatch):
    """Unless the limits or the prompts are others, or the file is damaged."""
    make_dataset(tmp_path / "d", None, prompts=9)
    first = find(tmp_path / "d", target)
    calls = []
    measure = measured._measure_at
    monkeypatch.setattr(measured, "_measure_at", lambda *args: calls.append(1) or measure(*args))
    assert find(tmp_path / "d", target) == first
    assert not calls
    assert find(tmp_path / "d", target, long=1).lanes == {"short": 0, "long": 9}
    (tmp_path / "d" / LENGTHS).write_text("[]")
    assert find(tmp_path / "d", target) == first
    assert len(calls) == 2


def test_what_the_template_refuses_is_counted(tmp_path):
    """It is no prompt of zero tokens."""
    refusal = "{% if '3' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}"
    template = f"{refusal}{{{{ messages[0]['content'] }}}}"
    target = load_tokenizer(str(make_tokenizer(tmp_path / "tokenizer", template=template)))
    make_dataset(tmp_path / "d", None, prompts=10)
    found = find(tmp_path / "d", target)
    assert (found.unrenderable, found.measured, sum(found.lanes.values())) == (1, 10, 9)
    assert "1 refused by the template" in found.to_line()
