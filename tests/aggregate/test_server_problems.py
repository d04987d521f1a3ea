"""A server is named where the others leave it far behind, and in no other case."""

import pytest

from tasks.aggregate.recent_answers import ServerActivity
from tasks.aggregate.server_problems import find_server_problems


def find(*answers_and_ages):
    """The problems of servers with (answers in 5 minutes, seconds since the last one)."""
    servers = [
        ServerActivity(server=f"http://s-{at}", answers=answers, tokens_per_s=1.0, last_answer_age_s=age_s)
        for at, (answers, age_s) in enumerate(answers_and_ages)
    ]
    return list(find_server_problems(servers))


def test_a_server_that_the_others_leave_behind_is_named():
    """With what it gave and what they did: silent, slow or both."""
    expected = "http://s-1: no answer for 4 min, 12 answers in 5 min; look at its log (http://s-0: 319)"
    assert find((319, 2.0), (12, 240.0)) == [expected]
    slow = "http://s-2: 4 answers in 5 min; look at its log (median of the others: 25)"
    assert find((20, 2.0), (30, 9.0), (4, 9.0)) == [slow]
    assert find((200, 2.0), (150, 70.0))[0].startswith("http://s-1: no answer for 70 s, 150 answers in")


@pytest.mark.parametrize(
    "servers",
    [
        [],
        [(0, 900.0)],
        [(100, 1.0), (26, 5.0)],
        [(19, 1.0), (0, 290.0)],
        [(60, 1.0), (20, 70.0)],
        [(0, 900.0), (0, 1200.0)],
        [(100, 70.0), (90, 80.0)],
    ],
    ids=["none", "one", "a quarter", "few answers", "chance", "long silent", "all silent"],
)
def test_no_server_is_blamed_by_chance(servers):
    """Long answers come seldom, and nothing comes in a pause."""
    assert find(*servers) == []
