"""A signal in the first half second ends the command with one line."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from deployments.start import main
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "flows.cli.app":
            os.kill(os.getpid(), int(sys.argv.pop()))
sys.meta_path.insert(0, Interrupt())
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_is_imported_is_one_line(number):
    """As later: exit 130 and no traceback."""
    argv = [sys.executable, "-c", SCRIPT, "export", "x", str(int(number))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    said = "draftmill: interrupted; nothing was begun\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


def test_it_is_the_command():
    """Under the signals that were there before."""
    script = "from deployments.start import main; main()"
    argv = [sys.executable, "-c", script, "export", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0
    assert "Exit status" in done.stdout
