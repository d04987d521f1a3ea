"""A problem says what is wrong, what follows and what to do; what costs most comes first."""

from datetime import UTC, datetime

import pytest

from tasks.aggregate.pace import SILENT_S
from tasks.aggregate.problems import Problems, find_problems, split_problem
from tasks.aggregate.stats import TIME_BUCKET_S, Damage, DatasetStats

NOW_S = 1_800_000_000.0  # Jan 15 08:00 UTC
HOUR = 3600
LIMITS = "lanes.short.max_new_tokens, lanes.long.max_new_tokens"


def to_iso(at_s):
    return datetime.fromtimestamp(at_s, UTC).isoformat()


def dataset(name="d", *, idle_s=10.0, **changes):
    """Ten thousand tokens of fifty thousand, in a hundred answers, the last one `idle_s` ago."""
    last = None if idle_s is None else to_iso(NOW_S - idle_s)
    known = {
        "status": "incomplete",
        "rows": 100,
        "answered": 100,
        "prompts": 10_000,
        "prompt_tokens": 100,
        "completion_tokens": 10_000,
        "budget_tokens": 50_000,
        "reached_percent": 20.0,
        "finish_reasons": {},
        "lengths": None,
        "empty": 0,
        "not_token_exact": 0,
        "duplicates": 0,
        "unreadable": 0,
        "rejected": {},
        "permanently_rejected": 0,
        "prepare": {"rows_read": 10_000},
        "retries": 0,
        "started_at": last,
        "first_finished_at": last,
        "last_finished_at": last,
        "mean_tokens_per_s": None,
        "length_counts": {100: 100},
    }
    return DatasetStats(name=name, **(known | changes))


def find(*stats, ended=False):
    return find_problems(stats, now_s=NOW_S, ended=ended)


def test_a_run_at_work_has_no_problem():
    """Nor has a few source rows that are no prompts, or a few answers that were cut."""
    assert find(dataset()) == Problems([], [])
    few = {"rejected": {"no_user_turn": 50}, "cut_lengths": {100: 20}}
    assert find(dataset(**few)) == Problems([], [])
    assert find(dataset(idle_s=SILENT_S - 1)) == Problems([], [])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"unreadable": 2, "damaged": {"raw_responses.jsonl": Damage(2, (813, 2041))}},
            (
                "2 damaged lines in raw_responses.jsonl (813, 2041); when this run has ended, remove them "
                "(their prompts are then asked again), and run the same command again"
            ),
        ),
        (
            {"status": "exhausted"},
            "its prompts are used up, 40.0k tokens short; give it more, or a smaller budget",
        ),
        (
            {"status": "exhausted", "rejected": {"http_400": 90, "a": 10, "no_user_turn": 9}},
            (
                "its prompts are used up, 40.0k tokens short; give it more, or a smaller budget. 100 have no "
                "answer (http_400 90, a 10): rejected.jsonl says why. --retry-rejected helps only where the "
                "cause has gone (server, limits)"
            ),
        ),
        (
            {"prompts": 150},
            "its prompts will be used up at about 15,000 of 50,000 tokens; give it more, or a smaller budget",
        ),
        (
            {"not_token_exact": 3},
            (
                "3 answers whose token ids are missing or do not add up; they are not exported: look at the "
                "server that gave them"
            ),
        ),
        (
            {"empty": 2},
            (
                "2 answers that are empty; nothing is trained on them: look at its prompts with "
                "draftmill preview"
            ),
        ),
        (
            {"rejected": {"no_user_turn": 2500}},
            (
                "25% of its source rows cannot be used; is the adapter the right one? no_user_turn 2,500 "
                "(rejected.jsonl says why)"
            ),
        ),
        (
            {"budget_tokens": None, "rejected": {"no_end_of_turn": 7}},
            "7 conversations cannot be converted (no_end_of_turn 7); rejected.jsonl says why",
        ),
    ],
)
def test_a_problem_says_what_follows_and_what_to_do(changes, text):
    """In one or two sentences, with its dataset."""
    found = find(dataset(**changes))
    assert found == Problems([f"d: {text}"], [], ("d",))


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (Damage(1, (7,)), "1 damaged line in rejected.jsonl (7); remove it, or the next run will fail ("),
        (Damage(9, (7, 8)), "9 damaged lines in rejected.jsonl, from line 7; remove them, or the next "),
    ],
)
def test_damaged_lines_are_numbered_where_they_are_few(damage, where):
    """Nobody is sent to a log while a run writes to it."""
    found = find(dataset(unreadable=damage.lines, damaged={"rejected.jsonl": damage}, idle_s=900))
    assert any(text.startswith(f"d: {where}") for text in found.trouble)


