"""What keeps artifacts up to date beside a run never holds it up, and ends with it."""

import asyncio
import logging

import pytest

from tasks import artifacts
from tasks.artifacts import artifact_key, run_artifact_key, show_beside


def test_a_show_that_hangs_or_fails_holds_up_nothing(monkeypatch, caplog):
    """The block goes on meanwhile; its end waits no longer than the limit, and nothing is raised or said."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(artifacts, "LAST_CALL_S", 0.05)
    calls = []

    async def run():
        hangs, before = asyncio.Event(), asyncio.all_tasks()

        async def fail_then_hang(ended):
            calls.append(ended)
            if len(calls) < 3:
                raise OSError("the server is away")
            hangs.set()
            await asyncio.Event().wait()

        async with show_beside(fail_then_hang, every_s=0.01):
            await hangs.wait()
        return asyncio.all_tasks() == before

    assert asyncio.run(asyncio.wait_for(run(), 60))
    assert calls == [False] * 3
    assert not caplog.records


def test_the_end_of_a_block_is_shown_however_it_ends():
    """A call in progress is let finish, then comes the last one; the block's own error gets out."""
    calls = []

    async def note(ended):
        await asyncio.sleep(0)
        calls.append(ended)

    async def run():
        async with show_beside(note, every_s=60):
            await asyncio.sleep(0)
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        asyncio.run(run())
    assert calls == [False, True]


def test_a_cancelled_block_is_cancelled_and_leaves_no_task():
    """Its end is shown all the same; a second cancel does not wait for that."""

    async def run():
        inside, at_the_end, before = asyncio.Event(), asyncio.Event(), asyncio.all_tasks()

        async def hang_at_the_end(ended):
            if ended:
                at_the_end.set()
                await asyncio.Event().wait()

        async def block():
            async with show_beside(hang_at_the_end, every_s=60):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(block())
        for reached in (inside, at_the_end):
            await reached.wait()
            task.cancel()
        await asyncio.wait({task})
        return task.cancelled(), asyncio.all_tasks() == before

    assert asyncio.run(asyncio.wait_for(run(), 60)) == (True, True)


def test_keys_are_what_prefect_accepts(tmp_path):
    """Whatever a folder or dataset is called; two folders of one name have two keys."""
    assert artifact_key("progress", "B1_Glaive é") == "progress-b1-glaive"
    one, other = (run_artifact_key(tmp_path / name / "Müller_v1", "progress") for name in ("x", "y"))
    assert one != other
    assert one.startswith("run-m-ller-v1-")
