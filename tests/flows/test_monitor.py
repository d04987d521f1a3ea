"""`draftmill monitor` shows what is in a folder, and ends when all is done or with Ctrl-C."""

import dataclasses
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from rich.console import Console
from run_support import DRAFTMILL
from typer.testing import CliRunner

from flows.cli.app import app
from flows.monitor.view import LookView
from tasks.aggregate.log_watch import RunLogWatch
from tasks.aggregate.recent_answers import ServerActivity
from tasks.aggregate.stats_views import shorten
from tasks.records.rows import Rejected, Response
from tasks.records.run_file import update_run_file


def start_run(folder, **budgets):
    plans = {
        name: {"budget_tokens": budget, "kind": "generate" if budget else "trajectory"}
        for name, budget in budgets.items()
    }
    update_run_file(folder, fingerprint={}, details={"datasets": plans}, now="now")


def add_rows(folder, *, rows, tokens=100, reason="stop"):
    folder.mkdir(exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    with (folder / "raw_responses.jsonl").open("ab") as log:
        for number in range(rows):
            name = f"{log.tell()}-{number}"
            row = Response(name, 0, [1], [2] * tokens, "", reason, 1, tokens, latency_s=4, finished_at=now)
            log.write(row.to_line())


def monitor(*args):
    return CliRunner().invoke(app, ["monitor", *map(str, args)])


def test_one_look_as_json(tmp_path):
    """One object on stdout and exit 0; every figure has its name and unit."""
    start_run(tmp_path, a=1000, b=500)
    add_rows(tmp_path / "a", rows=5)
    done = monitor(tmp_path, "--json", "--once")
    assert done.exit_code == 0, done.output
    look = json.loads(done.stdout)
    assert [(one["name"], one["state"], one["reached_percent"]) for one in look["datasets"]] == [
        ("a", "generating", 50.0),
        ("b", "waiting", 0.0),
    ]
    assert look["total"]["reached_percent"] == pytest.approx(100 * 500 / 1500)
    assert look["datasets"][0]["tokens_per_s"] > 0
    assert look["servers"][0]["answers"] == 5
    assert (look["problems"], look["notes"], look["stuck"]) == ([], [], [])


def test_it_ends_when_everything_is_done(tmp_path):
    """Also without --once; a pipe gets a line for each look."""
    start_run(tmp_path, a=1000)
    add_rows(tmp_path / "a", rows=10)
    done = monitor(tmp_path)
    assert (done.exit_code, done.stdout) == (0, "1,000 of 1,000 tokens, 1 of 1 datasets done\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_it(tmp_path, number):
    """Exit 0: whoever looks interrupts nothing. A look finds the rows that came since the one before."""
    argv = [*DRAFTMILL, "monitor", str(tmp_path), "--json", "--every", "0.2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline())["datasets"] == []
        start_run(tmp_path, a=1000)
        add_rows(tmp_path / "a", rows=3)
        while not (datasets := json.loads(process.stdout.readline())["datasets"]) or not datasets[0]["rows"]:
            pass
        assert datasets[0]["rows"] == 3
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize("content", [None, "notes.txt"])
def test_a_folder_of_something_else_is_refused(tmp_path, content):
    """Exit 2 and one line: it is not there, or has nothing of a run."""
    folder = tmp_path / "folder"
    if content:
        folder.mkdir()
        (folder / content).write_text("")
    done = monitor(folder)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"draftmill: {str(folder)!r} is not the folder of a run")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", [None, "run.lock", "prefect.log"])
def test_a_run_that_is_about_to_begin_is_waited_for(tmp_path, content):
    """Its folder is empty, or has what a run leaves before its run.json."""
    if content:
        (tmp_path / content).write_text("")
    done = monitor(tmp_path, "--once")
    assert (done.exit_code, "no run.json yet" in done.stdout) == (0, True)


def test_a_file_is_refused_as_one(tmp_path):
    """It is there, but it is no folder."""
    (tmp_path / "file").write_text("")
    done = monitor(tmp_path / "file")
    assert (done.exit_code, done.stderr.rstrip().endswith("is not the folder of a run: it is a file")) == (
        2,
        True,
    )


@pytest.mark.parametrize("has_run", [True, False])
def test_a_folder_that_is_removed_ends_it(tmp_path, has_run):
    """Exit 1 and one line, whatever was in it; it used to wait for ever."""
    folder = tmp_path / "run"
    folder.mkdir()
    if has_run:
        start_run(folder, a=1000)
    argv = [*DRAFTMILL, "monitor", str(folder), "--json", "--every", "0.2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        shutil.rmtree(folder)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == f"draftmill: {str(folder)!r} is gone: it was removed or renamed while it was watched\n"


def show(folder, *, width=80, height=24, after_s=0.0, is_cut=True, **changes):
    """The lines of a terminal of that size."""
    console = Console(file=io.StringIO(), width=width, height=height)
    look = RunLogWatch(folder).look(datetime.now(UTC).timestamp() + after_s)
    look = dataclasses.replace(look, **changes)
    console.print(LookView(folder, look, is_cut=is_cut))
    return console.file.getvalue().splitlines()


def refuse(folder):
    (folder / "rejected.jsonl").write_bytes(
        Rejected("a", "http_500", "", permanent=False, stage="generate").to_line()
    )


def test_a_look_fits_in_a_hundred_columns(tmp_path):
    """And says how far, how fast, when done and what went wrong, whatever the names hold."""
    start_run(tmp_path, **{"B4_mixturethoughts": 10_000_000, "A1": None, "[red]x": 2000})
    add_rows(tmp_path / "B4_mixturethoughts", rows=12, tokens=100_000)
    add_rows(tmp_path / "[red]x", rows=20, tokens=10, reason="length")
    refuse(tmp_path / "[red]x")
    shown = "\n".join(show(tmp_path, width=100, is_cut=False))
    assert "…" not in shown.split("\n", 1)[1]
    for text in (
        "B4_mixturethoughts",
        "[red]x",
        "1.20M/10.0M",
        "12.0%",
        "generating",
        "tokens/s; too early to tell when done",
        "tok/s (5 min)",
        "length 20 (cut off at max_new_tokens)",
        "unanswered: http_500 1 (see",
    ):
        assert text in shown
    assert "! [red]x: 1 prompt without an answer (http_500 1); the next run asks " in shown
    assert "! cut off at max_new_tokens 10: [red]x 100% of its tokens (20 of 20 answers so far). " in shown


def start_ten(folder):
    """Five that are done, three at work, one of them in trouble, and two that wait."""
    names = [f"B{number}_opencodeinstruct" for number in range(10)]
    start_run(folder, **dict.fromkeys(names, 1_000_000))
    for number, name in enumerate(names[:8]):
        add_rows(folder / name, rows=10, tokens=100_000 if number < 5 else 9_000)
    refuse(folder / names[6])
    return names


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 50)])
def test_ten_datasets_fit_in_a_terminal(tmp_path, size):
    """With all that answers the four questions, and no line of it cut."""
    names = start_ten(tmp_path)
    lines = show(tmp_path, width=size[0], height=size[1])
    assert len(lines) < size[1]
    shown = "\n".join(lines)
    for text in (*names, "52.7%", "5 of 10 datasets done", "tokens/s; too early to tell", "! B6_"):
        assert text in shown
    assert "…" not in "\n".join(lines[1:])


