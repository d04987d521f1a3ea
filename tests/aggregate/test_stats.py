"""Statistics come from the files alone and say when a dataset is done."""

import dataclasses
import io
import re
import time

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from tasks.aggregate.report import build_snapshot
from tasks.aggregate.stats import Damage, dataset_status, measure_reached, total_reached, total_stats
from tasks.aggregate.stats_scan import scan_dataset
from tasks.aggregate.stats_views import (
    format_percent,
    stats_rows,
    stats_table,
    stats_to_json,
    stats_to_parquet,
    write_stats,
)
from tasks.records.length_quantiles import length_quantiles
from tasks.records.rows import RecordError, Rejected, Response
from tasks.records.skim import skim_row
from tasks.tokens.masks import NotTokenExact, samples_from_response


def response(name, *, n=10, turn=0, **changes):
    row = {
        "id": name,
        "turn": turn,
        "input_ids": [1, 2, 3],
        "output_ids": list(range(n)),
        "text": "t",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": n,
        "finished_at": "2026-11-30T00:00:10Z",
        "latency_s": 10.0,
    }
    return Response.from_row(row | changes).to_line()


def rejected(name, reason, *, permanent=True, stage="generate", where=""):
    return Rejected(name, reason, "", permanent=permanent, stage=stage, where=where).to_line()


def scan(folder, responses=(), rejections=(), **options):
    (folder / "raw_responses.jsonl").write_bytes(b"".join(responses))
    (folder / "rejected.jsonl").write_bytes(b"".join(rejections))
    defaults = {"name": "d", "budget_tokens": 100, "max_samples": None, "prompts": 5}
    return scan_dataset(folder, **(defaults | options))


def test_rows_are_counted(tmp_path):
    """Tokens, reasons, retries and the share of the budget are sums over the rows."""
    stats = scan(
        tmp_path,
        [response("a", n=10), response("b", n=30, finish_reason="length", attempt=3), response("c", n=1)],
        prepare={"duplicates": 4},
    )
    assert (stats.rows, stats.prompt_tokens, stats.completion_tokens) == (3, 9, 41)
    assert stats.finish_reasons == {"length": 1, "stop": 2}
    assert (stats.retries, stats.empty, stats.not_token_exact) == (2, 1, 0)
    assert stats.reached_percent == pytest.approx(41)
    assert stats.prepare == {"duplicates": 4}


def test_missing_files_are_a_dataset_that_has_not_begun(tmp_path):
    """No file is no row, not an error."""
    stats = scan_dataset(tmp_path, name="d", budget_tokens=10, max_samples=None, prompts=None)
    assert (stats.rows, stats.status, stats.lengths, stats.mean_tokens_per_s) == (0, "incomplete", None, None)


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_last_line_is_ignored(tmp_path, cut):
    """A row that is being written is not counted, however much of it is there."""
    lines = b"".join([response("a"), response("b")])[:-cut]
    assert scan(tmp_path, [lines]).rows == 1
    assert scan(tmp_path, [lines]).unreadable == 0
    with pytest.raises(RecordError, match="raw_responses"):
        scan(tmp_path, [lines], torn_ok=False)


def test_a_damaged_line_in_the_middle_is_counted(tmp_path):
    """A whole line that is no row is named, and the rows around it count."""
    stats = scan(tmp_path, [response("a"), b"{nonsense\n", b"[1]\n", b'{"id":"x"}\n', response("b")])
    assert (stats.rows, stats.unreadable) == (2, 3)
    assert stats.damaged == {"raw_responses.jsonl": Damage(3, (2, 3, 4))}


def test_a_second_row_of_a_turn_counts_once(tmp_path):
    """Duplicates add no tokens; another turn is an answer of its own."""
    stats = scan(tmp_path, [response("a", n=10), response("a", n=99), response("a", n=5, turn=1)])
    assert (stats.rows, stats.duplicates, stats.completion_tokens, stats.answered) == (2, 1, 15, 2)


def test_rows_without_matching_ids_are_counted(tmp_path):
    """Old rows and rows whose counts differ are in the sums and named as not exact."""
    old = orjson.dumps({"id": "o", "usage": {"prompt_tokens": 3, "completion_tokens": 7}}) + b"\n"
    stats = scan(tmp_path, [old, response("a", n=10, output_ids=[1]), response("b")])
    assert (stats.rows, stats.completion_tokens, stats.not_token_exact) == (3, 27, 2)


