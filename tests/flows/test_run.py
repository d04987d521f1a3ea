"""The command line end to end on a real Prefect server, against a server that speaks SGLang's protocol."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from fake_sglang import expected_answer
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.settings import PREFECT_HOME, temporary_settings
from pyarrow.json import read_json
from run_support import interrupt

from flows.catalog import InputError
from flows.cli.run_pipeline import exit_code_of, up_command
from flows.pipeline import DatasetsFailedError, RunReport
from serving.client.errors import ForeignIds, KvCacheTooSmall, LaunchRefused, PortTaken, StartFailed
from tasks.aggregate.stats_scan import scan_dataset
from tasks.prepare.preparation import EmptyDatasetError
from tasks.prepare.sources import SourceError
from tasks.records.run_file import RunFolderError
from tasks.warm_up.preflight import PreflightError

pytestmark = pytest.mark.prefect


@pytest.fixture
def two_datasets(runner, fake_server):
    """A runner with two small datasets on a fast server."""
    runner.raw["server"]["base_urls"] = [fake_server(tokens_per_s=2000)]
    runner.add_dataset("a")
    runner.add_dataset("b")
    return runner


def _totals(runner, name):
    rows = runner.rows(name)
    return len(rows), len({row["id"] for row in rows}), sum(row["completion_tokens"] for row in rows)


def _export(runner, split="train"):
    folder = runner.output_dir / "export" / "data"
    return [
        row for file in sorted(folder.glob(f"{split}-*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def test_a_run_stops_each_dataset_at_its_budget(two_datasets):
    """One row a prompt, totals at the budget but not far beyond, exit 0, and the paths are printed."""
    done = two_datasets.run("--max-tokens-per-dataset", "1500")
    assert done.returncode == 0, done.stderr
    for name in ("a", "b"):
        rows, ids, tokens = _totals(two_datasets, name)
        assert rows == ids
        assert 1500 <= tokens < 1500 + 8 * 200
    assert str(two_datasets.output_dir / "export") in done.stdout
    assert "/runs/flow-run/" in done.stdout


def test_the_export_is_token_exact(two_datasets):
    """Masked ids are the output_ids of the row, and the rest is its prompt, as the model saw it."""
    assert two_datasets.run("--max-tokens-per-dataset", "1500").returncode == 0
    raw = {(name, row["id"]): row for name in ("a", "b") for row in two_datasets.rows(name)}
    exported = _export(two_datasets) + _export(two_datasets, "eval")
    assert len(exported) == len(raw)
    for row in exported:
        source = raw[row["dataset"], row["id"]]
        trained = [i for i, used in zip(row["input_ids"], row["loss_mask"], strict=True) if used]
        assert trained == source["output_ids"] == expected_answer(source["input_ids"], 200, 40)[0]
        assert row["input_ids"][: source["prompt_tokens"]] == source["input_ids"]
        assert sum(row["loss_mask"]) == source["completion_tokens"]


def test_a_second_run_generates_nothing(two_datasets):
    """The same bytes stay on disk, the output says that it resumed, and no server is needed for it."""
    assert two_datasets.run("--max-tokens-per-dataset", "1500").returncode == 0
    two_datasets.raw["server"]["base_urls"] = ["http://127.0.0.1:9"]
    files = [*two_datasets.output_dir.glob("*/raw_responses.jsonl"), *_exported_files(two_datasets)]
    before = {file: file.read_bytes() for file in files}
    done = two_datasets.run("--max-tokens-per-dataset", "1500")
    assert done.returncode == 0
    assert "nothing was generated again" in done.stdout
    assert "from the checkpoint, 0 rows read" in done.stderr
    assert {file: file.read_bytes() for file in before} == before


def test_the_export_command_writes_the_same_files(two_datasets):
    """Split, seed and formats are the run's own, so nothing changes."""
    two_datasets.raw["export"]["eval_fraction"] = 0.3
    assert two_datasets.run("--max-tokens-per-dataset", "1500").returncode == 0
    before = {file: file.read_bytes() for file in _exported_files(two_datasets)}
    assert any("eval" in file.name for file in before)
    assert two_datasets.call("export", str(two_datasets.output_dir)).returncode == 0
    assert {file: file.read_bytes() for file in _exported_files(two_datasets)} == before


def _exported_files(runner):
    return [path for path in (runner.output_dir / "export").rglob("*") if path.is_file()]


def test_a_larger_budget_goes_on_where_the_smaller_one_ended(two_datasets):
    """Existing tokens count, and their rows are the beginning of the new file."""
    two_datasets.run("--max-tokens-per-dataset", "800")
    before = (two_datasets.output_dir / "a" / "raw_responses.jsonl").read_bytes()
    two_datasets.run("--max-tokens-per-dataset", "1600")
    after = (two_datasets.output_dir / "a" / "raw_responses.jsonl").read_bytes()
    assert after.startswith(before)
    assert 1600 <= _totals(two_datasets, "a")[2] < 1600 + 8 * 200


