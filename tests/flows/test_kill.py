"""A generating process killed at random moments, again and again: no row is lost, doubled or torn.

DRAFTMILL_KILLS is the number of kills, DRAFTMILL_KILL_SEED their moments.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_sglang import FakeServer
from generation_support import Dataset, make_dataset, make_renderer, mark_id
from tiny_tokenizer import make_tokenizer

from tasks.core.response_log import REJECTED, RESPONSES

TESTS = Path(__file__).parents[1]
KILLS = int(os.environ.get("DRAFTMILL_KILLS", "6"))
SEED = int(os.environ.get("DRAFTMILL_KILL_SEED", "1"))
PROMPTS = 300
WINDOW = 16
BUDGET_TOKENS = 8000  # about two thirds of what the prompts give
WAIT_S = 120
FAULTS = {"status_500": 0.05, "reset": 0.03, "half": 0.02, "abort": 0.02, "wrong_count": 0.02}


@contextlib.contextmanager
def running(script, *options, **popen_options):
    """A script of tests/ as a process, killed at the end if it is still there."""
    command = [sys.executable, str(TESTS / script), *map(str, options)]
    with subprocess.Popen(command, text=True, **popen_options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition):
    """Poll a condition; the caller checks what it waited for."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("target") / "tokenizer")


@pytest.fixture
def dataset(tmp_path, tokenizer_folder):
    return make_dataset(
        tmp_path / "d1", make_renderer(tokenizer_folder), prompts=PROMPTS, long_every=20, marked_every=25
    )


@pytest.fixture
def options(tmp_path, tokenizer_folder, dataset):
    """The command line of generate_once.py, on a flaky server in a process of its own."""
    ready = tmp_path / "ready.json"
    server_options = ["--ready-file", ready, "--faults", json.dumps(FAULTS), "--seed", SEED]
    server_options += ["--tokens-per-s", 400, "--poison", mark_id(tokenizer_folder)]
    with running("fake_sglang.py", *server_options):
        wait_for(ready.exists)
        yield [
            dataset.folder,
            f"--url={json.loads(ready.read_text())['url']}",
            f"--tokenizer={tokenizer_folder}",
            f"--store={tmp_path / 'checkpoint.json'}",
            f"--window={WINDOW}",
        ]


def count_lines(dataset):
    """Whole lines of both logs, while another process writes them."""
    paths = (dataset.folder / RESPONSES, dataset.folder / REJECTED)
    return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())


def kill_after(dataset, options, lines):
    """Let a run write some lines, kill it at a moment it does not choose; False when it ended before."""
    wanted = count_lines(dataset) + lines
    with running("generate_once.py", *options, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_for(lambda: process.poll() is not None or count_lines(dataset) >= wanted)
        time.sleep(random.random() * 0.03)
        process.kill()
        _, errors = process.communicate()
        assert process.returncode in (0, -9), errors
        return process.returncode == -9


def finish(options):
    """Run to the end; returns the result."""
    process = subprocess.run(
        [sys.executable, str(TESTS / "generate_once.py"), *map(str, options)],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_killed_again_and_again_every_prompt_ends_with_one_row_or_one_reason(dataset, options):
    """After many kills a run meets its budget, a larger budget uses the rest, and all counts are true."""
    rng = random.Random(SEED)
    under_budget = [*options, f"--budget={BUDGET_TOKENS}"]
    moments = [rng.randrange(1, 2 * 180 // (KILLS + 1)) for _ in range(KILLS)]
    killed = sum(kill_after(dataset, under_budget, lines) for lines in moments)
    assert killed >= KILLS // 2
    check_budget(finish(under_budget), dataset)
    result = finish(options)
    dataset.check_complete(FakeServer())
    check_counts(result, dataset)
    assert {row.reason for row in dataset.rejected} == {"http_400"}


def check_budget(result: dict, dataset: Dataset):
    """The budget is met, and passed by no more than one window of the longest answers."""
    assert result["outcome"] == "complete"
    assert BUDGET_TOKENS <= result["completion_tokens"] <= BUDGET_TOKENS + WINDOW * 300
    check_counts(result, dataset)


def check_counts(result: dict, dataset: Dataset):
    """What the run says is what a recount finds; every line of both logs is whole."""
    assert (result["rows"], result["completion_tokens"]) == (len(dataset.rows), dataset.tokens)
    for name in (RESPONSES, REJECTED):
        assert (dataset.folder / name).read_bytes().endswith(b"\n")
