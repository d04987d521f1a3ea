"""A process that follows the one that started it."""

import subprocess
import sys
import time

import pytest

CHILD = """
import os, sys, time
from pathlib import Path
from serving.parent import watch_parent
calls = Path(sys.argv[1])
def say():
    with calls.open("a") as file:
        file.write("called\\n")
watch_parent(int(sys.argv[2]), say)
calls.touch()
time.sleep(4)
calls.with_suffix(".done").touch()
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], str(os.getpid())])
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the slow way is taken")
def test_a_dead_parent_is_noticed_once(tmp_path):
    """By the kernel's signal and by looking, which must not end the process twice."""
    calls = tmp_path / "calls"
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(calls)]) as parent:
        _wait_for(calls)
        parent.kill()
    _wait_for(calls.with_suffix(".done"))
    assert calls.read_text() == "called\n"


def _wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