def test_prompts_that_run_out_are_an_outcome_of_their_own(two_datasets):
    """Exit 0, every prompt used, and the shortfall is said."""
    done = two_datasets.run("--max-tokens-per-dataset", "1000000")
    assert done.returncode == 0
    assert _totals(two_datasets, "a")[:2] == (100, 100)
    assert "a is exhausted: all 100 prompts used" in done.stdout


def test_a_failed_dataset_stops_nobody_and_is_named(two_datasets):
    """The other is generated and exported, exit 2; once it is repaired, only it runs."""
    (two_datasets.folder / "a.jsonl").write_text("")
    done = two_datasets.run("--max-tokens-per-dataset", "800")
    assert done.returncode == 2
    assert "1 of 2 datasets failed" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert {row["dataset"] for row in _export(two_datasets)} == {"b"}
    report = (two_datasets.output_dir / "report.html").read_text()
    assert "not running" in report
    assert "with 1 of 2 datasets not done</strong>; its log (the terminal, " in report
    rows_of_b = two_datasets.rows("b")
    two_datasets.raw["datasets"].pop(0)
    two_datasets.add_dataset("a")
    assert two_datasets.run("--max-tokens-per-dataset", "800").returncode == 0
    assert two_datasets.rows("b") == rows_of_b
    assert {row["dataset"] for row in _export(two_datasets)} == {"a", "b"}


def test_a_damaged_log_is_neither_complete_nor_exported(two_datasets):
    """A line that is no row fails its dataset with file and byte; the table and the export agree."""
    assert two_datasets.run("--max-tokens-per-dataset", "500").returncode == 0
    path = two_datasets.output_dir / "a" / "raw_responses.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"garbage\n", *lines[3:]]))
    done = two_datasets.run("--max-tokens-per-dataset", "900")
    assert done.returncode == 1
    assert str(path) in done.stderr
    saved = json.loads((two_datasets.output_dir / "stats.json").read_text())["datasets"]
    assert [(one["name"], one["status"], one["unreadable"]) for one in saved] == [
        ("a", "incomplete", 1),
        ("b", "complete", 0),
    ]
    assert {row["dataset"] for row in _export(two_datasets)} == {"b"}


