"""What we keep about SGLang is what the installed one says: SGLANG_PYTHON is its interpreter.

make test-profiles SGLANG_PYTHON=/path/to/venv/bin/python SGLANG_MODEL=/path/to/a/tiny/model
"""

import json
import os
import shlex
import subprocess
from pathlib import Path

import httpx
import pytest
from run_support import DRAFTMILL

from serving.launch.command import build_command
from serving.launch.flag_table import TABLE_FILE
from serving.launch.profile import list_profiles, load_profile
from serving.launch.sglang_install import ask_parser

pytestmark = pytest.mark.live
DUMP = Path(__file__).parents[2] / "scripts/dump_sglang_flags.py"
PRESETS = [(name, preset) for name in list_profiles() for preset in load_profile(name).presets or [None]]


@pytest.fixture(scope="module")
def sglang_python():
    """The interpreter of a real SGLang."""
    python = os.environ.get("SGLANG_PYTHON")
    if not python:
        pytest.skip("needs the interpreter of a real SGLang: give SGLANG_PYTHON")
    return Path(python)


def test_the_kept_table_is_the_parsers(sglang_python):
    """Every name, alias, type, choice and default; `make sglang-flags` writes it anew."""
    done = subprocess.run([sglang_python, DUMP], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json.loads(TABLE_FILE.read_text())


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_sglangs_parser_takes_every_profile(sglang_python, name, preset):
    """With all that is advised, too."""
    profile = load_profile(name, preset)
    advised = {flag: value for advice in profile.advice for flag, value in advice.set.items()}
    unset = ["disable-radix-cache"] if name == "cpu" else []
    for overrides in ({}, advised):
        command = build_command(profile, model="some/model", overrides=overrides, unset=unset)
        verdict = ask_parser(sglang_python, command.argv[2:], command.env)
        assert (verdict.version, verdict.problem) == ("0.5.23", None)


def test_sglangs_variables_are_its_own(sglang_python):
    """A misspelled variable would be ignored without a word."""
    names = {name for profile in map(load_profile, list_profiles()) for name in profile.env_values()}
    ours = sorted(name for name in names if name.startswith("SGLANG_"))
    code = "import sglang, sys; print(sglang.__path__[0])"
    done = subprocess.run([sglang_python, "-c", code], capture_output=True, text=True, check=True)
    root = Path(done.stdout.split()[-1]) / "srt"
    sources = "".join((root / name).read_text() for name in ("environ.py", "platforms/__init__.py"))
    assert ours
    assert [name for name in ours if name not in sources] == []


def test_what_the_parser_refuses_is_passed_on(sglang_python):
    """For versions of SGLang whose flags we do not know."""
    verdict = ask_parser(sglang_python, ["--model-path", "m", "--nonsense"], {})
    assert "unrecognized arguments: --nonsense" in verdict.problem


def test_the_cpu_profile_starts_a_server_that_asks_for_its_key(
    sglang_python, start_server, tmp_path, monkeypatch
):
    """The whole way, from the command line to an answer; the key is shown by no process."""
    model = os.environ.get("SGLANG_MODEL")
    if not model:
        pytest.skip("needs a tiny model: give SGLANG_MODEL")
    monkeypatch.setenv("DRAFTMILL_API_KEY", "hunter2")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    serve = [*DRAFTMILL, "serve", "--profile", "cpu", "--model", model, "--python", str(sglang_python)]
    server = start_server(f"{shlex.join(serve)} --port {{port}}")
    question = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
    url = f"{server.url}/generate"
    assert httpx.post(url, json=question, trust_env=False).status_code == 401
    key = {"authorization": "Bearer hunter2"}
    assert httpx.post(url, json=question, headers=key, trust_env=False).status_code == 200
    shown = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True)
    assert str(server.port) in shown.stdout
    assert "hunter2" not in shown.stdout
