"""What a run is about to make."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prepare.preparation import PrepareOptions
from tasks.prepare.sample import sample_prompts
from tasks.prepare.sources import SourceError
from tasks.records.dataset_plan import DatasetPlan
from tasks.records.rows import Response
from tasks.warm_up.run_plan import OnDisk, PlannedDataset, RunPlan, estimate_bytes, expect_answer_tokens

OPTIONS = PrepareOptions(name="a", adapter="messages", seed=0)


def _planned(budget=1000, *, samples=None, rows=0, tokens=0, prompts=None, prompt_tokens=50, answer=100):
    return PlannedDataset(
        goal=DatasetPlan("a", budget, samples),
        on_disk=OnDisk(rows, tokens),
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer,
    )


@pytest.mark.parametrize(
    ("planned", "samples", "tokens", "runs_out"),
    [
        (_planned(), 10, 1000, False),
        (_planned(rows=4, tokens=400), 6, 600, False),
        (_planned(rows=11, tokens=1100), 0, 0, False),
        (_planned(prompts=7), 7, 700, True),
        (_planned(prompts=7, rows=3, tokens=300), 4, 400, True),
        (_planned(samples=5), 5, 500, False),
        (_planned(samples=5, prompts=3), 3, 300, True),
    ],
)
def test_a_dataset_is_planned_up_to_what_ends_first(planned, samples, tokens, runs_out):
    """The budget, the sample cap or the prompts."""
    assert (planned.left_samples, planned.left_tokens, planned.runs_out) == (samples, tokens, runs_out)


def test_the_mean_is_that_of_the_answers_that_are_there():
    """Once there are some; an answer is no longer than it may be."""
    assert expect_answer_tokens(None, OnDisk(), max_new_tokens=10**6) == 3000
    assert expect_answer_tokens(150, OnDisk(2, 20), max_new_tokens=10**6) == 150
    assert expect_answer_tokens(150, OnDisk(50, 5000), max_new_tokens=10**6) == 100
    assert expect_answer_tokens(5000, OnDisk(), max_new_tokens=192) == 192


def test_the_table_has_a_total_and_hours():
    """Where the speed is known."""
    rows = RunPlan((_planned(36_000), _planned(36_000, prompts=7)), 10.0).to_rows()
    assert [row["time"] for row in rows] == ["60 min", "70 s", "61 min"]
    assert rows[1]["note"] == "about 7 prompts may not suffice"
    assert rows[-1]["tokens to make"] == "36,700"
    assert "not measured" in RunPlan((_planned(),)).to_line()


@given(
    prompt=st.integers(20, 2000), answer=st.integers(20, 2000), vocab=st.sampled_from([32000, 49152, 163840])
)
def test_the_bytes_of_rows_are_estimated_within_a_third(prompt, answer, vocab):
    """Of rows as they are written, with ids spread over the vocabulary and English text."""
    ids = [(7919 * n) % vocab for n in range(prompt + answer)]
    row = Response(
        id="B2-0f3c", turn=0, input_ids=ids[:prompt], output_ids=ids[prompt:], text="abcd" * answer,
        finish_reason="stop", prompt_tokens=prompt, completion_tokens=answer, server="http://127.0.0.1:30000",
        finished_at="2026-11-30T02:11:09Z", latency_s=81.234,
        extra={"max_new_tokens": 10240, "params": {"temperature": 1.0, "top_p": 0.95}},
    )  # fmt: skip
    planned = _planned(answer, prompt_tokens=prompt, answer=answer)
    estimated = estimate_bytes(RunPlan((planned,)), vocab_size=vocab, formats=())
    assert 2 / 3 < estimated / len(row.to_line()) < 3 / 2


def test_a_sample_knows_how_many_rows_there_are(tmp_path):
    """Exactly where it has seen them all, else nearly."""
    path = tmp_path / "a.jsonl"
    line = json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n"
    path.write_text(line * 5)
    sample = sample_prompts([path], OPTIONS)
    assert (len(sample.prompts), sample.rows, sample.is_whole) == (5, 5, True)
    path.write_text(line * 100_000)
    sample = sample_prompts([path], OPTIONS)
    assert (len(sample.prompts), sample.is_whole) == (32, False)
    assert abs(sample.rows - 100_000) < 100


def test_a_damaged_file_behind_the_sample_is_named(tmp_path):
    """Its rows are counted before they are read, and that is a source that cannot be read, too."""
    row = {"messages": [{"role": "user", "content": "hello"}]}
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pq.write_table(pa.Table.from_pylist([row] * 40), paths[0])
    paths[1].write_bytes(paths[0].read_bytes()[:-9])
    with pytest.raises(SourceError, match=r"b\.parquet: not readable as parquet"):
        sample_prompts(paths, OPTIONS)
