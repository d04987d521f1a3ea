"""Bad input ends with exit 2, one clear message, and nothing started."""

import json
import os
import signal
import subprocess
import sys

import pytest
import yaml
from run_support import DRAFTMILL, Runner, write_prompts
from typer.testing import CliRunner

from flows.cli.app import app
from tasks.records.run_file import update_run_file


@pytest.fixture
def offline(tmp_path):
    """A runner whose Prefect would fail at once if it were asked for anything."""
    runner = Runner(tmp_path, tmp_path / "tok", env={"PREFECT_API_URL": "http://127.0.0.1:9/api", "PATH": ""})
    runner.raw["server"]["base_urls"] = ["http://127.0.0.1:9"]
    runner.add_dataset("a", prompts=3)
    return runner


def _assert_refused(done, *words):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outputdir": "x"}, ["outputdir", "unknown parameter"]),
        (
            {"sampling": {"temprature": 1}},
            ["sampling.temprature", "unknown", "(perhaps 'temperature')"],
        ),
        ({"budget_policy": "guess"}, ["budget_policy", "'guess'"]),
        ({"max_tokens_per_dataset": 0}, ["max_tokens_per_dataset", "0"]),
        ({"datasets": []}, ["datasets"]),
        ({"datasets": 5}, ["datasets", "5"]),
        ({"datasets": {"name": "x"}}, ["datasets", "list"]),
        ({"server": "foo"}, ["server", "'foo'"]),
        ({"datasets": ["B99_nothing"]}, ["'B99_nothing'", "B1_glaive"]),
        ({"server": {"base_urls": ["localhost:1"]}}, ["server.base_urls: 'localhost:1'", "http://HOST:PORT"]),
    ],
)
def test_a_wrong_parameter_is_named_with_its_value(offline, change, words):
    """Unknown keys, values out of range and unknown names are refused before anything starts."""
    offline.raw.update(change)
    _assert_refused(offline.run(), *words)
    assert not offline.output_dir.exists()


def test_a_password_in_a_url_is_refused_and_not_repeated(offline):
    """It would stand in every row; the message does not show it either."""
    offline.raw["server"]["base_urls"] = ["http://me:hunter2@127.0.0.1:1"]
    done = offline.run()
    _assert_refused(done, "server", "DRAFTMILL_API_KEY")
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": "gone.jsonl"}, ["'a'", "gone.jsonl"]),
        ({"adapter": "mesages"}, ["dataset 'a': adapter: ", "'glaive', 'magicoder', ", "(it is 'mesages')"]),
        ({"name": "../evil"}, ["datasets.0", "'../evil'"]),
        ({"name": "Export"}, ["datasets.0.name", "'Export'"]),
        ({"source": "a.xlsx"}, ["'a'", "a.xlsx", ".jsonl"]),
        ({"budget_tokens": -5}, ["dataset 'a': budget_tokens", "-5"]),
    ],
)
def test_a_wrong_dataset_is_named(offline, settings, words):
    """A missing source, an unknown adapter and a name that leaves the folder or is taken are refused."""
    (offline.folder / "a.xlsx").write_bytes(b"x")
    offline.raw["datasets"][0].update(settings)
    _assert_refused(offline.run(), *words)


@pytest.mark.parametrize(
    ("dataset", "line"),
    [
        ({"name": "x", "adapter": "messages"}, "dataset 'x': source: missing"),
        ({"source": "a.jsonl", "adapter": "messages"}, "datasets.0.name: missing"),
        ({"name": "x", "source": "a.jsonl", "adapter": "mesages"}, "dataset 'x': adapter: Input should be"),
        (5, "datasets.0: Input should be a name from the catalog or a mapping"),
    ],
)
def test_a_dataset_of_the_wrong_shape_is_one_line(offline, dataset, line):
    """What the other way to write a dataset would have needed is not said."""
    offline.raw["datasets"] = [dataset]
    done = offline.run()
    _assert_refused(done, line)
    assert len(done.stderr.splitlines()) == 1


def test_flags_over_a_malformed_file_are_refused_too(offline):
    """What a flag would be put over may have any shape."""
    offline.raw.update({"server": "foo", "datasets": 5})
    done = offline.run("--base-url", "http://127.0.0.1:9", "--max-tokens-per-dataset", "5")
    _assert_refused(done, "server", "'foo'", "datasets")


