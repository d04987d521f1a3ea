"""What a watch says of growing logs is what a full scan of them says, however they grow."""

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.aggregate.log_watch import RunLogWatch
from tasks.aggregate.pace import SILENT_S
from tasks.aggregate.problems import is_running
from tasks.aggregate.report import build_snapshot, make_tiles
from tasks.aggregate.run_stats import collect_stats, read_plans
from tasks.aggregate.stats_scan import DatasetScan
from tasks.records.log_tail import LogTail
from tasks.records.rows import Rejected, Response
from tasks.records.run_file import RunFolderError, update_run_file
from tasks.records.times import format_moment

NOW_S = 1_800_000_000.0
PLAN = {"budget_tokens": 1000, "max_samples": None}


def answer(name, *, tokens=10, at_s=NOW_S, turn=0, latency_s=5.0, **changes):
    finished = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    row = {"id": name, "turn": turn, "input_ids": [1], "output_ids": [2] * tokens, "prompt_tokens": 1}
    row |= {
        "completion_tokens": tokens,
        "finished_at": finished,
        "latency_s": latency_s,
        "server": "http://s",
    }
    return Response.from_row(row | changes).to_line()


def refusal(name, reason="http_500", *, stage="generate", permanent=False, where=""):
    return Rejected(name, reason, "why", permanent=permanent, stage=stage, where=where).to_line()


def start_run(folder, *, now="now", **plans):
    """A run.json with datasets; those of `plans` in details only where they have begun."""
    update_run_file(folder, fingerprint={}, details={"datasets": plans or {"d": PLAN}}, now=now)


def write(folder, *lines, name="raw_responses.jsonl", mode="ab"):
    folder.mkdir(exist_ok=True)
    with (folder / name).open(mode) as log:
        log.write(b"".join(lines))


def describe(scan):
    """All that can be told apart; which rejected row is the example depends on when one looks."""
    stats = scan.to_stats(name="d", budget_tokens=1000, max_samples=None, prompts=9)
    return dataclasses.replace(stats, rejected_examples={}), scan.recent.last_s, scan.recent.since(0)


OLD_ROW = orjson.dumps({"id": "old", "usage": {"prompt_tokens": 3, "completion_tokens": 7}}) + b"\n"
names = st.sampled_from("abcd")
response_lines = st.lists(
    st.builds(
        answer,
        names,
        tokens=st.integers(0, 30),
        turn=st.integers(0, 1),
        at_s=st.integers(0, 900).map(lambda s: NOW_S + s),
        finish_reason=st.sampled_from(["stop", "length"]),
    )
    | st.sampled_from([OLD_ROW, b"{nonsense\n"]),
    max_size=12,
)
rejected_lines = st.lists(
    st.builds(
        refusal,
        names,
        reason=st.sampled_from(["http_500", "http_400"]),
        stage=st.sampled_from(["prepare", "generate"]),
        permanent=st.booleans(),
        where=st.sampled_from(["f:1", "f:2"]),
    ),
    max_size=8,
)


@given(response_lines, rejected_lines, st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=5))
def test_a_scan_in_pieces_equals_a_scan_of_the_whole(responses, rejections, cuts):
    """Whatever was there at each look, lines that were torn then included."""
    logs = {"raw_responses.jsonl": b"".join(responses), "rejected.jsonl": b"".join(rejections)}
    with TemporaryDirectory() as folder:
        watched = DatasetScan(Path(folder))
        shares = zip(*sorted(cuts), strict=True) if cuts else [(), ()]
        ends = {
            name: [*sorted(int(share * len(log)) for share in own), len(log)]
            for (name, log), own in zip(logs.items(), shares, strict=True)
        }
        for both in zip(*ends.values(), strict=True):
            for (name, log), end in zip(logs.items(), both, strict=True):
                with (Path(folder) / name).open("ab") as file:
                    file.write(log[file.tell() : end])
            watched.read_new()
        whole = DatasetScan(Path(folder))
        whole.read_new()
        assert describe(watched) == describe(whole)
        assert watched._rejections.reasons.keys() >= watched._rejections.find_examples().keys()