@pytest.mark.parametrize("size", [(80, 24), (80, 14), (60, 16)])
def test_what_went_wrong_comes_before_what_is_done(tmp_path, size):
    """Thirty datasets: those that are done are counted, and the trouble of one is seen."""
    names = [f"d{number:02}" for number in range(30)]
    start_run(tmp_path, **dict.fromkeys(names, 1_000))
    for name in names[:25]:
        add_rows(tmp_path / name, rows=10)
    add_rows(tmp_path / "d25", rows=3)
    refuse(tmp_path / "d25")
    lines = show(tmp_path, width=size[0], height=size[1])
    assert len(lines) < size[1]
    shown = "\n".join(lines)
    for text in ("25 of 30 datasets done", "! d25: 1 prompt without an answer"):
        assert text in shown
    assert re.search(r"^and \d+ more: (waiting \d+, )?done \d+$", shown, re.M)
    assert [line.split()[1] for line in lines if line.startswith("d25 ")] == ["generating"]


def test_much_trouble_leaves_room_for_the_datasets(tmp_path):
    """What does not fit is counted."""
    names = start_ten(tmp_path)
    for name in names[:8]:
        refuse(tmp_path / name)
        add_rows(tmp_path / name, rows=20, tokens=0)
    lines = show(tmp_path)
    assert len(lines) < 24
    assert sum(line.startswith("! ") for line in lines) >= 5
    assert any(line.startswith("B7_") for line in lines)
    assert any(line.startswith("and ") and " more: waiting 2, done " in line for line in lines)
    assert lines[-1].startswith("in a larger window, or with --once: ")
    assert "the rest of " in lines[-1] or "more problem" in lines[-1]
    assert "in a larger window" not in "\n".join(show(tmp_path, is_cut=False))


