"""The progress of a run says what its checkpoints say, and never what a resumed dataset had before."""

import dataclasses
import json
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.aggregate.run_progress import DatasetWatch, RunProgress, describe_state
from tasks.prepare.preparation import PrepareReport
from tasks.records.dataset_plan import DatasetPlan
from tasks.records.progress import Progress

NOW_S = 1_800_000_000.0
PROMPTS = 100
REPORT = PrepareReport(
    key="key", rows_read=PROMPTS, conversations=PROMPTS, prompts=PROMPTS, duplicates=0, rejected={}
)


def checkpoint(*, rows=10, tokens=1000, saved_s=0.0, set_aside=0, key="key"):
    """As read back from the store; `saved_s` counts from NOW_S and loses what is below a second."""
    progress = Progress.empty(PROMPTS)
    progress.done[:rows] = 1
    progress.set_aside[rows : rows + set_aside] = 1
    progress.rows, progress.completion_tokens = rows, tokens
    progress.finish_reasons.update({"stop": rows})
    progress.rejected.update({"http_400": set_aside} if set_aside else {})
    saved_at = datetime.fromtimestamp(NOW_S + saved_s, UTC).isoformat(timespec="seconds")
    return json.loads(json.dumps(progress.to_checkpoint(prompts_key=key, updated_at=saved_at)))


def watch(*, budget=10_000, max_samples=None, name="d"):
    return DatasetWatch(DatasetPlan(name, budget, max_samples))


def look(watcher, found, at_s, **options):
    return watcher.look(found, options.pop("report", REPORT), at_s=NOW_S + at_s, **options)


def look_each(watcher, *looks):
    """Look at checkpoints of (tokens, saved_s), each when it was just saved; the last one's result."""
    for tokens, saved_s in looks:
        progress = look(watcher, checkpoint(tokens=tokens, saved_s=saved_s), saved_s)
    return progress


def test_a_look_repeats_the_checkpoint():
    """Rows, tokens, reasons and prompts are those of the checkpoint and the prepare report."""
    progress = look(watch(), checkpoint(rows=10, tokens=2500, set_aside=3), 0.0)
    assert (progress.rows, progress.prompts, progress.completion_tokens) == (10, PROMPTS, 2500)
    assert progress.reached_percent == 25
    assert progress.finish_reasons == {"stop": 10}
    assert progress.rejected == {"http_400": 3}


def test_speed_is_measured_between_checkpoints():
    """Tokens over the seconds between the checkpoints, whenever they were looked at."""
    watcher = watch()
    look(watcher, None, 0.0)
    look(watcher, checkpoint(tokens=1000, saved_s=5.0), 9.0)
    progress = look(watcher, checkpoint(tokens=2500, saved_s=15.0), 19.9)
    assert progress.tokens_per_s == pytest.approx(150.0)
    assert progress.eta_s == pytest.approx(7500 / 150)


def test_speed_forgets_what_is_older_than_a_minute():
    """A server that has become slow shows within a minute."""
    looks = [(0, 0)] + [(100_000, 10.0 * n) for n in range(1, 8)] + [(100_600, 80.0)]
    assert look_each(watch(budget=10**6), *looks).tokens_per_s == pytest.approx(10.0)


@pytest.mark.parametrize("pause_s", [10.0, 86_400.0])
def test_what_a_resumed_dataset_had_before_is_no_speed(pause_s):
    """Nor the rows that its old checkpoint had missed, be it an hour or seconds old."""
    looks = [(100, -pause_s), (900_000, 5.0)]
    assert look_each(watch(budget=10**6), *looks).tokens_per_s == 0.0
    assert look_each(watch(budget=10**6), *looks, (900_050, 10.0)).tokens_per_s == pytest.approx(10.0)


def test_two_checkpoints_of_one_second_divide_by_nothing():
    """updated_at has whole seconds; the later one of a second counts."""
    watcher = watch()
    assert look_each(watcher, (0, -9.0), (100, 1.1), (150, 1.8)).tokens_per_s == 0.0
    assert look_each(watcher, (350, 3.0)).tokens_per_s == pytest.approx(100.0)


def test_a_clock_or_a_count_that_goes_back_gives_no_speed_below_zero():
    """A retry on another machine starts the measurement anew; rows that somebody removed are no speed."""
    assert look_each(watch(), (0, -9.0), (500, 10.0), (300, 20.0)).tokens_per_s == 0.0
    watcher = watch()
    assert look_each(watcher, (0, -9.0), (500, 10.0), (600, 4.0)).tokens_per_s == 0.0
    assert look_each(watcher, (650, 9.0)).tokens_per_s == pytest.approx(10.0)


