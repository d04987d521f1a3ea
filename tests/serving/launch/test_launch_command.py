"""The command that starts SGLang is right before it is run, and shows no key."""

import json
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from serving.client.errors import LaunchRefused
from serving.launch.command import KeyFile, LaunchCommand, build_command, is_loopback, read_changes
from serving.launch.flag_checks import find_problems
from serving.launch.profile import list_profiles, load_profile
from serving.launch.sglang_install import ask_parser, check_installed, find_install

RTX = "rtx-pro-6000-x8"
KEY = 'k3y"with:#quotes'


def build(profile="cpu", **options):
    """A command of a profile for some model."""
    return build_command(load_profile(profile), **{"model": "some/model", **options})


def value_of(command, flag):
    """The word after a flag."""
    return command.argv[command.argv.index(flag) + 1]


def refusal(**options):
    """The message that a command is refused with."""
    with pytest.raises(LaunchRefused) as refused:
        build(**options)
    return str(refused.value)


@pytest.mark.parametrize("name", list_profiles())
def test_every_profile_makes_a_command(name):
    """It names the model, listens on this machine only and passes the checks."""
    command = build(name)
    assert command.argv[:4] == ["sglang", "serve", "--model-path", "some/model"]
    assert value_of(command, "--host") == "127.0.0.1"
    assert value_of(command, "--port") == "30000"
    assert command.expected_kv_tokens == load_profile(name).expected_kv_tokens


@pytest.mark.parametrize("name", list_profiles())
def test_every_advice_passes_the_checks(name):
    """What is recommended can be set."""
    for advice in load_profile(name).advice:
        unset = ["disable-radix-cache"] if name == "cpu" else []
        build(name, overrides=advice.set, unset=unset)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"cuda-graph-max-bs": "64"}, "--cuda-graph-max-bs-decode"),
        ({"fp8-gemm-runner-backend": "cutlass"}, "it is --fp8-gemm-backend"),
        ({"enable-pcie-oneshot-allreduce": ""}, "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1"),
        ({"stream-output": ""}, "--incremental-streaming-output"),
        ({"enable-nan-detection": ""}, "it is gone"),
        ({"kv-cache-dtype": "fp8"}, "it is fp8_e4m3"),
        ({"tp": "8"}, "it is --tp-size"),
        ({"mem-fraction": "0.9"}, "did you mean --mem-fraction-static?"),
        ({"atention-backend": "fa3"}, "did you mean --attention-backend?"),
        ({"zzzzzz": "1"}, "--zzzzzz: SGLang 0.5.23 has no such flag"),
        ({"mem-fraction-static": "7"}, "7 is not between 0 and 1"),
        ({"mem-fraction-static": "nan"}, "'nan' is not a number"),
        ({"tp-size": "0"}, "0 is not 1 or more"),
        ({"tp-size": "two"}, "'two' is not a whole number"),
        ({"page-size": "1.5"}, "'1.5' is not a whole number"),
        ({"chunked-prefill-size": "0"}, "0 is neither 1 or more nor -1"),
        ({"context-length": "1.5Ki"}, "'1.5Ki' is not a whole number"),
        ({"schedule-conservativeness": "0"}, "0 is not above 0"),
        ({"attention-backend": "flash"}, "'flash' is none of triton, "),
        ({"json-model-override-args": "{'a': 1}"}, "is not JSON"),
        ({"preferred-sampling-params": "{"}, "is not JSON"),
        (
            {"enable-metrics": "true"},
            "--enable-metrics is a switch, on when it is there (the value is 'true')",
        ),
        ({"enable-metrics": "0"}, "off when it is left out (the value is '0'): leave the flag out"),
        ({"tp-size": ""}, "--tp-size needs a value: tp-size=VALUE"),
        ({"tp-size": "2", "tensor-parallel-size": "1"}, "tp-size and tensor-parallel-size are the same flag"),
        ({"trust_remote_code": ""}, "did you mean --trust-remote-code?"),
        ({"served-model-name": "--tp-size"}, "starts with a dash"),
        ({"enable-hierarchical-cache": ""}, "exclude each other"),
        ({"NCCL X": "1"}, "'NCCL X' is no name"),
        ({"port": "99999"}, "99999 is not between 1 and 65535"),
    ],
)
def test_what_sglang_would_not_take_is_named(override, words):
    """Unknown and old names, values out of range, of the wrong type or none of the choices."""
    assert words in refusal(overrides=override)


