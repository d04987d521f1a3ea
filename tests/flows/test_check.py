"""`draftmill check`: each reason why a run could not succeed is one line and exit 2; Prefect is not asked."""

import json
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from fake_sglang import NOT_A_ROUTERS
from prefect.client.orchestration import get_client
from run_support import Runner
from tiny_tokenizer import TEMPLATE, make_tokenizer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from flows.cli.app import app

FAKE_LAUNCHER = """#!/bin/sh
echo "server_args: {{'api_key': '{key}'}}"  # as SGLang does
while [ "$1" != --port ]; do shift; done
exec {python} {fake} --port "$2" --api-key {key} --tokenizer {tokenizer}
"""
THINK = ("<think>", "</think>")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A tokenizer that has think tokens: the ids 3 and 4."""
    template = TEMPLATE + "{% if thinking is defined and not thinking %}calm{% endif %}"
    return make_tokenizer(tmp_path_factory.mktemp("thinker"), template=template, extra_tokens=THINK)


@pytest.fixture
def checked(tmp_path, tokenizer_dir, fake_server, monkeypatch):
    """`checked(**options)` checks a small run against a fake server with these options, in this process."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # it would fail if it were asked
    runner = Runner(tmp_path, tokenizer_dir, env={})
    runner.add_dataset("a", prompts=20)

    def check(*flags, **options):
        runner.raw["server"]["base_urls"] = [fake_server(**{"tokenizer": str(tokenizer_dir), **options})]
        monkeypatch.chdir(tmp_path)
        return CliRunner().invoke(app, ["check", "--param-file", str(runner.write()), *flags])

    check.runner = runner
    return check


def _assert_refused(done, *words):
    assert done.exit_code == 2, done.output
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("draftmill: checking")]
    for word in words:
        assert word in line


def test_a_run_that_could_succeed_passes(checked):
    """What was checked and the plan are printed, and no trace of it is left."""
    done = checked("--max-tokens-per-dataset", "400")
    assert done.exit_code == 0, done.output
    for words in (
        "serves 'fake'",
        "one id each",
        "same ids there and here",
        "KV tokens",
        "free",
        "The run can",
    ):
        assert words in done.stdout
    assert "400" in done.stdout
    assert not checked.runner.output_dir.exists()


def test_the_speed_is_measured_and_tells_the_time(checked):
    """With the window full, for as long as the parameter says."""
    checked.runner.raw["server"]["measure_s"] = 2
    done = checked("--max-tokens-per-dataset", "400", tokens_per_s=200)
    assert done.exit_code == 0, done.output
    assert "at the measured" in done.stdout


