"""Checkpoints in the Prefect result store: small JSON results under a stable key.

Knows Prefect's storage and its traps; does not know what a checkpoint holds. Invariants: a reader finds
the old checkpoint or the new one, never a part; nothing that is read from disk is unpickled.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.filesystems import LocalFileSystem, WritableFileSystem
from prefect.results import ResultStore, aresolve_result_storage
from prefect.serializers import JSONSerializer
from prefect.settings import get_current_settings

from tasks.records.files import write_bytes_atomically
from tasks.records.run_file import hash_fingerprint

logger = logging.getLogger(__name__)


class CheckpointUnreadableError(ValueError):
    """A stored checkpoint that is damaged, or that another tool wrote."""


class AtomicLocalFileSystem(LocalFileSystem):
    """Prefect's local file system, but a write is whole or not at all.

    The stock block opens the file for writing: a kill -9 in a write loop left empty or torn files in 15
    of 25 tries (Prefect 3.9.1).
    """

    _block_type_name = "Atomic Local File System"
    _block_type_slug = "atomic-local-file-system"

    async def awrite_path(self, path: str, content: bytes) -> str:
        """Write to a temp file in the same folder, fsync, rename."""
        target = Path(self._resolve_path(path))
        await asyncio.to_thread(_write, target, content)
        return str(target)


class PrefectCheckpointStore:
    """One dataset's checkpoint under `checkpoints/<key>` in the default result storage.

    The default storage is the folder PREFECT_RESULTS_LOCAL_STORAGE_PATH, or the block that
    PREFECT_DEFAULT_RESULT_STORAGE_BLOCK names (S3, say).
    """

    def __init__(self, key: str) -> None:
        self.key = f"checkpoints/{key}"
        self._store: ResultStore | None = None

    async def load(self) -> dict[str, Any] | None:
        """The last checkpoint; None when there is none or it cannot be trusted, which is logged."""
        try:
            return await self.read()
        except CheckpointUnreadableError as exc:
            logger.warning("checkpoint %s cannot be read (%s); all rows are counted again", self.key, exc)
            return None

    async def read(self) -> dict[str, Any] | None:
        """The same for whoever only looks.

        Raises:
            CheckpointUnreadableError: there is one, and it cannot be trusted.
        """
        store = await self._open()
        content = await _read_bytes(store.result_storage, self.key)
        if content is None:
            return None
        try:
            _check_serializer(content)  # before Prefect reads it, in whatever way
            value = (await store.aread(self.key)).result
        except Exception as exc:
            raise CheckpointUnreadableError(str(exc)) from exc
        return value if isinstance(value, dict) else None

    async def save(self, checkpoint: dict[str, Any]) -> None:
        """Replace the checkpoint."""
        await (await self._open()).awrite(checkpoint, key=self.key)

    async def _open(self) -> ResultStore:
        if self._store is None:
            self._store = ResultStore(
                result_storage=await _resolve_storage(),
                serializer=JSONSerializer(),
                cache_result_in_memory=False,  # the cache goes stale when another process writes
            )
        return self._store


def make_checkpoint_key(output_dir: Path, *, fingerprint: Mapping[str, Any], dataset: str) -> str:
    """A stable name for one dataset of one run folder, safe as a file name.

    Of the fingerprint its datasets do not count: run.json has all of them, a session none.
    """
    shared = {name: value for name, value in fingerprint.items() if name != "datasets"}
    parts = json.dumps([str(output_dir.resolve()), hash_fingerprint(shared), dataset])
    return hashlib.sha256(parts.encode()).hexdigest()[:40]


async def _resolve_storage() -> WritableFileSystem:
    """Prefect's default result storage; a local one with whole writes.

    Prefect's own `aget_default_result_storage` leaves the client open with which it asks the server.
    """
    results = get_current_settings().results
    block: str | UUID | None = results.default_storage_block
    if block is None:
        async with get_client() as client:
            configuration = await client.read_server_default_result_storage()
        block = configuration.default_result_storage_block_id
    storage = None if block is None else await aresolve_result_storage(block)
    if storage is None or type(storage) is LocalFileSystem:
        basepath = str(results.local_storage_path) if storage is None else storage.basepath
        return AtomicLocalFileSystem(basepath=basepath)
    return storage


async def _read_bytes(storage: Any, key: str) -> bytes | None:
    """The stored record, or None: each kind of storage has an exception of its own for a missing key."""
    try:
        return bytes(await storage.aread_path(key))
    except Exception as exc:  # noqa: BLE001
        logger.debug("no checkpoint %s: %s", key, exc)
        return None


def _write(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(target, content)


def _check_serializer(content: bytes) -> None:
    """Refuse a record that names another serializer: Prefect would unpickle it, or import what it names."""
    plain = json.loads(JSONSerializer().model_dump_json())
    named = json.loads(content)["metadata"]["serializer"]
    if named != plain:
        raise ValueError(f"it names the serializer {named!r}")
