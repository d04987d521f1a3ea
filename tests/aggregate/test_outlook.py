"""What is left and until when is said so that the one fits the other."""

import dataclasses

import pytest

from tasks.aggregate.outlook import describe_end, describe_left, describe_needs
from tasks.aggregate.run_progress import DatasetWatch, RunProgress
from tasks.records.dataset_plan import DatasetPlan

NOW_S = 1_800_000_000.0  # Jan 15 08:00 UTC


def run(*states, short=0.0, budget=10_000):
    """Datasets with 1,000 tokens left, at 10 tokens a second where they move."""
    one = DatasetWatch(DatasetPlan("d", budget, None)).look(None, None, at_s=NOW_S)
    changes = {"left_tokens": 1000.0, "short_tokens": short}
    return RunProgress(
        tuple(
            dataclasses.replace(
                one, name=f"d{at}", state=state, tokens_per_s=10.0 * (state == "generating"), **changes
            )
            for at, state in enumerate(states)
        )
    )


@pytest.mark.parametrize(
    ("states", "end", "needs", "left"),
    [
        (["generating"], "done in 2 min (about Jan 15 08:01 UTC)", "", "1.00k tokens left"),
        (
            ["generating", "damaged", "stopped"],
            "the others done in 2 min (about Jan 15 08:01 UTC)",
            "then d1, d2 need you",
            "1.00k tokens left, and 2.00k of d1, d2",
        ),
        (
            ["generating", *["stopped"] * 5],
            "the others done in 2 min (about Jan 15 08:01 UTC)",
            "then d1, d2, d3 and 2 more need you",
            "1.00k tokens left, and 5.00k of d1, d2, d3 and 2 more",
        ),
        (["damaged"], "end not known yet", "d0 needs you", "0 tokens left, and 1.00k of d0"),
    ],
)
def test_the_end_and_what_is_left_leave_out_the_same(states, end, needs, left):
    """Who waits for somebody is named with what it lacks."""
    progress = run(*states)
    assert describe_end(progress, now_s=NOW_S) == end
    assert (describe_needs(progress), describe_left(progress)) == (needs, left)


def test_what_no_prompt_gives_is_told_apart():
    """It is in no time."""
    expected = "1.00k tokens left (500 of the budgets cannot be reached: out of prompts)"
    assert describe_left(run("generating", short=500.0)) == expected
