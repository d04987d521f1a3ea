"""The `draftmill` command from its first moment: half a second of imports can be interrupted, too.

Knows signals; what the command does is deployments/cli.py's. Invariant: its own imports take no time.
"""

import signal
import sys


def main() -> None:
    """Entry point of the `draftmill` command."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from deployments.cli import main as run_command
    except KeyboardInterrupt:
        sys.stderr.write("draftmill: interrupted; nothing was begun\n")
        sys.exit(130)
    signal.signal(signal.SIGTERM, before)
    run_command()
