"""The task around a dataset's preparation."""

import asyncio
import threading
import time

import pytest

from tasks.prepare import task as prepare
from tasks.prepare.preparation import PrepareOptions


def test_a_task_that_is_cancelled_stops_its_thread(tmp_path, monkeypatch):
    """The process waits for its threads: Ctrl-C would else last as long as the source is large."""
    begun, stopped = threading.Event(), threading.Event()

    def prepare_for_long(*_, is_stopped, **__):
        begun.set()
        deadline = time.monotonic() + 120
        while not is_stopped() and time.monotonic() < deadline:
            time.sleep(0.01)
        if is_stopped():
            stopped.set()

    async def cancel():
        task = asyncio.create_task(prepare.prepare_prompts.fn(request))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    (tmp_path / "a.jsonl").write_text("{}\n")
    monkeypatch.setattr(prepare, "prepare", prepare_for_long)
    request = prepare.PrepareRequest(
        output_dir=tmp_path / "out",
        source=str(tmp_path / "a.jsonl"),
        options=PrepareOptions(name="a", adapter="text", seed=0),
        fingerprint={},
        details={},
    )
    asyncio.run(cancel())
    assert stopped.is_set()
