"""The llama.cpp server inside this process, and the few calls that are made to it.

Knows xllamacpp and llama.cpp's own HTTP; knows nothing of SGLang.
Invariant: every id that llama.cpp sampled is returned. Its streaming replies lose the ids of tokens that
end inside a multi-byte character, so only whole replies are asked for (see decoding.py for how).
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import select
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serving.embedded.errors import EngineError, ModelError
from serving.embedded.slots import POLL_S

# Read by libgomp when it is loaded, so they must be set before xllamacpp is imported. Otherwise OpenMP's
# threads spin at every barrier: on a busy machine 32 tokens took 75 s, against 3.2 s with these.
_OPENMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}

_REPLY_FIELDS = ["tokens", "stop_type", "timings"]
_SHORT_CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Segment:
    """What one call to llama.cpp brought."""

    tokens: list[int]
    ended_by_model: bool
    """The last token is one of the model's own end tokens."""
    cached_tokens: int
    prompt_s: float


class LlamaBackend:
    """A loaded model; `complete` may be called from any number of threads."""

    def __init__(self, gguf: Path, *, slots: int, context_length: int, threads: int) -> None:
        """Load the model; this takes about a second for the demo model.

        Args:
            gguf: The model file.
            slots: How many requests are decoded at once.
            context_length: Tokens per slot, prompt and answer together.
            threads: CPU threads of the decoder.

        Raises:
            ModelError: the file cannot be loaded, or the context is longer than the model was trained for.
            EngineError: xllamacpp is not installed or cannot be imported.
        """
        self._key = secrets.token_hex(16)  # the inner port is open to every local process otherwise
        self._server = _start(gguf, slots, context_length, threads, self._key)
        address = urlsplit(self._server.listening_address)
        self._host, self._port = address.hostname or "127.0.0.1", address.port
        meta = self._short_call("GET", "/v1/models")["data"][0]["meta"]
        self.vocab_size = int(meta["n_vocab"])
        trained = int(meta["n_ctx_train"])
        if context_length > trained:
            raise ModelError(
                f"context length {context_length} is more than {gguf.name} was trained for ({trained})"
            )

    def complete(self, body: Mapping[str, Any], *, cancelled: Callable[[], bool]) -> Segment | None:
        """Sample one segment; None when `cancelled` turned true before it was whole.

        Raises:
            EngineError: llama.cpp refused the call or died.
        """
        payload = {
            **body,
            "return_tokens": True,
            "response_fields": _REPLY_FIELDS,
        }
        connection = self._connect(None)
        try:
            _send(connection, "POST", "/completion", payload, self._key)
            if not _wait_readable(connection.sock, cancelled):
                return None  # closing the connection makes llama.cpp drop the task within a second
            reply = _receive(connection)
        except (OSError, http.client.HTTPException) as exc:
            raise EngineError(f"llama.cpp did not answer: {exc!r}") from exc
        finally:
            connection.close()
        return Segment(
            tokens=reply["tokens"],
            ended_by_model=reply["stop_type"] == "eos",
            cached_tokens=max(0, int(reply["timings"]["cache_n"])),
            prompt_s=reply["timings"]["prompt_ms"] / 1000,
        )

    def tokenize(self, text: str) -> list[int]:
        """Return llama.cpp's own ids of a text, special tokens recognised and none added."""
        body = {"content": text, "add_special": False, "parse_special": True}
        tokens: list[int] = self._short_call("POST", "/tokenize", body)["tokens"]
        return tokens

    def _connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _short_call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        connection = self._connect(_SHORT_CALL_TIMEOUT_S)
        try:
            _send(connection, method, path, body, self._key)
            return _receive(connection)
        except (OSError, http.client.HTTPException) as exc:
            raise EngineError(f"llama.cpp did not answer {path}: {exc!r}") from exc
        finally:
            connection.close()


def _start(gguf: Path, slots: int, context_length: int, threads: int, key: str) -> Any:
    for name, value in _OPENMP.items():
        os.environ.setdefault(name, value)
    try:
        import xllamacpp  # here: after the environment is set, and only where the engine runs
    except ImportError as exc:
        raise EngineError(
            f"the embedded engine needs xllamacpp ({exc}): pip install 'draftmill[embedded]'; "
            "where libgomp.so.1 is missing, install the system package libgomp1"
        ) from exc
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_parallel = slots
    params.n_ctx = context_length * slots  # llama.cpp divides it between the slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.api_keys = [key]
    params.ctx_shift = False  # never drop the start of a prompt silently
    params.cache_ram_mib = 0
    params.warmup = False
    params.ui = False
    params.verbosity = 0
    try:
        return xllamacpp.Server(params)
    except RuntimeError as exc:
        raise ModelError(
            f"llama.cpp cannot load {gguf} ({exc}): the file may be cut short, or {slots} slots of "
            f"{context_length} tokens may need more memory than there is"
        ) from exc


def _send(
    connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None, key: str
) -> None:
    payload = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request(method, path, payload, headers)


def _receive(connection: http.client.HTTPConnection) -> Any:
    response = connection.getresponse()
    raw = response.read()
    try:
        reply = json.loads(raw)
    except ValueError as exc:
        raise EngineError(f"llama.cpp answered {response.status} without JSON: {raw[:200]!r}") from exc
    if response.status != http.HTTPStatus.OK:
        raise EngineError(f"llama.cpp answered {response.status}: {reply.get('error', reply)}")
    return reply


def _wait_readable(sock: socket.socket, cancelled: Callable[[], bool]) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    while not poller.poll(POLL_S * 1000):
        if cancelled():
            return False
    return True
