"""One dataset run by itself, in a process of its own: it brings its own session."""

import asyncio
import subprocess
import sys
import time

import pytest

from flows.parameters import RunParameters
from tasks.generate.dispatch_permit import ProcessDispatchPermit

pytestmark = pytest.mark.prefect

GENERATE = """
import asyncio, sys
from flows.dataset import generate_dataset
from flows.parameters import RunParameters
parameters = RunParameters.model_validate_json(sys.argv[1])
print(asyncio.run(generate_dataset(parameters, parameters.datasets[0])).to_line())
"""


@pytest.fixture
def start(runner, fake_server):
    """Start the flow of the first of two datasets."""
    runner.raw["server"]["base_urls"] = [fake_server()]
    runner.add_dataset("a", prompts=30)
    runner.add_dataset("b", prompts=30)
    parameters = RunParameters.model_validate(runner.raw).model_dump_json()

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", GENERATE, parameters],
            cwd=runner.folder, env=runner.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        runner.started.append(process)
        return process

    return start


def test_a_dataset_is_generated_without_a_run_around_it(runner, start):
    """It opens the servers itself, and the next time finds its work done."""
    said, _ = start().communicate(timeout=300)
    assert "a is exhausted: all 30 prompts used" in said
    assert len({row["id"] for row in runner.rows("a")}) == 30
    assert not runner.rows("b")
    said, _ = start().communicate(timeout=300)
    assert "nothing new was needed" in said


def test_it_waits_for_its_turn_in_the_folder(runner, start):
    """Another process that dispatches into the same output_dir comes first."""
    runner.output_dir.mkdir()

    async def hold_until_it_waits():
        async with ProcessDispatchPermit(runner.output_dir, 1).hold("other"):
            process = start()
            deadline = time.monotonic() + 300
            while not (runner.output_dir / "a" / "raw_responses.jsonl").exists():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            await asyncio.sleep(2.0)
            assert not runner.rows("a")
        return process

    process = asyncio.run(hold_until_it_waits())
    process.communicate(timeout=300)
    assert len(runner.rows("a")) == 30
