"""Conversations as text, for trainers that render and tokenize by themselves, and what they lose by that.

Knows roles, texts and how to compare; does not know where they come from. Invariant: a line has an id and
conversations and nothing else, for SpecForge passes other keys to the chat template; what is measured is what
such a trainer would see.
"""

import contextlib
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tasks.export.files import Conversation, FileEntry, HashedFile, Messages, RowBatch
from tasks.export.split.assign import SPLITS, Split
from tasks.records.prompt_file import hash_id
from tasks.records.rows import Prompt
from tasks.tokens.call_style import calls_as_text
from tasks.tokens.rendering import Renderer, RenderError
from tasks.tokens.tokenizer import TargetTokenizer

SAMPLE_ROWS = 500

Retokenizer = TargetTokenizer | str
"""The target's tokenizer, or why there is none."""


class ConversationSink:
    """`conversations/{split}.jsonl`, one line a generation whose words are known."""

    def __init__(self, folder: Path, retokenizer: Retokenizer) -> None:
        (folder / "conversations").mkdir()
        self._folder = folder
        self._open: dict[Split, HashedFile] = {}
        self._retokenizer = retokenizer
        self._sample = _SampledRows()
        self.description: dict[str, Any] = {}

    def write(self, batch: RowBatch) -> None:
        """Write the next rows."""
        for row, conversation in enumerate(batch.conversations):
            if conversation is not None:
                self._write(batch, row, conversation)

    def finish(self) -> list[FileEntry]:
        """Close all files, measure, and describe the files, train before eval."""
        files = [self._open[split] for split in SPLITS if split in self._open]
        for file in files:
            file.finish()
        rows = sum(file.entry.rows for file in files)
        self.description = {"rows": rows, **_measure(self._sample.rows, self._retokenizer)}
        return [file.entry for file in files]

    def close(self) -> None:
        """Let go of the files."""
        for file in self._open.values():
            with contextlib.suppress(OSError):
                file.close()

    def _write(self, batch: RowBatch, row: int, conversation: Conversation) -> None:
        if batch.split not in self._open:
            entry = FileEntry(f"conversations/{batch.split}.jsonl", "conversations", batch.split)
            self._open[batch.split] = HashedFile(self._folder, entry)
        messages = to_plain(conversation.messages)
        line = {"id": conversation.id, "conversations": messages}
        file = self._open[batch.split]
        file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        file.entry.rows += 1
        ids = _TrainedIds.copy(batch, row) if conversation.is_one_row else None
        self._sample.add(hash_id(f"{batch.datasets[row]}/{conversation.id}"), messages, ids)


def to_plain(messages: Messages) -> Messages:
    """Role and content alone: thoughts and calls become text, what else a message has is lost."""
    return [
        {"role": message["role"], "content": _thought_text(message) + str(message.get("content") or "")}
        for message in calls_as_text(messages)
    ]


def describe_retokenizer(retokenizer: Retokenizer) -> dict[str, Any]:
    """What decides the measured rate, for the export's key."""
    if isinstance(retokenizer, str):
        return {"none": retokenizer}
    identity = retokenizer.identity
    return {
        "tokenizer": [identity.files_sha256, identity.chat_template_sha256, retokenizer.vocab_size],
        "versions": [version("transformers"), version("tokenizers")],
    }


@dataclass(frozen=True, slots=True, eq=False)
class _TrainedIds:
    """A row's ids and mask, as Sample has them; without the batch that they were in."""

    input_ids: np.ndarray
    loss_mask: np.ndarray

    @classmethod
    def copy(cls, batch: RowBatch, row: int) -> "_TrainedIds":
        part = batch.slice(row)
        return cls(batch.input_ids[part].copy(), batch.loss_mask[part].copy())


class _SampledRows:
    """Up to 500 rows, those of the smallest hashes, whatever the order; holds their texts and ids."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Messages, _TrainedIds | None]] = []
        self._count = 0

    def add(self, place: int, messages: Messages, ids: _TrainedIds | None) -> None:
        self._count += 1  # of equal places the messages must not be compared
        heapq.heappush(self._heap, (-place, self._count, messages, ids))
        if len(self._heap) > SAMPLE_ROWS:
            heapq.heappop(self._heap)

    @property
    def rows(self) -> list[tuple[Messages, _TrainedIds | None]]:
        return [(messages, ids) for _, _, messages, ids in self._heap]


def _measure(rows: Sequence[tuple[Messages, _TrainedIds | None]], retokenizer: Retokenizer) -> dict[str, Any]:
    """The share of rows that are other ids when rendered and tokenized again, and where these begin."""
    if isinstance(retokenizer, str):
        return {"not_measured": retokenizer}
    renderer = Renderer(retokenizer)
    found = Counter(_find_difference(renderer, messages, trained) for messages, trained in rows)
    places = {place: n for place, n in found.items() if place is not None}
    differ = sum(places.values())
    share = differ / len(rows) if rows else None
    counts = {"measured_rows": len(rows), "rows_that_differ": differ, "mismatch_rate": share}
    return {**counts, "differ_from": places}


def _find_difference(renderer: Renderer, messages: Messages, trained: _TrainedIds | None) -> str | None:
    """Where a row's ids stop being the same: "prompt", "answer", or "end", behind all of them; None: nowhere.

    Blanks at the end, which templates write after a turn, are no difference. A conversation that the template
    refuses is "refused", and one of several rows (None), which it is not any more, is "several_rows".
    """
    if trained is None:
        return "several_rows"
    try:
        text = renderer.render_text(Prompt("", messages), add_generation_prompt=False)
        [ids] = renderer.encode([text])
    except RenderError:
        return "refused"
    found, wanted = np.array(ids, np.int64), trained.input_ids
    shared = min(len(found), len(wanted))
    differs = np.flatnonzero(found[:shared] != wanted[:shared])
    place = int(differs[0]) if len(differs) else shared
    if place < len(wanted):
        return "answer" if trained.loss_mask[place] else "prompt"
    return "end" if renderer.decode(ids[place:]).strip() else None


def _thought_text(message: dict[str, Any]) -> str:
    thought = message.get("reasoning_content")
    return f"<think>{thought}</think>" if thought else ""