@given(
    looks=st.lists(
        st.tuples(st.integers(0, 3), st.floats(-200, 200), st.booleans(), st.booleans()), max_size=12
    ),
    budget=st.integers(0, 3),
    max_samples=st.none() | st.integers(1, 3),
)
def test_no_order_of_looks_breaks_it(looks, budget, max_samples):
    """Whatever comes when: a share of 0 to 100, a speed and an ETA that are not negative, and a row."""
    watcher = watch(budget=budget, max_samples=max_samples)
    for count, at_s, exists, ended in looks:
        found = checkpoint(rows=count, tokens=count * 7, saved_s=at_s, set_aside=count) if exists else None
        progress = look(watcher, found, abs(at_s), ended=ended)
        run = RunProgress((progress, progress))
        assert 0.0 <= run.total.reached_percent <= 100.0
        assert progress.tokens_per_s >= 0.0
        assert progress.eta_s is None or progress.eta_s >= 0.0
        assert run.to_line()
        assert len(run.to_rows()) == 3


def test_a_dataset_waits_until_its_checkpoint_changes():
    """What an earlier run has left does not say that it is generated now."""
    watcher = watch()
    old = checkpoint(saved_s=-500.0)
    assert [look(watcher, old, at_s).state for at_s in (0.0, 100.0)] == ["waiting", "waiting"]
    assert look(watcher, checkpoint(saved_s=105.0), 107.0).state == "generating"


def test_a_first_look_knows_a_fresh_checkpoint():
    """Whoever comes to a run that is on its way need not look twice."""
    assert look(watch(), checkpoint(saved_s=-4.0), 0.0).state == "generating"
    assert look(watch(), None, 0.0, report=None).state == "waiting"


def test_a_dataset_that_saves_nothing_any_more_has_stopped():
    """After a minute, or at once when the run has ended; and it goes on when it is retried."""
    watcher = watch()
    look_each(watcher, (0, 0.0), (100, 5.0), (200, 15.0))
    same = checkpoint(tokens=200, saved_s=15.0)
    assert look(watcher, same, 50.0).state == "generating"
    stopped = look(watcher, same, 80.0)
    assert (stopped.state, stopped.tokens_per_s, stopped.eta_s) == ("stopped", 0.0, None)
    assert look(watcher, checkpoint(tokens=300, saved_s=85.0), 86.0).state == "generating"
    assert look(watcher, checkpoint(tokens=300, saved_s=85.0), 87.0, ended=True).state == "stopped"


@pytest.mark.parametrize(
    ("rows", "tokens", "set_aside", "max_samples", "state"),
    [
        (10, 10_000, 0, None, "complete"),
        (10, 500, 0, 10, "complete"),
        (90, 500, 10, None, "exhausted"),
        (0, 0, 100, None, "exhausted"),
        (90, 500, 9, None, "waiting"),
    ],
)
def test_a_dataset_is_done_at_its_budget_its_cap_or_its_last_prompt(
    rows, tokens, set_aside, max_samples, state
):
    """One that is done has nothing left; one that reached its goal counts its whole budget."""
    found = checkpoint(rows=rows, tokens=tokens, set_aside=set_aside, saved_s=-500.0)
    progress = look(watch(max_samples=max_samples), found, 0.0)
    assert progress.state == state
    assert progress.is_done == (state != "waiting")
    assert (progress.eta_s == 0.0) == progress.is_done
    assert RunProgress((progress,)).total.reached_percent == (100.0 if state == "complete" else tokens / 100)


def test_what_cannot_be_read_leaves_what_is_known():
    """No checkpoint, a damaged one: the figures stay. One of other prompts: they are of no use."""
    watcher = watch()
    look(watcher, checkpoint(tokens=700), 0.0)
    damaged = {**checkpoint(tokens=9_999), "completion_tokens": 1}
    for found in (None, damaged, {}, checkpoint(tokens=9_999, key="other")):
        assert look(watcher, found, 1.0).completion_tokens == 700
    others = dataclasses.replace(REPORT, key="other")
    assert look(watcher, checkpoint(tokens=700), 2.0, report=others).completion_tokens == 0


def test_what_is_left_may_be_less_than_the_budget():
    """Where the prompts or the sample cap end first, their mean length tells what is still to come."""
    found = checkpoint(rows=40, tokens=4_000, set_aside=10)
    assert look(watch(budget=4_500), found, 0.0).left_tokens == 500
    assert look(watch(budget=10**6), found, 0.0).left_tokens == pytest.approx(50 * 100)
    assert look(watch(budget=10**6, max_samples=60), found, 0.0).left_tokens == pytest.approx(20 * 100)


def test_the_total_is_the_sum_and_no_dataset_makes_up_for_another():
    """The bar counts each dataset up to its budget, the table's total all tokens."""
    over = look(watch(budget=1_000, name="over"), checkpoint(tokens=3_000), 0.0)
    none = look(watch(budget=1_000, name="none"), None, 0.0)
    run = RunProgress((over, none))
    assert run.total.reached_percent == pytest.approx(50.0)
    assert (run.total.completion_tokens, run.total.budget_tokens, run.total.rows) == (3_000, 2_000, 10)
    assert run.to_line() == "3,000 of 2,000 tokens, 1 of 2 datasets done, 0 tokens/s, end not known yet"


