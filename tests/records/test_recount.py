"""After a crash and a resume, the statistics are what a plain recount of the file finds."""

import json
from collections import Counter
from contextlib import closing, contextmanager

import orjson
import pytest

from tasks.aggregate.stats_scan import scan_dataset
from tasks.records.prompt_file import IndexBuilder, PromptFile, hash_id
from tasks.records.response_log import RESPONSES, ResponseLog
from tasks.records.rows import Prompt, Response

IDS = [f"p{number}" for number in range(30)]


def write_prompts(folder):
    index = IndexBuilder()
    with (folder / "prompts.jsonl").open("wb") as file:
        for name in IDS:
            line = Prompt(id=name, messages=[{"role": "user", "content": name}]).to_line()
            index.add(line, id_hash=hash_id(name))
            file.write(line)
    index.write(folder / "prompts.jsonl")


@contextmanager
def open_log(folder):
    with (
        closing(PromptFile(folder / "prompts.jsonl")) as prompts,
        closing(ResponseLog(folder, prompts)) as log,
    ):
        yield log


def answer(log, position):
    tokens = position + 1
    reason = "length" if position % 4 == 0 else "stop"
    row = Response(IDS[position], 0, [1, 2], [3] * tokens, "", reason, 2, tokens)
    log.append(row, position=position)


def recount(folder):
    """By the plainest means."""
    rows = {}
    for line in (folder / RESPONSES).read_text().splitlines():
        row = json.loads(line)
        counts = row.get("usage", row)
        rows.setdefault((row["id"], row.get("turn", 0)), (counts, row.get("finish_reason", "stop")))
    reasons = Counter(reason for _, reason in rows.values())
    return (
        len(rows),
        sum(counts["prompt_tokens"] for counts, _ in rows.values()),
        sum(counts["completion_tokens"] for counts, _ in rows.values()),
        dict(reasons),
    )


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize("torn_bytes", [0, 1, 40])
def test_statistics_after_a_crash_equal_a_recount(tmp_path, with_checkpoint, torn_bytes):
    """Rows of an older tool first, a crash in the middle of a row, then a resume: all of it counts once."""
    write_prompts(tmp_path)
    old = [{"id": IDS[n], "usage": {"prompt_tokens": 3, "completion_tokens": 40 + n}} for n in range(5)]
    (tmp_path / RESPONSES).write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in old))
    with open_log(tmp_path) as log:
        log.resume(None, prompts_key="k")
        for position in range(5, 12):
            answer(log, position)
        checkpoint = log.progress.to_checkpoint(prompts_key="k", updated_at="now")
        for position in range(12, 18):
            answer(log, position)
    with (tmp_path / RESPONSES).open("ab") as file:
        file.write(Response("torn", 0, [1], [2], "", "stop", 1, 1).to_line()[:torn_bytes])
    with open_log(tmp_path) as log:
        log.resume(checkpoint if with_checkpoint else None, prompts_key="k")
        for position in range(18, 25):
            answer(log, position)
        progress = log.progress
    stats = scan_dataset(tmp_path, name="d", budget_tokens=9999, max_samples=None, prompts=len(IDS))
    counted = (stats.rows, stats.prompt_tokens, stats.completion_tokens, stats.finish_reasons)
    assert counted == recount(tmp_path)
    assert counted[:3] == (progress.rows, progress.prompt_tokens, progress.completion_tokens)
    assert (stats.rows, stats.not_token_exact, stats.unreadable) == (25, 5, 0)
