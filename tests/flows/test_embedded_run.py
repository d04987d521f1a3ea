"""The whole flow against the embedded engine: a real model, a real tokenizer, a real Prefect server."""

import json
import signal
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from run_support import interrupt
from transformers import AutoTokenizer

from serving.embedded.model import resolve_model

pytestmark = [pytest.mark.prefect, pytest.mark.embedded]


@pytest.fixture
def embedded(runner):
    """Two demo datasets, cut to short answers, on the embedded engine."""
    runner.raw["target"] = {"tool_calls_as_text": True}
    runner.raw["server"] = {"mode": "embedded", "slots": 4, "context_length": 1024}
    lane = {"concurrency": 4, "max_new_tokens": 48}
    runner.raw["lanes"] = {"long_prompt_tokens": 400, "short": lane, "long": lane}
    runner.raw["datasets"] = []
    demo = Path(__file__).parents[2] / "demo"
    for name, adapter in (("B1_glaive", "glaive"), ("B6_ultrachat", "ultrachat")):
        rows = (demo / f"{adapter}.jsonl").read_text().splitlines(keepends=True)[:8]
        (runner.folder / f"{adapter}.jsonl").write_text("".join(rows))
        runner.raw["datasets"].append({"name": name, "source": f"{adapter}.jsonl", "adapter": adapter})
    return runner


def _exported(runner):
    files = (runner.output_dir / "export" / "data").glob("*.parquet")
    return {row["id"]: row for file in files for row in pq.read_table(file).to_pylist()}


def test_real_answers_become_token_exact_training_data(embedded):
    """Prompts are rendered as the model's template says, answers decode to the text that was served."""
    done = embedded.run("--max-tokens-per-dataset", "120", timeout=800)
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("demo").tokenizer_dir)
    exported = _exported(embedded)
    rows = embedded.rows("B1_glaive") + embedded.rows("B6_ultrachat")
    assert len(rows) == len(exported) >= 6
    for row in rows:
        assert tokenizer.decode(row["output_ids"], skip_special_tokens=True) == row["text"]
        assert tokenizer.decode(row["input_ids"]).endswith("<|im_start|>assistant\n")
        trained = exported[row["id"]]
        ids = [i for i, used in zip(trained["input_ids"], trained["loss_mask"], strict=True) if used]
        assert ids == row["output_ids"]
    assert "functions" in tokenizer.decode(embedded.rows("B1_glaive")[0]["input_ids"])


def test_a_kill_in_the_middle_of_generation_is_resumed(embedded):
    """Kill -9 takes the engine along; the next run answers what is left, each prompt once."""
    process = embedded.start("--max-tokens-per-dataset", "100000", "--dataset", "B6_ultrachat")
    embedded.wait_for_rows("B6_ultrachat", 2, process, timeout=800)
    children = psutil.Process(process.pid).children(recursive=True)
    interrupt(process, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    before = embedded.rows("B6_ultrachat")
    done = embedded.run("--max-tokens-per-dataset", "100000", "--dataset", "B6_ultrachat", timeout=800)
    assert done.returncode == 0, done.stderr
    rows = embedded.rows("B6_ultrachat")
    report = json.loads((embedded.output_dir / "B6_ultrachat" / "prepare.json").read_text())
    assert len(rows) == len({row["id"] for row in rows}) == report["prompts"]
    assert rows[: len(before)] == before