@pytest.mark.parametrize("name", ["raw_responses.jsonl", "rejected.jsonl"])
@pytest.mark.parametrize("change", ["cut", "replaced", "rewritten", "removed"])
def test_a_log_that_is_no_longer_the_one_that_was_read_is_read_again(tmp_path, name, change):
    """Cut, replaced by another file, written over in place with more than before, or gone."""
    write(tmp_path, answer("a"), answer("b"))
    write(tmp_path, refusal("a"), refusal("c"), refusal("d", "http_400"), name="rejected.jsonl")
    watched = DatasetScan(tmp_path)
    watched.read_new()
    log = tmp_path / name
    lines = log.read_bytes().splitlines(keepends=True)
    if change == "cut":
        log.write_bytes(lines[0])
    elif change == "replaced":
        (tmp_path / "new").write_bytes(b"".join(lines * 2))
        (tmp_path / "new").replace(log)
    elif change == "rewritten":
        log.write_bytes(b"".join(reversed(lines)) * 3)
    else:
        log.unlink()
    watched.read_new()
    whole = DatasetScan(tmp_path)
    whole.read_new()
    assert describe(watched) == describe(whole)


def test_only_what_was_added_is_read(tmp_path):
    """A second look at the same log gives nothing, a third one only the new line."""
    log = tmp_path / "log"
    log.write_bytes(b"a\nb\n")
    tail = LogTail(log)
    assert list(tail.read()) == [b"a\n", b"b\n"]
    assert (tail.is_continued(), list(tail.read())) == (True, [])
    with log.open("ab") as file:
        file.write(b"c\ntorn")
    assert (tail.is_continued(), list(tail.read())) == (True, [b"c\n"])


def test_a_folder_without_run_json_has_nothing_to_see_yet(tmp_path):
    """Then datasets appear, also those that wait for their turn."""
    watch = RunLogWatch(tmp_path)
    assert watch.look(NOW_S) is None
    details = {"datasets": {"b": PLAN}, "plans": {"b": {"budget_tokens": 2000}, "a": {"budget_tokens": 7}}}
    update_run_file(tmp_path, fingerprint={}, details=details, now="now")
    look = watch.look(NOW_S)
    assert [(one.name, one.budget_tokens, one.state) for one in look.progress.datasets] == [
        ("a", 7, "waiting"),
        ("b", 2000, "waiting"),
    ]
    start_run(tmp_path, c=PLAN)
    assert [one.name for one in watch.look(NOW_S).progress.datasets] == ["a", "b", "c"]


def test_a_damaged_run_json_is_an_error(tmp_path):
    """Not something to wait for."""
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunFolderError, match="damaged"):
        RunLogWatch(tmp_path).look(NOW_S)


def test_speed_comes_from_the_last_minutes_and_the_end_from_the_last_hour(tmp_path):
    """400 tokens in the 20 seconds since the first answer began, 3,600 in the hour; 6,000 are left."""
    start_run(tmp_path, d=PLAN | {"budget_tokens": 10_000})
    for minute in range(60, 6, -1):
        tokens = 3600 - 400 - 53 if minute == 60 else 1
        write(tmp_path / "d", answer(str(minute), tokens=tokens, at_s=NOW_S - 10 - 60 * minute))
    write(tmp_path / "d", answer("later", tokens=400, at_s=NOW_S - 310))
    write(tmp_path / "d", *(answer(name, tokens=200, at_s=NOW_S - 10, latency_s=10) for name in "ab"))
    look = RunLogWatch(tmp_path).look(NOW_S)
    [one] = look.progress.datasets
    assert (one.state, one.tokens_per_s) == ("generating", 20.0)
    assert one.pace == look.progress.pace == look.progress.total.pace
    assert one.eta_s == look.progress.total.eta_s == one.left_tokens / look.progress.pace.tokens_per_s
    assert look.progress.pace.tokens_per_s == pytest.approx(4000 / 3600, rel=0.02)
    [server] = look.servers
    assert (server.answers, server.tokens_per_s, server.last_answer_age_s) == (2, 20.0, 10.0)
    assert look.idle_s == (10.0,)