def test_calls_that_the_template_cannot_show_are_refused(checked, tmp_path):
    """Their own model's form would be lost; a parameter accepts that they are written as text."""
    function = {"name": "tide", "arguments": '{"at": "Husum"}'}
    turns = [
        {"role": "user", "content": "tide?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "1:00"},
    ]
    (tmp_path / "calls.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    checked.runner.raw["datasets"] = [{"name": "c", "source": "calls.jsonl", "adapter": "messages"}]
    _assert_refused(checked(), "'c'", "shows no tool calls", "target.tool_calls_as_text")
    checked.runner.raw["target"]["tool_calls_as_text"] = True
    done = checked()
    assert done.exit_code == 0, done.output


def test_settings_for_another_mode_are_said(checked):
    """A profile alone does not launch anything; the run can start all the same."""
    checked.runner.raw["server"] |= {"profile": "cpu", "python": "/opt/sglang/bin/python"}
    done = checked()
    assert done.exit_code == 0, done.output
    assert "not used with this server.mode: server.profile, server.python; set" in done.stdout


def test_a_router_passes_and_what_it_hides_is_said(checked):
    """It tells of one server behind it, and of no load."""
    done = checked("--max-tokens-per-dataset", "400", missing=NOT_A_ROUTERS, max_total_num_tokens=500)
    assert done.exit_code == 0, done.output
    for words in ("is a router", "not checked", "server.request_timeout_s", "serves 'fake'", "500 KV tokens"):
        assert words in done.stdout
    assert "would be in flight" not in done.stdout


def test_a_router_that_tells_nothing_passes_with_notes(checked):
    """Its answers to probes are good, which is what counts."""
    pages = [*NOT_A_ROUTERS, "/get_model_info", "/get_server_info"]
    done = checked("--max-tokens-per-dataset", "400", missing=pages)
    assert done.exit_code == 0, done.output
    assert "does not say which model it serves; not compared" in done.stdout
    assert "does not say how many KV tokens it has; not checked" in done.stdout


def test_a_router_whose_servers_come_up_is_waited_for(checked):
    """It is ready before they are, and answers 500 when it is asked what it serves."""
    done = checked("--max-tokens-per-dataset", "400", missing=NOT_A_ROUTERS, info_failures=2)
    assert done.exit_code == 0, done.output
    assert "serves 'fake'" in done.stdout
    checked.runner.raw["server"]["ready_timeout_s"] = 0.1
    done = checked("--max-tokens-per-dataset", "400", missing=NOT_A_ROUTERS, info_failures=1000)
    assert done.exit_code == 1, done.output
    assert "not ready after 0.1 s" in done.stderr
    assert "/get_model_info: answered 500" in done.stderr


def test_another_model_behind_a_router_is_refused(checked):
    """What one server behind it says counts."""
    _assert_refused(checked(missing=NOT_A_ROUTERS, served_model_name="org/other"), "'org/other'", "'fake'")


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_misspelt_launch_flag_is_refused_before_anything_starts(checked, command):
    """The parameter and the right name are said, a line for each flag."""
    checked.runner.raw["server"] = {
        "mode": "launch",
        "profile": "cpu",
        "launch_flags": {"atention-backend": "triton", "mem-fraction-static": 7, "enable-mixed-chunk": False},
    }
    done = CliRunner().invoke(app, [command, "--param-file", str(checked.runner.write())])
    assert done.exit_code == 2, done.output
    lines = done.stderr.removeprefix("draftmill: ").splitlines()
    assert all(line.startswith("server.launch_flags: --") for line in lines)
    for words in ("did you mean --attention-backend?", "7 is not between 0 and 1", "does not set it"):
        assert words in done.stderr
    assert len(lines) == 3
    assert not checked.runner.output_dir.exists()


def test_another_model_is_refused(checked):
    """Both names are said."""
    _assert_refused(checked(served_model_name="org/other"), "'org/other'", "target.model is 'fake'")


def test_another_model_is_refused_before_the_hub_is_asked_for_a_tokenizer(checked, monkeypatch):
    """Which takes a minute where there is no such model, or no Hub."""
    checked.runner.raw["target"] = {"model": "org/wanted"}
    monkeypatch.setattr("tasks.warm_up.open_session.load_tokenizer", None)  # calling it would be a TypeError
    _assert_refused(checked(served_model_name="org/other"), "'org/other'", "target.model is 'org/wanted'")


def test_a_tokenizer_that_counts_differently_is_refused(checked, tmp_path):
    """The server's own tokenizer decides."""
    other = make_tokenizer(tmp_path / "other", merges=False)
    _assert_refused(checked(tokenizer=str(other)), "tokenizes a text into", "target.tokenizer")


def _extend(checked, tmp_path, tokens, *, template=TEMPLATE):
    """Give the run a tokenizer of its own with more tokens; returns its folder and how many ids it has."""
    tokenizer = AutoTokenizer.from_pretrained(checked.runner.raw["target"]["tokenizer"])
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "extended")
    checked.runner.raw["target"]["tokenizer"] = str(tmp_path / "extended")
    return tmp_path / "extended", len(tokenizer)


def _count_answers(checked):
    """How many prompts the server has answered; it must be alive to say so."""
    [url] = checked.runner.raw["server"]["base_urls"]
    return len(httpx.get(f"{url}/stats", trust_env=False).json()["answered"])


def test_a_tokenizer_larger_than_the_model_is_refused_and_the_server_lives(checked, tmp_path):
    """An id that the model does not have would end it: both sizes are said, and nothing is sent."""
    _, size = _extend(checked, tmp_path, ["<|im|>"], template="<|im|>" + TEMPLATE)
    _assert_refused(checked(vocab_size=size - 1), f"has {size} ids", f"has {size - 1}:")
    assert _count_answers(checked) == 0


def test_a_tokenizer_with_more_tokens_than_the_servers_is_refused(checked, tmp_path):
    """Also with tokens that the template does not use, and though the model has room for them."""
    _extend(checked, tmp_path, ["<tool>"])
    _assert_refused(checked(), "tokenizes a text into", "target.tokenizer")
    assert _count_answers(checked) == 1  # the text: no ids were sent


def test_tokens_that_the_model_has_no_id_for_are_kept_from_the_server(checked, tmp_path):
    """Those that a plain prompt does not have: a prompt with one is rejected, the others are asked."""
    template = "{% if images %}<image>{% endif %}" + TEMPLATE
    folder, size = _extend(checked, tmp_path, ["<image>"], template=template)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps({"id": "seen", "messages": [{"role": "user", "content": "<image>"}]}) + "\n")
    done = checked("--max-tokens-per-dataset", "400", tokenizer=str(folder), vocab_size=size - 1)
    assert done.exit_code == 0, done.output
    assert f"a prompt with '<image>' ({size - 1}) is rejected" in done.stdout
    assert "1 of the first 21 prompts would be rejected (id_outside_vocabulary" in done.stdout
    assert _count_answers(checked) == 2


