"""`draftmill up`: what it starts is started again when it dies, and ends with it, however it ends."""

import contextlib
import os
import signal
import subprocess

import psutil
import pytest
from run_support import DRAFTMILL
from served_support import wait_until

pytestmark = pytest.mark.prefect

GROUPS = {"pipeline", "datasets"}


@pytest.fixture
def start(prefect_url, tmp_path):
    """Start it on the session's Prefect server."""
    started = []

    def start():
        with (tmp_path / "up.log").open("ab") as log:
            env = {**os.environ, "PREFECT_API_URL": prefect_url}
            started.append(subprocess.Popen([*DRAFTMILL, "up"], env=env, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def find_groups(process):
    """The processes that serve, by the group's name."""
    found = {}
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, or gone meanwhile
            if "deployments.serve" in (argv := child.cmdline()):
                found[argv[-3]] = child
    return found


def test_what_dies_is_started_again_and_all_end_together(start, tmp_path):
    """Kill -9 of a group brings a new one; Ctrl-C ends all, with exit 0 and the address printed before."""
    process = start()
    wait_until(lambda: set(find_groups(process)) == GROUPS)
    killed = find_groups(process)["datasets"]
    killed.kill()
    wait_until(lambda: find_groups(process).get("datasets") not in (None, killed))
    wait_until(lambda: set(find_groups(process)) == GROUPS)
    groups = find_groups(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 0
    assert not any(group.is_running() for group in groups.values())
    log = (tmp_path / "up.log").read_text()
    assert "watch, start and retry runs at http://127.0.0.1:" in log
    assert "what serves datasets has ended (status -9); starting it again" in log


def test_killed_itself_it_leaves_nothing_behind(start):
    """What it started notices."""
    process = start()
    wait_until(lambda: set(find_groups(process)) == GROUPS)
    groups = find_groups(process)
    process.kill()
    _, alive = psutil.wait_procs(groups.values(), timeout=300)
    assert not alive
