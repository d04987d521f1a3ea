"""Requests per second of the whole generation path beside a bare aiohttp loop, in one run.

Ours renders, sends, checks, appends, counts and checkpoints, in the event loop of the command line; the bare
loop, asyncio's own, posts ready-made bodies of the same prompts and parses the answers. The server answers at
once, from a process of its own, with 1,500 ids. What is compared is the ratio: absolute figures are the
machine's.

Usage: python benchmarks/bench_client.py [--quick] [--requests N] [--connections N] [--ids N]
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from bench_support import RULES, Checkpoints, make_renderer, open_resources, read_peak_rss_mib, serve_apart

from serving.client.event_loop import find_loop_factory
from serving.client.protocol import GenerationRequest
from tasks.generate.generation import generate_dataset
from tasks.prepare.preparation import PrepareOptions, open_prompts, prepare_prompts
from tasks.tokens.rendering import Renderer

PROMPT_WORDS = 60


async def _run_bare(url: str, bodies: list[bytes], connections: int) -> None:
    left = iter(bodies)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def work() -> None:
            for body in left:
                async with session.post(f"{url}/generate", data=body) as reply:
                    orjson.loads(await reply.read())

        await asyncio.gather(*(work() for _ in range(connections)))


async def _run_ours(url: str, folder: Path, connections: int, renderer: Renderer) -> None:
    async with open_resources(url, renderer, connections=connections) as resources:
        await generate_dataset(
            folder, rules=RULES, resources=resources, checkpoints=Checkpoints(), on_status=lambda _: None
        )


def _prepare(folder: Path, requests: int) -> None:
    source = folder / "source.jsonl"
    with source.open("wb") as out:
        for number in range(requests):
            words = " ".join(f"question{(number + n) % 97}" for n in range(PROMPT_WORDS // 6))
            row = {"id": str(number), "messages": [{"role": "user", "content": f"{number} {words}"}]}
            out.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    options = PrepareOptions(name="bench", adapter="messages", seed=0)
    prepare_prompts(folder / "bench", [source], options=options, source_sha256="x")


def _make_bodies(folder: Path, renderer: Renderer) -> list[bytes]:
    with contextlib.closing(open_prompts(folder)) as opened:
        prompts = list(opened)
    params = RULES.dispatch.sampling_params
    return [
        GenerationRequest(prompt.id, ids, params).to_body()
        for prompt, ids in zip(prompts, renderer.render_all(prompts), strict=True)
        if isinstance(ids, list)
    ]


def _time(work: Any, requests: int, loop_factory: Any = None) -> tuple[float, float]:
    """Requests per second, and CPU milliseconds per request of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(work)
    return requests / (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu) / requests


def main() -> None:
    """Run both and print them with their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=150)
    parser.add_argument("--ids", type=int, default=1_500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    requests = options.requests // 10 if options.quick else options.requests
    with serve_apart(options.ids) as server, tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        _prepare(folder, requests)
        renderer = make_renderer(folder)
        bodies = _make_bodies(folder / "bench", renderer)
        ratios = []
        for _ in range(options.rounds):
            bare, bare_ms = _time(_run_bare(server.url, bodies, options.connections), requests)
            for log in (folder / "bench").glob("r*.jsonl"):
                log.unlink()
            ours, ours_ms = _time(
                _run_ours(server.url, folder / "bench", options.connections, renderer),
                requests,
                find_loop_factory(),
            )
            ratios.append(ours / bare)
            print(
                f"bare aiohttp {bare:7.0f} requests/s {bare_ms:5.2f} ms CPU   "
                f"ours {ours:7.0f} requests/s {ours_ms:5.2f} ms CPU   ratio {ours / bare:.2f}"
            )
    print(f"median ratio {sorted(ratios)[len(ratios) // 2]:.2f}; peak RSS {read_peak_rss_mib():.0f} MiB")


if __name__ == "__main__":
    main()
