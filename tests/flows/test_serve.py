"""`draftmill serve --profile` says what it would start, refuses what SGLang would not take, hides the key."""

import json
import os
import subprocess
import sys

import pytest
from run_support import DRAFTMILL

FAKE_SGLANG = """#!{python}
import json, os, sys
key_file = sys.argv[sys.argv.index("--config") + 1]
key = [oct(os.stat(key_file).st_mode & 0o777), open(key_file).read()]
json.dump([sys.argv[1:], os.environ.get("OMP_NUM_THREADS"), key], open("started.json", "w"))
"""


@pytest.fixture
def serve(tmp_path):
    """Run `draftmill serve` in a folder of its own, with nothing on PATH."""

    def call(*flags, **env):
        own = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        return subprocess.run(
            [*DRAFTMILL, "serve", *flags],
            cwd=tmp_path,
            env={**own, **env},
            timeout=120,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.fixture
def fake_bin(tmp_path):
    """A folder with an `sglang` that writes down how it was started."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "sglang"
    script.write_text(FAKE_SGLANG.format(python=sys.executable))
    script.chmod(0o755)
    return folder


def test_a_dry_run_prints_the_command_and_nothing_else(serve):
    """On stdout, so that it can be piped; who checked it is said beside it."""
    done = serve("--profile", "cpu", "--model", "m", "--set", "tp-size=2", "--port", "1234", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OMP_NUM_THREADS=1 ")
    assert " sglang serve --model-path m --host 127.0.0.1 --port 1234 " in done.stdout
    assert "--tp-size 2" in done.stdout
    assert done.stdout.count("\n") == 1
    assert "checked against the flags of SGLang 0.5.23" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--profile", "h100", "--model", "m"], ["'h100'", "h200-x8"]),
        (["--profile", "cpu"], ["--model"]),
        (["--profile", "cpu", "--model", "m", "--preset", "fast"], ["'fast'"]),
        (["--profile", "cpu", "--model", "m", "--set", "tp=2"], ["--tp-size"]),
        (["--profile", "cpu", "--model", "m", "--set", "enable-metrics"], ["flag=value"]),
        (["--profile", "cpu", "--model", "m", "--set", "=4"], ["--set =4", "flag=value"]),
        (["--profile", "cpu", "--model", "m", "--set", "seed=1", "--set", "seed=2"], ["--set seed", "twice"]),
        (["--profile", "cpu", "--model", "m", "--slots", "2"], ["--slots"]),
        (["--profile", "cpu", "--model", "m", "--python", "gone"], ["gone"]),
        (["--profile", "cpu", "--model", "./gone", "--dry-run"], ["./gone", "Hub id"]),
        (["--profile", "h200-x8", "--model", "m", "--set", "tp-size=9", "--dry-run"], ["9 GPUs", "has 8"]),
        (["--profile", "cpu", "--model", "m", "--port", "0"], ["--port"]),
        (["--profile", "cpu", "--model", "m"], ["cannot start SGLang", "--python"]),
        (["--dry-run"], ["--dry-run", "--profile"]),
        (["--set", "tp-size=2", "--explain"], ["--set, --explain", "--profile"]),
    ],
)
def test_bad_input_ends_with_2_and_says_what_to_write(serve, flags, words):
    """Nothing is started."""
    done = serve(*flags)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_explain_gives_a_reason_for_everything(serve):
    """A paragraph first, then every flag and variable; what was changed is marked, what is used explained."""
    changes = ("--set", "page-size=64", "--set", "MY_TOKEN=hunter2")
    done = serve("--profile", "rtx-pro-6000-x8", "--model", "m", *changes, "--explain")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].startswith("rtx-pro-6000-x8: 8x RTX PRO 6000")
    assert max(map(len, lines)) <= 100
    assert "4,578" in done.stdout
    flags = ("--attention-backend flashinfer", "--page-size 64", "CUDA_DEVICE_MAX_CONNECTIONS=64")
    assert all(f"  {flag}" in lines for flag in flags)
    assert "      You set it." in lines
    assert "hunter2" not in done.stdout
    assert "  magik: public findings" in done.stdout
    assert "  Marlin: kernels" in done.stdout
    assert "Hopper" not in done.stdout  # a word of other profiles


def test_explain_breaks_nothing_that_one_may_copy(serve, tmp_path):
    """A path, a flag, an address and a whole --set stay on one line, however long they are."""
    model = "some-organisation-with-a-long-name/" + "a-model-with-a-long-name-" * 5
    done = serve("--profile", "rtx-pro-6000-x8", "--model", model, "--explain")
    lines = done.stdout.splitlines()
    assert f"  --model-path {model}" in lines
    assert "      --set hicache-write-policy=write_through" in lines
    assert any("https://github.com/flashinfer-ai/flashinfer/issues/2708" in line for line in lines)


def test_a_model_with_code_of_its_own_is_warned_about(serve, tmp_path):
    """The command is printed without the flag: nobody but the user trusts it."""
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "configuration.py"}}')
    done = serve("--profile", "cpu", "--model", str(tmp_path), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "add --set trust-remote-code=" in done.stderr
    assert "trust" not in done.stdout


def test_profiles_are_compared_in_one_table(serve):
    """Flags are rows, profiles are columns, no name is cut."""
    done = serve("--profiles")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("b200-x8", "rtx-pro-6000-x8", "--cuda-graph-max-bs-decode"))
    assert "…" not in done.stdout
    [row] = [line.split() for line in done.stdout.splitlines() if "--mem-fraction-static" in line]
    assert row[1:] == ["0.85", "0.85", "0.5", "0.85", "0.85", "0.94"]


def test_the_server_gets_its_flags_its_environment_and_its_key(serve, fake_bin, tmp_path):
    """The key is in a file of mode 600, and in no output."""
    env = {"PATH": str(fake_bin), "DRAFTMILL_API_KEY": "hunter2", "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    done = serve("--profile", "cpu", "--model", "m", **env)
    assert done.returncode == 1, done.stderr  # this one ends at once
    assert "hunter2" not in done.stdout + done.stderr
    argv, threads, key = json.loads((tmp_path / "started.json").read_text())
    key_file = tmp_path / "run/draftmill/sglang-30000.yaml"
    assert "hunter2" not in " ".join(argv)
    assert argv[-2:] == ["--config", str(key_file)]
    assert threads == "1"
    assert key == ["0o600", 'api-key: "hunter2"\n']
    assert not key_file.exists()


def test_a_dry_run_with_a_key_writes_no_file(serve, tmp_path):
    """It says where the key would be, not what it is."""
    env = {"DRAFTMILL_API_KEY": "hunter2", "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    done = serve("--profile", "cpu", "--model", "m", "--dry-run", **env)
    assert "sglang-30000.yaml, mode 600" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_an_open_server_on_the_network_is_refused(serve):
    """Everybody could use it; the message says how to give it a key."""
    command = ("--profile", "cpu", "--model", "m", "--set", "host=0.0.0.0", "--dry-run")
    refused = serve(*command)
    assert refused.returncode == 2
    assert "DRAFTMILL_API_KEY" in refused.stderr
    assert serve(*command, DRAFTMILL_API_KEY="hunter2").returncode == 0