@pytest.mark.parametrize(
    ("states", "total"),
    [
        (["complete", "generating", "waiting"], "generating"),
        (["complete", "waiting", "stopped"], "waiting"),
        (["exhausted", "stopped"], "stopped"),
        (["exhausted", "complete"], "exhausted"),
        (["complete", "complete"], "complete"),
    ],
)
def test_the_total_is_done_when_all_are(states, total):
    """Generating while one is, then as the one that is furthest from complete."""
    one = look(watch(), None, 0.0)
    assert RunProgress(tuple(dataclasses.replace(one, state=state) for state in states)).total.state == total


def test_the_table_has_a_line_a_dataset_and_the_total():
    """Every cell is text, as Prefect's table shows it."""
    watcher = watch(name="B1_glaive")
    look_each(watcher, (0, 0.0), (1_000, 5.0))
    found = checkpoint(rows=10, tokens=2_500, saved_s=15.0, set_aside=2)
    row, total = RunProgress((look(watcher, found, 15.0),)).to_rows()
    assert row == {
        "dataset": "B1_glaive",
        "state": "generating",
        "reached": "25.0%",
        "completion tokens": "2,500",
        "budget": "10,000",
        "tokens/s (1 min)": "150",
        "done in": "",
        "answers": "10",
        "prompts": "100",
        "finish reasons": "stop 10",
        "not used": "http_400 2",
    }
    assert total == {**row, "dataset": "total", "done in": "50 s"}


def test_a_watch_keeps_no_flags():
    """A look at a million prompts leaves a few numbers, whatever is kept of it for the speed."""
    watcher = watch()
    look_each(watcher, (0, 0.0), (1_000, 5.0))
    kept = [value for one in watcher._recent for value in dataclasses.asdict(one).values()]
    assert kept
    assert not any(isinstance(value, np.ndarray | Progress) for value in kept)


def test_a_dataset_that_ran_out_of_prompts_is_not_done():
    """It is counted apart, in the same words everywhere."""
    one = look(watch(), None, 0.0)
    states = ["complete", "exhausted", "waiting"]
    run = RunProgress(tuple(dataclasses.replace(one, state=state) for state in states))
    assert run.describe_done() == "1 of 3 datasets done, 1 out of prompts"


def shared(*states_and_left, budgets=True):
    """Datasets that share a window: (state, tokens left), each moving at 10 tokens a second."""
    one = look(watch(), None, 0.0)
    return RunProgress(
        tuple(
            dataclasses.replace(
                one,
                name=f"d{number}",
                state=state,
                left_tokens=float(left),
                tokens_per_s=10.0 if state == "generating" else 0.0,
                budget_tokens=10_000 if budgets else None,
            )
            for number, (state, left) in enumerate(states_and_left)
        )
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["waiting", "generating", "stopped", "damaged", "complete", "exhausted"]),
            st.integers(0, 10_000),
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_no_dataset_is_said_to_end_later_than_the_whole(found, budgets):
    """Its share of the window grows as the others end."""
    run = shared(*found, budgets=budgets)
    ends = [run.measure_end(one) for one in run.datasets]
    assert all(end is None or run.eta_s is None or end <= run.eta_s for end in ends)
    told = [run.find_earlier_end(one) for one in run.datasets]
    assert all(end is None or run.eta_s is None or end < run.eta_s for end in told)
    for one, shown, end in zip(run.datasets, told, ends, strict=True):
        assert shown == (None if one.is_done or end == run.eta_s else end)


def test_what_does_not_go_on_by_itself_is_no_part_of_the_end():
    """A dataset that is damaged, or that stopped while others go on; where all stopped there is no end."""
    run = shared(("generating", 1000), ("waiting", 500), ("stopped", 4000), ("damaged", 9000))
    assert (run.stuck, run.eta_s) == (("d2", "d3"), 150.0)
    assert run.to_line().endswith("10 tokens/s, the others done in 2 min")
    assert [run.measure_end(one) for one in run.datasets] == [100.0, None, None, None]
    assert run.stuck_tokens == 13_000
    still = shared(("stopped", 4000), ("waiting", 500))
    assert (still.stuck, still.eta_s) == ((), None)


@pytest.mark.parametrize(
    ("state", "idle_s", "budget", "words"),
    [
        ("generating", 5.0, 1, "generating"),
        ("generating", 5.0, None, "converting"),
        ("generating", 70.0, 1, "quiet 70 s"),
        ("stopped", 13.5 * 3600, 1, "stopped 13 h"),
        ("stopped", None, 1, "stopped"),
        ("damaged", 13.5 * 3600, 1, "damaged"),
        ("exhausted", 13.5 * 3600, 1, "out of prompts"),
        ("complete", 13.5 * 3600, None, "done"),
    ],
)
def test_a_state_is_said_in_the_same_words_everywhere(state, idle_s, budget, words):
    """With how long there was no answer, where that matters."""
    one = dataclasses.replace(look(watch(), None, 0.0), state=state, budget_tokens=budget)
    assert describe_state(one, idle_s) == words
