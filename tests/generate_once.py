"""Generate one prepared dataset in a process of its own, without Prefect, so that it can be killed.

Usage: python generate_once.py FOLDER --url URL --tokenizer DIR --store FILE [--budget TOKENS]
Prints the result as one JSON line. Exit code 3: prompts are left that failed for reasons that may pass.
"""

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from generation_support import UNREACHABLE, Dataset, make_renderer, open_resources

from tasks import dispatch
from tasks.core.files import write_json_atomically
from tasks.generation import GenerationIncompleteError


class FileStore:
    """A checkpoint store in one JSON file, replaced whole."""

    def __init__(self, path):
        self.path = path

    async def load(self):
        """The last checkpoint."""
        return json.loads(self.path.read_bytes()) if self.path.exists() else None

    async def save(self, checkpoint):
        """Replace the checkpoint."""
        await asyncio.to_thread(write_json_atomically, self.path, checkpoint)


async def _main(options):
    dispatch.BACKOFF_FIRST_S = 0.02
    dataset = Dataset(options.folder, make_renderer(options.tokenizer), FileStore(options.store))
    async with open_resources(dataset.renderer, options.url, short=options.window) as resources:
        return await dataset.generate(resources, budget_tokens=options.budget, checkpoint_every_s=0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=UNREACHABLE)
    parser.add_argument("--window", type=int, default=16)
    try:
        result = asyncio.run(_main(parser.parse_args()))
    except GenerationIncompleteError as exc:
        sys.stderr.write(f"{exc}\n")
        sys.exit(3)
    sys.stdout.write(json.dumps(dataclasses.asdict(result)) + "\n")
