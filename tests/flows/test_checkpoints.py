"""Checkpoints in the real Prefect result store: whole, JSON only, and replaced."""

import asyncio
import json
import logging
import signal
import subprocess
import sys

import pytest
from prefect.serializers import PickleSerializer
from prefect.settings import PREFECT_RESULTS_LOCAL_STORAGE_PATH

from tasks.checkpoints import PrefectCheckpointStore, make_checkpoint_key

pytestmark = pytest.mark.prefect

WRITE_FOR_EVER = """
import asyncio, sys
from tasks.checkpoints import PrefectCheckpointStore
async def main():
    store = PrefectCheckpointStore(sys.argv[1])
    number = 0
    while True:
        number += 1
        await store.save({"number": number, "filler": "x" * 200_000})
        if number == 3:
            print("writing", flush=True)
asyncio.run(main())
"""


@pytest.fixture
def warnings_logged():
    """Messages of our logger; Prefect's logging set-up takes caplog's handler off the root."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tasks.checkpoints").addHandler(handler)
    yield messages
    logging.getLogger("tasks.checkpoints").removeHandler(handler)


def _path(key):
    return PREFECT_RESULTS_LOCAL_STORAGE_PATH.value() / "checkpoints" / key


def test_a_checkpoint_is_read_back_by_another_store(prefect_url):
    """What one process saved, the next one loads; the last save wins."""
    asyncio.run(PrefectCheckpointStore("again").save({"rows": 1}))
    asyncio.run(PrefectCheckpointStore("again").save({"rows": 2, "finish_reasons": {"stop": 2}}))
    assert asyncio.run(PrefectCheckpointStore("again").load()) == {"rows": 2, "finish_reasons": {"stop": 2}}


def test_a_missing_checkpoint_is_none(prefect_url):
    """There is nothing to resume from the first time."""
    assert asyncio.run(PrefectCheckpointStore("never").load()) is None


@pytest.mark.parametrize(
    "serializer",
    [{"type": "pickle"}, {"type": "json", "jsonlib": "json", "object_decoder": "os.system"}, {}],
)
def test_a_record_that_names_another_serializer_is_refused(prefect_url, serializer, warnings_logged):
    """Prefect would unpickle it or import what it names; we say so and count the rows again."""
    asyncio.run(PrefectCheckpointStore("evil").save({"rows": 1}))
    record = json.loads(_path("evil").read_text())
    record["metadata"]["serializer"] = serializer
    if serializer.get("type") == "pickle":
        record["result"] = PickleSerializer().dumps({"rows": 9}).decode()
    _path("evil").write_text(json.dumps(record))
    assert asyncio.run(PrefectCheckpointStore("evil").load()) is None
    [warning] = warnings_logged
    assert "cannot be read" in warning


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"metadata": {}, "result": "1"}'])
def test_a_damaged_checkpoint_is_none(prefect_url, content):
    """Nothing on disk can make a run fail to start."""
    asyncio.run(PrefectCheckpointStore("torn").save({"rows": 1}))
    _path("torn").write_bytes(content)
    assert asyncio.run(PrefectCheckpointStore("torn").load()) is None


def test_a_kill_in_a_write_leaves_a_whole_checkpoint(prefect_url):
    """Kill -9 in a loop of writes: every time the old one or the new one is there, never a part."""
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, "killed"], stdout=subprocess.PIPE)
        with writer, writer.stdout as output:
            assert output.readline() == b"writing\n"
            writer.send_signal(signal.SIGKILL)
        checkpoint = asyncio.run(PrefectCheckpointStore("killed").load())
        assert checkpoint is not None
        assert len(checkpoint["filler"]) == 200_000


def test_the_key_tells_folders_fingerprints_and_datasets_apart(tmp_path):
    """Two runs never share a checkpoint; the same run always finds its own."""
    keys = {
        make_checkpoint_key(folder, fingerprint={"model": fingerprint}, dataset=dataset)
        for folder in (tmp_path / "a", tmp_path / "b")
        for fingerprint in ("1", "2")
        for dataset in ("x", "y")
    }
    assert len(keys) == 8
    again = make_checkpoint_key(
        tmp_path / "c" / ".." / "a", fingerprint={"model": "1", "datasets": {"x": 1}}, dataset="x"
    )
    assert again in keys
