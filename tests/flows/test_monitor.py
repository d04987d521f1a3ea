"""`draftmill monitor` shows what is in a folder, and ends when all is done or with Ctrl-C."""

import io
import json
import signal
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from rich.console import Console
from run_support import DRAFTMILL
from typer.testing import CliRunner

from flows.folder_cli import app
from flows.monitor import render_look, shorten
from tasks.core.log_watch import RunLogWatch
from tasks.core.records import Rejected, Response
from tasks.core.run_file import update_run_file


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
    assert [(one["name"], one["state"], one["share"]) for one in look["datasets"]] == [
        ("a", "generating", 0.5),
        ("b", "waiting", 0.0),
    ]
    assert look["total"]["percent"] == pytest.approx(100 * 500 / 1500)
    assert look["datasets"][0]["tokens_per_s"] > 0
    assert look["servers"][0]["answers"] == 5


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


def test_a_look_fits_in_a_hundred_columns(tmp_path):
    """And says how far, how fast, when done and what went wrong, whatever the names hold."""
    start_run(tmp_path, **{"B4_mixturethoughts": 10_000_000, "A1": None, "[red]x": 2000})
    add_rows(tmp_path / "B4_mixturethoughts", rows=12, tokens=100_000)
    add_rows(tmp_path / "[red]x", rows=3, reason="length")
    refused = Rejected("a", "http_500", "", permanent=False, stage="generate")
    (tmp_path / "[red]x" / "rejected.jsonl").write_bytes(refused.to_line())
    console = Console(file=io.StringIO(), width=100)
    console.print(render_look(tmp_path, RunLogWatch(tmp_path).look(datetime.now(UTC).timestamp())))
    shown = console.file.getvalue()
    assert "…" not in shown
    for text in (
        "B4_mixturethoughts",
        "[red]x",
        "1.20M/10.0M",
        "0/? conv.",
        "12.0%",
        "generating",
        "tok/s, ETA",
    ):
        assert text in shown
    assert "! [red]x: prompts set aside: http_500 1" in shown
    assert "! [red]x: 100% of its answers were cut at max_new_tokens" in shown


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1.00k"), (12_345, "12.3k"), (92_000_000, "92.0M")]
)
def test_counts_are_shortened(count, text):
    """To three digits."""
    assert shorten(count) == text


def test_it_needs_no_prefect():
    """It starts at once."""
    code = "import sys, flows.monitor; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