@pytest.mark.parametrize(
    ("final", "again"),
    [
        (0, "the next run asks them again"),
        (2, "the next run asks 8 of them again"),
        (
            10,
            (
                "no run asks them again by itself: --retry-rejected helps only where the cause has gone "
                "(server, limits)"
            ),
        ),
    ],
)
def test_prompts_without_an_answer_are_asked_again_or_not(final, again):
    """By whether their failure may pass."""
    found = find(dataset(rejected={"http_500": 9, "b": 1}, permanently_rejected=final))
    why = "10 prompts without an answer (http_500 9, b 1)"
    assert found.trouble == [f"d: {why}; {again} (rejected.jsonl says why)"]


@pytest.mark.parametrize(
    ("rejected", "example", "but"),
    [
        ({"prompt_too_long": 9}, "", None),
        ({"prompt_too_long": 1, "http_400": 8}, "p: the input has 9 tokens, the context is 8", None),
        ({"http_400": 9}, "p: 9 tokens exceed the maximum allowed length", None),
        (
            {"prompt_too_long": 1, "http_400": 8},
            "p: no such tool in this context",
            ", not with prompt_too_long",
        ),
        ({"http_413": 9}, "p: the context has 9 tokens", ""),
    ],
)
@pytest.mark.parametrize("status", ["exhausted", "incomplete"])
def test_prompts_that_are_too_long_are_not_to_be_asked_again(rejected, example, but, status):
    """A refusal of the server is one where its example says so."""
    changes = {"rejected": rejected, "permanently_rejected": 9, "status": status}
    [text] = find(dataset(rejected_examples={"http_400": example}, **changes)).trouble
    if but is None:
        assert text.endswith(", too long for the context; asking again will not help")
    else:
        assert f"--retry-rejected helps only where the cause has gone (server, limits){but}" in text
        assert (" not with " in text) is bool(but)


def test_some_source_rows_that_cannot_be_used_are_a_note():
    """It does not make a good run look bad."""
    found = find(dataset(rejected={"no_user_turn": 500}))
    assert found == Problems([], ["d: 5% of its source rows cannot be used (no_user_turn 500)"])


def cut(name, share, **changes):
    """Of its tokens, this share in answers that were cut off at 500 tokens."""
    cut_answers = round(share * 100)
    counts = {500: cut_answers, 5: 100 * (100 - cut_answers)}
    return dataset(name, rows=1000, cut_lengths={500: cut_answers}, length_counts=counts, **changes)


def test_answers_that_were_cut_off_are_one_sentence_for_all_datasets():
    """The worst first, with the limit, what follows and what to do."""
    found = find(cut("a", 0.52), cut("b", 0.71), cut("c", 0.3), cut("free", 0.9, budget_tokens=None))
    [text] = found.trouble
    assert text.startswith(
        "cut off at max_new_tokens 500: b 71% of its tokens (7% of its answers), a 52% (5%), and c between "
        "25% and 50%. They are exported as they are, without a stop token. For fewer of them in what is to "
        f"come, stop the run, raise {LIMITS}, and run it again with --accept-changed max_new_tokens"
    )
    assert (found.notes, found.names) == ([], ())
    many = find(cut("a", 0.52), *(cut(name, 0.3) for name in "bcde")).trouble[0]
    assert ", and 4 datasets between 25% and 50%. They" in many
    below = find(cut("a", 0.3), cut("c", 0.26)).notes
    expected = (
        "cut off at max_new_tokens 500: a 30% of its tokens (3% of its answers), c 26% (3%) (no problem"
    )
    assert [text.startswith(expected) for text in below] == [True]


def test_a_larger_limit_is_advised_for_what_is_to_come():
    """By name where some are done; where all are, only another run would have it."""
    some = find(cut("a", 0.52, status="complete"), cut("b", 0.6), cut("c", 0.3), cut("d", 0.1)).trouble[0]
    again = "and run it again with --accept-changed max_new_tokens"
    assert some.endswith(f". For fewer of them in b, c, stop the run, raise {LIMITS}, {again}")
    done = find(cut("a", 0.52, status="complete"), cut("d", 0.1)).trouble[0]
    assert done.endswith(f"token; a larger limit ({LIMITS}) only matters to another run")


def test_cut_answers_are_told_while_it_is_cheap_to_act():
    """With how few answers that is from; but not of a handful."""
    early = {"length_counts": {100: 10, 900: 30}, "cut_lengths": {900: 20, 800: 10}}
    [text] = find(dataset(rows=40, **early)).trouble
    assert text.startswith(
        "cut off at max_new_tokens 800 or 900: d 93% of its tokens (30 of 40 answers so far). "
    )
    assert find(dataset(rows=10, **early)) == Problems([], [])


