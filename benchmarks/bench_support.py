"""What the benchmarks share: a server that answers at once, prepared prompts, and processes of their own."""

import asyncio
import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import orjson

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install PyTorch
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from tiny_tokenizer import VOCAB_SIZE, make_tokenizer

from serving.client.pool import ServerPool
from serving.client.sglang import SGLangClient
from tasks.generate.dispatch import DispatchRules
from tasks.generate.dispatch_permit import DispatchPermit
from tasks.generate.generation import GenerationRules, Resources
from tasks.generate.window import Window
from tasks.prepare.lane import Lane
from tasks.prepare.preparation import PROMPTS, REPORT, PrepareReport
from tasks.records.files import write_json_atomically
from tasks.records.prompt_file import IndexBuilder, hash_id
from tasks.records.rows import Prompt
from tasks.tokens.rendering import Renderer
from tasks.tokens.tokenizer import load_tokenizer

PROMPTS_KEY = "benchmark"
RULES = GenerationRules("bench", 1 << 60, DispatchRules({"temperature": 1.0, "top_p": 0.95}))

_Value = TypeVar("_Value")


class Server:
    """Where the server listens, and when its first request arrived (`time.perf_counter`)."""

    def __init__(self) -> None:
        self.port = multiprocessing.Value("i", 0)
        self.first_request_s = multiprocessing.Value("d", 0.0)

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port.value}"


class _Answerer(asyncio.Protocol):
    """Answers every POST at once; counts the prompt's ids, for the answer must tell them."""

    def __init__(self, ids: int, server: Server) -> None:
        self._reply = {
            "text": "x" * 4 * ids,
            "output_ids": [7 + n % 900 for n in range(ids)],
            "meta_info": {},
        }
        self._meta = {
            "finish_reason": {"type": "stop", "matched": 2},
            "completion_tokens": ids,
            "cached_tokens": 0,
        }
        self._server = server
        self._ready: dict[int, bytes] = {}
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._server.first_request_s.value:
            self._server.first_request_s.value = time.perf_counter()
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + size:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + size], self._buffer[end + 4 + size :]
            self._transport.write(self._answer(body))

    def _answer(self, body: bytes) -> bytes:
        prompt_tokens = len(orjson.loads(body)["input_ids"]) if body else 0
        if prompt_tokens not in self._ready:
            meta = {**self._meta, "prompt_tokens": prompt_tokens}
            content = orjson.dumps({**self._reply, "meta_info": meta})
            head = (
                f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            )
            self._ready[prompt_tokens] = head.encode() + content
        return self._ready[prompt_tokens]


def _serve(server: Server, ids: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: _Answerer(ids, server), "127.0.0.1", 0, backlog=1024)
        server.port.value = listener.sockets[0].getsockname()[1]
        await listener.serve_forever()

    asyncio.run(main())


@contextlib.contextmanager
def serve_apart(ids: int) -> Iterator[Server]:
    """A server in a process of its own; every answer has `ids` ids."""
    server = Server()
    process = multiprocessing.Process(target=_serve, args=(server, ids), daemon=True)
    process.start()
    try:
        while not server.port.value:
            time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        process.join()


class Checkpoints:
    """One checkpoint in memory, through JSON as a real store's."""

    def __init__(self, text: str = "null") -> None:
        self._text = text

    async def load(self) -> dict[str, Any] | None:
        """The last checkpoint."""
        checkpoint: dict[str, Any] | None = json.loads(self._text)
        return checkpoint

    async def save(self, checkpoint: dict[str, Any]) -> None:
        """Replace the checkpoint."""
        self._text = json.dumps(checkpoint)


def make_renderer(folder: Path) -> Renderer:
    """A small real tokenizer, written to `<folder>/tokenizer`."""
    return Renderer(load_tokenizer(str(make_tokenizer(folder / "tokenizer"))))


@contextlib.asynccontextmanager
async def open_resources(url: str, renderer: Renderer, *, connections: int) -> AsyncIterator[Resources]:
    """What `generate_dataset` needs, with one server and a window of `connections`."""
    lanes = {"short": Lane("short", connections, 2048), "long": Lane("long", 1, 2048)}
    pool = ServerPool([SGLangClient(url, vocab_size=VOCAB_SIZE, max_connections=connections + 8)])
    resources = Resources(pool, Window(lanes), renderer, 8192, DispatchPermit(1))
    try:
        yield resources
    finally:
        resources.threads.shutdown()
        await pool.close()


def write_prompts(folder: Path, count: int) -> None:
    """A prepared dataset of `count` short prompts, made without a source."""
    folder.mkdir(parents=True, exist_ok=True)
    index = IndexBuilder()
    with (folder / PROMPTS).open("wb") as out:
        for number in range(count):
            content = f"What is {number} times {number % 97}, and why?"
            prompt = Prompt(name_prompt(number), [{"role": "user", "content": content}])
            line = prompt.to_line()
            index.add(line, id_hash=hash_id(prompt.id))
            out.write(line)
    index.write(folder / PROMPTS)
    report = PrepareReport(
        PROMPTS_KEY, rows_read=count, conversations=count, prompts=count, duplicates=0, rejected={}
    )
    write_json_atomically(folder / REPORT, dataclasses.asdict(report))


def name_prompt(number: int) -> str:
    """The id of a prompt that `write_prompts` wrote."""
    return f"bench-{number:08d}"


def run_apart(function: Callable[..., _Value], *args: Any) -> _Value:
    """The value of a call in a new process: its memory and its imports are its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result()


def read_peak_rss_mib() -> float:
    """The most memory this process has held; `ru_maxrss` begins with what its parent held."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


class ProcessClock:
    """Times this process and its children, and looks at their memory twenty times a second.

    At the end it has `wall_s`, `cpu_s`, and `peak_mib`, the most RSS of all of them together.
    """

    def __enter__(self) -> "ProcessClock":
        self.peak_mib = 0.0
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._watch_memory)
        self._watch.start()
        self._started_s, self._started_cpu_s = time.perf_counter(), sum(os.times()[:4])
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = (
            time.perf_counter() - self._started_s,
            sum(os.times()[:4]) - self._started_cpu_s,
        )
        self._done.set()
        self._watch.join()

    def _watch_memory(self) -> None:
        while not self._done.wait(0.05):
            self.peak_mib = max(self.peak_mib, sum(map(_read_rss_mib, ["self", *_list_children()])))


def _list_children() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += (task / "children").read_text().split()
    return found


def _read_rss_mib(pid: str) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        return int(status.split("VmRSS:")[1].split()[0]) / 1024
    except (OSError, IndexError):  # it has ended
        return 0.0
