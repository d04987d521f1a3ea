"""Finished conversations become ids: one row each, masked on the target's turns, resumed where it stopped."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from generation_support import Dataset, cancel, make_rules
from tiny_tokenizer import TEMPLATE, make_tokenizer

from tasks.aggregate.stats_scan import scan_dataset
from tasks.export.export_run import export_run
from tasks.export.rows import ExportDataset
from tasks.generate.generation import NothingAnsweredError
from tasks.generate.tokenization import tokenize_dataset
from tasks.prepare.preparation import PrepareOptions, prepare_prompts
from tasks.tokens.rendering import Renderer
from tasks.tokens.tokenizer import load_tokenizer
from tasks.tokens.trajectories import TrajectoryRenderer

FORGETFUL = TEMPLATE.replace(  # as thinking templates do: earlier thoughts are dropped
    "{{ m['content'] }}",
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'].split('</think>')[-1] }}",
)
CONVERSATIONS = 12


class Recorded:
    """A prepared dataset of finished conversations, and what renders them."""

    def __init__(self, folder, *, template=TEMPLATE):
        self.target = load_tokenizer(str(make_tokenizer(folder / "tokenizer", template=template)))
        self.renderer = Renderer(self.target)
        self.dataset = Dataset(folder / "a1", self.renderer)
        self.dataset.folder.mkdir()
        source = folder / "source.jsonl"
        with source.open("w") as lines:
            for number in range(CONVERSATIONS):
                lines.write(json.dumps({"id": f"t{number}", "messages": make_messages(number)}) + "\n")
        options = PrepareOptions(name="a1", adapter="messages", seed=0, shape="trajectory")
        prepare_prompts(self.dataset.folder, [source], options=options, source_sha256="0")

    async def tokenize(self, **options):
        """Bring it to its end."""
        with ThreadPoolExecutor(1) as threads:
            return await tokenize_dataset(
                self.dataset.folder,
                rules=make_rules("a1", budget_tokens=None, **options),
                renderer=TrajectoryRenderer(self.target, self.renderer),
                threads=threads,
                checkpoints=self.dataset.store,
                on_status=self.dataset.statuses.append,
            )

    def export(self, folder):
        """The rows of the export, by id."""
        export_run(
            datasets=[ExportDataset("a1", self.dataset.folder, "complete")],
            out_dir=folder / "export", eval_fraction=0.0, seed=0, formats=["jsonl"], provenance={},
        )  # fmt: skip
        lines = (folder / "export" / "jsonl" / "train.jsonl").read_text().splitlines()
        return {row["id"]: row for row in map(json.loads, lines)}


def make_messages(number, turns=3):
    """A system prompt, then questions and answers with thoughts; the last question is not answered."""
    messages = [{"role": "system", "content": "be kind"}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"the quick question {number} {turn}"})
        messages.append(
            {"role": "assistant", "content": f"<think>hm {turn}</think>the answer {number} {turn}"}
        )
    return [*messages, {"role": "user", "content": "and?"}]


def read_marked(recorded, row):
    """The texts of a row's marked stretches."""
    texts, current = [], []
    for token, mark in zip([*row["input_ids"], 0], [*row["loss_mask"], 0], strict=True):
        if mark:
            current.append(token)
        elif current:
            texts.append(recorded.target.tokenizer.decode(current))
            current = []
    return texts


def test_a_conversation_is_one_sequence_marked_on_the_targets_turns(tmp_path):
    """Thoughts are kept; the stop token is marked, the template's own text is not."""
    recorded = Recorded(tmp_path)
    result = asyncio.run(recorded.tokenize())
    assert (result.outcome, result.rows, result.prompts) == ("complete", CONVERSATIONS, CONVERSATIONS)
    rows = recorded.export(tmp_path)
    assert len(rows) == CONVERSATIONS
    expected = [f"<think>hm {turn}</think>the answer 7 {turn}<|end|>" for turn in range(3)]
    assert read_marked(recorded, rows["a1-t7"]) == expected


