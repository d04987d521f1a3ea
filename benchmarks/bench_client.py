"""Requests per second of the whole generation path beside a bare aiohttp loop, in one run.

Ours renders, sends, checks, appends, counts and checkpoints; the bare loop posts ready-made bodies and parses
the answers. The server answers at once, from a process of its own, with 1,500 ids. What is compared is the
ratio: absolute figures are the machine's.

Usage: python benchmarks/bench_client.py [--quick] [--requests N] [--connections N] [--ids N]
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tiny_tokenizer import VOCAB_SIZE, make_tokenizer

from serving.client import SGLangClient
from serving.pool import ServerPool
from tasks.core.prepare import PrepareOptions, prepare_prompts
from tasks.core.rendering import Renderer
from tasks.core.tokenizer import load_tokenizer
from tasks.core.window import Lane, Window
from tasks.dispatch import DispatchRules
from tasks.generation import GenerationRules, Resources, generate_dataset
from tasks.turn import Turn

PROMPT_WORDS = 60


class _Answerer(asyncio.Protocol):
    """Answers every POST at once; counts the prompt's ids, for the answer must tell them."""

    def __init__(self, ids: int) -> None:
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
        self._ready: dict[int, bytes] = {}
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
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


def _serve(port: Any, ids: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Answerer(ids), "127.0.0.1", 0, backlog=1024)
        port.value = server.sockets[0].getsockname()[1]
        await server.serve_forever()

    asyncio.run(main())


async def _run_bare(url: str, bodies: list[bytes], connections: int) -> None:
    left = iter(bodies)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def work() -> None:
            for body in left:
                async with session.post(f"{url}/generate", data=body) as reply:
                    orjson.loads(await reply.read())

        await asyncio.gather(*(work() for _ in range(connections)))


class _Memory:
    async def load(self) -> dict[str, Any] | None:
        return None

    async def save(self, checkpoint: dict[str, Any]) -> None:
        json.dumps(checkpoint)


async def _run_ours(url: str, folder: Path, connections: int, renderer: Renderer) -> None:
    lanes = {"short": Lane("short", connections, 2048), "long": Lane("long", 1, 2048)}
    pool = ServerPool([SGLangClient(url, vocab_size=VOCAB_SIZE, max_connections=connections + 8)])
    resources = Resources(pool, Window(lanes), renderer, 8192, Turn(1))
    rules = GenerationRules("bench", 1 << 60, DispatchRules({"temperature": 1.0, "top_p": 0.95}))
    try:
        await generate_dataset(
            folder, rules=rules, resources=resources, checkpoints=_Memory(), on_status=lambda _: None
        )
    finally:
        resources.threads.shutdown()
        await pool.close()


def _prepare(folder: Path, requests: int) -> None:
    source = folder / "source.jsonl"
    with source.open("wb") as out:
        for number in range(requests):
            words = " ".join(f"question{(number + n) % 97}" for n in range(PROMPT_WORDS // 6))
            row = {"id": str(number), "messages": [{"role": "user", "content": f"{number} {words}"}]}
            out.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    options = PrepareOptions(name="bench", adapter="messages", seed=0)
    prepare_prompts(folder / "bench", [source], options=options, source_sha256="x")


def _time(work: Any, requests: int) -> tuple[float, float]:
    """Requests per second, and CPU milliseconds per request of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(work)
    return requests / (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu) / requests


def main() -> None:
    """Run both and print them with their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=150)
    parser.add_argument("--ids", type=int, default=1_500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    requests = options.requests // 10 if options.quick else options.requests
    port = multiprocessing.Value("i", 0)
    server = multiprocessing.Process(target=_serve, args=(port, options.ids), daemon=True)
    server.start()
    while not port.value:
        time.sleep(0.05)
    url = f"http://127.0.0.1:{port.value}"
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        _prepare(folder, requests)
        renderer = Renderer(load_tokenizer(str(make_tokenizer(folder / "tokenizer"))))
        body = orjson.dumps(
            {"rid": "x", "input_ids": list(range(60)), "sampling_params": {"temperature": 1.0}}
        )
        ratios = []
        for _ in range(options.rounds):
            bare, bare_ms = _time(_run_bare(url, [body] * requests, options.connections), requests)
            for log in (folder / "bench").glob("r*.jsonl"):
                log.unlink()
            ours, ours_ms = _time(_run_ours(url, folder / "bench", options.connections, renderer), requests)
            ratios.append(ours / bare)
            print(
                f"bare aiohttp {bare:7.0f} requests/s {bare_ms:5.2f} ms CPU   "
                f"ours {ours:7.0f} requests/s {ours_ms:5.2f} ms CPU   ratio {ours / bare:.2f}"
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"median ratio {sorted(ratios)[len(ratios) // 2]:.2f}; peak RSS {peak:.0f} MiB")
    server.terminate()


if __name__ == "__main__":
    main()
