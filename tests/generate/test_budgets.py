"""A dataset ends at its budget, and only then or when its prompts ran out."""

import pytest
from fake_sglang import FakeServer


@pytest.mark.parametrize("policy", ["drain", "forecast"])
@pytest.mark.parametrize("budget_tokens", [1, 500, 4000, 9000])
def test_budget_is_reached_and_then_nothing_is_sent(make, policy, budget_tokens):
    """A run ends at or above its budget while prompts remain, by no more than what was in flight."""
    dataset, server = make(prompts=300), FakeServer(latency_s=0.005)
    result = dataset.run(server, short=16, budget_tokens=budget_tokens, budget_policy=policy)
    dataset.check_rows(server)
    assert result.outcome == "complete"
    assert budget_tokens <= dataset.tokens == result.completion_tokens < budget_tokens + 16 * 200
    assert len(server.seen) == len(dataset.rows) < 300


@pytest.mark.parametrize("policy", ["drain", "forecast"])
def test_failed_attempts_do_not_hold_the_budget_back(make, policy):
    """What failed is no longer expected: a flaky server's run reaches its budget all the same."""
    dataset, server = make(prompts=300), FakeServer(latency_s=0.002, faults={"status_500": 0.3, "empty": 0.1})
    result = dataset.run(server, short=16, budget_tokens=5000, budget_policy=policy, max_attempts=20)
    dataset.check_rows(server)
    assert result.outcome == "complete"
    assert 5000 <= dataset.tokens == result.completion_tokens < 5000 + 16 * 200


def test_forecast_stops_closer_to_the_budget_than_draining(make):
    """Knowing what is in flight saves most of the overshoot of a full window."""
    over = {}
    for policy in ("drain", "forecast"):
        dataset, server = make(policy, prompts=400), FakeServer(tokens_per_s=400)
        dataset.run(server, short=48, budget_tokens=6000, budget_policy=policy)
        over[policy] = dataset.tokens - 6000
    assert over["forecast"] < over["drain"]


@pytest.mark.parametrize("policy", ["drain", "forecast"])
def test_tokens_of_earlier_runs_count_towards_the_budget(make, policy):
    """A larger budget on resume adds what is missing to it, not all of it again."""
    dataset, server = make(prompts=300), FakeServer(latency_s=0.002)
    for budget_tokens in (3000, 6000):
        dataset.run(server, short=8, budget_tokens=budget_tokens, budget_policy=policy)
        assert budget_tokens <= dataset.tokens < budget_tokens + 8 * 200
    dataset.check_rows(server)


def test_budget_that_is_reached_needs_no_server(make):
    """A second run with the same budget sends nothing and says so."""
    dataset, server = make(), FakeServer()
    dataset.run(server, budget_tokens=500)
    asked = len(server.seen)
    result = dataset.run(server, budget_tokens=500)
    assert (len(server.seen), result.new_rows) == (asked, 0)
    assert "nothing new was needed" in result.to_line()


@pytest.mark.parametrize("faults", [{}, {"status_500": 0.3, "empty": 0.1}])
@pytest.mark.parametrize("cap", [1, 7, 39])
def test_max_samples_is_met_exactly(make, cap, faults):
    """No answer more than asked for is paid for, whatever fails on the way."""
    dataset, server = make(), FakeServer(latency_s=0.002, faults=faults)
    result = dataset.run(server, max_samples=cap, max_attempts=50, max_empty_answers=50)
    assert (result.outcome, len(dataset.rows)) == ("complete", cap)
    assert sum(server.answered.values()) == cap


def test_prompts_that_run_out_are_an_outcome_of_their_own(make):
    """Exhausted says how many tokens are short, and is not an error."""
    dataset, server = make(prompts=10), FakeServer()
    result = dataset.run(server, budget_tokens=100_000)
    assert result.outcome == "exhausted"
    assert f"{100_000 - dataset.tokens:,} tokens short" in result.to_line()
