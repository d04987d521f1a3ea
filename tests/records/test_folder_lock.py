"""One writer a dataset, and a lock that is never stale."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tasks.records.folder_lock import FolderLockedError, hold_folder_lock

HOLD = """
import sys
from pathlib import Path
from tasks.records.folder_lock import hold_folder_lock
with hold_folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path until its standard input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def try_to_hold(folder):
    with hold_folder_lock(folder):
        return True


def test_a_second_process_is_refused_and_told_who_writes(tmp_path, holder):
    """The message names the folder, the process and the host."""
    with pytest.raises(FolderLockedError) as caught:
        try_to_hold(tmp_path)
    text = str(caught.value)
    assert f"process {holder.pid} on {socket.gethostname()};" in text
    assert str(tmp_path) in text


def test_a_refusal_leaves_the_lock_as_it_is(tmp_path, holder):
    """Being refused twice tells the same holder: the first refusal has neither written nor unlocked."""
    for _ in range(2):
        with pytest.raises(FolderLockedError, match=f"process {holder.pid} "):
            try_to_hold(tmp_path)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_lock_is_free_when_its_holder_is_gone(tmp_path, holder, end):
    """However the holder ends, the next one gets the lock at once."""
    holder.send_signal(end) if end else holder.stdin.close()
    holder.wait(timeout=30)
    assert try_to_hold(tmp_path)


def test_two_tasks_of_one_process_exclude_each_other(tmp_path):
    """The lock belongs to the block that holds it, not to the process."""
    with (
        hold_folder_lock(tmp_path / "dataset"),
        pytest.raises(FolderLockedError, match=f"process {os.getpid()} "),
    ):
        try_to_hold(tmp_path / "dataset")
    assert try_to_hold(tmp_path / "dataset")


def test_two_datasets_do_not_exclude_each_other(tmp_path):
    """Each folder has its own lock."""
    with hold_folder_lock(tmp_path / "one"):
        assert try_to_hold(tmp_path / "two")


def test_an_exception_frees_the_lock(tmp_path):
    """A block that fails leaves nothing held."""
    with pytest.raises(ZeroDivisionError), hold_folder_lock(tmp_path):
        raise ZeroDivisionError
    assert try_to_hold(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b'{"pid": 1}', b"\xff", b'{"pid": 1, "host": "x"}' * 9]
)
def test_a_lock_file_that_cannot_be_read_still_locks(tmp_path, content):
    """Whatever the file says, its holder is refused a companion, and its next holder writes its own name."""
    with hold_folder_lock(tmp_path):
        (tmp_path / "generate.lock").write_bytes(content)
        with pytest.raises(FolderLockedError, match="written by another process;"):
            try_to_hold(tmp_path)
    with hold_folder_lock(tmp_path), pytest.raises(FolderLockedError, match=f"process {os.getpid()} "):
        try_to_hold(tmp_path)


def test_a_full_disk_does_not_hinder_the_lock(tmp_path, monkeypatch):
    """The holder's name is a help; a row that does not fit says it better, with the path."""

    def fail(fd, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with hold_folder_lock(tmp_path), pytest.raises(FolderLockedError, match="another process"):
        try_to_hold(tmp_path)