def test_a_finished_conversation_is_exact_by_its_sequences(tmp_path):
    """Its spans are the target's tokens, the rest of its ids those of prompts."""
    sequences = [
        {"turn": 0, "input_ids": [1, 2, 3], "loss_spans": [[1, 3]]},
        {"turn": 1, "input_ids": [1, 2, 3, 4], "loss_spans": [[3, 4]]},
    ]
    row = {"input_ids": None, "output_ids": None, "prompt_tokens": 4, "sequences": sequences}
    stats = scan(tmp_path, [response("a", n=3, **row), response("b", n=4, **row)])
    assert (stats.rows, stats.prompt_tokens, stats.completion_tokens) == (2, 8, 7)
    assert stats.not_token_exact == 1


def test_the_last_rejection_of_a_prompt_counts_and_an_answer_ends_it(tmp_path):
    """Reasons are those that stand now."""
    stats = scan(
        tmp_path,
        [response("answered")],
        [
            rejected("answered", "http_500", permanent=False),
            rejected("p", "http_500", permanent=False),
            rejected("p", "http_400"),
            rejected("q", "timeout", permanent=False),
        ],
    )
    assert stats.rejected == {"http_400": 1, "timeout": 1}
    assert stats.permanently_rejected == 1


def test_source_rows_without_id_are_told_apart_by_their_place(tmp_path):
    """Two bad source rows are two, and preparing again does not double them."""
    lines = [rejected("", "no_user_turn", stage="prepare", where=f"f:{n}") for n in (1, 2, 1)]
    stats = scan(tmp_path, [], lines, prompts=1)
    assert stats.rejected == {"no_user_turn": 2}
    assert (stats.permanently_rejected, stats.status) == (0, "incomplete")


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "incomplete"),
        ({"completion_tokens": 99}, "incomplete"),
        ({"completion_tokens": 100}, "complete"),
        ({"rows": 7, "max_samples": 7}, "complete"),
        ({"rows": 6, "max_samples": 7}, "incomplete"),
        ({"settled": 5}, "exhausted"),
        ({"settled": 5, "completion_tokens": 100}, "complete"),
        ({"settled": 5, "prompts": None}, "incomplete"),
        ({"settled": 5, "budget_tokens": None}, "complete"),
        ({"settled": 4, "budget_tokens": None}, "incomplete"),
    ],
)
def test_status(changes, status):
    """Complete at a cap, exhausted when every prompt is settled short of it."""
    base = {"rows": 3, "completion_tokens": 50, "settled": 4, "prompts": 5}
    assert dataset_status(**({"budget_tokens": 100, "max_samples": None} | base | changes)) == status


def test_exhausted_counts_answers_and_permanent_rejections(tmp_path):
    """A prompt that will be asked again keeps the dataset incomplete."""
    last = rejected("c", "timeout", permanent=False)
    lines = [response("a"), response("b")]
    assert scan(tmp_path, lines, [last], prompts=3).status == "incomplete"
    assert scan(tmp_path, lines, [last, rejected("c", "http_400")], prompts=3).status == "exhausted"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200))
