"""The engine: requests in, answers out, over one loaded model.

Knows slots, segments, validation and aborts; knows no HTTP. Every method may be called from any thread.
Invariant: whatever ends a request (an answer, an abort, a lost client, an error), its slot comes back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from serving.embedded.backend import LlamaBackend
from serving.embedded.decoding import Decoding
from serving.embedded.errors import ModelError, RequestError
from serving.embedded.model import ModelFiles
from serving.embedded.sampling import SamplingParams
from serving.embedded.slots import SlotPool

_THROUGHPUT_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue."""

    rid: str
    input_ids: list[int]
    params: SamplingParams
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request, or of its part so far when `finish_reason` is None."""

    rid: str
    text: str
    output_ids: list[int]
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    cached_tokens: int
    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is."""

    running: int
    waiting: int
    used_tokens: int
    tokens_per_s: float


@dataclass(slots=True)
class _Live:
    request: Request
    limit: int
    aborted: bool = False
    tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    started: float = field(default_factory=time.monotonic)


class Engine:
    """A loaded model with its tokenizer and its slots."""

    def __init__(self, files: ModelFiles, *, slots: int, context_length: int, threads: int) -> None:
        """Load the model; arguments and errors as in `LlamaBackend`."""
        self.slots = slots
        self.context_length = context_length
        self._tokenizer = _load_tokenizer(files.tokenizer_dir)
        self._backend = LlamaBackend(files.gguf, slots=slots, context_length=context_length, threads=threads)
        self.vocab_size = self._backend.vocab_size
        if self._tokenizer.get_vocab_size() > self.vocab_size:
            raise ModelError(
                f"the tokenizer in {files.tokenizer_dir} has {self._tokenizer.get_vocab_size()} tokens, "
                f"the model {files.gguf.name} only {self.vocab_size}: they do not belong together"
            )
        self._pool = SlotPool(slots)
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}
        self._recent: deque[tuple[float, int]] = deque()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def generate(
        self,
        requests: Sequence[Request],
        *,
        gone: Callable[[], bool] = lambda: False,
        on_partial: Callable[[Answer], None] | None = None,
    ) -> list[Answer]:
        """Answer requests, in their order; all are refused when one of them is.

        Args:
            requests: What to answer.
            gone: Whether nobody waits for the answers any more; asked several times a second.
            on_partial: Called after each segment that does not finish an answer.

        Raises:
            RequestError: a request is out of bounds, or its rid is in use.
            EngineError: llama.cpp failed.
        """
        lives = [_Live(request, self._check(request)) for request in requests]
        with self._admitted(lives):
            if len(lives) == 1:
                return [self._answer(lives[0], gone, on_partial)]
            with ThreadPoolExecutor(max_workers=min(len(lives), self.slots)) as threads:
                return list(threads.map(lambda live: self._answer(live, gone, on_partial), lives))

    def abort(self, rid: str) -> None:
        """Abort the request with exactly this rid, if there is one."""
        with self._lock:
            if live := self._live.get(rid):
                live.aborted = True

    def abort_all(self) -> None:
        """Abort every request, running or waiting."""
        with self._lock:
            for live in self._live.values():
                live.aborted = True

    def flush_cache(self) -> bool:
        """Forget cached prefixes; does nothing and returns False while requests run."""
        return self._pool.flush()

    def load(self) -> Load:
        """Return how busy the engine is."""
        now = time.monotonic()
        with self._lock:
            running = self._pool.running
            self._forget_old(now)
            return Load(
                running=running,
                waiting=max(0, len(self._live) - running),
                used_tokens=sum(live.tokens for live in self._live.values()),
                tokens_per_s=sum(count for _, count in self._recent) / _THROUGHPUT_WINDOW_S,
            )

    def _check(self, request: Request) -> int:
        """Refuse what would crash or be cut by a real server; return the number of ids to sample at most."""
        size, context = len(request.input_ids), self.context_length
        if size == 0:
            raise RequestError("input_ids must not be empty")
        if min(request.input_ids) < 0 or max(request.input_ids) >= self.vocab_size:
            raise RequestError(f"input_ids must be within [0, {self.vocab_size - 1}]")
        if size >= context:
            raise RequestError(
                f"The input ({size} tokens) is longer than the model's context length ({context} tokens)."
            )
        wanted = request.params.max_new_tokens
        if wanted is not None and request.params.max_new_tokens_given and size + wanted > context:
            raise RequestError(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. "
                f"You requested a total of {size + wanted} tokens: {size} tokens from the input messages and "
                f"{wanted} tokens for the completion."
            )
        return context - size if wanted is None else min(wanted, context - size)

    @contextlib.contextmanager
    def _admitted(self, lives: Sequence[_Live]) -> Iterator[None]:
        counts = Counter(live.request.rid for live in lives)
        with self._lock:
            taken = [rid for rid, count in counts.items() if count > 1 or rid in self._live]
            if taken:
                raise RequestError(f"Duplicate request ID detected: {', '.join(taken)}")
            self._live.update((live.request.rid, live) for live in lives)
        try:
            yield
        finally:
            with self._lock:
                for rid in counts:
                    del self._live[rid]

    def _answer(
        self,
        live: _Live,
        gone: Callable[[], bool],
        on_partial: Callable[[Answer], None] | None,
    ) -> Answer:
        request = live.request
        decoding = Decoding(
            request.input_ids,
            request.params,
            limit=live.limit,
            decode=self._decode,
            sample_index=request.sample_index,
        )

        def cancelled() -> bool:
            return live.aborted or gone()

        with self._pool.hold(request.input_ids, cancelled=cancelled) as slot:
            live.queue_s = time.monotonic() - live.started
            while decoding.finish_reason is None:
                if slot is None or cancelled():
                    decoding.abort()
                    break
                body = {**decoding.next_body(), "id_slot": slot.index, "cache_prompt": bool(slot.cached_ids)}
                segment = self._backend.complete(body, cancelled=cancelled)
                if segment is None:
                    continue
                if not decoding.output_ids:
                    live.cached_tokens = segment.cached_tokens
                    live.first_token_s = live.queue_s + segment.prompt_s
                decoding.feed(segment)
                slot.cached_ids = decoding.all_ids
                self._count(live, len(segment.tokens), len(slot.cached_ids))
                if decoding.finish_reason is None and on_partial is not None:
                    on_partial(_snapshot(live, decoding))
        return _snapshot(live, decoding)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _count(self, live: _Live, new_tokens: int, held_tokens: int) -> None:
        now = time.monotonic()
        with self._lock:
            live.tokens = held_tokens
            self._recent.append((now, new_tokens))
            self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _THROUGHPUT_WINDOW_S:
            self._recent.popleft()


def _snapshot(live: _Live, decoding: Decoding) -> Answer:
    return Answer(
        rid=live.request.rid,
        text=decoding.text(),
        output_ids=list(decoding.output_ids),
        finish_reason=decoding.finish_reason,
        prompt_tokens=len(live.request.input_ids),
        cached_tokens=live.cached_tokens,
        queue_s=live.queue_s,
        first_token_s=live.first_token_s,
        total_s=time.monotonic() - live.started,
    )


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # tokenizers raises bare Exception for a missing or broken file
        raise ModelError(f"the tokenizer {path} cannot be loaded: {exc}") from exc