@pytest.mark.parametrize("mode", ["embedded", "launch"])
def test_a_url_for_a_mode_that_starts_a_server_is_refused(offline, mode):
    """It would be ignored, and another server would answer than the one at the URL."""
    _assert_refused(offline.run("--mode", mode, "--base-url", "http://127.0.0.1:9"), "--base-url")


def test_a_dataset_asked_for_twice_is_taken_once(offline):
    """Repeating the flag is no mistake: the run gets as far as its source."""
    offline.raw["datasets"][0]["source"] = "gone.jsonl"
    _assert_refused(offline.run("--dataset", "a", "--dataset", "a"), "gone.jsonl")


@pytest.mark.parametrize(
    ("blocked", "words"),
    [("datasets", ["make hub", "requirements/hub.txt"]), ("nothing", ["the Hub cannot be asked"])],
)
def test_a_dataset_of_the_catalog_says_how_to_go_on_without_the_hub(tmp_path, blocked, words):
    """Without the extra and without network: one line with the command, and the file to change."""
    script = (
        "import importlib.util as u; find = u.find_spec\n"
        f"u.find_spec = lambda name, *package: None if name == {blocked!r} else find(name, *package)\n"
        "from deployments.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "run", "--dataset", "B1_glaive"],
        cwd=tmp_path,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "PREFECT_API_URL": "http://127.0.0.1:9/api"},
        capture_output=True,
        text=True,
        check=False,
    )
    _assert_refused(done, "B1_glaive", "datasets.toml", "hf download", "point `source` at them", *words)
    assert len(done.stderr.splitlines()) == 1


def test_a_dataset_that_is_not_there_is_named_with_those_that_are(offline):
    """Those of the parameter file and those of the catalog: each of them can be asked for."""
    offline.add_dataset("mine", prompts=3)
    _assert_refused(offline.run("--dataset", "nope"), "'nope'", "a, mine", "B1_glaive")


@pytest.mark.parametrize("name", ["a", "A"])
def test_two_datasets_of_one_name_are_refused(offline, name):
    """They would write to one folder, with other capitals on some filesystems too."""
    offline.add_dataset(name, prompts=3)
    _assert_refused(offline.run(), f"datasets: {name}, a would share a folder")


def test_a_missing_parameter_file_is_named(offline):
    """The path that was given is in the message."""
    _assert_refused(offline.call("run", "--param-file", "nope.yaml"), "'nope.yaml'", "does not exist")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1", "\x00"])
def test_a_parameter_file_that_is_no_mapping_is_refused(offline, text):
    """A list, broken YAML and binary rubbish end alike."""
    (offline.folder / "odd.yaml").write_text(text)
    _assert_refused(offline.call("run", "--param-file", "odd.yaml"), "'odd.yaml'")


def test_a_run_without_datasets_says_so(offline):
    """`draftmill run` alone names what is missing."""
    _assert_refused(offline.call("run"), "datasets", "missing")


@pytest.mark.parametrize("command", ["stats", "export"])
def test_a_folder_that_is_no_run_is_refused(offline, command):
    """Nothing is counted or exported from a folder without run.json."""
    _assert_refused(offline.call(command, str(offline.folder)), str(offline.folder), "run.json")


def test_an_output_folder_that_takes_no_file_is_refused(offline):
    """Before Prefect is asked for anything."""
    done = offline.run("--output-dir", "/proc")
    _assert_refused(done, "'/proc' cannot be written to", "another output_dir")
    assert "starting" not in done.stderr


@pytest.mark.parametrize(
    "url", ["localhost:4200/api", "http://", "http://127.0.0.1:99999/api", "http://a:b/"]
)
def test_an_address_of_prefect_that_is_none_is_refused(offline, url):
    """It is named with its value, and with what to do."""
    offline.env["PREFECT_API_URL"] = url
    _assert_refused(offline.run(), f"PREFECT_API_URL is {url!r}", "unset it")


def test_a_damaged_run_file_is_refused_before_anything_starts(offline):
    """One message, which names it."""
    offline.output_dir.mkdir()
    (offline.output_dir / "run.json").write_text("{")
    done = offline.run()
    _assert_refused(done, "run.json is damaged")
    assert "starting" not in done.stderr


