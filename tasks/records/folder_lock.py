"""One writer a folder at a time: of a dataset, and of a whole run.

Knows an fcntl lock and who holds it; the kernel releases it when the holder dies, however it dies,
so a lock is never stale.
"""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

DATASET_LOCK, RUN_LOCK = "generate.lock", "run.lock"


class FolderLockedError(RuntimeError):
    """Another process writes this folder; the message names it."""


@contextlib.contextmanager
def hold_folder_lock(folder: Path, name: str = DATASET_LOCK) -> Iterator[None]:
    """Hold a lock file of the folder while the block runs.

    Raises:
        FolderLockedError: another process (or another task of this one) holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(fd)
            raise FolderLockedError(
                f"{folder} is being written by {holder}; wait until that run has ended or stop it. "
                "Nothing was changed."
            ) from None
        with contextlib.suppress(OSError):  # a full disk: who holds it is a help, the lock is what counts
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield
    finally:
        os.close(fd)


def _read_holder(fd: int) -> str:
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