def test_an_answer_in_another_tokenizers_tokens_is_refused(checked, tmp_path):
    """A text may be the same ids on both sides, and the server still have tokens that ours has not."""
    ours = checked.runner.raw["target"]["tokenizer"]
    folder, size = _extend(checked, tmp_path, ["<think>"])
    checked.runner.raw["target"]["tokenizer"] = ours
    _assert_refused(
        checked(tokenizer=str(folder), lead=[size - 1]), f"the ids {size - 1},", f"has {size - 1};"
    )
    done = checked(lead=[size - 1])  # no tokenizer has it: the model's padding
    assert done.exit_code == 0, done.output


def test_the_servers_size_is_used_where_the_tokenizer_has_no_config(checked, tmp_path):
    """Where it does not tell either, the guess is said."""
    folder, size = _extend(checked, tmp_path, [])
    assert not (folder / "config.json").exists()
    done = checked("--max-tokens-per-dataset", "400", tokenizer=str(folder), lead=[1000])
    assert done.exit_code == 0, done.output
    assert "its model has 1,024 ids" in done.stdout
    done = checked("--max-tokens-per-dataset", "400", tokenizer=str(folder), tells_vocab=False, lead=[5])
    assert f"{size} is assumed" in done.stdout + done.stderr


def test_an_answer_of_a_larger_model_is_refused(checked):
    """As soon as a probe shows it."""
    _assert_refused(checked(lead=[1500]), "the id 1500", "has 1,024", "target.tokenizer")


@pytest.mark.parametrize("options", [{"context_length": 200}, {"served_model_name": "org/other"}])
def test_nothing_is_generated_after_a_refusal(checked, options):
    """The server may be somebody else's."""
    assert checked(**options).exit_code == 2
    assert _count_answers(checked) == 0


def test_a_context_too_small_for_a_lane_is_refused(checked):
    """No prompt of the short lane would leave room for an answer."""
    _assert_refused(checked(context_length=200), "context of 200", "lanes.short", "--context-length")


def test_a_context_that_only_cuts_is_no_refusal(checked):
    """It is said."""
    done = checked(context_length=400)
    assert done.exit_code == 0, done.output
    assert "longer ones are cut" in done.stdout


