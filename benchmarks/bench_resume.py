"""Resuming a million rows: seconds until the first request is sent, beside reading the file once.

Makes a prepared dataset of which all but the last 1,000 prompts are answered, with a checkpoint. Then,
each in a process of its own: (a) from the start of `generate_dataset` with the checkpoint to the moment
the first request reaches a server; (b) reading raw_responses.jsonl in blocks of 1 MiB, from the page cache
and, as after a crash of the machine, from the disk; (c) as (a) without the checkpoint, so that every row is
counted. (a) and (b) are medians. Each run goes on to its end; the next one cuts off what it added.

Usage: python benchmarks/bench_resume.py [--quick] [--prompts N] [--ids N] [--rounds N] [--folder FOLDER]
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench_support import (
    PROMPTS_KEY,
    RULES,
    Checkpoints,
    Server,
    make_renderer,
    name_prompt,
    open_resources,
    read_peak_rss_mib,
    run_apart,
    serve_apart,
    write_prompts,
)

from tasks.generate.generation import GenerationResult, generate_dataset
from tasks.records.progress import Progress
from tasks.records.response_log import RESPONSES
from tasks.records.rows import Response
from tasks.tokens.rendering import Renderer

OPEN_PROMPTS = 1_000
CHECKPOINT = "checkpoint.json"
TARGET_S, TARGET_OF_READING = 2.0, 0.1


def make_dataset(folder: Path, prompts: int, ids: int) -> None:
    """Prompts, a row for all but the last of them, and the checkpoint of those rows."""
    write_prompts(folder, prompts)
    pick = random.Random(0)
    response = Response(
        id="",
        turn=0,
        input_ids=[pick.randrange(10_000, 100_000) for _ in range(24)],
        output_ids=[pick.randrange(10_000, 100_000) for _ in range(ids)],
        text="and " * ids,
        finish_reason="stop",
        prompt_tokens=24,
        completion_tokens=ids,
        server="http://127.0.0.1:30000",
        latency_s=1.234,
        finished_at="2026-11-30T02:11:09Z",
        extra={"max_new_tokens": 2048},
    )
    head, tail = response.to_line().split(b'"id":"', 1)
    progress, end = Progress.empty(prompts), 0
    with (folder / RESPONSES).open("wb", buffering=1 << 20) as out:
        for position in range(prompts - OPEN_PROMPTS):
            end += out.write(b'%b"id":"%b%b' % (head, name_prompt(position).encode(), tail))
            progress.add_response(response, position=position, byte_offset=end)
    checkpoint = progress.to_checkpoint(prompts_key=PROMPTS_KEY, updated_at="2026-11-30T02:11:09Z")
    (folder / CHECKPOINT).write_text(json.dumps(checkpoint))


def time_resume(folder: Path, prompts: int, from_checkpoint: bool) -> tuple[float, float]:
    """Seconds until the first request arrived, and the peak RSS in MiB."""
    checkpoint = (folder / CHECKPOINT).read_text()
    os.truncate(folder / RESPONSES, json.loads(checkpoint)["byte_offset"])
    renderer = make_renderer(folder)
    checkpoints = Checkpoints(checkpoint) if from_checkpoint else Checkpoints()
    with serve_apart(ids=20) as server:
        started_s, result = asyncio.run(_resume(folder, server, renderer, checkpoints))
        took_s = server.first_request_s.value - started_s
    how = "from the checkpoint, 0 rows read" if from_checkpoint else "by counting every row"
    if (result.rows, result.new_rows) != (prompts, OPEN_PROMPTS) or how not in result.resumed:
        raise RuntimeError(f"not the run that is measured: {result}")
    return took_s, read_peak_rss_mib()


async def _resume(
    folder: Path, server: Server, renderer: Renderer, checkpoints: Checkpoints
) -> tuple[float, GenerationResult]:
    async with open_resources(server.url, renderer, connections=150) as resources:
        await resources.pool.clients[0].is_ready()  # as warm-up has asked before: httpx imports a lot then
        server.first_request_s.value = 0.0
        started_s = time.perf_counter()
        result = await generate_dataset(
            folder, rules=RULES, resources=resources, checkpoints=checkpoints, on_status=lambda _: None
        )
    return started_s, result


def time_reading(path: Path, from_disk: bool = False) -> float:
    """Seconds to read a file that is in the page cache, or that has just been dropped from it."""
    with path.open("rb", buffering=0) as file:
        if from_disk:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started_s = time.perf_counter()
        while file.read(1 << 20):
            pass
    return time.perf_counter() - started_s


def main() -> None:
    """Make the dataset, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the prompts")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--ids", type=int, default=600, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="make the dataset here, or use the one there; keep it")
    options = parser.parse_args()
    prompts = options.prompts // 10 if options.quick else options.prompts
    with tempfile.TemporaryDirectory() as temp:
        folder = options.folder or Path(temp)
        if not (folder / CHECKPOINT).exists():
            run_apart(make_dataset, folder, prompts, options.ids)
        log = folder / RESPONSES
        print(
            f"{prompts:,} prompts, {OPEN_PROMPTS:,} of them open; {log.stat().st_size / 1e9:.2f} GB of rows"
        )
        run_apart(time_reading, log)  # into the page cache
        rounds = [
            (*run_apart(time_resume, folder, prompts, True), run_apart(time_reading, log))
            for _ in range(options.rounds)
        ]
        resume_s, peak_mib, read_s = map(statistics.median, zip(*rounds, strict=True))
        count_s, _ = run_apart(time_resume, folder, prompts, False)
        disk_s = run_apart(time_reading, log, True)
    print(
        f"a  checkpoint to first request {resume_s:8.3f} s (target {TARGET_S:g}), peak RSS {peak_mib:.0f} MiB"
    )
    print(f"b  reading the file once       {read_s:8.3f} s, from the disk {disk_s:.3f} s")
    print(f"c  counting every row          {count_s:8.3f} s")
    ratios = f"{resume_s / read_s:.3f}, from the disk {resume_s / disk_s:.3f}"
    print(f"a/b {ratios} (target {TARGET_OF_READING:g})   a/c {resume_s / count_s:.4f}")


if __name__ == "__main__":
    main()