def test_what_does_not_fit_is_counted(tmp_path):
    """Notes, how answers ended and servers; the datasets that nobody has to see are folded before."""
    names = start_ten(tmp_path)
    for name in names[:4]:
        (tmp_path / name / "rejected.jsonl").write_bytes(
            b"".join(
                Rejected(
                    str(n), "no_user_turn", "", permanent=True, stage="prepare", where=f"f:{n}"
                ).to_line()
                for n in range(15)
            )
        )
        report = {"key": "", "rows_read": 100, "conversations": 90, "prompts": 90, "duplicates": 0}
        report |= {"rejected": {"no_user_turn": 15}, "reused": False}
        (tmp_path / name / "prepare.json").write_text(json.dumps(report))
    lines = show(tmp_path, height=17)
    assert len(lines) < 17
    assert lines[-1].startswith("in a larger window, or with --once: ")
    assert "more note" in lines[-1]
    assert "how answers ended" in lines[-1]
    assert any(line.startswith("and 7 more: waiting 2, done 5") for line in lines)
    assert [line.split()[0] for line in lines if " generating" in line] == names[5:8]


@pytest.mark.parametrize("height", [40, 18])
def test_a_server_that_is_silent_while_others_answer_stands_out(tmp_path, height):
    """In the table, and in the line that takes its place."""
    names = [f"d{number}" for number in range(9)]
    start_run(tmp_path, **dict.fromkeys(names, 1_000))
    for name in names:
        add_rows(tmp_path / name, rows=1)
    ages = (3.0, 200.0)
    servers = tuple(
        ServerActivity(server=f"http://s-{at}", answers=9, tokens_per_s=9.0, last_answer_age_s=age)
        for at, age in enumerate(ages)
    )
    shown = "\n".join(show(tmp_path, height=height, servers=servers))
    words = {
        40: r"http://s-1 +9 +9 no answer for 3 min",
        18: r"2 servers; no answer from http://s-1 for 3 min",
    }
    assert re.search(words[height], shown)
    both = tuple(dataclasses.replace(one, last_answer_age_s=200.0) for one in servers)
    assert "no answer f" not in "\n".join(show(tmp_path, height=height, servers=both))


def test_datasets_that_are_in_trouble_are_shown_first(tmp_path):
    """Where there is no room for all, whatever their state."""
    names = [f"d{number}" for number in range(20)]
    start_run(tmp_path, **dict.fromkeys(names, 1_000))
    for name in names:
        add_rows(tmp_path / name, rows=1 if name != "d17" else 10)
    refuse(tmp_path / "d17")
    refuse(tmp_path / "d9")
    lines = show(tmp_path, height=16)
    assert len(lines) < 16
    shown = [line.split()[0] for line in lines if line.startswith("d")]
    assert {"d17", "d9"} <= set(shown)
    assert len(shown) < 20