def test_everything_wrong_is_said_at_once():
    """One line for each."""
    lines = refusal(overrides={"tp": "2", "page-size": "x"}, unset=["nonsense"], port=0).splitlines()
    assert len(lines) == 4
    assert any("--nonsense: SGLang 0.5.23 has no such flag" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "enable-metric",
            "profile 'cpu' does not set it, so it cannot be left out; did you mean --enable-metrics?",
        ),
        ("page-size", "profile 'cpu' does not set it, so it cannot be left out; --explain lists"),
        ("page-sise", "has no such flag; did you mean --page-size?"),
        ("NCCL_PROTO", "NCCL_PROTO: profile 'cpu' does not set it"),
        ("model-path", "--model-path: every server needs it"),
    ],
)
def test_what_cannot_be_left_out_is_named_once(name, words):
    """A misspelt name, a flag that the profile does not set, one that every server needs."""
    message = refusal(unset=[name])
    assert words in message
    assert "\n" not in message


def test_a_server_on_the_network_needs_a_key(tmp_path):
    """Else everybody could use it; loopback and a file of the user's are let through."""
    for host in ("0.0.0.0", "::", "gpu-1"):
        assert "DRAFTMILL_API_KEY" in refusal(overrides={"host": host})
    build(overrides={"host": "0.0.0.0"}, api_key=KEY, key_file=tmp_path / "key.yaml")
    build(overrides={"host": "0.0.0.0", "config": "mine.yaml"})
    build(overrides={"host": "localhost"})


@pytest.mark.parametrize("value", ["128k", "25.6k", "64Ki", "4096"])
def test_counts_with_suffixes_are_taken(value):
    """As SGLang takes them."""
    assert value_of(build(overrides={"context-length": value}), "--context-length") == value


def test_an_override_replaces_the_profiles_value_under_any_alias():
    """The flag is there once, in the profile's place."""
    command = build(RTX, overrides={"tensor-parallel-size": "4", "--page-size": "64"})
    assert value_of(command, "--tp-size") == "4"
    assert "--tensor-parallel-size" not in command.argv
    assert value_of(command, "--page-size") == "64"


def test_switches_are_set_and_left_out():
    """A switch has no word after it; what the profile sets can be left out, variables too."""
    command = build(RTX, overrides={"trust-remote-code": ""}, unset=["enable-metrics", "NCCL_IB_DISABLE"])
    assert command.argv[-1] == "--trust-remote-code"
    assert "--enable-metrics" not in command.argv
    assert "NCCL_IB_DISABLE" not in command.env
    assert "NCCL_P2P_DISABLE" in command.env


def test_changes_are_read_as_yaml_has_them():
    """Switches by true and false, numbers as numbers, null for what the profile sets; texts as they are."""
    changes, unset = read_changes(
        {
            "trust-remote-code": True, "--enable-metrics": False, "watchdog-timeout": None, "tp-size": 4,
            "mem-fraction-static": 0.9, "context-length": "32k", "SGLANG_A": True, "SGLANG_B": False,
            "NCCL_IB_DISABLE": None,
        }
    )  # fmt: skip
    assert changes == {
        "trust-remote-code": "", "tp-size": "4", "mem-fraction-static": "0.9", "context-length": "32k",
        "SGLANG_A": "1", "SGLANG_B": "0",
    }  # fmt: skip
    assert unset == ["--enable-metrics", "watchdog-timeout", "NCCL_IB_DISABLE"]
    command = build(RTX, overrides=changes, unset=unset)
    assert value_of(command, "--mem-fraction-static") == "0.9"
    assert not {"--enable-metrics", "--watchdog-timeout"} & set(command.argv)


