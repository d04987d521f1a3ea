"""Whether a port is free, and who has it.

Knows sockets and Linux's /proc; opens no connection.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from serving.client.errors import PortTaken

_LISTENING = "0A"


def check_port_is_free(port: int) -> None:
    """Find a taken port before minutes of loading.

    SGLang looks only when all is loaded, and then takes the answers of the other server for its own: its
    warm-up succeeds and its log says that it is ready (0.5.23).

    Raises:
        PortTaken: names the process that has it, where that can be seen.
    """
    with contextlib.closing(socket.socket()) as probe:
        # As the server does: connections of one that has just ended are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise PortTaken(f"port {port} cannot be used: {exc.strerror}; choose another one") from exc
            holder = find_listener(port) or "another process"
            raise PortTaken(f"port {port} is taken by {holder}; end it, or choose another port") from exc


def find_listener(port: int) -> str | None:
    """The process that listens on a port, as `process 12 (python -m x)`; None when it cannot be seen."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or ended meanwhile
            if any(str(fd.readlink()) in sockets for fd in (process / "fd").iterdir()):
                return f"process {process.name} ({_name(process)})"
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    inodes.add(fields[9])
    return inodes


def _name(process: Path) -> str:
    """The command without its options, whose values may be secret."""
    words = []
    for word in (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:3]:
        if word.startswith("--"):
            break
        words.append(word)
    return " ".join(words).strip() or (process / "comm").read_text().strip()
