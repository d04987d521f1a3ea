"""Generate one prepared dataset in a process of its own, without Prefect, so that it can be killed.

Usage: python generate_once.py FOLDER --url URL --tokenizer DIR --store FILE [--budget TOKENS] ...
Prints the result as one JSON line. Exit code 3: prompts are left that failed for reasons that may pass.
Its disk is slow, so that a kill can land in the middle of a row or of a checkpoint.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import random
import sys
import time
from pathlib import Path

from generation_support import UNREACHABLE, Dataset, make_renderer, open_resources

from tasks.generate import retries
from tasks.generate.generation import GenerationIncompleteError
from tasks.records.files import dump_json, replace_atomically

PAUSE_S = 0.015
CHECKPOINT_EVERY_S = 0.1

_write = os.write


class FileStore:
    """A checkpoint store in one JSON file, replaced whole."""

    def __init__(self, path):
        self.path = path

    async def load(self):
        """The last checkpoint."""
        return json.loads(self.path.read_bytes()) if self.path.exists() else None

    async def save(self, checkpoint):
        """Replace the checkpoint."""
        await asyncio.to_thread(self._replace, dump_json(checkpoint))

    def _replace(self, data):
        with replace_atomically(self.path) as file:
            file.write(data[: len(data) // 2])
            file.flush()
            time.sleep(PAUSE_S)
            file.write(data[len(data) // 2 :])


def write_in_parts(fd, data):
    """Like os.write, which may write a part; now and then the rest has to wait."""
    if len(data) < 2 or random.random() > 0.1:
        return _write(fd, data)
    written = _write(fd, data[: len(data) // 2])
    time.sleep(PAUSE_S)
    return written


async def _main(options):
    retries.BACKOFF_FIRST_S = 0.02
    os.write = write_in_parts
    dataset = Dataset(options.folder, make_renderer(options.tokenizer), FileStore(options.store))
    servers = {"short": options.window, "request_timeout_s": options.request_timeout_s}
    async with open_resources(dataset.renderer, options.url, **servers) as resources:
        return await dataset.generate(
            resources,
            budget_tokens=options.budget,
            max_attempts=options.max_attempts,
            checkpoint_every_s=CHECKPOINT_EVERY_S,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=UNREACHABLE)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--max-attempts", type=int, default=5)
    parser.add_argument("--request-timeout-s", type=float, default=60.0)
    try:
        result = asyncio.run(_main(parser.parse_args()))
    except GenerationIncompleteError as exc:
        sys.stderr.write(f"{exc}\n")
        sys.exit(3)
    sys.stdout.write(json.dumps(dataclasses.asdict(result)) + "\n")