def test_a_full_disk_is_refused(checked, monkeypatch):
    """With the path, the bytes needed and the bytes free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    _assert_refused(checked(), str(checked.runner.output_dir), "bytes) for rows", "1,000 bytes) free")


def test_prompts_that_end_need_no_disk_for_the_budget(checked):
    """A budget that means all prompts is no reason to refuse; that they may not suffice is said."""
    done = checked("--max-tokens-per-dataset", "1000000000000")
    assert done.exit_code == 0, done.output
    assert "about 20 prompts may not suffice" in done.stdout


def test_too_few_kv_tokens_are_refused(checked):
    """One request alone has to fit."""
    _assert_refused(checked(max_total_num_tokens=300), "300 KV tokens", "456", "--mem-fraction-static")


def test_a_server_without_ids_is_refused(checked):
    """It answers, but nothing could be trained on."""
    _assert_refused(checked(no_ids=True), "no output_ids", "completion_tokens")


def test_thinking_that_does_not_come_is_refused(checked, thinker):
    """The dataset asks for it, the tokenizer has the tokens, and the answer has none of them."""
    checked.runner.raw["target"]["tokenizer"] = str(thinker)
    checked.runner.raw["datasets"][0]["chat_template_kwargs"] = {"thinking": True}
    _assert_refused(checked(tokenizer=str(thinker)), "'a'", "thinking expected but absent", "<think>")
    assert checked(tokenizer=str(thinker), think_id=3).exit_code == 0


def test_a_misspelt_template_argument_is_refused(checked, thinker):
    """A template ignores what it does not know without a word."""
    checked.runner.raw["target"]["tokenizer"] = str(thinker)
    checked.runner.raw["datasets"][0]["chat_template_kwargs"] = {"thinkng": False}
    _assert_refused(checked(tokenizer=str(thinker)), "'a'", "'thinkng'", "(it reads thinking)", "correct")


def test_all_refusals_come_together(checked):
    """One line for each that needs no answer of the server."""
    checked.runner.raw["export"]["draft_vocab_size"] = 5000
    done = checked(served_model_name="other", context_length=200)
    assert done.exit_code == 2
    lines = done.stderr.splitlines()[1:]
    assert len(lines) == 3
    assert all(any(word in line for line in lines) for word in ("'other'", "lanes.short", "5000"))


def test_a_tokenizer_that_is_not_there_is_refused(checked):
    """Together with what can be said without one."""
    checked.runner.raw["target"]["tokenizer"] = str(checked.runner.folder / "none")
    done = checked(served_model_name="other")
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 3


def test_a_source_without_a_prompt_is_named(checked):
    """A run would generate the other datasets; the check says what is wrong with this one."""
    (checked.runner.folder / "a.jsonl").write_text('{"no": "messages"}\n')
    _assert_refused(checked(), "'a'", "no row gives a prompt (the adapter rejects all)", "a.jsonl")
    (checked.runner.folder / "a.jsonl").write_text("")
    _assert_refused(checked(), "'a'", "no row gives a prompt", "a.jsonl is empty")


def test_a_source_that_cannot_be_read_is_named_once(checked):
    """Also where its dataset has rows, whose settings would be compared."""
    folder = checked.runner.output_dir / "a"
    folder.mkdir(parents=True)
    (folder / "raw_responses.jsonl").write_text("{}\n")
    source = checked.runner.folder / "a.jsonl"
    source.unlink()
    source.symlink_to("/proc/self/mem")  # reading its start is an error
    done = checked()
    assert done.exit_code == 2, done.output
    assert done.stderr.count(f"dataset 'a': {source}: cannot be read") == 1


def test_a_server_that_is_away_is_exit_1(checked):
    """It may come back: nothing has to be changed."""
    checked.runner.raw["server"]["ready_timeout_s"] = 0.1
    checked.runner.raw["server"]["base_urls"] = ["http://127.0.0.1:9"]
    done = CliRunner().invoke(app, ["check", "--param-file", str(checked.runner.write())])
    assert done.exit_code == 1
    assert "not ready after" in done.stderr


def test_a_server_that_only_fails_is_exit_1(checked):
    """It is asked several times before."""
    done = checked(faults={"status_500": 1.0})
    assert done.exit_code == 1
    assert "fails to answer a short prompt" in done.stderr


def test_rows_made_with_other_settings_are_refused(checked):
    """As a run would refuse them; nothing is written."""
    folder = checked.runner.output_dir / "a"
    folder.mkdir(parents=True)
    (folder / "raw_responses.jsonl").write_text("{}\n")
    done = checked()
    assert done.exit_code == 2
    assert "holds responses made with other settings" in done.stderr
    assert not (checked.runner.output_dir / "run.json").exists()


def test_a_wrong_key_is_refused(checked, monkeypatch):
    """The variable is named; the key is not shown."""
    monkeypatch.setenv("DRAFTMILL_API_KEY", "wrong-marker")
    done = checked(api_key="right-marker")
    _assert_refused(done, "401", "DRAFTMILL_API_KEY")
    assert "marker" not in done.output


@pytest.fixture
def launching(checked, tmp_path):
    """`launching(line)` checks a run whose SGLang writes a line and ends."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    checked.runner.raw["target"]["model"] = str(model)
    checked.runner.raw["server"] = {
        "mode": "launch", "profile": "cpu", "python": str(python), "port": find_free_port(),
    }  # fmt: skip

    def check(line=None):
        if line is not None:
            script = python.with_name("sglang")
            script.write_text(f"#!{sys.executable}\nprint({line!r})\nraise SystemExit(1)\n")
            script.chmod(0o755)
        return CliRunner().invoke(app, ["check", "--param-file", str(checked.runner.write())])

    check.raw = checked.runner.raw
    check.output_dir = checked.runner.output_dir
    return check


