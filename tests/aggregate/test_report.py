"""The report answers four questions in words and charts, and cannot be made to run or fetch anything."""

import dataclasses
import itertools
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.aggregate.problems import Problems, find_problems, is_running
from tasks.aggregate.report import build_snapshot, make_tiles, read_coverage, render_report, write_report
from tasks.aggregate.report_charts import (
    draw_coverage,
    draw_lengths,
    draw_throughput,
    lay_out_time,
    nice_ticks,
)
from tasks.aggregate.run_stats import collect_stats, read_plans
from tasks.aggregate.stats import PAUSE_S, TIME_BUCKET_S, find_gaps
from tasks.aggregate.stats_scan import scan_dataset
from tasks.records.rows import Rejected, Response
from tasks.records.run_file import update_run_file

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
START_S = 1_800_000_000
EVIL = "<script>alert('x')</script>\"&"
MANIFEST = {
    "vocab": {
        "draft_vocab_size": 32000,
        "datasets": [{"name": "d", "coverage": 0.97}, {"name": "none", "coverage": None}],
        "total": {"coverage": 0.96},
        "curve": [{"draft_vocab_size": 1000, "coverage": 0.5}, {"draft_vocab_size": 32000, "coverage": 0.96}],
    }
}


def make_stats(
    folder, *, rows=10, tokens=100, budget=1000, reason="stop", name="d", gap_s=0, every_s=10, **changes
):
    """`rows` answers, one every 10 s or so; the second half comes `gap_s` later."""
    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(rows):
        at_s = START_S + every_s * number + (gap_s if number >= rows // 2 else 0)
        finished = datetime.fromtimestamp(at_s, UTC).isoformat()
        row = Response(str(number), 0, [1], [2] * tokens, "", reason, 1, tokens, finished_at=finished)
        lines.append(row.to_line())
    (folder / "raw_responses.jsonl").write_bytes(b"".join(lines))
    stats = scan_dataset(folder, name=name, budget_tokens=budget, max_samples=None, prompts=rows + 5)
    return dataclasses.replace(stats, **changes)


def tiles_of(*stats, after_s=100.0, ended=False):
    """The tiles of a page that is made `after_s` after the first answer."""
    look = build_snapshot(stats, now_s=START_S + after_s, ended=ended)
    return make_tiles(look, running=is_running(look.idle_s, ended=ended))


def problems_of(*stats, after_s=100.0, ended=False):
    """What is wrong `after_s` after the first answer."""
    return find_problems(stats, now_s=START_S + after_s, ended=ended)


def render(*stats, run=None, manifest=None, folder="/data/run"):
    return render_report(stats, run=run or {}, manifest=manifest, folder=folder, now=NOW)


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_a_finished_run_is_told_in_four_tiles(tmp_path):
    """How far, how fast, when done, what went wrong."""
    tiles = tiles_of(make_stats(tmp_path / "d"))
    assert [tile.answer for tile in tiles] == ["100.0%", "11 tokens/s", "Jan 15 08:01 UTC", "Nothing"]
    assert "1,000 of 1,000 tokens, 1 of 1 datasets done" in tiles[0].detail
    assert tiles[1].detail == "on average over 2 min of work; last answer Jan 15 08:01 UTC"
    assert (tiles[2].detail, tiles[2].tone) == ("finished, after 2 min", "good")
    later = tiles_of(make_stats(tmp_path / "d"), after_s=9151)[2]
    assert (later.answer, later.detail) == (
        "Jan 15 08:01 UTC",
        "finished 2 h 31 min before this report, after 2 min",
    )


def test_a_run_that_is_not_done_says_how_long_it_will_take(tmp_path):
    """What is left at the speed of the last hour; and where it stopped, that and what to do, once."""
    stats = make_stats(tmp_path / "d", budget=1200, every_s=80)
    far, fast, end, wrong = tiles_of(stats, after_s=725)
    assert (far.answer, wrong.answer) == ("83.3%", "Nothing")
    assert fast.detail == "over the 12 min of work so far; last answer Jan 15 08:12 UTC"
    assert end.answer == "Jan 15 08:14 UTC"
    assert end.detail == "in 2 min as of 08:12, at that speed; 200 tokens left"
    problems = problems_of(stats, after_s=3180)
    expected = "the run stopped at Jan 15 08:12 UTC, 41 min ago, with 1 of 1 datasets not done"
    why = "its log (the terminal, or its page in the Prefect UI) says why"
    assert problems.trouble == [f"{expected}; {why}. To go on, run the same command again"]
    [_, fast, end, wrong] = tiles_of(stats, after_s=3180)
    assert fast.answer == "stopped"
    assert fast.detail == "1 tokens/s over the 12 min of work so far; last answer Jan 15 08:12 UTC"
    assert (end.answer, end.tone) == ("not running", "bad")
    assert end.detail == "200 tokens left: 2 min of work at its 1 tokens/s"
    assert (wrong.answer, wrong.detail) == ("1 thing", expected)


@pytest.mark.parametrize(
    ("every_s", "answer", "detail"),
    [
        (10, "too early to tell", "200 tokens left, after 2 min of work"),
        (60, "Jan 15 08:10 UTC", "a first guess: in 2 min as of 08:09, at that speed; 200 tokens left"),
    ],
)
def test_the_end_of_a_run_that_has_just_begun_is_a_guess(tmp_path, every_s, answer, detail):
    """Or nothing at all."""
    [_, _, end, _] = tiles_of(
        make_stats(tmp_path / "d", budget=1200, every_s=every_s), after_s=every_s * 9 + 5
    )
    assert (end.answer, end.detail) == (answer, detail)


def test_a_speed_that_fell_is_told(tmp_path):
    """The last hour's speed is the one that counts, so that no end is too hopeful, but when all is done."""
    tokens = {START_S + at: 10_000 if at < 7200 else 1000 for at in range(0, 10_800, 10)}
    times = {"last_finished_at": "2027-01-15T11:00:00Z", "tokens_by_time": tokens}
    times |= {"completion_tokens": 7_560_000, "prompts": 100}
    stats = dataclasses.replace(make_stats(tmp_path / "d", budget=10_000_000), **times)
    _, fast, end, _ = tiles_of(stats, after_s=10_800)
    assert fast.answer == "100 tokens/s"
    assert fast.detail == "over the last hour of work (700 on average); last answer Jan 15 11:00 UTC"
    assert end.detail.startswith("in 6 h 47 min as of 11:00, at that speed; ")
    assert problems_of(stats, after_s=10_800).trouble[0].startswith("the speed fell from 1,000 tokens/s (")
    _, fast, stopped, _ = tiles_of(stats, after_s=20_000)
    assert fast.answer == "stopped"
    assert fast.detail.startswith("100 tokens/s in its last hour (700 on average); last answer ")
    assert stopped.detail.endswith(
        "left: 6 h 47 min of work at the last hour's 100 tokens/s, 58 min at the average 700"
    )
    done = tiles_of(dataclasses.replace(stats, status="complete"), after_s=10_800)[1]
    assert (done.answer, done.detail.split(";")[0]) == ("700 tokens/s", "on average over 3 h of work")


@pytest.mark.parametrize(
    ("after_s", "ended", "answer"),
    [
        (800, False, "Jan 15 08:15 UTC in 2 min as of"),
        (800, True, "not running"),
        (720 + PAUSE_S, False, "not running"),
    ],
)
def test_a_page_tells_whether_the_run_is_at_work(tmp_path, after_s, ended, answer):
    """By its last answer, unless whoever writes the page knows that it has ended."""
    stats = make_stats(tmp_path / "d", budget=1200, every_s=80)
    now = datetime.fromtimestamp(START_S + after_s, UTC)
    text = Page(render_report([stats], run={}, manifest=None, folder="f", now=now, ended=ended)).text
    assert f"When done? {answer}" in text
    assert text.count("run the same command again") == (answer == "not running")
    assert ("No pause was longer" in text) is (answer != "not running")


def test_datasets_that_have_not_begun_are_one_thing(tmp_path):
    """Where the run ended early, and none while nobody knows."""
    stats = [make_stats(tmp_path / name, rows=0, name=name) for name in "ab"]
    found = problems_of(*stats, ended=True)
    assert found.trouble == [
        (
            "the run ended, with 2 of 2 datasets not done; its log (the terminal, or its page in the Prefect "
            "UI) says why. To go on, run the same command again"
        )
    ]
    assert problems_of(*stats) == Problems([], [])
    assert [tile.answer for tile in tiles_of(*stats)] == ["0.0%", "not known", "not known", "Nothing"]


def test_prompts_that_will_not_suffice_are_told_before_they_are_used_up(tmp_path):
    """From the mean of the answers so far; a run at work is told too, and is not 100% in the end."""
    short = dataclasses.replace(
        make_stats(tmp_path / "d", budget=60_000), rows=100, answered=100, prompts=150,
        completion_tokens=10_000,
        status="incomplete",
    )  # fmt: skip
    expected = "d: its prompts will be used up at about 15,000 of 60,000 tokens; "
    assert problems_of(short).trouble[0].startswith(expected)
    left = "5.00k tokens left (45.0k of the budgets cannot be reached: out of prompts)"
    assert tiles_of(short)[2].detail.startswith(left)
    assert problems_of(dataclasses.replace(short, max_samples=140)).trouble == []
    changes = {"answered": 150, "rows": 150, "completion_tokens": 15_000, "reached_percent": 25.0}
    out = dataclasses.replace(short, status="exhausted", **changes)
    far, _, end, _ = tiles_of(out)
    assert [(one.answer, one.tone) for one in (far, end)] == [
        ("25.0%", "plain"),
        ("Jan 15 08:01 UTC", "plain"),
    ]
    assert end.detail == "finished short of the budget, for want of prompts, after 2 min"
    assert "0 of 1 datasets done, 1 out of prompts" in far.detail


def test_pauses_are_no_part_of_the_speed(tmp_path):
    """A run that went on the next day was not slow, and its report names the pause."""
    through = make_stats(tmp_path / "a")
    paused = make_stats(tmp_path / "b", gap_s=86_400)
    assert paused.mean_tokens_per_s == pytest.approx(through.mean_tokens_per_s, rel=0.2)
    text = Page(render(paused)).text
    assert "There were no answers for 24 h (Jan 15 08:00 to Jan 16 08:00 UTC)." in text
    assert "No answer for 24 h, from Jan 15 08:00 to Jan 16 08:00 UTC 24 h pause" in text


def test_a_run_that_stopped_is_drawn_up_to_now(tmp_path):
    """The chart does not end as if it were the present; one that is done ends with its last answer."""
    stats = make_stats(tmp_path / "d", budget=2000)
    assert "none for" not in Page(render(dataclasses.replace(stats, status="complete"))).text
    now = datetime.fromtimestamp(START_S, UTC) + timedelta(hours=7)
    for running, shown in ((True, True), (False, True)):
        text = Page(
            render_report([stats], run={}, manifest=None, folder="f", now=now, ended=not running)
        ).text
        assert ("none for 6 h 58 min" in text) is shown
    tokens = stats.tokens_by_time
    chart = draw_throughput(tokens, width=900, height=200, until_s=START_S + 7200)
    [silence] = chart.cuts
    assert max(bar.x + bar.width for bar in chart.bars) <= silence.x + 1e-6
    assert silence.x + silence.width == pytest.approx(900)


def test_finished_conversations_are_no_speed_of_the_servers(tmp_path):
    """Neither do they fill the budget: they have a table of their own, and are in no total."""
    stats = [
        make_stats(tmp_path / "d", budget=2000),
        make_stats(tmp_path / "t", budget=None, tokens=9000, name="t"),
    ]
    far, fast, *_ = tiles_of(*stats)
    assert (far.answer, fast.answer) == ("50.0%", "11 tokens/s")
    text = Page(render(*stats)).text
    assert "Finished conversations They were recorded before this run" in text
    assert "total of the datasets with a budget" in text
    row = text.split("total of the datasets with a budget", 1)[1].split("Finished")[0]
    assert row.split()[-5:] == ["50.0%", "1,000", "2,000", "10", "15"]


def test_a_run_of_finished_conversations_only_speaks_of_no_answers(tmp_path):
    """Its tokens and its speed are theirs."""
    stats = make_stats(tmp_path / "t", budget=None, tokens=9000)
    text = Page(render_report([stats], run={}, manifest=None, folder="f", now=NOW)).text
    page = text.split("reckoned from the last hour of work.")[1]
    assert "Conversations from Jan 15" in page
    assert "Budgets" not in page
    assert "How answers ended" not in page
    assert "last conversation Jan 15 08:01 UTC" in text


def test_datasets_that_do_not_go_on_are_left_out_of_the_end(tmp_path):
    """It is said who needs somebody first, and the words and colours are the monitor's."""
    stats = [
        make_stats(tmp_path / "d", budget=2000, every_s=80, prompts=900),
        make_stats(tmp_path / "late", budget=9000, name="late", prompts=900),
        make_stats(tmp_path / "torn", budget=9000, name="torn", prompts=900, unreadable=1),
        make_stats(tmp_path / "new", budget=1000, rows=0, name="new"),
    ]
    end = tiles_of(*stats, after_s=730)[2]
    assert (end.tone, end.answer) == ("warn", "Jan 15 08:20 UTC")
    assert end.detail == (
        "the others, in 8 min as of 08:12, at that speed; then late, torn need you; 2.00k tokens left, and "
        "16.0k of late, torn"
    )
    now = datetime.fromtimestamp(START_S + 730, UTC)
    page = Page(render_report(stats, run={}, manifest=None, folder="f", now=now))
    states = [attrs["class"] for _, attrs in page.tags if attrs.get("class", "").startswith("status")]
    assert states == [
        f"status {state}" for state in ("generating", "stopped", "damaged", "waiting", "stopped")
    ]
    assert "■ generating, 1 stopped, 1 damaged" in page.text
    assert "■ stopped 11 min" in page.text


def test_every_section_is_there(tmp_path):
    """Charts with texts for each bar, tables, and what the rows were made with."""
    stats = make_stats(
        tmp_path / "d", rejected={"http_400": 3}, rejected_examples={"http_400": "p-7: too long"}
    )
    run = {"fingerprint": {"model": "org/model", "seed": 7, "datasets": {"d": {"adapter": "messages"}}}}
    run["details"] = {
        "draftmill": "0.1.0",
        "servers": {"http://gpu:1": {"tp_size": 8}},
        "datasets": {"d": {}},
    }
    page = Page(render(stats, run=run, manifest=MANIFEST))
    for text in (
        "org/model",
        "/data/run",
        "91 to 127 tokens: 10 answers",
        "p-7: too long",
        "http_400",
        "tp_size",
    ):
        assert text in page.text
    for text in ("32,000 ids: 96.00% of the tokens", "97.00%", "adapter", "seed", "2026-11-30 12:00 UTC"):
        assert text in page.text
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == 7
    assert all("aria-label" in attrs for tag, attrs in page.tags if tag == "svg")


def test_what_was_cut_off_is_told_by_answers_and_by_tokens(tmp_path):
    """A few answers can be most of the tokens."""
    changes = {"finish_reasons": {"stop": 9, "length": 1}, "cut_lengths": {90: 1}}
    stats = make_stats(tmp_path / "d", length_counts={10: 9, 90: 1}, **changes)
    row = Page(render(stats)).text.split("Inexact ids d ")[1].split(" total ")[0]
    assert row.split()[:5] == ["9", "90.0%", "1", "10.0%", "50.0%"]


def test_the_name_of_an_option_stays_on_one_line(tmp_path):
    """In the list and in the tiles, and a name that looks like one is harmless."""
    stats = make_stats(tmp_path / "d", name="--<b>", rejected={"http_500": 9}, permanently_rejected=9)
    html = render(stats)
    assert '<span class="option">--retry-rejected</span> helps only' in html
    assert "<b>" not in html


def test_nothing_at_all_is_a_report_too():
    """No dataset, no run.json, no export."""
    text = Page(render()).text
    assert "there is no run.json" in text
    assert "What a draft vocabulary covers" not in text


def test_names_and_reasons_are_harmless(tmp_path):
    """Whatever they hold, there is no script, no address to load and no handler in the page."""
    stats = make_stats(
        tmp_path / "d",
        name=EVIL,
        rejected={EVIL: 30},
        finish_reasons={EVIL: 10},
        rejected_examples={EVIL: EVIL},
    )
    run = {"fingerprint": {"model": EVIL, EVIL: EVIL, "datasets": {EVIL: {EVIL: EVIL}}}}
    run["details"] = {"servers": {EVIL: {EVIL: EVIL}}}
    vocab = {**MANIFEST["vocab"], "datasets": [{"name": EVIL, "coverage": 0.5}]}
    html = render(stats, run=run, manifest={"vocab": vocab}, folder=EVIL)
    assert "<script" not in html
    page = Page(html)
    assert EVIL in page.text
    assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "object", "form", "base", "a"}
    for _, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on") or name == "src"]
        assert attrs.get("href", "data:,") == "data:,"
    assert ("meta", "default-src 'none'") in [
        (tag, (a.get("content") or "").split(";")[0]) for tag, a in page.tags
    ]


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        [],
        {},
        {"vocab": {}},
        {"vocab": {"left_out": "x"}},
        {"vocab": {**MANIFEST["vocab"], "curve": [1]}},
    ],
)
def test_a_manifest_without_coverage_leaves_the_section_out(manifest):
    """An export without a vocabulary, or one of another version."""
    assert read_coverage(manifest) is None


