"""A log's lines are whole, whatever stops the writer."""

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.records.append_file import AppendError, AppendFile

LINES = st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"\n", b"") + b"\n"), max_size=12)

FILL_THE_DISK = """
import json, sys
from pathlib import Path
from tasks.records.append_file import AppendError, AppendFile
path, returned = Path(sys.argv[1]), 0
with AppendFile(path) as log:
    try:
        while True:
            log.append(b"x" * 999 + b"\\n")
            returned += 1
    except AppendError as exc:
        found = {"errno": exc.errno, "filename": exc.filename, "text": str(exc)}
    print(json.dumps({**found, "returned": returned, "content": path.read_bytes().count(b"\\n"),
                      "size": path.stat().st_size, "counted": log.size}))
"""

APPEND_FOREVER = """
import os, sys
from pathlib import Path
from tasks.records.append_file import AppendFile
log, number = AppendFile(Path(sys.argv[1])), 0
while True:
    log.append(b"%d:" % number + b"x" * 200_000 + b"\\n")
    os.write(1, b".")
    number += 1
"""


@contextlib.contextmanager
def file_size_limit(size):
    """No file may grow past `size`: a write is cut short first and refused then, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_lines_follow_each_other_and_the_size_is_told(tmp_path):
    """Each append returns where its line ends, also after the file was opened again."""
    path = tmp_path / "new" / "log.jsonl"
    with AppendFile(path) as log:
        assert (log.size, log.cut_bytes) == (0, 0)
        assert log.append(b"one\n") == 4
    with AppendFile(path) as log:
        assert (log.size, log.cut_bytes) == (4, 0)
        assert log.append(b"two\nthree\n") == 14 == log.size
        log.sync()
    assert path.read_bytes() == b"one\ntwo\nthree\n"


@given(lines=LINES, data=st.data())
def test_a_file_cut_anywhere_keeps_its_whole_lines(lines, data):
    """Opening cuts what follows the last newline, says how much, and appends after it."""
    whole = b"".join(lines)
    torn = whole[: data.draw(st.integers(0, len(whole)), label="cut")]
    kept = torn[: torn.rfind(b"\n") + 1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(torn)
        with AppendFile(path) as log:
            assert (log.size, log.cut_bytes) == (len(kept), len(torn) - len(kept))
            log.append(b"next\n")
        assert path.read_bytes() == kept + b"next\n"


@pytest.mark.parametrize("whole", [b"", b"\n", b"first\n", b"x" * (1 << 20) + b"\n"])
@pytest.mark.parametrize("torn_bytes", [0, 1, (1 << 20) - 1, 1 << 20, 3 << 20])
def test_a_torn_line_of_megabytes_is_cut(tmp_path, whole, torn_bytes):
    """The search for the last newline does not end at a chunk of the file."""
    path = tmp_path / "log"
    path.write_bytes(whole + b"y" * torn_bytes)
    with AppendFile(path) as log:
        assert (log.size, log.cut_bytes) == (len(whole), torn_bytes)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", [b"", b"no newline", b"one\ntwo"])
def test_a_line_without_its_newline_is_refused(tmp_path, line):
    """What would be cut at the next opening is not written at all."""
    path = tmp_path / "log"
    with AppendFile(path) as log, pytest.raises(ValueError, match="must end with a newline"):
        log.append(line)
    assert path.read_bytes() == b""


@settings(max_examples=50)
@given(lines=LINES, limit=st.integers(0, 200))
def test_a_refused_write_leaves_the_lines_that_were_appended(lines, limit):
    """Whatever does not fit is refused whole; a shorter line may still fit, and none is damaged."""
    with tempfile.TemporaryDirectory() as folder:
        path, written = Path(folder) / "log", b""
        with AppendFile(path) as log, file_size_limit(limit):
            for line in lines:
                if len(written) + len(line) <= limit:
                    log.append(line)
                    written += line
                else:
                    with pytest.raises(AppendError, match=f"{len(line)} bytes could not") as caught:
                        log.append(line)
                    assert caught.value.filename == str(path)
                assert log.size == len(written)
        assert path.read_bytes() == written


def test_a_full_disk_leaves_whole_lines_and_names_the_path(tmp_path):
    """ENOSPC in the middle of a line: nothing of that line stays, and the message says what to do."""
    mount = f"mount -t tmpfs -o size=64k none '{tmp_path}'"
    run = f"{mount} && exec '{sys.executable}' -c \"$0\" '{tmp_path}/log'"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", run, FILL_THE_DISK], capture_output=True, text=True, check=False
    )
    if done.returncode and "Error" not in done.stderr:
        pytest.skip(f"no private tmpfs here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errno"] == errno.ENOSPC
    assert found["filename"] == f"{tmp_path}/log"
    assert "the disk is full: 1000 bytes could not be appended" in found["text"]
    assert 50 < found["returned"] == found["content"]
    assert found["size"] == found["counted"] == 1000 * found["returned"]


def test_an_interrupt_in_the_middle_of_a_line_leaves_no_part_of_it(tmp_path, monkeypatch):
    """Ctrl-C between two short writes: the next line does not continue the torn one."""
    write, path = os.write, tmp_path / "log"

    def write_half_then_interrupt(fd, data):
        monkeypatch.setattr(os, "write", interrupt)
        return write(fd, data[: len(data) // 2])

    def interrupt(fd, data):
        raise KeyboardInterrupt

    with AppendFile(path) as log:
        log.append(b"kept\n")
        monkeypatch.setattr(os, "write", write_half_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.append(b"interrupted\n")
        monkeypatch.setattr(os, "write", write)
        assert log.append(b"next\n") == 10
    assert path.read_bytes() == b"kept\nnext\n"


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    """The kernel may take a part of a line; the rest follows."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    with AppendFile(tmp_path / "log") as log:
        log.append(b"a longer line\n")
    assert (tmp_path / "log").read_bytes() == b"a longer line\n"