def find_free_port():
    """One that nobody has at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("sglang: error: unrecognized arguments: --new", 2, "correct the flag"),
        ("torch.OutOfMemoryError: CUDA out of memory.", 2, "the weights do not fit"),
        ("RuntimeError: NCCL error in: x.cpp:1", 1, "do not reach one another"),
        ("something else", 1, "ended with status 1"),
    ],
)
def test_a_server_that_does_not_start_says_whether_that_may_pass(launching, line, code, words):
    """2 where the same start would fail again; a few lines and the log's path come with it."""
    done = launching(line)
    assert done.exit_code == code, done.output
    first, *shown = done.stderr.splitlines()[-3:]
    assert words in first
    assert str(launching.output_dir / "server.log") in shown[0]
    assert shown[1] == line
    assert "starts SGLang, which takes minutes" in done.stderr


def test_what_is_missing_is_said_before_sglang_is_started(launching, tmp_path):
    """An interpreter without SGLang, a folder without a model; nothing is left of the check."""
    done = launching()
    assert done.exit_code == 2, done.output
    assert f"{tmp_path / 'bin' / 'python'} has none installed" in done.stderr
    launching.raw["target"]["model"] = str(tmp_path / "none")
    done = launching("it was started")
    assert done.exit_code == 2, done.output
    assert f"there is no folder {tmp_path / 'none'}" in done.stderr
    assert not launching.output_dir.exists()


def launch_fake(runner, tokenizer_dir, key, **settings):
    """Let a run launch the fake server; returns its port."""
    sglang = runner.folder / "sglang"  # found beside the interpreter that is named
    fake = Path(__file__).parents[1] / "support" / "fake_sglang.py"
    sglang.write_text(
        FAKE_LAUNCHER.format(python=sys.executable, fake=fake, key=key, tokenizer=tokenizer_dir)
    )
    sglang.chmod(0o755)
    port = find_free_port()
    runner.env = {**runner.env, "DRAFTMILL_API_KEY": key, "XDG_RUNTIME_DIR": str(runner.folder / "state")}
    runner.raw["server"] = {
        "mode": "launch",
        "profile": "cpu",
        "python": str(runner.folder / "python"),
        "port": port,
        **settings,
    }
    return port


