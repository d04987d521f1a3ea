"""Every prompt is asked once, and its row is the server's own answer."""

from collections import Counter

import pytest
from fake_sglang import FakeServer, prompt_key
from generation_support import (
    CONTEXT_LENGTH,
)

from tasks.generate import feed


@pytest.mark.parametrize("prompts", [1, 3, 40, 200])
def test_every_prompt_gets_the_servers_own_answer_once(make, prompts):
    """All prompts are used, each row holds the ids that were sent and that came back."""
    dataset, server = make(prompts=prompts, long_every=7), FakeServer()
    result = dataset.run(server)
    dataset.check_complete(server)
    assert (result.outcome, result.rows, result.new_rows) == ("exhausted", prompts, prompts)
    assert result.completion_tokens == dataset.tokens
    assert "short" in result.to_line()


def test_prompts_are_asked_in_dispatch_order(make):
    """A budget uses a prefix of the shuffled prompts, never a sample of the quick ones."""
    dataset, server = make(prompts=60), FakeServer()
    dataset.run(server, max_samples=25)
    wanted = {prompt_key(dataset.renderer.render(prompt)) for prompt in dataset.prompts[:25]}
    assert {prompt_key(seen["input_ids"]) for seen in server.seen} == wanted


def test_request_carries_sampling_and_a_rid_of_its_own(make):
    """Sampling parameters go as they are; a seed is each prompt's own and the same on every attempt."""
    dataset, server = make(prompts=10), FakeServer(script=["status_500"] * 10)
    dataset.run(server, sampling_params={"top_p": 0.9, "top_k": -1}, seed=7)
    seeds = {prompt_key(seen["input_ids"]): seen["sampling_params"]["sampling_seed"] for seen in server.seen}
    assert len({seen["rid"] for seen in server.seen}) == len(server.seen) == 20
    assert len(set(seeds.values())) == 10
    for seen in server.seen:
        seed = seeds[prompt_key(seen["input_ids"])]
        expected = {"top_p": 0.9, "top_k": -1, "max_new_tokens": 200, "sampling_seed": seed}
        assert seen["sampling_params"] == expected


def test_two_lanes_have_their_own_limits(make):
    """Long prompts take the long lane with its limit; the rows say which lane and limit it was."""
    dataset, server = make(prompts=30, long_every=3), FakeServer()
    dataset.run(server)
    lanes = {(row.lane, row.extra["max_new_tokens"], row.prompt_tokens >= 200) for row in dataset.rows}
    assert lanes == {("short", 200, False), ("long", 300, True)}


def test_answer_limit_is_lowered_to_what_fits_the_context(make):
    """A limit that the server would shorten without a word is lowered here, and recorded."""
    dataset, server = make(prompts=5), FakeServer()
    dataset.run(server, short_limit=10_000)
    for row in dataset.rows:
        assert row.extra["max_new_tokens"] == CONTEXT_LENGTH - row.prompt_tokens - 1


def test_prompt_longer_than_the_context_is_never_sent(make, monkeypatch):
    """It is rejected with the reason; the others go on."""
    monkeypatch.setattr("generation_support.CONTEXT_LENGTH", 300)
    dataset, server = make(prompts=10, long_every=5), FakeServer()
    dataset.run(server)
    dataset.check_complete(server)
    assert Counter(row.reason for row in dataset.rejected) == {"prompt_too_long": 2}
    assert max(len(seen["input_ids"]) for seen in server.seen) < 300


def test_run_whose_last_prompts_cannot_be_sent_ends(make, monkeypatch):
    """With nothing in flight, the end of the prompts is noticed by itself."""
    monkeypatch.setattr("generation_support.CONTEXT_LENGTH", 300)
    monkeypatch.setattr(feed, "BATCH", 1)
    dataset, server = make(prompts=20, long_every=5), FakeServer()
    dataset.run(server)
    result = dataset.run(server, retry_rejected=True)
    assert (result.outcome, len(server.seen)) == ("exhausted", 16)
    assert [row.reason for row in dataset.rejected] == ["prompt_too_long"] * 8


def test_lane_far_behind_the_other_still_gets_its_prompts(make, monkeypatch):
    """Prompts read past because their lane had enough are all asked, once each."""
    for name, value in (("READY_PER_LANE", 4), ("BATCH", 2), ("PARKED_LIMIT", 8)):
        monkeypatch.setattr(feed, name, value)
    dataset, server = make(prompts=150, long_every=25), FakeServer()
    dataset.run(server, short=1, long=1)
    dataset.check_complete(server)
    assert len(server.seen) == 150
