"""The SGLang that is installed: how it is started, and what its own parser says.

Knows interpreters and processes; does not know profiles. Invariant: nothing here starts a server or loads a
model.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.client.errors import LaunchRefused
from serving.launch.command import DEFAULT_LAUNCHER

PARSE_TIMEOUT_S = 300.0  # 8 s on two idle cores, most of it importing torch
_NO_SGLANG = 77
# SGLang 0.5.23 has no `python -m` form of `sglang serve`: its module does nothing when run.
_FROM_PYTHON = ("-c", "from sglang.cli.main import main; main()")
_OTHER_PYTHON = "say which Python has it (--python, server.python)"
_FIND = f"""
import importlib.util, sys
if importlib.util.find_spec("sglang") is None:
    sys.exit({_NO_SGLANG})
"""
_PARSE = f"""{_FIND}
import json
from sglang.srt.server_args import prepare_server_args
from sglang.version import __version__
prepare_server_args(sys.argv[1:])
print(json.dumps({{"version": __version__}}))
"""


@dataclass(frozen=True, slots=True)
class Install:
    """How to start SGLang, and the interpreter to ask; no interpreter where none was found."""

    launcher: tuple[str, ...]
    python: Path | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What SGLang's parser said: its version (None without SGLang there) and what it refused, if anything."""

    version: str | None
    problem: str | None = None


def find_install(python: Path | None = None) -> Install:
    """SGLang in a given interpreter's environment, else the `sglang` on PATH, else this interpreter's.

    Raises:
        LaunchRefused: a folder was given.
    """
    if python is None:
        on_path = shutil.which(DEFAULT_LAUNCHER[0])
        beside = Path(on_path).resolve().with_name("python") if on_path else Path(sys.executable)
        return Install(DEFAULT_LAUNCHER, beside if beside.exists() else None)
    if python.is_dir():
        raise LaunchRefused(
            f"{python} is a folder: give the interpreter in it, as {python / 'bin' / 'python'}"
        )
    script = python.with_name("sglang")
    start = (str(script),) if script.exists() else (str(python), *_FROM_PYTHON)
    return Install((*start, "serve"), python)


def check_installed(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """See in milliseconds whether a command finds SGLang.

    Raises:
        LaunchRefused: its program is not there, or is a Python without SGLang.
    """
    program = argv[0]
    if shutil.which(program) is None:
        raise LaunchRefused(
            f"cannot start SGLang: there is no program {program!r}; install it, or {_OTHER_PYTHON}"
        )
    if tuple(argv[1:3]) != _FROM_PYTHON:
        return
    try:
        done = subprocess.run(
            [program, "-c", _FIND], env={**os.environ, **env}, capture_output=True,
            timeout=PARSE_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return  # the start will tell
    except OSError as exc:
        raise LaunchRefused(f"cannot start SGLang: {exc}; {_OTHER_PYTHON}") from exc
    if done.returncode != 0:
        raise LaunchRefused(
            f"cannot start SGLang: {program} has none installed; install it there, or {_OTHER_PYTHON}"
        )


def ask_parser(
    python: Path, flags: Sequence[str], env: Mapping[str, str], *, timeout_s: float = PARSE_TIMEOUT_S
) -> Verdict:
    """Let SGLang's own parser read flags in a process of its own; nothing is started and no model is read.

    Raises:
        OSError: the interpreter cannot be run.
    """
    try:
        done = subprocess.run(
            [str(python), "-c", _PARSE, *flags],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict(None, f"{python}: SGLang's parser did not answer within {timeout_s:g} s")
    if done.returncode == _NO_SGLANG:
        return Verdict(None)
    output = done.stdout if done.returncode == 0 else done.stderr
    lines = [line for line in output.splitlines() if line.strip()]
    if done.returncode == 0:
        return Verdict(json.loads(lines[-1])["version"])
    last = lines[-1] if lines else f"it ended with status {done.returncode}"
    return Verdict("unknown", f"SGLang's own parser refuses it: {last}")
