"""The command line against a real SGLang server: what a fake cannot prove."""

import json
import signal

import pyarrow.parquet as pq
import pytest
from run_support import interrupt
from transformers import AutoTokenizer

pytestmark = [pytest.mark.live, pytest.mark.prefect]


def _exported(runner):
    files = (runner.output_dir / "export" / "data").glob("*.parquet")
    return {row["id"]: row for file in files for row in pq.read_table(file).to_pylist()}


def test_a_run_is_token_exact_and_on_budget(runner, tokenizer_dir):
    """Text is what the ids decode to, masks are the output ids, and the budget holds."""
    runner.add_dataset("a", prompts=60)
    done = runner.run("--max-tokens-per-dataset", "2000")
    assert done.returncode == 0, done.stderr
    tokenizer, exported, rows = (
        AutoTokenizer.from_pretrained(tokenizer_dir),
        _exported(runner),
        runner.rows("a"),
    )
    assert 2000 <= sum(row["completion_tokens"] for row in rows) < 2000 + 8 * 120
    for row in rows:
        assert tokenizer.decode(row["output_ids"], skip_special_tokens=True) == row["text"]
        trained = exported[row["id"]]
        ids = [i for i, used in zip(trained["input_ids"], trained["loss_mask"], strict=True) if used]
        assert ids == row["output_ids"]


def test_a_check_passes_and_measures(runner):
    """Ids, tokenizer and memory are as they should be, and the plan has a time."""
    runner.add_dataset("a", prompts=60)
    runner.raw["server"]["measure_s"] = 10
    done = runner.call("check", "--param-file", str(runner.write()), "--max-tokens-per-dataset", "2000")
    assert done.returncode == 0, done.stderr
    for words in ("the same ids were seen", "same ids there and here", "KV tokens", "at the measured"):
        assert words in done.stdout
    assert not runner.output_dir.exists()


def test_a_kill_in_the_middle_is_resumed(runner):
    """After kill -9 of the run the server goes on, and the next run asks only what is left."""
    runner.add_dataset("a", prompts=120)
    process = runner.start("--max-tokens-per-dataset", "1000000")
    runner.wait_for_rows("a", 10, process)
    interrupt(process, signal.SIGKILL)
    done = runner.run("--max-tokens-per-dataset", "1000000")
    assert done.returncode == 0, done.stderr
    ids = [row["id"] for row in runner.rows("a")]
    assert len(ids) == len(set(ids)) == 120
    assert "resumes with" in done.stderr


def test_prompts_beyond_the_context_are_set_aside_or_shortened(runner):
    """Too long for the model: rejected, with the reason. Nearly: a shorter answer, and that is recorded."""
    path = runner.folder / "a.jsonl"
    sizes = {"short": 3, "near": 1950, "beyond": 5000}
    with path.open("w") as file:
        for name, size in sizes.items():
            messages = [{"role": "user", "content": "7" * size}]  # a digit is an id of its own
            file.write(json.dumps({"id": name, "messages": messages}) + "\n")
    runner.add_dataset("a", prompts=None)
    assert runner.run("--max-tokens-per-dataset", "1000000").returncode == 0
    rows = {row["id"]: row for row in runner.rows("a")}
    assert set(rows) == {"a-short", "a-near"}
    assert rows["a-near"]["lane"] == "long"
    assert rows["a-near"]["max_new_tokens"] < 120
    [rejected] = map(json.loads, (runner.output_dir / "a" / "rejected.jsonl").read_text().splitlines())
    assert (rejected["id"], rejected["reason"]) == ("a-beyond", "prompt_too_long")