def test_a_dataset_without_an_answer_for_minutes_has_stopped(tmp_path):
    """It is said for how long; a dataset that is done never stops."""
    start_run(tmp_path, done={"budget_tokens": 10, "max_samples": None}, d=PLAN)
    for name in ("d", "done"):
        write(tmp_path / name, answer("a"))
    watch = RunLogWatch(tmp_path)
    states = [one.state for one in watch.look(NOW_S + SILENT_S - 1).progress.datasets]
    assert states == ["generating", "complete"]
    look = watch.look(NOW_S + SILENT_S)
    assert [one.state for one in look.progress.datasets] == ["stopped", "complete"]
    assert watch.look(NOW_S + SILENT_S + 1).progress.total.tokens_per_s == 0
    expected = "the run stopped at Jan 15 08:00 UTC, 5 min ago, with 1 of 2 datasets not done; "
    assert [text.startswith(expected) for text in look.problems.trouble] == [True]


def test_a_run_without_an_answer_for_half_an_hour_is_in_trouble(tmp_path):
    """From when it was last begun; one answer, or a run.json without a time, and nothing is said."""
    start_run(tmp_path, now="2027-01-15T07:00:00Z")
    start_run(tmp_path, now="2027-01-15T08:00:00+00:00")
    watch = RunLogWatch(tmp_path)
    assert watch.look(NOW_S + 1799).problems.trouble == []
    [text] = watch.look(NOW_S + 1800).problems.trouble
    assert text.startswith("no answer yet, 30 min after the run began; its log (")
    write(tmp_path / "d", answer("a", at_s=NOW_S + 1800))
    assert watch.look(NOW_S + 1801).problems.trouble == []
    (tmp_path / "d" / "raw_responses.jsonl").unlink()
    start_run(tmp_path)
    assert watch.look(NOW_S + 9000).problems.trouble == []


def test_the_end_is_known_between_two_datasets(tmp_path):
    """One is done, and the next has no answer yet; monitor and report agree."""
    start_run(tmp_path, done={"budget_tokens": 3000, "max_samples": None}, d=PLAN)
    write(tmp_path / "done", *(answer(str(n), tokens=30, at_s=NOW_S - 10 * n) for n in range(100)))
    look = RunLogWatch(tmp_path).look(NOW_S + 100)
    page = build_snapshot(collect_stats(tmp_path, read_plans(tmp_path)), now_s=NOW_S + 100)
    for one in (look, page):
        assert [part.state for part in one.progress.datasets] == ["waiting", "complete"]
        assert one.progress.eta_s == pytest.approx(1000 / 3, rel=0.05)
    assert make_tiles(page, running=True)[2].detail.startswith("in 6 min as of 08:01, ")


def test_a_dataset_that_has_just_ended_was_part_of_the_speed(tmp_path):
    """The run's speed does not fall because one of its datasets is done."""
    start_run(tmp_path, done={"budget_tokens": 10, "max_samples": None}, d=PLAN)
    for name in ("d", "done"):
        write(tmp_path / name, answer("a", tokens=100, at_s=NOW_S, latency_s=50))
    look = RunLogWatch(tmp_path).look(NOW_S)
    assert [one.state for one in look.progress.datasets] == ["generating", "complete"]
    assert sum(one.tokens_per_s for one in look.progress.datasets) == look.progress.total.tokens_per_s == 4.0


