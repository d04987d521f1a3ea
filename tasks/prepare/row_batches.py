"""From source rows to lines of prompts.jsonl, some hundred at a time: what is done with each row by itself.

Knows adapters and a prompt's JSON; does not know files, nor what is a duplicate or in which order prompts
come. Invariant: what becomes of a row does not depend on the others.
"""

import array
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.prepare.adapters import (
    RowRejected,
    Shape,
    content_id,
    get_adapter,
    has_rounded,
    hash_content,
    make_prompt,
)
from tasks.prepare.sources import MalformedRow, SourceRow, read_exactly
from tasks.records import exact_json
from tasks.records.prompt_file import hash_id
from tasks.records.rows import Prompt, Rejected

MALFORMED_ROW = "malformed_row"
_FORMAT = 1
_BATCH_ROWS = 512
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """What decides prompts.jsonl besides the bytes of the source.

    `system_prompt` is put first where a conversation has none, which `keep_system_prompts` sees to when it is
    False. `chat_template_kwargs` are handed to the chat template ({"thinking": False}, say) and win over the
    row's own. `shape` says which turns the target writes. `max_prompts` is how many prompts are kept at most,
    the first ones of the dispatch order: what they are does not depend on it.
    """

    name: str
    adapter: str
    seed: int
    shape: Shape = "last"
    system_prompt: str | None = None
    keep_system_prompts: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompts: int | None = None

    def key(self, source_sha256: str) -> str:
        """Names the prompt file that these options make of that source."""
        parts = {**dataclasses.asdict(self), "source": source_sha256, "format": _FORMAT}
        if self.max_prompts is None:  # as keys were before there was one
            del parts["max_prompts"]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class RowBatch:
    """Rows as prompts' lines, each with the hashes of its id and content and its number of answers.

    `rejected` are the others: the reason and the line for rejected.jsonl. `nulls_removed` is of all of them.
    """

    lines: list[bytes] = field(default_factory=list)
    id_hashes: "array.array[int]" = field(default_factory=lambda: array.array("Q"))
    contents: "array.array[int]" = field(default_factory=lambda: array.array("Q"))
    answers: "array.array[int]" = field(default_factory=lambda: array.array("H"))
    rejected: list[tuple[str, bytes]] = field(default_factory=list)
    nulls_removed: int = 0


def make_batches(rows: Iterable[SourceRow | MalformedRow], options: PrepareOptions) -> Iterator[RowBatch]:
    """Every row, in order; a batch holds so many rows and bytes at most, whatever one row takes."""
    adapt = _make_adapt(options)
    batch, room, room_bytes = RowBatch(), _BATCH_ROWS, _BATCH_BYTES
    for row in rows:
        room_bytes -= adapt(row, batch)
        room -= 1
        if room == 0 or room_bytes < 0:
            yield batch
            batch, room, room_bytes = RowBatch(), _BATCH_ROWS, _BATCH_BYTES
    yield batch


def _make_adapt(options: PrepareOptions) -> Callable[[SourceRow | MalformedRow, RowBatch], int]:
    """What adds a row to a batch and returns the size of its line."""
    to_conversation = get_adapter(options.adapter)
    label = options.name.split("_", 1)[0]
    shape, keep_system, system_prompt = options.shape, options.keep_system_prompts, options.system_prompt
    chat_template_kwargs = options.chat_template_kwargs

    def make(row: Mapping[str, Any]) -> Prompt:
        conversation = to_conversation(row)
        prompt = make_prompt(conversation, shape, keep_system=keep_system, system_prompt=system_prompt)
        if chat_template_kwargs:
            prompt.chat_template_kwargs.update(chat_template_kwargs)
        return prompt

    def add(row: SourceRow | MalformedRow, batch: RowBatch) -> int:
        if isinstance(row, MalformedRow):
            return _reject(batch, label, row.where, MALFORMED_ROW, row.detail)
        if row.nulls_removed:
            batch.nulls_removed += row.nulls_removed
        try:
            prompt = make(row.row)
            if has_rounded(prompt):
                prompt = make(read_exactly(row))
            return _add(batch, prompt, label)
        except RowRejected as exc:
            return _reject(batch, label, row.where, exc.reason, exc.detail)
        except RecursionError as exc:
            return _reject(batch, label, row.where, "bad_field", f"the row is nested too deep: {exc}")

    return add


def _add(batch: RowBatch, prompt: Prompt, label: str) -> int:
    """The line is made whole before anything is added. Its messages' JSON, which costs most, is made once."""
    try:
        prompt_id = f"{label}-{prompt.id or content_id(prompt)}"
        messages = exact_json.dumps(prompt.messages)
        line = prompt.to_line_with(messages, prompt_id=prompt_id)
        content = hash_content(prompt, messages)
    except TypeError as exc:  # of json and orjson: lone surrogates, bytes in parquet
        raise RowRejected("bad_field", f"the row has a value without a JSON form: {exc}") from exc
    batch.lines.append(line)
    batch.id_hashes.append(hash_id(prompt_id))
    batch.contents.append(content)
    batch.answers.append(prompt.answers)
    return len(line)


def _reject(batch: RowBatch, label: str, where: str, reason: str, detail: str) -> int:
    line = Rejected(
        id=f"{label}-{where}", reason=reason, detail=detail, permanent=True, stage="prepare", where=where
    ).to_line()
    batch.rejected.append((reason, line))
    return len(line)
