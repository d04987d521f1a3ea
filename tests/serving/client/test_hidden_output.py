"""What a guarded process writes reaches the log as it comes, without the secrets."""

import asyncio
import contextlib
import os
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.launch.guarded import GuardedProcess
from serving.launch.guardian import _copy_hidden
from serving.launch.redaction import REDACTED

KEY = 'k3y"with\\quotes'
WRITER = """
import os, sys, time
key = sys.argv[1]
os.write(1, f"args: {{'api_key': {key!r}}} ".encode())
os.write(1, b"loading 10%\\r")
for part in (key[:5], key[5:]):
    os.write(2, part.encode())
    time.sleep(0.2)
os.write(1, b" done" + key[:4].encode())
time.sleep(float(sys.argv[2]))
"""


async def run(log_path, *args, hide, look=lambda: None):
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    argv = [sys.executable, "-c", WRITER, *args]
    process = await GuardedProcess.start(argv, env=dict(os.environ), log=log, hide=hide)
    os.close(log)
    try:
        await asyncio.to_thread(look)
        return await process.wait()
    finally:
        await process.kill()


def test_a_key_is_not_in_the_log_however_it_is_written(tmp_path):
    """Quoted, in two parts, and begun but not ended."""
    log = tmp_path / "log"
    assert asyncio.run(run(log, KEY, "0", hide={KEY})) == 0
    assert log.read_bytes() == b"args: {'api_key': '<redacted>'} loading 10%\r<redacted> donek3y\""


def test_progress_without_a_line_end_is_seen_while_it_runs(tmp_path):
    """Progress bars end their lines with a carriage return: nothing waits for a line to be whole."""
    log = tmp_path / "log"

    def look():
        deadline = time.monotonic() + 60
        while b"loading 10%" not in log.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    async def scenario():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(120):
                looking = asyncio.create_task(run(log, KEY, "600", hide={KEY}, look=look))
                while b"done" not in (log.read_bytes() if log.exists() else b""):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)

    asyncio.run(scenario())
    assert KEY.encode() not in log.read_bytes()


@given(
    parts=st.lists(st.sampled_from(["secret", "sec", "ret", "s", "rets", "x"]), max_size=12),
    secrets=st.sampled_from([["secret"], ["secrets", "secret"], ["rets", "secret"]]),
)
def test_whatever_the_pieces_nothing_else_changes(parts, secrets):
    """The copy is the text with each secret replaced, and has none in it."""
    source, sink = os.pipe()
    for part in parts:
        os.write(sink, part.encode())
    os.close(sink)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.launch.guardian._write_all", written.append)
        real_read = os.read
        patch.setattr("serving.launch.guardian.os.read", lambda fd, _size: real_read(fd, 3))
        _copy_hidden(source, [secret.encode() for secret in secrets])
    os.close(source)
    copied = b"".join(written).decode()
    assert not any(secret in copied for secret in secrets)
    if secrets == ["secret"]:
        assert copied == "".join(parts).replace("secret", REDACTED)
