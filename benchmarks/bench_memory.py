"""Memory of whole generations of 10,000, 100,000 and 1,000,000 prompts: it should stay flat.

Each runs in a process of its own against a server, in another one, that answers at once with 20 ids.

Usage: python benchmarks/bench_memory.py [--quick] [--ids N]
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from bench_support import (
    RULES,
    Checkpoints,
    make_renderer,
    open_resources,
    read_peak_rss_mib,
    run_apart,
    serve_apart,
    write_prompts,
)

from tasks.generate.generation import generate_dataset
from tasks.tokens.rendering import Renderer

TARGET_MIB = 150


def measure(folder: Path, prompts: int, ids: int) -> float:
    """Peak RSS in MiB of this process, after it has generated every prompt."""
    renderer = make_renderer(folder)
    with serve_apart(ids) as server:
        asyncio.run(_generate(folder, server.url, renderer, prompts))
    return read_peak_rss_mib()


async def _generate(folder: Path, url: str, renderer: Renderer, prompts: int) -> None:
    async with open_resources(url, renderer, connections=150) as resources:
        result = await generate_dataset(
            folder, rules=RULES, resources=resources, checkpoints=Checkpoints(), on_status=lambda _: None
        )
    if result.new_rows != prompts:
        raise RuntimeError(f"not the run that is measured: {result}")


def main() -> None:
    """Measure each size and print it; then the difference of the last to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000, 20,000 and 100,000 prompts")
    parser.add_argument("--ids", type=int, default=20, help="of each answer")
    options = parser.parse_args()
    peaks = []
    for prompts in (2_000, 20_000, 100_000) if options.quick else (10_000, 100_000, 1_000_000):
        with tempfile.TemporaryDirectory() as temp:
            run_apart(write_prompts, Path(temp), prompts)
            started_s = time.perf_counter()
            peaks.append(run_apart(measure, Path(temp), prompts, options.ids))
        took_s = time.perf_counter() - started_s
        print(f"{prompts:9,} prompts   {took_s:6.0f} s   peak RSS {peaks[-1]:5.0f} MiB", flush=True)
    print(f"last - first: {peaks[-1] - peaks[0]:.0f} MiB (target {TARGET_MIB})")


if __name__ == "__main__":
    main()