@pytest.mark.prefect
def test_a_server_that_stays_down_ends_the_run(runner, tokenizer_dir):
    """Nobody starts it again, so nobody waits for it; what is there is kept, and the next run goes on."""
    port = launch_fake(runner, tokenizer_dir, "marker-5f3c9a", restarts=0)
    runner.raw["dataset_retries"] = 2
    runner.add_dataset("a", prompts=3000)
    run = runner.start()
    runner.wait_for_rows("a", 20, run)
    for process in psutil.process_iter(["cmdline"]):
        if f"--port {port}" in " ".join(process.info["cmdline"] or []):
            process.kill()
    assert run.wait(timeout=200) == 1, runner.log()
    assert "it stays down, for its 0 restarts are used up" in runner.log()
    rows = len(runner.rows("a"))
    assert rows >= 20
    runner.raw["max_samples"] = rows + 5
    assert runner.run().returncode == 0
    assert len({row["id"] for row in runner.rows("a")}) == len(runner.rows("a")) >= rows + 5


@pytest.mark.prefect
def test_how_a_server_was_launched_is_recorded_without_secrets(runner, tokenizer_dir):
    """The profile, the flags, the whole command and the variables; neither key nor token in any file."""
    key, token = "marker-5f3c9a", "marker-77d1e0"
    launch_fake(
        runner, tokenizer_dir, key,
        launch_flags={"trust-remote-code": True, "tp-size": 2, "MY_TOKEN": token},
    )  # fmt: skip
    runner.add_dataset("a", prompts=20)
    done = runner.run("--max-tokens-per-dataset", "300")
    assert done.returncode == 0, done.stderr
    launch = json.loads((runner.output_dir / "run.json").read_text())["details"]["launch"]
    assert (launch["profile"], launch["preset"]) == ("cpu", None)
    assert launch["launch_flags"] == {"trust-remote-code": True, "tp-size": 2, "MY_TOKEN": "<redacted>"}
    assert launch["argv"][:4] == [str(runner.folder / "sglang"), "serve", "--model-path", "fake"]
    assert "--trust-remote-code" in launch["argv"]
    assert launch["env"]["MY_TOKEN"] == "<redacted>"  # noqa: S105  no secret
    files = [path.read_bytes() for path in runner.output_dir.rglob("*") if path.is_file()]
    assert not any(secret.encode() in content for content in files for secret in (key, token))


@pytest.mark.prefect
def test_a_secret_reaches_neither_file_nor_log_nor_artifact(runner, fake_server, prefect_url):
    """The server's key is in /server_info in clear, twice, and in its command line."""
    secret = "marker-5f3c9a"  # noqa: S105  no secret
    runner.env = {**runner.env, "DRAFTMILL_API_KEY": secret, "PREFECT_LOGGING_LEVEL": "DEBUG"}
    runner.raw["server"]["base_urls"] = [url] = [fake_server(api_key=secret)]
    runner.add_dataset("a", prompts=20)
    done = runner.run("--max-tokens-per-dataset", "300")
    assert done.returncode == 0, done.stderr
    settings = json.loads((runner.output_dir / "run.json").read_text())["details"]["servers"][url]
    assert (settings["api_key"], settings["launch_command"]) == ("<redacted>", "<redacted>")
    assert settings["max_total_num_tokens"] == 100000
    checked = runner.call("check", "--param-file", "params.yaml")
    assert checked.returncode == 0, checked.stderr
    said = [done.stdout, done.stderr, checked.stdout, checked.stderr]
    files = [path.read_bytes() for path in runner.output_dir.rglob("*") if path.is_file()]
    assert not any(secret in text for text in said)
    assert not any(secret.encode() in content for content in files)
    with get_client(sync_client=True) as client:
        pages = [
            client._client.post(path, json={"limit": 200}).text
            for path in ("/logs/filter", "/artifacts/filter", "/flow_runs/filter", "/task_runs/filter")
        ]
    assert not any(secret in page for page in pages)
    assert "to make: about" in pages[1]
