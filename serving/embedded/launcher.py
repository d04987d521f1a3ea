"""Start the embedded engine in a process of its own, and stop it again.

Knows the command line of `python -m serving.embedded` and its ready file; loads no model itself, so a crash
of llama.cpp cannot take the caller along.
Invariant: however the block ends, the process is gone; and should the caller be killed, it ends by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from serving.embedded.errors import EmbeddedError
from serving.launch.processes import describe_tail, environment_without_secrets, open_log, stop_group

START_TIMEOUT_S = 600.0
"""Long, because the first start downloads the model."""

_POLL_S = 0.1
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Ready:
    url: str
    tokenizer_dir: Path
    model_id: str


class EmbeddedServer:
    """An embedded engine that lives as long as an `async with` block.

    Args:
        model: "demo", a .gguf file, or a folder with exactly one.
        log_file: Where the process's output goes (appended); its folder is created.
        slots: Requests decoded at once.
        context_length: Tokens per request, prompt and answer together.
        threads: CPU threads; None leaves the choice to the engine.
        cache_dir: Where the demo model is kept; None for the default.
        port: 0 takes a free one.
        served_model_name: The name in `/model_info`; None for the engine's own.
        start_timeout_s: How long the download and loading may take.
    """

    def __init__(
        self,
        *,
        model: str = "demo",
        log_file: Path,
        slots: int = 8,
        context_length: int = 2048,
        threads: int | None = None,
        cache_dir: Path | None = None,
        port: int = 0,
        served_model_name: str | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        options = {
            "--model": model,
            "--port": port,
            "--slots": slots,
            "--context-length": context_length,
            "--threads": threads,
            "--cache-dir": cache_dir,
            "--served-model-name": served_model_name,
        }
        self._options = [f"{name}={value}" for name, value in options.items() if value is not None]
        self._log_file = log_file
        self._log_start = 0
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._ready: _Ready | None = None

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return self._started().url

    @property
    def tokenizer_dir(self) -> Path:
        """The folder for `AutoTokenizer.from_pretrained`."""
        return self._started().tokenizer_dir

    @property
    def model_id(self) -> str:
        """The served model's name."""
        return self._started().model_id

    @property
    def pid(self) -> int:
        """The engine's process id, which is also its process group and session."""
        if self._process is None:
            raise EmbeddedError("the embedded engine was not started")
        return self._process.pid

    async def __aenter__(self) -> Self:
        """Start the engine and wait until it answers.

        Raises:
            EmbeddedError: it died, or was not ready in time; the message ends with its log's last lines.
        """
        with tempfile.TemporaryDirectory(prefix="draftmill-") as folder:
            ready_file = Path(folder) / "ready.json"
            try:
                await self._spawn(ready_file)
                async with asyncio.timeout(self._start_timeout_s):
                    self._ready = await self._wait_ready(ready_file)
            except TimeoutError as exc:
                await self._stop()
                raise EmbeddedError(
                    f"the embedded engine was not ready in {self._start_timeout_s:g} s{self._log_tail()}"
                ) from exc
            except BaseException:
                await self._stop()
                raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the engine: SIGTERM, a grace period, SIGKILL."""
        await self._stop()

    def _started(self) -> _Ready:
        if self._ready is None:
            raise EmbeddedError("the embedded engine was not started")
        return self._ready

    async def _spawn(self, ready_file: Path) -> None:
        log, self._log_start = open_log(self._log_file)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "serving.embedded"),
                *self._options,
                *("--ready-file", str(ready_file)),
                *("--exit-with-parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=environment_without_secrets(),  # the engine needs none
                start_new_session=True,  # a Ctrl-C for us is not one for it: we stop it ourselves
            )
        finally:
            os.close(log)

    async def _wait_ready(self, ready_file: Path) -> _Ready:
        process = self._process
        assert process is not None  # noqa: S101 - narrows the type: _spawn has just set it
        while (ready := _read_ready(ready_file)) is None:
            if process.returncode is not None:
                raise EmbeddedError(
                    f"the embedded engine ended with status {process.returncode} before it was ready"
                    f"{self._log_tail()}"
                )
            await asyncio.sleep(_POLL_S)
        async with httpx.AsyncClient(base_url=ready.url, trust_env=False) as client:  # no proxy to ourselves
            try:
                (await client.get("/ready")).raise_for_status()
            except httpx.HTTPError as exc:
                raise EmbeddedError(
                    f"the embedded engine does not answer: {exc!r}{self._log_tail()}"
                ) from exc
        return ready

    async def _stop(self) -> None:
        process = self._process
        self._ready = None
        if process is None or process.returncode is not None:
            return
        await stop_group(process, grace_s=_GRACE_S)

    def _log_tail(self) -> str:
        """Return the last lines that this start wrote, ready to be put behind a message."""
        return describe_tail(self._log_file, self._log_start)


def _read_ready(path: Path) -> _Ready | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return _Ready(content["url"], Path(content["tokenizer_dir"]), content["model_id"])
