"""Signals end a run with its exit code, however fast they come."""

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, os, signal, sys
from flows.cli.interrupts import run_until_interrupted

async def work(signals):
    for left in reversed(range(signals)):
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not left:
                print("saved")
                raise

sys.exit(run_until_interrupted(work(int(sys.argv[1])), exit_code=130, last_words="the last words"))
"""


@pytest.mark.parametrize(("signals", "out", "err"), [(1, "saved\n", ""), (2, "", "the last words\n")])
def test_a_signal_cancels_and_a_second_one_ends_at_once(signals, out, err):
    """The work may save on the first; the second waits for nothing, but says its last words."""
    argv = [sys.executable, "-c", SCRIPT, str(signals)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, out, err)