def test_quantiles_are_those_of_the_lengths(lengths):
    """The histogram gives what numpy gives for the list."""
    values, counts = np.unique(lengths, return_counts=True)
    found = length_quantiles(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    for percent in (5, 25, 50, 75, 95):
        expected = np.percentile(lengths, percent, method="inverted_cdf")
        assert getattr(found, f"p{percent}") == expected
    assert (found.max, found.mean) == (max(lengths), pytest.approx(np.mean(lengths)))


def test_mean_speed_is_over_the_span_from_the_first_start(tmp_path):
    """The first answer's own duration belongs to the span; rows without a time do not count."""
    stats = scan(
        tmp_path,
        [
            response("b", n=60, finished_at="2026-11-30T00:00:30Z", latency_s=1),
            response("a", n=40, finished_at="2026-11-30T00:00:10Z", latency_s=10),
            response("c", n=20, finished_at=""),
        ],
    )
    assert (stats.first_finished_at, stats.last_finished_at) == (
        "2026-11-30T00:00:10.000Z",
        "2026-11-30T00:00:30.000Z",
    )
    assert stats.mean_tokens_per_s == pytest.approx(100 / 30)


def test_pauses_are_no_part_of_the_mean_speed(tmp_path):
    """A run that went on the next day was not slow; neither is the total of two that took turns."""
    days = ("2026-11-30T00:00:00Z", "2026-11-30T00:01:40Z"), ("2026-12-01T00:00:00Z", "2026-12-01T00:01:40Z")
    one, two = (
        scan(tmp_path, [response(at, n=100, finished_at=at, latency_s=10) for at in day], name=name)
        for name, day in zip(("one", "two"), days, strict=True)
    )
    assert one.mean_tokens_per_s == two.mean_tokens_per_s == pytest.approx(200 / 110)
    assert total_stats([one, two]).mean_tokens_per_s == pytest.approx(400 / 220, rel=0.1)


ODD_FIELDS = [
    {"latency_s": 1e300},
    {"latency_s": -1e300},
    {"latency_s": "nan"},
    {"latency_s": "inf"},
    {"finished_at": "0001-01-01T00:00:00Z"},
    {"finished_at": "0001-01-01T00:00:00+23:00"},
    {"finished_at": "9999-12-31T23:59:59Z", "latency_s": -1e9},
    {"finished_at": "1970-01-01T00:00:01Z"},
    {"attempt": 10**18},
    {"cached_tokens": -(10**18)},
]


@pytest.mark.parametrize("odd", ODD_FIELDS, ids=str)
def test_an_answer_with_an_odd_time_counts(tmp_path, odd):
    """The figure is left out of the statistics and brings nothing down; the answer and its ids are whole."""
    line = orjson.dumps(orjson.loads(response("a")) | odd) + b"\n"
    stats = scan(tmp_path, [line, response("b")], name="one")
    assert (stats.rows, stats.completion_tokens, stats.unreadable, stats.not_token_exact) == (2, 20, 0, 0)
    assert stats.last_finished_at == "2026-11-30T00:00:10.000Z"
    stats_to_parquet([stats])
    [sample] = samples_from_response(Response.from_line(line))
    assert sample.n_loss == 10
    build_snapshot([stats], now_s=1_800_000_000.0)


@pytest.mark.parametrize("turn", ["x", "1", 1.5, [1], 10**15])
def test_a_sequence_with_an_odd_turn_is_not_token_exact(tmp_path, turn):
    """Nothing says which answer it is; statistics and export leave out the same."""
    sequences = [{"turn": turn, "input_ids": [1, 2, 3], "loss_spans": [[1, 3]]}]
    line = response("a", n=2, prompt_tokens=1, input_ids=None, output_ids=None, sequences=sequences)
    stats = scan(tmp_path, [line])
    assert (stats.rows, stats.unreadable, stats.not_token_exact) == (1, 0, 1)
    with pytest.raises(NotTokenExact, match="'a': a sequence's turn is"):
        samples_from_response(Response.from_line(line))


def test_a_rejected_line_with_an_odd_field_is_damaged(tmp_path):
    """And the others count."""
    whole = orjson.loads(rejected("a", "http_400"))
    odd = [orjson.dumps(whole | {name: [1]}) + b"\n" for name in ("id", "reason", "where", "detail")]
    stats = scan(tmp_path, [], [*odd, orjson.dumps(whole) + b"\n"])
    assert (stats.unreadable, stats.rejected) == (4, {"http_400": 1})
    assert stats.damaged == {"rejected.jsonl": Damage(4, (1, 2, 3, 4))}


@pytest.mark.parametrize(
    ("changes", "percent"),
    [
        ({}, 41.0),
        ({"completion_tokens": 130, "status": "complete"}, 130.0),
        ({"status": "complete"}, 100.0),  # by its sample cap
        ({"status": "exhausted"}, 41.0),
        ({"budget_tokens": 0, "status": "complete"}, 100.0),
        ({"budget_tokens": None}, 25.0),
        ({"budget_tokens": None, "prompts": None}, 0.0),
        ({"budget_tokens": None, "prompts": 0, "status": "complete"}, 100.0),
    ],
)
def test_reached_is_of_the_budget_or_of_the_prompts(changes, percent):
    """And all of it where the dataset is complete."""
    base = {"completion_tokens": 41, "budget_tokens": 100, "answers": 2, "prompts": 8, "status": "incomplete"}
    values = base | changes
    assert measure_reached(values.pop("status"), **values) == pytest.approx(percent)


@given(st.lists(st.tuples(st.floats(0, 300), st.none() | st.integers(0, 10**9)), max_size=12))
def test_the_whole_has_reached_no_more_than_its_parts(parts):
    """It is 100 exactly when each dataset that counts is, whatever the others have over."""
    whole = total_reached(parts)
    counted = [percent for percent, budget in parts if budget] or [percent for percent, _ in parts]
    assert min([100.0, *counted]) * bool(parts) <= whole + 1e-9
    assert whole <= min(100.0, max(counted, default=0.0)) + 1e-9


@pytest.mark.parametrize(
    ("percent", "text"),
    [(0, "0.0%"), (99.96, "99.9%"), (100, "100.0%"), (29.0, "29.0%"), (0.3 * 100, "30.0%")],
)
def test_what_is_short_of_all_is_never_shown_as_all(percent, text):
    """It is rounded down."""
    assert format_percent(percent) == text


row_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\,[]:{}_', max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(
    ids=st.lists(st.integers(0, 9), max_size=5),
    keys=st.permutations(["id", "input_ids", "text", "output_ids", "meta"]),
    text=st.sampled_from(['"input_ids":[1,2]', "]", '\\"output_ids":[', "plain"]),
    meta=row_values | st.fixed_dictionaries({"output_ids": row_values}),
)
def test_skimming_a_line_gives_the_counts_of_the_whole_line(ids, keys, text, meta):
    """Whatever stands around the ids, the two ways of reading agree."""
    row = {"id": "a", "input_ids": ids, "output_ids": ids[:2], "text": text, "meta": meta}
    skimmed = skim_row(orjson.dumps({key: row[key] for key in keys}))
    counts = {"input_ids": len(ids), "output_ids": len(ids[:2])}
    for key, count in counts.items():
        value = skimmed.pop(key)
        assert (len(value) if isinstance(value, list) else value) == count
    assert (skimmed["id"], skimmed["text"]) == ("a", text)