def test_a_dataset_that_stopped_while_others_go_on_is_trouble():
    """One sentence for each, or one for many; those of finished conversations convert."""
    advice = "look at the run's log: others go on, and the same command goes on with it after this run"
    silent = [dataset(name, idle_s=900) for name in "abc"]
    assert find(silent[0], dataset()).trouble == [f"a: no answer for 15 min; {advice}"]
    free = dataset("free", idle_s=900, budget_tokens=None, prompts=400)
    expected = f"free: converted 100 of 400, none for 15 min; {advice}"
    assert find(free, dataset()).trouble == [expected]
    many = find(*silent, dataset())
    [text] = many.trouble
    assert text.startswith("3 datasets stopped 15 min ago or more: a, b, c; look at")
    assert many.names == ("a", "b", "c")


@pytest.mark.parametrize(("ended", "idle_s", "word"), [(False, 900, "stopped"), (True, 900, "ended")])
def test_a_run_that_stopped_is_one_problem(ended, idle_s, word):
    """With when, and what to do, whatever number of datasets is not done."""
    found = find(dataset("a", idle_s=idle_s), dataset("b", idle_s=None), ended=ended)
    when = "at Jan 15 07:45 UTC, 15 min ago, with 2 of 2 datasets not done"
    why = "its log (the terminal, or its page in the Prefect UI) says why"
    assert found.trouble == [f"the run {word} {when}; {why}. To go on, run the same command again"]


def timed(*stretches, **changes):
    """A dataset of stretches (from, to, tokens a second) that ends now, in seconds before it."""
    tokens = {
        int(NOW_S) - at: speed * TIME_BUCKET_S
        for begin, end, speed in stretches
        for at in range(begin, end, -TIME_BUCKET_S)
    }
    started = to_iso(NOW_S - stretches[0][0])
    return dataset(tokens_by_time=tokens, started_at=started, **changes)


def test_a_long_standstill_is_trouble_until_the_run_is_done():
    """Then it is only worth knowing; a short one is nothing."""
    night = timed((12 * HOUR, 11 * HOUR, 100), (2 * HOUR, 0, 100))
    text = "no answers for 9 h (Jan 14 21:00 to Jan 15 06:00 UTC)"
    [found] = find(night).trouble
    why = "the run was stopped, or its servers were away: their logs and the run's say which"
    assert found == f"{text}, then it went on; {why}"
    assert find(timed((12 * HOUR, 11 * HOUR, 100), (2 * HOUR, 0, 100), status="complete")).notes == [text]
    assert find(timed((3 * HOUR, 2 * HOUR, 100), (2 * HOUR - 800, 0, 100))) == Problems([], [])
    [often] = find(timed(*((at, at - 60, 100) for at in range(5 * HOUR, 0, -460)))).trouble
    assert often.startswith(
        "no answers for more than 5 min, 39 times, 4 h 20 min in all, the longest 7 min ("
    )


def test_a_speed_that_fell_is_trouble_until_the_run_is_done():
    """With the work that both speeds are the means of, and what to look at."""
    stretches = ((4 * HOUR, 2 * HOUR, 1000), (2 * HOUR, 0, 100))
    [found] = find(timed(*stretches)).trouble
    before, after = "from 1,000 tokens/s (over 2 h of work)", "to 100 (over the 2 h since Jan 15 06:00 UTC)"
    assert found == f"the speed fell {before} {after}; look at the servers' logs, and at who else uses them"
    assert find(timed(*stretches, status="complete")) == Problems([], [])
    stopped = find(timed(*stretches), ended=True).trouble[0]
    assert stopped.endswith(
        " Its speed had fallen: look at that before you go on, then run the same command again"
    )


def test_what_is_said_of_one_dataset_stands_together():
    """Where its worst problem stands: what stops a run first, then what costs most."""
    found = find(
        dataset("small", status="exhausted", completion_tokens=45_000),
        dataset("large", status="exhausted", empty=50),
        dataset("late", idle_s=900, not_token_exact=1),
        dataset("torn", unreadable=1, idle_s=900),
        cut("cut", 0.8),
    )
    starts = [text.split(": ")[0] for text in found.trouble]
    assert starts[:6] == ["torn", "late", "late", "large", "large", "small"]
    assert starts[6].startswith("cut off at")
    assert found.names == ("torn", "late", "large", "small")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: 2 lines; remove them. Then go on", ("a: 2 lines", "; remove them. Then go on")),
        ("a: 2.5 lines. Remove them; go on", ("a: 2.5 lines", ". Remove them; go on")),
        ("the run stopped", ("the run stopped", "")),
    ],
)
def test_what_is_wrong_is_told_from_what_to_do(text, parts):
    """For a place where there is little room."""
    assert split_problem(text) == parts
