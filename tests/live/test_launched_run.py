"""A run that starts its own SGLang: to the end, also when that is killed or frozen in the middle.

Needs SGLANG_PYTHON (an interpreter with SGLang), SGLANG_MODEL (a tiny one) and, where it needs more,
SGLANG_LAUNCH_FLAGS (JSON, as server.launch_flags).
"""

import json
import os
import signal
import socket

import psutil
import pytest
from run_support import Runner

pytestmark = pytest.mark.live

PROMPTS = 400


@pytest.fixture
def launched(tmp_path, prefect_url):
    """A runner whose runs start SGLang on the CPU."""
    python, model = os.environ.get("SGLANG_PYTHON"), os.environ.get("SGLANG_MODEL")
    if not python or not model:
        pytest.skip("starts a server of its own: give SGLANG_PYTHON and SGLANG_MODEL")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runner = Runner(tmp_path, model, env={**os.environ, "PREFECT_API_URL": prefect_url})
    runner.raw["target"] = {"model": model}
    flags = json.loads(os.environ.get("SGLANG_LAUNCH_FLAGS", "{}"))
    runner.raw["server"] = {
        "mode": "launch",
        "profile": "cpu",
        "python": python,
        "port": port,
        "launch_flags": flags,
        "stall_timeout_s": 10,
    }
    runner.add_dataset("a", prompts=PROMPTS)
    yield runner
    runner.end_all()


def find_family(process):
    """The server's processes: all that came from the run, but for the run's own."""
    return [
        one for one in psutil.Process(process.pid).children(recursive=True) if "sglang" in str(one.cmdline())
    ]


def find_scheduler(process):
    [scheduler] = [one for one in find_family(process) if "sglang::scheduler" in str(one.cmdline())]
    return scheduler


def find_parent(process):
    """The one that started all the others."""
    family = find_family(process)
    [parent] = [one for one in family if one.parent() not in family and "guardian" not in str(one.cmdline())]
    return parent


@pytest.mark.parametrize(
    ("find", "number"),
    [
        (find_scheduler, None),
        (find_scheduler, signal.SIGKILL),
        (find_scheduler, signal.SIGSTOP),
        (find_parent, signal.SIGKILL),
    ],
)
def test_a_run_starts_its_server_and_gets_over_its_end(launched, find, number):
    """Each prompt once, exit 0, no process of it is left, and the key is in no file of the folder."""
    key = "marker-4711-of-the-server"
    launched.env = {**launched.env, "DRAFTMILL_API_KEY": key}
    process = launched.start()
    launched.wait_for_rows("a", 20, process, timeout=900)
    family = find_family(process)
    assert family
    if number is not None:
        find(process).send_signal(number)
    assert process.wait(1500) == 0, launched.log()
    ids = [row["id"] for row in launched.rows("a")]
    assert len(ids) == len(set(ids)) == PROMPTS
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    files = [path for path in launched.output_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if key.encode() in path.read_bytes()]
    assert key not in launched.log()
    assert (number is None) == ("starting it again" not in launched.log())