def test_a_template_that_rewrites_history_makes_a_row_a_turn(tmp_path):
    """Each turn is learnt behind the history that it was given, earlier thoughts gone."""
    recorded = Recorded(tmp_path, template=FORGETFUL)
    result = asyncio.run(recorded.tokenize())
    assert result.rows == CONVERSATIONS
    rows = recorded.export(tmp_path)
    assert len(rows) == 3 * CONVERSATIONS
    for turn in range(3):
        row = rows["a1-t7" if turn == 0 else f"a1-t7#{turn}"]
        assert read_marked(recorded, row) == [f"<think>hm {turn}</think>the answer 7 {turn}<|end|>"]
        assert recorded.target.tokenizer.decode(row["input_ids"]).count("<think>") == 1


@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL])
@pytest.mark.parametrize("cap", [1, 7])
def test_it_goes_on_where_it_stopped(tmp_path, template, cap):
    """With its checkpoint and without: one row a conversation, and the stats are those of a recount."""
    recorded = Recorded(tmp_path, template=template)
    asyncio.run(recorded.tokenize(max_samples=cap))
    assert len(recorded.dataset.rows) == cap
    if cap == 1:
        recorded.dataset.store.text = None
    result = asyncio.run(recorded.tokenize())
    assert (result.rows, result.new_rows) == (CONVERSATIONS, CONVERSATIONS - cap)
    assert len({row.id for row in recorded.dataset.rows}) == len(recorded.dataset.rows) == CONVERSATIONS
    stats = scan_dataset(
        recorded.dataset.folder, name="a1", budget_tokens=None, max_samples=None, prompts=CONVERSATIONS
    )
    assert (stats.status, stats.rows, stats.not_token_exact) == ("complete", CONVERSATIONS, 0)
    assert stats.completion_tokens == result.completion_tokens


def test_a_cancelled_one_keeps_what_is_there(tmp_path, monkeypatch):
    """The batch that was being rendered is rendered again."""
    recorded = Recorded(tmp_path)

    async def stop_early():
        running = asyncio.create_task(recorded.tokenize())
        while len(recorded.dataset.rows) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await cancel(running)

    asyncio.run(stop_early())
    assert asyncio.run(recorded.tokenize()).rows == CONVERSATIONS
    assert len({row.id for row in recorded.dataset.rows}) == len(recorded.dataset.rows)


def test_what_cannot_be_shown_to_be_the_targets_is_set_aside(tmp_path):
    """With the reason; the others are there, and the dataset is complete."""
    recorded = Recorded(tmp_path)
    prompts = recorded.dataset.folder / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("the answer 5 1", "the <|end|> answer 5 1"))
    result = asyncio.run(recorded.tokenize())
    assert (result.outcome, result.rows) == ("complete", CONVERSATIONS - 1)
    [rejected] = recorded.dataset.rejected
    assert (rejected.id, rejected.reason, rejected.permanent) == ("a1-t5", "special_token_in_answer", True)


def test_a_dataset_without_any_row_is_no_success(tmp_path):
    """All of it was rejected for good: it says why, and that something has to be changed."""
    recorded = Recorded(tmp_path)
    prompts = recorded.dataset.folder / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("the answer", "the <|end|> answer"))
    with pytest.raises(NothingAnsweredError, match=r"none of its 12 prompts .*special_token_in_answer 12"):
        asyncio.run(recorded.tokenize())
    with pytest.raises(NothingAnsweredError):
        asyncio.run(recorded.tokenize())


def test_turns_that_hold_nothing_are_set_aside(tmp_path):
    """There is nothing to learn but the token that ends them; it is not counted as a row."""
    recorded = Recorded(tmp_path)
    prompts = recorded.dataset.folder / "prompts.jsonl"
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    for message in lines[0]["messages"]:
        if message["role"] == "assistant":
            message["content"] = ""
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert asyncio.run(recorded.tokenize()).rows == CONVERSATIONS - 1
    assert [one.reason for one in recorded.dataset.rejected] == ["empty_answer"]