def test_a_file_that_cannot_be_cut_back_takes_no_more_lines(tmp_path, monkeypatch):
    """A line after a torn one would be lost with it, so it is refused; the next opening repairs the file."""
    path = tmp_path / "log"

    def fail(fd, size):
        raise OSError(errno.EIO, "Input/output error")

    with AppendFile(path) as log:
        log.append(b"kept\n")
        with monkeypatch.context() as patch, file_size_limit(8):
            patch.setattr(os, "ftruncate", fail)
            with pytest.raises(AppendError, match=r"bytes could not be appended.*log"):
                log.append(b"torn line\n")
        with pytest.raises(AppendError):
            log.append(b"n\n")
    assert path.read_bytes() == b"kept\ntor"
    with AppendFile(path) as log:
        assert log.cut_bytes == 3
    assert path.read_bytes() == b"kept\n"


def test_a_closed_file_refuses_lines(tmp_path):
    """Closing twice is fine, appending afterwards is not."""
    log = AppendFile(tmp_path / "log")
    log.close()
    log.close()
    with pytest.raises(AppendError):
        log.append(b"late\n")


def test_a_failed_opening_closes_the_file(tmp_path, monkeypatch):
    """No descriptor is left behind when the file cannot be repaired."""

    def fail(fd, size):
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "log").write_bytes(b"torn")
    before = set(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError, match="Input/output"):
        AppendFile(tmp_path / "log")
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize("lines_before_the_kill", [1, 2, 7, 20])
def test_a_killed_writer_loses_nothing_that_was_appended(tmp_path, lines_before_the_kill):
    """After a kill -9, each acknowledged line is there once, and a torn one at the end is cut."""
    path = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", APPEND_FOREVER, path], stdout=subprocess.PIPE) as writer:
        acknowledged = len(writer.stdout.read(lines_before_the_kill))
        writer.kill()
        acknowledged += len(writer.stdout.read())
    AppendFile(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert acknowledged <= len(lines) <= acknowledged + 1
    assert lines == [b"%d:" % number + b"x" * 200_000 + b"\n" for number in range(len(lines))]