LONG = response("a", n=700, output_ids=list(range(100, 800)))
LEFT_OUT = re.compile(rb"[\[,]0[0-9]")
places = st.integers(0, 2700)  # in the ids
damages = st.one_of(
    st.builds(lambda at, n: ("cut", at, n), places, st.integers(1, 2800)),
    st.builds(lambda at, row: ("next", at, row), places, st.sampled_from([LONG, response("b"), b'{"id":1}'])),
    st.builds(lambda at, put: ("put", at, put), places, st.binary(min_size=1, max_size=3)),
    st.builds(
        lambda at, put: ("put", at, put),
        places,
        st.sampled_from([b"\0" * 40, b",,", b'"', b"true", b"-", b" ", b"1", b",", b"]", b"[", b"/", b"00"]),
    ),
)


def damage(line, kind, at, what):
    at += line.index(b'"output_ids":[') + len(b'"output_ids":[')
    if kind == "cut":
        return line[:at] + line[at + what :].rstrip(b"\n") + b"\n"
    if kind == "next":
        return line[:at] + what.rstrip(b"\n") + b"\n"
    return line[:at] + what + line[at + len(what) :]


@given(st.lists(damages, min_size=1, max_size=3))
@example([("next", 1000, LONG)])
@example([("put", 3, b",,")])
def test_a_line_that_is_damaged_in_its_ids_is_unreadable_to_all(found):
    """Statistics refuse what the run refuses, but for what is named in `skim_row`; nothing else."""
    line = LONG
    for one in found:
        line = damage(line, *one)
    is_skimmed, is_read = can_read(lambda: skim_row(line)), can_read(lambda: Response.from_line(line))
    assert is_skimmed or not is_read
    assert is_read or not is_skimmed or LEFT_OUT.search(line)


def can_read(read):
    try:
        read()
    except RecordError:
        return False
    return True


@pytest.mark.parametrize(
    "torn", [LONG[:1500] + LONG, LONG[:1500] + bytes(40) + LONG[1540:], LONG.replace(b",300,", b",,")]
)
def test_a_row_that_is_torn_in_its_ids_is_no_answer(tmp_path, torn):
    """With the next row on the same line, zeros or a gap in the middle; the rows around it count."""
    stats = scan(tmp_path, [response("b"), torn, response("c")])
    assert (stats.rows, stats.unreadable, stats.not_token_exact) == (2, 1, 0)
    assert stats.damaged["raw_responses.jsonl"].numbers == (2,)