@pytest.mark.parametrize(
    ("part", "changed", "key"),
    [
        ("details", {"datasets": {"a": {}}}, "details.datasets.a.budget_tokens is missing"),
        ("details", {"datasets": {"a": None}}, "details.datasets.a.budget_tokens is missing"),
        ("details", {"datasets": {"a": {"budget_tokens": "5"}}}, "details.datasets.a.budget_tokens is '5'"),
        ("details", {"export": None}, "details.export is missing"),
        ("details", {"export": {"eval_fraction": "x"}}, "details.export.eval_fraction is 'x'"),
        ("fingerprint", {"seed": None}, "fingerprint.seed is missing"),
    ],
)
def test_a_setting_that_run_json_lacks_is_named(tmp_path, part, changed, key):
    """With the file, after it was edited by hand."""
    details = {"datasets": {"a": {"budget_tokens": 5, "max_samples": None}}}
    update_run_file(tmp_path, fingerprint={"seed": 0}, details=details, now="now")
    run = json.loads((tmp_path / "run.json").read_text())
    run[part] |= changed
    (tmp_path / "run.json").write_text(json.dumps(run))
    done = CliRunner().invoke(app, ["export", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"draftmill: {tmp_path / 'run.json'} is damaged ({key}); restore it")


@pytest.mark.parametrize("command", ["stats", "export"])
def test_a_file_that_cannot_be_read_is_named(offline, command):
    """Exit 1 and one line with its path, whatever the operating system has against it."""
    details = {"datasets": {"a": {"budget_tokens": 5}}}
    update_run_file(offline.output_dir, fingerprint={"seed": 0}, details=details, now="now")
    log = offline.output_dir / "a" / "raw_responses.jsonl"
    log.mkdir(parents=True)
    done = offline.call(command, str(offline.output_dir))
    assert done.returncode == 1
    assert str(log) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_source_is_found_from_the_parameter_file(offline):
    """A relative source starts at the parameter file, wherever the command is run."""
    inner = offline.folder / "inner"
    inner.mkdir()
    write_prompts(inner / "b.jsonl", 2)
    (inner / "p.yaml").write_text("datasets: [{name: b, source: b.jsonl, adapter: messages}]")
    done = offline.call("run", "--param-file", "inner/p.yaml", "--output-dir", "/proc")
    _assert_refused(done, "'/proc' cannot be written to")  # which is looked at after the sources


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_while_it_starts_says_how_to_go_on(offline, number):
    """Exit 130 with the sentence, also before Prefect is there."""
    argv = [*DRAFTMILL, "run", "--param-file", str(offline.write())]
    with subprocess.Popen(argv, cwd=offline.folder, env=offline.env, stderr=subprocess.PIPE) as process:
        assert b"starting" in process.stderr.readline()
        process.send_signal(number)
        rest = process.stderr.read().decode()
    assert process.returncode == 130, rest
    assert "Run the same command again" in rest
    assert "Traceback" not in rest


@pytest.mark.parametrize("command", [[], ["run"], ["check"], ["serve"], ["stats"], ["export"], ["monitor"]])
def test_help_is_there_and_needs_no_prefect(command):
    """Help of every command, without the seconds that importing Prefect takes."""
    done = subprocess.run([*DRAFTMILL, *command, "--help"], capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    code = "import sys, flows.cli.app; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_help_of_a_run_names_exit_statuses_variables_and_choices():
    """What a script around it has to know."""
    text = subprocess.run([*DRAFTMILL, "run", "--help"], capture_output=True, text=True, check=True).stdout
    for line in (
        "  1    a failure",
        "  2    refused",
        "  130  interrupted",
        "DRAFTMILL_API_KEY",
        "PREFECT_API_URL",
    ):
        assert line in text
    assert "connect|launch|embedded" in " ".join(text.split())


def test_every_parameter_is_described(offline):
    """--help-parameters lists all of them with a sentence and a default."""
    text = offline.call("run", "--help-parameters").stdout
    for name in ("max_tokens_per_dataset: 10000000", "temperature: 1.0", "concurrency: 150", "adapter:"):
        assert name in text
    assert "None" not in text
    assert yaml.safe_load(text)["max_tokens_per_dataset"] == 10000000, "it is one to start from"
