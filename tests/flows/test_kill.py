"""A generating process killed again and again on a failing server: no row is lost, doubled or torn.

DRAFTMILL_KILL_SEED changes the moments of the kills and the server's faults. `make chaos` runs the large one.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
from fake_sglang import FakeServer, prompt_key
from generation_support import Dataset, make_dataset, make_renderer, mark_id
from tiny_tokenizer import make_tokenizer

from tasks.records.progress import Progress
from tasks.records.response_log import REJECTED, RESPONSES, read_lines

SUPPORT = Path(__file__).parents[1] / "support"
SEED = int(os.environ.get("DRAFTMILL_KILL_SEED", "1"))
WINDOW, LONG_WINDOW = 16, 4
LONGEST_ANSWER = 300
MAX_ATTEMPTS = 2  # few, so that some prompts run out of them
STARTING_S = 1.5
WAIT_S = 120
FAULTS = {
    "status_500": 0.05,
    "reset": 0.02,
    "hang": 0.005,
    "half": 0.01,
    "abort": 0.01,
    "empty": 0.01,
    "wrong_count": 0.005,
}
REASONS = {
    "server_failed": {"status_500"},
    "connection_broken": {"reset"},
    "bad_reply": {"half", "wrong_count"},
    "aborted": {"abort"},
    "empty_answer": {"empty"},
    "http_400": {"poison"},
}
MOMENTS = ("starting", "generating", "writing a row", "writing a checkpoint")


@contextlib.contextmanager
def running(script, *options, **popen_options):
    """A script of tests/ as a process, killed at the end if it is still there."""
    command = [sys.executable, str(SUPPORT / script), *map(str, options)]
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
def dataset(tmp_path, tokenizer_folder, prompts):
    kinds = {"long_every": 20, "marked_every": 50, "mute_every": 100}
    return make_dataset(tmp_path / "d1", make_renderer(tokenizer_folder), prompts=prompts, **kinds)


@pytest.fixture
def store(tmp_path):
    """The file with the checkpoint."""
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "checkpoint.json"


@pytest.fixture
def url(tmp_path, tokenizer_folder):
    """A failing server in a process of its own."""
    ready = tmp_path / "ready.json"
    options = ["--ready-file", ready, "--faults", json.dumps(FAULTS), "--seed", SEED, "--tokens-per-s", 400]
    options += ["--poison", mark_id(tokenizer_folder), "--mute", mark_id(tokenizer_folder, "#")]
    with running("fake_sglang.py", *options):
        wait_for(ready.exists)
        yield json.loads(ready.read_text())["url"]


@pytest.fixture
def options(tokenizer_folder, dataset, store, url):
    """The command line of generate_once.py."""
    return [
        *(dataset.folder, f"--url={url}", f"--tokenizer={tokenizer_folder}", f"--store={store}"),
        *(f"--window={WINDOW}", f"--max-attempts={MAX_ATTEMPTS}", "--request-timeout-s=2"),
    ]


@pytest.mark.failures
@pytest.mark.parametrize(
    ("kills", "prompts"), [(6, 300), pytest.param(50, 2000, marks=pytest.mark.chaos)], ids=["small", "large"]
)
def test_killed_again_and_again_every_prompt_ends_with_one_row_or_one_reason(
    kills, prompts, dataset, store, url, options
):
    """After many kills a run meets its budget, a larger budget uses the rest, and all counts are true."""
    rng = random.Random(SEED)
    budget_tokens = 30 * prompts  # about three quarters of what they give
    under_budget = [*options, f"--budget={budget_tokens}"]
    moments = [MOMENTS[number % len(MOMENTS)] for number in range(kills)]
    rng.shuffle(moments)
    most_lines = 2 * prompts // (3 * kills)  # the last kill comes before the budget is reached
    half_written = 0
    for moment in moments:
        half_written += kill(moment, dataset, store, under_budget, lines=rng.randint(1, most_lines))
        check_checkpoint(dataset, store)
    assert half_written >= kills // 6
    result = finish(under_budget, dataset)
    assert result["outcome"] == "complete"
    assert 0 <= result["completion_tokens"] - budget_tokens <= (WINDOW + LONG_WINDOW) * LONGEST_ANSWER
    assert finish(options, dataset)["outcome"] == "exhausted"
    check_checkpoint(dataset, store)
    check_every_prompt(dataset)
    check_against_server(dataset, httpx.get(f"{url}/stats", trust_env=False).json(), kills=kills)


def kill(moment, dataset, store, options, *, lines):
    """Kill a run in its start-up, or after some lines at a moment; True when a file is left half-written."""
    temps, wanted = count_temps(store), count_lines(dataset) + lines
    starting_s = STARTING_S * random.random() if moment == "starting" else WAIT_S
    started = time.monotonic()

    def has_come():
        return count_lines(dataset) >= wanted or time.monotonic() - started >= starting_s

    def is_at_moment():
        if moment == "writing a checkpoint":
            return count_temps(store) > temps
        return moment != "writing a row" or is_torn(dataset)

    with running("generate_once.py", *options, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_for(lambda: process.poll() is not None or has_come())
        time.sleep(random.random() * 0.05 if moment == "generating" else 0)
        wait_for(lambda: process.poll() is not None or is_at_moment())
        process.kill()
        _, errors = process.communicate()
    assert process.returncode == -9, errors
    return moment.startswith("writing") and (is_torn(dataset) or count_temps(store) > temps)


def finish(options, dataset):
    """Run until nothing is left that failed for a reason that may pass; returns the last result."""
    for _ in range(10):
        rows_before = len(dataset.rows)
        process = subprocess.run(
            [sys.executable, str(SUPPORT / "generate_once.py"), *map(str, options)],
            capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert process.returncode in (0, 3), process.stderr
        if process.returncode == 0:
            break
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    counted = (len(dataset.rows), len(dataset.rows) - rows_before, len(dataset.prompts), dataset.tokens)
    assert tuple(result[name] for name in ("rows", "new_rows", "prompts", "completion_tokens")) == counted
    assert not is_torn(dataset)
    return result


def count_lines(dataset):
    """Whole lines of both logs, while another process writes them."""
    return sum(path.read_bytes().count(b"\n") for path in logs(dataset))


def count_temps(store):
    """Checkpoints that are being written, or were when their process was killed."""
    return len(list(store.parent.glob(".*.tmp")))


def is_torn(dataset):
    """Whether a log ends in the middle of a line."""
    return any(path.stat().st_size and not path.read_bytes().endswith(b"\n") for path in logs(dataset))


def logs(dataset):
    return [path for name in (RESPONSES, REJECTED) if (path := dataset.folder / name).exists()]


def check_checkpoint(dataset, store):
    """What the checkpoint says is what a recount of the logs up to its offsets finds."""
    if not store.exists():
        return
    saved, prompts = json.loads(store.read_bytes()), dataset.prompts
    progress = Progress.from_checkpoint(saved, prompts_key=saved["prompts_key"], prompts=len(prompts))
    rows = dataset.rows[: count_up_to(dataset.folder / RESPONSES, progress.byte_offset)]
    rejected = dataset.rejected[: count_up_to(dataset.folder / REJECTED, progress.rejected_offset)]
    assert (progress.rows, progress.duplicates) == (len(rows), 0)
    assert progress.prompt_tokens == sum(row.prompt_tokens for row in rows)
    assert progress.completion_tokens == sum(row.completion_tokens for row in rows)
    assert progress.finish_reasons == Counter(row.finish_reason for row in rows)
    assert progress.rejected == Counter(row.reason for row in rejected)
    assert {prompts[at].id for at in np.flatnonzero(progress.done)} == {row.id for row in rows}
    permanent = {row.id for row in rejected if row.permanent}
    assert {prompts[at].id for at in np.flatnonzero(progress.set_aside)} == permanent


def count_up_to(path, offset):
    """Lines of a log before a byte offset, which must be the end of one of them."""
    ends = [0, *(end for end, _ in read_lines(path))]
    assert offset in ends
    return ends.index(offset)


def check_every_prompt(dataset: Dataset):
    """Each prompt has one good row or was rejected for good, once; what may pass was asked again."""
    dataset.check_rows(FakeServer())
    done = {row.id for row in dataset.rows}
    permanent = Counter(row.id for row in dataset.rejected if row.permanent)
    assert done.isdisjoint(permanent)
    assert done | set(permanent) == {prompt.id for prompt in dataset.prompts}
    assert set(permanent.values()) == {1}


def check_against_server(dataset: Dataset, stats: dict, *, kills: int):
    """Each reason is what the server did to that prompt; a kill costs no more than what was in flight."""
    keys = {prompt.id: prompt_key(dataset.renderer.render(prompt)) for prompt in dataset.prompts}
    for row in dataset.rejected:
        assert row.permanent == (row.reason in ("http_400", "empty_answer"))
        assert row.attempts >= {"http_400": 1, "empty_answer": 3}.get(row.reason, MAX_ATTEMPTS)
        if row.reason != "timed_out":  # a slow machine times out by itself
            faults = stats["faulty"][keys[row.id]]
            given = sum(faults.get(fault, 0) for fault in REASONS[row.reason])
            assert given >= (3 if row.reason == "empty_answer" else 1)
    refused = {row.id for row in dataset.rejected if row.reason == "http_400"}
    assert refused == {prompt.id for prompt in dataset.prompts if "@" in prompt.messages[0]["content"]}
    assert sum(stats["answered"].values()) <= len(dataset.rows) + kills * (WINDOW + LONG_WINDOW)
