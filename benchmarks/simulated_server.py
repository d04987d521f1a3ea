"""An SGLang server in virtual time: a model of continuous batching behind httpx's transport.

Knows how throughput is shared and how long an answer is; does not know datasets or budgets. n running
requests get T(n) = peak * n * (1 + k) / (n + k * W) tokens/s in equal shares; what is more than W waits in a
queue. k is the concavity. At 0 one request alone gets the whole peak, and an emptying window costs nothing;
at 1 half a window gets two thirds of the peak; the larger k is, the nearer T(n) is to n / W of it. On a real
server, too, each further request adds less than the one before. Prefill and network take no time here, and
no request decodes slower than another.
Invariant: time passed = tokens made / peak + lost_s.
"""

import asyncio
import hashlib
import heapq
import math
import selectors
import statistics
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

import httpx
import orjson

FULL_SPEED = 50.0  # tokens/s of one request in a full window
SIGMA = 0.8  # of the lognormal lengths

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class _VirtualSelector(selectors.DefaultSelector):
    """Moves the loop's clock instead of sleeping."""

    def __init__(self, loop: "VirtualLoop") -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if timeout is None and not events:
            raise RuntimeError(f"after {self._loop.now_s} s nothing is left that could happen")
        if timeout and not events:
            self._loop.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is ready.

    What is meant for a thread runs in the loop: it takes no virtual time, and runs are repeatable.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_VirtualSelector(self))

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self.now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Run it as the next thing that the loop does."""
        job = self.create_future()

        def work() -> None:
            if job.cancelled():
                return
            try:
                job.set_result(func(*args))
            except Exception as exc:  # noqa: BLE001  it is the waiter's, as with a thread
                job.set_exception(exc)

        self.call_soon(work)
        return job


class SimulatedServer(httpx.AsyncBaseTransport):
    """SGLang's /generate, answered by a model of shared throughput; keeps account of the time it lost."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, window: int, concavity: float, seed: int) -> None:
        self._loop = loop
        self._window = window
        self._concavity = concavity
        self._seed = seed
        self.peak = FULL_SPEED * window
        self.tokens = 0
        self.busy_s = self.running_s = self.lost_s = 0.0
        self._last_s = 0.0
        self._each = 0.0  # tokens that a request running since the start would have
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []  # by what `_each` is at their end
        self._queued: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        """Requests that decode now."""
        return len(self._running)

    def advance(self) -> None:
        """Bring the account up to now."""
        elapsed_s, self._last_s = self._loop.time() - self._last_s, self._loop.time()
        n = self.running
        throughput = self._throughput(n)
        self.lost_s += elapsed_s * (1.0 - throughput / self.peak)
        self.running_s += elapsed_s * n
        if n:
            self.busy_s += elapsed_s
            self._each += elapsed_s * throughput / n

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one prompt when its last token is there; there are no other pages."""
        if request.url.path != "/generate":
            return httpx.Response(404)
        body = orjson.loads(request.content)
        params = body["sampling_params"]
        wanted = self._choose_length(body["input_ids"], params["mean_tokens"])
        tokens = min(wanted, params["max_new_tokens"])
        done = self._loop.create_future()
        self._queued.append((tokens, done))
        self._step()
        await done
        self.tokens += tokens
        meta = {
            "finish_reason": {"type": "stop" if tokens == wanted else "length"},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": tokens,
        }
        ids = b"[" + b",".join([b"7"] * tokens) + b"]"
        content = b'{"text":"","output_ids":%b,"meta_info":%b}' % (ids, orjson.dumps(meta))
        return httpx.Response(200, content=content)

    def _throughput(self, n: int) -> float:
        return self.peak * n * (1 + self._concavity) / (n + self._concavity * self._window) if n else 0.0

    def _choose_length(self, input_ids: list[int], mean_tokens: float) -> int:
        """Lognormal by a hash of the prompt: the same in every run."""
        digest = hashlib.blake2b(f"{self._seed}:{input_ids}".encode(), digest_size=6).digest()
        share = (int.from_bytes(digest, "little") + 0.5) / 2**48
        normal = statistics.NormalDist().inv_cdf(share)
        return max(2, round(mean_tokens * math.exp(SIGMA * normal - SIGMA**2 / 2)))

    def _step(self) -> None:
        """End what is done, let in what waits, and come back when the next one is done."""
        self.advance()
        while self._running and self._running[0][0] <= self._each + 1e-6:
            heapq.heappop(self._running)[2].set_result(None)
        while self._queued and self.running < self._window:
            tokens, done = self._queued.popleft()
            heapq.heappush(self._running, (self._each + tokens, self._sent, done))
            self._sent += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if n := self.running:
            left = max(0.0, self._running[0][0] - self._each)
            self._timer = self._loop.call_later(left * n / self._throughput(n), self._step)