def test_coverage_leaves_out_what_is_not_known():
    """A dataset without a trained token has no share."""
    coverage = read_coverage(MANIFEST)
    assert coverage.datasets == [("d", 0.97), ("total", 0.96)]
    assert coverage.curve == [(1000, 0.5), (32000, 0.96)]


def test_the_report_of_a_folder_is_written_beside_its_statistics(tmp_path):
    """With what run.json and the manifest say; a damaged manifest costs only its section."""
    update_run_file(
        tmp_path, fingerprint={"model": "m"}, details={"datasets": {"d": {"budget_tokens": 1000}}}, now="n"
    )
    make_stats(tmp_path / "d")
    refused = Rejected("p", "http_400", "no", permanent=True, stage="generate")
    (tmp_path / "d" / "rejected.jsonl").write_bytes(refused.to_line())
    stats = collect_stats(tmp_path, read_plans(tmp_path))
    (tmp_path / "export").mkdir()
    for manifest, has_section in ((orjson.dumps(MANIFEST), True), (b"{", False)):
        (tmp_path / "export" / "manifest.json").write_bytes(manifest)
        text = Page(write_report(tmp_path, stats).read_text()).text
        assert ("What a draft vocabulary covers" in text) is has_section
        assert "p: no" in text
    assert list(tmp_path.glob(".*.tmp")) == []