def test_a_name_in_capitals_is_an_environment_variable():
    """It wins over the profile's."""
    command = build(RTX, overrides={"NCCL_BUFFSIZE": "1048576", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"})
    assert command.env["NCCL_BUFFSIZE"] == "1048576"
    assert command.env["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] == "1"


def test_a_list_becomes_several_words():
    """Where the flag takes one."""
    argv = build(overrides={"cuda-graph-bs-decode": "1 2 4"}).argv
    at = argv.index("--cuda-graph-bs-decode")
    assert argv[at : at + 4] == ["--cuda-graph-bs-decode", "1", "2", "4"]


def test_recorded_batches_follow_the_number_of_requests():
    """Unless they are set by themselves, or there is no such number."""
    assert value_of(build(RTX, concurrency=40), "--cuda-graph-max-bs-decode") == "40"
    changed = build(RTX, overrides={"max-running-requests": "64"})
    assert value_of(changed, "--cuda-graph-max-bs-decode") == "64"
    both = build(RTX, overrides={"max-running-requests": "64", "cuda-graph-max-bs-decode": "32"})
    assert value_of(both, "--cuda-graph-max-bs-decode") == "32"
    assert "--cuda-graph-max-bs-decode" not in build(RTX, unset=["max-running-requests"]).argv


def test_the_key_is_in_a_file_that_only_its_owner_reads(tmp_path):
    """It is in no word of the command, in no variable, and in no printed form."""
    path = tmp_path / "new" / "key.yaml"
    command = build(api_key=KEY, key_file=path)
    command.key_file.write()
    command.key_file.write()
    assert command.argv[-2:] == ["--config", str(path)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert yaml.safe_load(path.read_text()) == {"api-key": KEY}
    assert [entry.name for entry in path.parent.iterdir()] == ["key.yaml"]
    for shown in (command.to_shell(), repr(command), *command.argv, *command.env.values()):
        assert "k3y" not in shown
    command.key_file.remove()
    assert not path.exists()


def test_a_key_on_the_command_line_is_refused_and_not_repeated():
    """`ps` would show it to everybody."""
    message = refusal(overrides={"api-key": "hunter2"})
    assert "DRAFTMILL_API_KEY" in message
    assert "hunter2" not in message
    assert "hunter2" not in refusal(overrides={"--admin-api-key": "hunter2"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_key": KEY}, "needs a key_file"),
        ({"api_key": KEY, "key_file": "key.txt"}, "ends in .yaml"),
        ({"api_key": "-k", "key_file": "key.yaml"}, "no dash in front"),
        ({"api_key": "clé", "key_file": "key.yaml"}, "printable ASCII"),
        ({"api_key": "two words", "key_file": "key.yaml"}, "printable ASCII"),
        ({"api_key": "", "key_file": "key.yaml"}, "printable ASCII"),
        ({"api_key": KEY, "key_file": "key.yaml", "overrides": {"config": "mine.yaml"}}, "one such file"),
    ],
)
def test_a_key_that_sglang_could_not_read_is_refused(tmp_path, options, words):
    """A file of another name, a key that looks like a flag, two files."""
    if "key_file" in options:
        options = {**options, "key_file": tmp_path / options["key_file"]}
    assert words in refusal(**options)


def test_secrets_are_shown_as_stars():
    """In variables and in words, whoever put them there."""
    env = {"HF_TOKEN": "hunter2", "OMP_NUM_THREADS": "1"}
    command = LaunchCommand(["sglang", "serve", "--api-key", "hunter3", "--admin-api-key=hunter4"], env)
    expected = "HF_TOKEN='***' OMP_NUM_THREADS=1 sglang serve --api-key '***' '--admin-api-key=***'"
    assert command.to_shell() == expected


def test_a_shell_reads_the_printed_command_as_it_is_run():
    """Blanks, quotes and dollars in values arrive whole, and so does the environment."""
    overrides = {"json-model-override-args": '{"a": "it\'s $HOME"}', "NCCL_NOTE": "a b;c"}
    command = build(RTX, model="/models/a b", overrides=overrides)
    words = shlex.split(command.to_shell())
    assert words[len(command.env) :] == command.argv
    assert words[: len(command.env)] == [f"{name}={value}" for name, value in command.env.items()]
    show = "import json,os,sys; print(json.dumps([sys.argv[1:], os.environ['NCCL_NOTE']]))"
    launcher = (sys.executable, "-c", show)
    printed = build(RTX, model="/models/a b", overrides=overrides, launcher=launcher)
    done = subprocess.run(["sh", "-c", printed.to_shell()], capture_output=True, check=True)
    assert json.loads(done.stdout) == [printed.argv[3:], "a b;c"]


def test_the_address_is_one_that_this_machine_reaches(tmp_path):
    """Listening everywhere is no address to ask."""
    key = {"api_key": KEY, "key_file": tmp_path / "key.yaml"}
    assert build().base_url == "http://127.0.0.1:30000"
    assert build(overrides={"host": "0.0.0.0", "port": "1234"}, **key).base_url == "http://127.0.0.1:1234"
    assert build(overrides={"host": "fd00::1"}, **key).base_url == "http://[fd00::1]:30000"


def test_the_checks_take_what_they_should():
    """Negative numbers, optional values and JSON."""
    settings = {
        "--chunked-prefill-size": "-1",
        "--model-checksum": "",
        "--extra-metric-labels": '{"a": "b"}',
        "--no-dllm-fdfo": None,
        "--hicache-storage-backend-extra-config": "@file.toml",
    }
    assert find_problems(settings) == []


def test_loopback_is_this_machine():
    """Names and addresses."""
    assert all(is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "gpu-1", "10.0.0.1"))


def test_an_interpreters_own_sglang_is_used(tmp_path):
    """The program beside it, or its module where there is none."""
    python = tmp_path / "python"
    assert find_install(python).launcher[:2] == (str(python), "-c")
    (tmp_path / "sglang").write_text("")
    assert find_install(python).launcher == (str(tmp_path / "sglang"), "serve")


def test_an_interpreter_without_sglang_says_nothing_about_flags():
    """It is no reason to refuse: the command may be meant for another machine."""
    verdict = ask_parser(sys.executable, ["--nonsense"], {})
    assert (verdict.version, verdict.problem) == (None, None)


def test_a_key_file_does_not_follow_what_was_left_there(tmp_path):
    """A link in its place is replaced, not written through."""
    other = tmp_path / "other"
    other.write_text("mine")
    link = tmp_path / "key.yaml"
    link.symlink_to(other)
    KeyFile(link, KEY).write()
    assert other.read_text() == "mine"
    assert not link.is_symlink()


def test_an_interpreter_without_sglang_is_found_before_the_start(tmp_path):
    """So is one that is not there, or is none; a script of its own is taken at its word."""
    text = tmp_path / "text"
    text.write_text("no program\n")
    text.chmod(0o755)
    for python, words in (
        (Path(sys.executable), f"{sys.executable} has none installed"),
        (tmp_path / "none", "there is no program"),
        (text, "Exec format error"),
    ):
        with pytest.raises(LaunchRefused, match=re.escape(words)) as caught:
            check_installed([*find_install(python).launcher], {})
        assert "server.python" in str(caught.value)
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    check_installed([*find_install(Path(sys.executable)).launcher], {"PYTHONPATH": str(tmp_path)})
    check_installed(["true", "serve"], {})


@pytest.mark.parametrize("name", ["DRAFTMILL_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_secret_that_is_handed_on_anyway_is_no_setting(name):
    """On a command line or in a stored parameter others could read it, and the key would not be SGLang's."""
    with pytest.raises(LaunchRefused, match=f"{name}: set it in draftmill's own environment") as caught:
        build_command(load_profile("cpu"), model="m", overrides={name: "marker-secret"})
    assert "marker" not in str(caught.value)


def test_a_folder_is_no_interpreter(tmp_path):
    """The message says what is in it."""
    with pytest.raises(LaunchRefused, match=re.escape(f"{tmp_path} is a folder")):
        find_install(tmp_path)
