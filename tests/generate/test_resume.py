"""A resume asks what is left, and counts what is there."""

import asyncio

import pytest
from fake_sglang import FakeServer, wait_until
from generation_support import (
    DictStore,
    serve,
)

from tasks.records.folder_lock import FolderLockedError
from tasks.records.response_log import RESPONSES


def test_resume_generates_nothing_twice(make):
    """Three runs that each do a part answer every prompt once in all."""
    dataset, server = make(prompts=60, long_every=6), FakeServer()
    results = [dataset.run(server, max_samples=cap) for cap in (10, 31, None)]
    dataset.check_complete(server)
    assert [result.new_rows for result in results] == [10, 21, 29]
    assert set(server.answered.values()) == {1}
    assert "from the checkpoint, 0 rows read" in results[1].resumed


def test_resume_without_a_checkpoint_counts_the_rows(make):
    """The log is the truth: a lost checkpoint costs a scan and nothing else."""
    dataset, server = make(), FakeServer()
    dataset.run(server, max_samples=15)
    dataset.store = DictStore()
    result = dataset.run(server)
    dataset.check_complete(server)
    assert "by counting every row, 15 rows read" in result.resumed
    assert set(server.answered.values()) == {1}


def test_resume_with_an_old_checkpoint_reads_the_tail(make):
    """Rows after the checkpoint are found in the log."""
    dataset, server = make(), FakeServer()
    dataset.run(server, max_samples=10)
    old = dataset.store.text
    dataset.run(server, max_samples=25)
    dataset.store.text = old
    result = dataset.run(server)
    assert "15 rows read" in result.resumed
    dataset.check_complete(server)
    assert set(server.answered.values()) == {1}


@pytest.mark.parametrize("checkpoint", ["{}", '{"format": 1}', '{"lengths": [1]}', '{"lengths": 3}'])
def test_checkpoint_that_is_none_is_not_trusted(make, checkpoint):
    """Whatever object the store returns, the run goes on from the log."""
    dataset, server = make(), FakeServer()
    dataset.run(server, max_samples=10)
    dataset.store.text = checkpoint
    dataset.run(server)
    dataset.check_complete(server)
    assert set(server.answered.values()) == {1}


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_torn_last_line_is_repaired_and_asked_again(make, cut):
    """What a power cut left of the last row is removed, and its prompt is asked again."""
    dataset, server = make(), FakeServer()
    dataset.run(server, max_samples=10)
    path = dataset.folder / RESPONSES
    path.write_bytes(path.read_bytes()[:-cut])
    result = dataset.run(server)
    dataset.check_complete(server)
    assert "torn last line" in result.resumed
    assert sum(server.answered.values()) == 41


class BrokenStore(DictStore):
    """A store that always raises."""

    async def load(self):
        """Fail."""
        raise OSError("no store")

    async def save(self, _):
        """Fail."""
        self.saves += 1
        raise OSError("no store")


class HangingStore(DictStore):
    """A store that never answers."""

    async def load(self):
        """Hang."""
        await asyncio.Event().wait()

    async def save(self, _):
        """Hang."""
        self.saves += 1
        await asyncio.Event().wait()


@pytest.mark.parametrize("store", [BrokenStore, HangingStore])
def test_checkpoint_store_that_fails_never_stops_generation(make, store, monkeypatch):
    """Neither loading nor saving has to succeed, or to answer at all."""
    monkeypatch.setattr("tasks.generate.opened_dataset.CHECKPOINT_TIMEOUT_S", 0.1)
    dataset, server = make(store=store()), FakeServer(latency_s=0.02)
    dataset.run(server, max_samples=15, checkpoint_every_s=0.02)
    dataset.run(server, checkpoint_every_s=0.02)
    dataset.check_complete(server)
    assert dataset.store.saves >= 2


def test_checkpoints_are_saved_while_it_runs_and_at_the_end(make):
    """The last checkpoint covers every row."""
    dataset, server = make(), FakeServer(latency_s=0.02)
    dataset.run(server, checkpoint_every_s=0.01)
    assert dataset.store.saves > 2
    assert dataset.store.rows == 40


def test_status_is_reported_while_it_runs(make):
    """Reports grow from nothing to everything, and make lines."""
    dataset, server = make(), FakeServer(latency_s=0.02)
    dataset.run(server, report_every_s=0.01, budget_tokens=2000)
    rows = [status.rows for status in dataset.statuses]
    assert rows[0] == 0
    assert rows == sorted(rows)
    assert rows[-1] == len(dataset.rows)
    assert all(status.to_line() for status in dataset.statuses)


def test_second_generation_of_the_same_folder_is_refused(make):
    """One writer at a time; the first one is not disturbed."""
    dataset, server = make(), FakeServer()

    async def scenario():
        async with serve(dataset.renderer, server, at_once=2) as resources:
            server.gate.clear()
            first = asyncio.create_task(dataset.generate(resources))
            await wait_until(lambda: server.in_flight)
            with pytest.raises(FolderLockedError):
                await dataset.generate(resources)
            server.gate.set()
            await first

    asyncio.run(scenario())
    dataset.check_complete(server)


def test_finished_dataset_whose_checkpoint_is_gone_is_counted_once(make):
    """The next run counts every row and saves that; the one after reads none, and saves nothing."""
    dataset, server = make(prompts=20), FakeServer()
    dataset.run(server)
    dataset.store.text = None
    assert "20 rows read" in dataset.run(server).resumed
    saves = dataset.store.saves
    assert "0 rows read" in dataset.run(server).resumed
    assert dataset.store.saves == saves