buckets = st.dictionaries(
    st.integers(0, 400_000_000).map(lambda n: n * TIME_BUCKET_S),
    st.integers(0, 10**7),
    min_size=1,
    max_size=40,
)


@given(buckets)
def test_time_is_cut_only_where_there_is_no_answer(tokens):
    """Whatever the span, seconds or decades: few buckets, each answer in one of them, cuts are pauses."""
    axis = lay_out_time(tokens, width=900)
    shown = [at for stretch in axis.stretches for at in stretch]
    assert len(shown) <= 120
    assert {at // axis.step_s for at in tokens} <= set(shown)
    assert shown == sorted(set(shown))
    cuts = axis.find_cuts(sorted(tokens))
    gaps = find_gaps(tokens, longer_than_s=PAUSE_S)
    assert len(cuts) == len(axis.stretches) - 1 <= len(gaps)
    ends = [x + axis.per_bar for _, x in axis.place()]
    assert all(ends[i] <= x + 1e-6 for i, (_, x) in enumerate(axis.place()[1:]))
    assert ends[-1] == pytest.approx(900)


def test_a_night_without_answers_takes_little_of_the_chart():
    """Two hours of work with a night between are shown in minutes; a pause of minutes stays a hole."""
    evening = [at for at in range(0, 3600, 10) if not 1200 <= at < 1560]
    morning = range(36_000, 39_600, 10)
    chart = draw_throughput(dict.fromkeys([*evening, *morning], 100), width=900, height=200)
    assert len(chart.bars) > 50
    [cut] = chart.cuts
    assert cut.label == "9 h pause"
    assert cut.width < 30
    assert [bar.x for bar in chart.bars if cut.x - 1e-6 < bar.x < cut.x + cut.width - 1e-6] == []
    places = sorted(tick.at for tick in chart.x_ticks)
    assert places[-1] == 900
    assert all(b - a > 50 for a, b in itertools.pairwise(places))


def test_bars_at_the_ends_and_beside_a_pause_are_as_high_as_the_others():
    """Each is divided by the time that it covers."""
    times = [at for at in range(1_000, 40_000, 10) if not 20_050 < at < 30_520]
    chart = draw_throughput(dict.fromkeys(times, 500), width=900, height=200)
    assert len(chart.cuts) == 1
    assert {round(bar.height, 6) for bar in chart.bars} == {200.0}
    assert chart.bars[0].text.startswith("Jan 01 00:16 to ")


def test_one_answer_at_the_very_end_is_no_peak():
    """A bar of a few seconds is told with the one beside it."""
    tokens = dict.fromkeys(range(1_000, 39_610, 10), 500) | {39_610: 20_000}
    *_, before, last = draw_throughput(tokens, width=900, height=200).bars
    assert last.text.endswith(" (20,500 tokens)")
    assert before.height < last.height < 2.5 * before.height


def test_the_ticks_of_a_coverage_are_round():
    """Whatever the lowest share is."""
    for least in (0.0, 0.31, 0.55, 0.71, 0.88, 0.93, 0.999):
        chart = draw_coverage([(1000, least), (2000, 1.0)], chosen=2000, width=900, height=200)
        labels = [int(tick.label.rstrip("%")) for tick in chart.y_ticks]
        steps = {b - a for a, b in itertools.pairwise(labels)}
        assert steps <= {1, 2, 5, 10, 20}
        assert (len(steps), labels[-1]) == (1, 100)
        assert labels[0] <= 100 * least


@given(buckets)
def test_throughput_loses_no_token(tokens):
    """Every token is in a bar, and every bar in the chart."""
    chart = draw_throughput(tokens, width=900, height=200)
    said = sum(int(bar.text.split("(")[1].split(" ")[0].replace(",", "")) for bar in chart.bars)
    assert said == sum(tokens.values())
    assert all(0 <= bar.x <= 900 and bar.x + bar.width <= 900.01 for bar in chart.bars)
    assert all(0 <= bar.height <= 200.01 for bar in chart.bars)


def test_millions_are_written_out_on_an_axis():
    """Of answers in one bin, or of tokens a second."""
    lengths = draw_lengths({100: 3_000_000}, {}, longest=100, median=100, width=400, height=90)
    speed = draw_throughput({0: 23_000_000}, width=900, height=200)
    assert [chart.y_ticks[-1].label for chart in (lengths, speed)] == ["3,000,000", "2,500,000"]


@given(st.dictionaries(st.integers(0, 40_000), st.integers(1, 1000), min_size=1, max_size=60))
def test_a_histogram_counts_every_answer_once(counts):
    """Each in the bin whose text names it, none outside the chart."""
    chart = draw_lengths(counts, {}, longest=max(1, *counts), median=min(counts), width=400, height=90)
    said = {}
    for bar in chart.bars:
        bounds, count = bar.text.split(" tokens: ")
        low, *high = (int(bound.replace(",", "")) for bound in bounds.split(" to "))
        said[low, high[0] if high else low] = int(count.split()[0].replace(",", ""))
        assert 0 <= bar.x <= bar.x + bar.width <= 400.01
        assert 0 < bar.height <= 90.01
    for (low, high), count in said.items():
        assert count == sum(n for length, n in counts.items() if low <= length <= high)
    assert sum(said.values()) == sum(counts.values())


@given(st.floats(1e-6, 1e12))
def test_ticks_are_few_and_reach_the_highest(highest):
    """From 0 upwards in equal steps."""
    ticks = nice_ticks(highest)
    assert ticks[0] == 0
    assert ticks[-1] >= highest * (1 - 1e-9)
    assert 2 <= len(ticks) <= 7


def test_gaps_are_found_between_buckets():
    """The longest first."""
    gaps = find_gaps([0, 10, 500, 2000], longer_than_s=300)
    assert [(gap.start_s, gap.end_s) for gap in gaps] == [(510, 2000), (20, 500)]


def test_every_chart_is_well_formed(tmp_path):
    """A browser would repair it silently."""
    html = render(make_stats(tmp_path / "d", reason="length"), manifest=MANIFEST)
    charts = ["<svg" + part.split("</svg>")[0] + "</svg>" for part in html.split("<svg")[1:]]
    assert len(charts) == 7
    for chart in charts:
        ET.fromstring(chart)  # noqa: S314  our own text