def test_the_first_line_says_when_which_model_and_where(tmp_path):
    """Of a long path its end."""
    start_run(tmp_path, a=1000)
    update_run_file(tmp_path, fingerprint={"model": "org/model"}, details={}, now="now")
    [title] = show(tmp_path, width=70)[:1]
    assert re.fullmatch(r"\w{3} \d\d \d\d:\d\d:\d\d UTC  org/model  ….*" + tmp_path.name[-9:], title)
    assert len(title) <= 70


def test_conversations_are_converted_and_not_answered(tmp_path):
    """What their dataset has is in no count of answers."""
    start_run(tmp_path, free=None, a=100_000)
    report = {"key": "", "rows_read": 8, "conversations": 8, "prompts": 8, "duplicates": 0, "rejected": {}}
    for name in ("free", "a"):
        add_rows(tmp_path / name, rows=4)
    (tmp_path / "free" / "prepare.json").write_text(json.dumps(report | {"reused": False}))
    shown = "\n".join(show(tmp_path, width=120))
    assert re.search(r"^free +converting ", shown, re.M)
    assert "answers ended: stop 4; conversations converted: free 4 of 8" in shown


def test_a_run_that_stopped_says_so(tmp_path):
    """In place of a speed and an end."""
    start_ten(tmp_path)
    shown = "\n".join(show(tmp_path, after_s=7260))
    assert "not running; 4.73M tokens left" in shown
    assert "server" not in shown.split("! the run stopped")[0]
    assert "stopped 2 h" in shown
    [trouble] = [part.split("\n\n")[0] for part in shown.split("! the run stopped at ")[1:]]
    words = " ".join(trouble.split())
    assert "UTC, 2 h 1 min ago, with 5 of 10 datasets not done; its log (the terminal, " in words


def test_a_run_that_is_done_shows_no_servers(tmp_path):
    """And one that ran out of prompts is finished, but not done."""
    start_run(tmp_path, a=1000, b=500)
    for name in "ab":
        add_rows(tmp_path / name, rows=10)
    assert any(line.startswith("everything is done, finished ") for line in show(tmp_path))
    lines = show(tmp_path, after_s=3600, width=120)
    assert any(", 60 min ago; " in line and "tokens/s on average over " in line for line in lines)
    assert not any("server" in line or "tok/s" in line for line in show(tmp_path)[1:])
    start_run(tmp_path, a=5000)
    report = {"key": "", "rows_read": 10, "conversations": 10, "prompts": 10, "duplicates": 0, "rejected": {}}
    (tmp_path / "a" / "prepare.json").write_text(json.dumps(report | {"reused": False}))
    assert any(
        ", short of the budget: there are no more prompts" in line for line in show(tmp_path, width=120)
    )


@pytest.mark.parametrize(("width", "heading"), [(80, " answers cut off$"), (120, r" cut off \(answers\)$")])
def test_the_share_of_answers_says_what_it_is_of(tmp_path, width, heading):
    """Where there is room."""
    start_run(tmp_path, B4_mixturethoughts=10_000_000)
    add_rows(tmp_path / "B4_mixturethoughts", rows=12, tokens=100_000, reason="length")
    shown = "\n".join(show(tmp_path, width=width))
    assert re.search(f"^dataset .*{heading}", re.sub(" +$", "", shown, flags=re.M), re.M)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 92, 120])
def test_no_line_is_wider_than_the_terminal(tmp_path, width):
    """Columns of less value go, then letters of long names."""
    start_run(tmp_path, a_dataset_with_a_name_of_some_length_and_more=10_000_000, b=None)
    add_rows(tmp_path / "a_dataset_with_a_name_of_some_length_and_more", rows=12, tokens=100_000)
    lines = show(tmp_path, width=width, height=60)
    assert all(len(line) <= width for line in lines)
    assert any("12.0%" in line and "a_data" in line for line in lines) is (width > 20)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1.00k"), (12_345, "12.3k"), (92_000_000, "92.0M")]
)
def test_counts_are_shortened(count, text):
    """To three digits."""
    assert shorten(count) == text


def test_it_needs_no_prefect():
    """It starts at once."""
    code = "import sys, flows.monitor.live; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