def test_an_unreachable_server_is_named(runner):
    """Exit 1 with the URL, without a traceback."""
    runner.raw["server"] = {"mode": "connect", "base_urls": ["http://127.0.0.1:9"], "ready_timeout_s": 1}
    runner.add_dataset("a", prompts=3)
    done = runner.run()
    assert done.returncode == 1
    assert "http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_prefect_server_that_is_away_is_named(two_datasets):
    """Exit 1 with its URL and what to do, without a traceback, and nothing is generated."""
    two_datasets.env["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    done = two_datasets.run("--max-tokens-per-dataset", "500")
    assert done.returncode == 1
    assert "http://127.0.0.1:9/api does not answer" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not two_datasets.rows("a")


def test_proxies_of_the_environment_are_no_obstacle(two_datasets):
    """Loopback is reached directly, whatever proxy the environment names."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        two_datasets.env[name] = "http://127.0.0.1:9"
    assert two_datasets.run("--max-tokens-per-dataset", "500").returncode == 0
    assert two_datasets.rows("a")


def test_a_second_run_on_the_same_folder_is_refused(runner, fake_server):
    """At once and whole, datasets that the first has not begun included; the first is not disturbed."""
    runner.raw["server"]["base_urls"] = [fake_server(tokens_per_s=2)]  # the first must outlast the second
    runner.add_dataset("a")
    process = runner.start()
    runner.wait_for_rows("a", 1, process)
    runner.add_dataset("b")
    done = runner.run()
    assert done.returncode == 1
    assert f"is being written by process {process.pid} on" in done.stderr
    assert "Prefect" not in done.stderr
    assert not (runner.output_dir / "b").exists()
    assert interrupt(process) == 130
    rows, ids, _ = _totals(runner, "a")
    assert rows == ids >= 1


def test_a_full_disk_is_named_and_loses_nothing(two_datasets):
    """Exit 1 with the path and what to do, no traceback; with space again, the run completes."""
    (two_datasets.folder / "limit.py").write_text(
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "from flows.cli.app import main; main()\n"
    )
    argv = ["run", "--param-file", str(two_datasets.write()), "--max-tokens-per-dataset", "3000"]
    limited = [sys.executable, "limit.py", *argv]
    done = subprocess.run(
        limited, cwd=two_datasets.folder, env=two_datasets.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "raw_responses.jsonl" in done.stderr
    assert "run the same command again" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    before = two_datasets.rows("a")
    assert before
    assert two_datasets.run("--max-tokens-per-dataset", "3000").returncode == 0
    assert two_datasets.rows("a")[: len(before)] == before


def test_other_settings_are_refused_in_the_same_folder(two_datasets):
    """The field, both values and both ways out are named; nothing changes; accepting it is recorded."""
    assert two_datasets.run("--max-tokens-per-dataset", "500").returncode == 0
    before = two_datasets.rows("a")
    two_datasets.raw["sampling"] = {"temperature": 0.5}
    done = two_datasets.run("--max-tokens-per-dataset", "900")
    assert done.returncode == 2
    for word in ("sampling.temperature", "1.0", "0.5", "--accept-changed", "another output_dir"):
        assert word in done.stderr
    assert two_datasets.rows("a") == before
    assert two_datasets.run("--max-tokens-per-dataset", "900", "--accept-changed", "sampling").returncode == 0
    changes = json.loads((two_datasets.output_dir / "run.json").read_text())["accepted_changes"]
    assert [(change["field"], change["old"], change["new"]) for change in changes] == [
        ("sampling.temperature", 1.0, 0.5)
    ]


def test_a_source_that_is_no_json_is_refused(runner, fake_server):
    """With its file; the other dataset is generated."""
    runner.raw["server"]["base_urls"] = [fake_server()]
    for name in "ab":
        runner.add_dataset(name, prompts=5)
    (runner.folder / "a.jsonl").write_text("this is no JSON\n")
    done = runner.run()
    assert done.returncode == 2, done.stderr
    assert "a.jsonl: not JSON Lines" in done.stderr
    assert len(runner.rows("b")) == 5


def test_a_source_that_fails_stops_only_its_dataset(two_datasets):
    """Damaged behind the rows that are sampled, or unreadable: named, and the others are done."""
    folder = two_datasets.folder / "parts"
    folder.mkdir()
    pq.write_table(read_json(two_datasets.folder / "a.jsonl"), folder / "one.parquet")
    (folder / "two.parquet").write_bytes((folder / "one.parquet").read_bytes()[:-9])
    two_datasets.raw["datasets"][0]["source"] = "parts"
    two_datasets.add_dataset("c", prompts=None)
    (two_datasets.folder / "c.jsonl").symlink_to("/proc/self/mem")  # reading its start is an error
    for budget in (500, 900):  # the second run goes on in a folder that is there
        done = two_datasets.run("--max-tokens-per-dataset", str(budget))
        assert done.returncode == 2, done.stderr
        for words in ("2 of 3 datasets failed", "two.parquet: not readable as parquet", "c.jsonl: cannot be"):
            assert words in done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert {row["dataset"] for row in _export(two_datasets)} == {"b"}
        assert _totals(two_datasets, "b")[2] >= budget


def test_answers_of_another_model_in_mid_run_are_exit_2(runner, fake_server):
    """Somebody serves a larger model on the port: the dataset stops, and no prompt is rejected for it."""
    runner.raw["server"]["base_urls"] = [fake_server(faults={"foreign_id": 0.2})]  # the same draws each time
    runner.raw["dataset_retries"] = 2
    runner.add_dataset("a", prompts=200)
    done = runner.run()
    assert done.returncode == 2, done.stderr
    assert "the id 1024, but the target has 1,024 ids" in done.stderr
    assert runner.rows("a")
    assert not (runner.output_dir / "a" / "rejected.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ([RunFolderError("x")], 2),
        ([RunFolderError("x"), InputError("x")], 2),
        ([PreflightError([])], 2),
        ([LaunchRefused("x"), StartFailed("x", failure="bad_argument", requires_user_action=True)], 2),
        ([KvCacheTooSmall("x")], 2),
        ([ForeignIds("x")], 2),
        ([StartFailed("x")], 1),
        ([PortTaken("x")], 1),
        ([SourceError("x"), EmptyDatasetError("x")], 2),
        ([RunFolderError("x"), RuntimeError("x")], 1),
        ([RuntimeError("x")], 1),
    ],
)
def test_a_run_exits_2_only_where_every_failure_is_a_refusal(failures, code):
    """A failure that may pass by itself is worth the same command again; so is a run that has one."""
    failed = {str(number): failure for number, failure in enumerate(failures)}
    assert (
        exit_code_of(DatasetsFailedError(failed, RunReport(Path(), [], [], None), datasets=len(failed)))
        == code
    )
    if len(failures) == 1:
        assert exit_code_of(failures[0]) == code


def test_the_command_for_the_ui_names_the_home_that_is_not_prefects_own(monkeypatch):
    """The runs are in the database of PREFECT_HOME."""
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    with temporary_settings({PREFECT_HOME: Path.home() / ".prefect"}):
        assert up_command() == "/venv/bin/draftmill up"
    with temporary_settings({PREFECT_HOME: Path("/my home")}):
        assert up_command() == "PREFECT_HOME='/my home' /venv/bin/draftmill up"


def test_only_the_dataset_asked_for_runs(two_datasets):
    """--dataset picks out of the parameter file."""
    assert two_datasets.run("--max-tokens-per-dataset", "500", "--dataset", "b").returncode == 0
    assert two_datasets.rows("b")
    assert not two_datasets.rows("a")


def test_statistics_and_artifacts_agree_with_the_files(two_datasets):
    """stats.json, the command's JSON and the Prefect artifacts show what a recount finds."""
    assert two_datasets.run("--max-tokens-per-dataset", "800").returncode == 0
    truth = scan_dataset(
        two_datasets.output_dir / "a", name="a", budget_tokens=800, max_samples=None, prompts=100
    )
    shown = json.loads(two_datasets.call("stats", str(two_datasets.output_dir), "--json").stdout)
    saved = json.loads((two_datasets.output_dir / "stats.json").read_text())
    assert shown == saved
    assert (
        saved["datasets"][0]["completion_tokens"] == truth.completion_tokens == _totals(two_datasets, "a")[2]
    )
    [table, progress] = asyncio.run(_artifacts("stats", "progress-a"))
    assert f"{truth.completion_tokens:,}" in table
    assert float(progress) == 100.0


async def _artifacts(*keys):
    async with get_client() as client:
        found = []
        for key in keys:
            filters = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
            [*artifacts] = await client.read_artifacts(artifact_filter=filters)
            found.append(str(max(artifacts, key=lambda artifact: artifact.updated).data))
        return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_and_goes_on(runner, fake_server, number):
    """Ctrl-C or SIGTERM: exit 130 with a checkpoint; the next run reads no row twice and asks none again."""
    runner.raw["server"]["base_urls"] = [fake_server(tokens_per_s=20)]
    runner.add_dataset("a")
    process = runner.start("--max-tokens-per-dataset", "2500")
    runner.wait_for_rows("a", 10, process)
    assert interrupt(process, number) == 130, runner.log()
    assert "everything generated is saved" in runner.log()
    before = runner.rows("a")
    done = runner.run("--max-tokens-per-dataset", "2500")
    assert done.returncode == 0, done.stderr
    assert f"resumes with {len(before)} responses" in done.stderr
    assert "from the checkpoint, 0 rows read" in done.stderr
    rows, ids, tokens = _totals(runner, "a")
    assert rows == ids
    assert tokens >= 2500
    assert runner.rows("a")[: len(before)] == before


def test_a_killed_run_loses_and_doubles_nothing(runner, fake_server):
    """Kill -9 twice in the middle, then the same command: each prompt once, the total from all runs."""
    runner.raw["server"]["base_urls"] = [fake_server(tokens_per_s=20)]
    runner.add_dataset("a")
    for wanted in (8, 30):
        process = runner.start("--max-tokens-per-dataset", "2500")
        runner.wait_for_rows("a", wanted, process)
        interrupt(process, signal.SIGKILL)
    before = (runner.output_dir / "a" / "raw_responses.jsonl").read_bytes()
    done = runner.run("--max-tokens-per-dataset", "2500")
    assert done.returncode == 0, done.stderr
    rows, ids, tokens = _totals(runner, "a")
    assert rows == ids
    assert 2500 <= tokens < 2500 + 8 * 200
    whole = before[: before.rfind(b"\n") + 1]
    assert (runner.output_dir / "a" / "raw_responses.jsonl").read_bytes().startswith(whole)


def test_a_run_with_a_prefect_server_of_its_own_leaves_no_process(runner, fake_server, tmp_path):
    """Without a configured server one is started and stopped; even kill -9 of the run ends it."""
    runner.env = {name: value for name, value in runner.env.items() if name != "PREFECT_API_URL"}
    runner.env["PREFECT_HOME"] = str(tmp_path / "home")
    runner.raw["server"]["base_urls"] = [fake_server(tokens_per_s=20)]
    runner.add_dataset("a")
    process = runner.start("--max-tokens-per-dataset", "2500")
    runner.wait_for_rows("a", 3, process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("flows.prefect_server" in " ".join(child.cmdline()) for child in children)
    interrupt(process, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_raising_max_prompts_goes_on_where_the_prompts_ended(runner, fake_server):
    """The answers that are there stay, and count towards the new number of prompts."""
    runner.raw["server"]["base_urls"] = [fake_server()]
    runner.add_dataset("a", prompts=30, max_prompts=5)
    assert runner.run().returncode == 0
    before = runner.rows("a")
    assert len(before) == 5
    runner.raw["datasets"][0]["max_prompts"] = 12
    assert runner.run().returncode == 0
    rows = runner.rows("a")
    assert rows[:5] == before
    assert len({row["id"] for row in rows}) == len(rows) == 12