def test_skimming_is_not_slower_than_parsing():
    """16,000 ids a line cost less than orjson takes for them (measured: a tenth)."""
    line = response("a", n=16_000, output_ids=list(range(100_000, 116_000)))
    assert best_time(lambda: skim_row(line)) < best_time(lambda: orjson.loads(line))


def best_time(call):
    times = []
    for _ in range(30):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def two_datasets(tmp_path):
    one = scan(tmp_path, [response("a", n=10), response("b", n=20)], [rejected("r", "http_400")], name="one")
    two = scan(tmp_path, [response("a", n=99)], name="two", budget_tokens=99)
    return [one, two]


def test_total_sums_everything(tmp_path):
    """The total's quantiles are over all rows, not over the datasets' quantiles."""
    total = total_stats(two_datasets(tmp_path))
    assert (total.rows, total.completion_tokens, total.budget_tokens) == (3, 129, 199)
    assert (total.lengths.p50, total.lengths.max, total.rejected) == (20, 99, {"http_400": 1})
    assert (total.status, total.reached_percent) == ("incomplete", pytest.approx(100 * 129 / 199))


def test_a_dataset_without_a_budget_fills_no_other(tmp_path):
    """Neither do tokens of trajectories count as the whole's, nor as its speed."""
    one = scan(tmp_path, [response("a", n=50)], name="one")
    free = scan(tmp_path, [response("a", n=900)], name="free", budget_tokens=None)
    total = total_stats([one, free])
    assert (total.reached_percent, total.completion_tokens, total.rows) == (50, 50, 2)
    assert total.mean_tokens_per_s == one.mean_tokens_per_s


def test_views_show_the_same_figures(tmp_path):
    """JSON, Parquet, rows and the table are made from one list."""
    stats = two_datasets(tmp_path)
    data = orjson.loads(orjson.dumps(stats_to_json(stats)))
    assert [d["completion_tokens"] for d in data["datasets"]] == [30, 99]
    assert data["total"]["completion_tokens"] == 129
    table = pq.read_table(io.BytesIO(stats_to_parquet(stats)))
    assert table.column("completion_tokens").to_pylist() == [30, 99]
    assert table.column("completion_max").to_pylist() == [20, 99]
    assert orjson.loads(table.column("rejected").to_pylist()[0]) == {"http_400": 1}
    rows = stats_rows(stats)
    assert [row["dataset"] for row in rows] == ["one", "two", "total"]
    assert rows[0]["reached"] == "30.0%"
    console = Console(file=io.StringIO(), width=240)
    console.print(stats_table(stats))
    assert all(text in console.file.getvalue() for text in ("one", "two", "total", "http_400 1", "129"))


def test_the_table_says_what_its_total_leaves_out(tmp_path):
    """Where some datasets have a budget and some have none."""
    one, two = two_datasets(tmp_path)
    for second, said in ((two, False), (dataclasses.replace(two, budget_tokens=None), True)):
        console = Console(file=io.StringIO(), width=120)
        console.print(stats_table([one, second]))
        shown = console.file.getvalue()
        assert ("total: its tokens and its speed leave out the datasets without a budget" in shown) is said


def test_the_table_breaks_no_number_at_eighty_columns(tmp_path):
    """Names may be folded; figures of ten million tokens fit, and odd names are shown as they are."""
    [one, _] = two_datasets(tmp_path)
    large = dataclasses.replace(
        one, name="B2_[red]opencodeinstruct", completion_tokens=10_002_325, budget_tokens=10**7,
        status="exhausted", rows=14_136, mean_tokens_per_s=12_345.6, rejected={"[b]": 123_456},
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    console.print(stats_table([large]))
    shown = console.file.getvalue()
    for text in ("10,002,325", "10.0M", "14,136", "12,346", "123,456", "[b] 123,456", "B2_[red]"):
        assert text in shown
    assert "…" not in shown


def test_write_stats_puts_both_files(tmp_path):
    """stats.json and stats.parquet are whole; no dataset at all is a valid state."""
    write_stats([], tmp_path)
    assert orjson.loads((tmp_path / "stats.json").read_bytes())["total"]["rows"] == 0
    assert pq.read_table(tmp_path / "stats.parquet").num_rows == 0