def test_a_server_that_falls_behind_is_trouble_and_one_of_an_earlier_run_is_not(tmp_path):
    """The servers are those that run.json names, while the run goes on."""
    start_run(tmp_path, d=PLAN | {"budget_tokens": 10_000})
    write(tmp_path / "d", *(answer(str(n), at_s=NOW_S - 9 * n) for n in range(30)))
    for name, at_s in (("old", NOW_S - 4000), ("slow", NOW_S - 250)):
        write(tmp_path / "d", answer(name, at_s=at_s, server=f"http://{name}"))
    expected = "no answer for 4 min, 1 answer in 5 min; look at its log (http://s: 30)"
    assert len(RunLogWatch(tmp_path).look(NOW_S).servers) == 3
    servers = {"http://s": {}, "http://slow": {}}
    update_run_file(tmp_path, fingerprint={}, details={"servers": servers}, now="now")
    watch = RunLogWatch(tmp_path)
    assert f"http://slow: {expected}" in watch.look(NOW_S).problems.trouble
    assert not any("http://" in text for text in watch.look(NOW_S + SILENT_S).problems.trouble)


@pytest.mark.parametrize("ahead_s", [-4000.0, 0.0, 4000.0])
def test_a_clock_that_is_wrong_does_not_stop_a_dataset(tmp_path, ahead_s):
    """Rows that were seen to come are new, whatever the time they name."""
    start_run(tmp_path)
    watch = RunLogWatch(tmp_path)
    for second in (0, 100):
        write(tmp_path / "d", answer(str(second), tokens=200, at_s=NOW_S + second))
        look = watch.look(NOW_S + ahead_s + second)
    [one] = look.progress.datasets
    assert (one.state, one.tokens_per_s) == ("generating", pytest.approx(400 / 105))
    assert watch.look(NOW_S + ahead_s + 100 + SILENT_S).progress.datasets[0].state == "stopped"


def test_finished_conversations_are_done_of_all(tmp_path):
    """A dataset without a budget counts conversations, and no tokens against the others' budget."""
    start_run(tmp_path, free={"kind": "trajectory", "budget_tokens": None}, d=PLAN)
    report = {"key": "", "rows_read": 8, "conversations": 8, "prompts": 8, "duplicates": 0, "rejected": {}}
    write(tmp_path / "free", orjson.dumps(report | {"reused": False}), name="prepare.json", mode="wb")
    write(tmp_path / "free", *(answer(name, tokens=1000) for name in "ab"))
    write(tmp_path / "d", answer("a", tokens=100))
    look = RunLogWatch(tmp_path).look(NOW_S + 5)
    d, free = look.progress.datasets
    assert (free.reached_percent, free.left_tokens, free.tokens_per_s) == (25, 6000, 200)
    assert (d.tokens_per_s, look.progress.total.tokens_per_s, look.progress.total.reached_percent) == (
        10,
        10,
        10,
    )


@pytest.mark.parametrize("after_s", [0, 60, SILENT_S])
def test_a_monitor_and_a_report_of_one_run_agree(tmp_path, after_s):
    """On the end and on what went wrong, where a cap comes first, a dataset is silent, or all stopped."""
    start_run(tmp_path, capped=PLAN | {"budget_tokens": 10**6, "max_samples": 300}, old=PLAN, d=PLAN)
    for name, ends_s, count in (("capped", 0, 100), ("d", 30, 80), ("old", 3000, 5)):
        lines = [answer(str(n), at_s=NOW_S - ends_s - 20 * n, finish_reason="length") for n in range(count)]
        write(tmp_path / name, *lines)
    look = RunLogWatch(tmp_path).look(NOW_S + after_s)
    page = build_snapshot(collect_stats(tmp_path, read_plans(tmp_path)), now_s=NOW_S + after_s)
    assert page.progress.pace == look.progress.pace
    assert page.problems == look.problems
    assert [one.state for one in page.progress.datasets] == [one.state for one in look.progress.datasets]
    end = make_tiles(page, running=is_running(look.idle_s))[2]
    assert page.progress.eta_s == look.progress.eta_s
    if after_s < SILENT_S:
        assert end.answer == format_moment(look.at_s + look.progress.eta_s)
        assert "; then old needs you; " in end.detail
        assert look.problems.trouble[0].startswith("old: no answer for 5")
    else:
        assert (end.answer, look.progress.eta_s) == ("not running", None)
        assert look.problems.trouble[0].startswith(
            "the run stopped at Jan 15 08:00 UTC, 5 min ago, with 3 of 3"
        )
