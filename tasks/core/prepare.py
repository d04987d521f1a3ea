"""From source rows to prompts.jsonl: adapted, told apart, shuffled, reported.

Knows sources, adapters and the dispatch order; does not know templates or servers. Invariant: the same
source, options and seed give the same bytes; every row read is a prompt, a duplicate, a rejected row or one
left over.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tasks.core.adapters import RowRejected, Shape, content_id, get_adapter, hash_content, make_prompt
from tasks.core.files import name_in_errors, remove_stale_temps, replace_atomically, write_json_atomically
from tasks.core.prompt_draft import PromptDraft
from tasks.core.prompt_file import IndexBuilder, PromptFile
from tasks.core.records import Prompt, Rejected
from tasks.core.response_log import REJECTED, parse_line, read_lines
from tasks.core.sources import MalformedRow, Source, iter_rows

PROMPTS = "prompts.jsonl"
REPORT = "prepare.json"
_DRAFT = ".prompts.draft"
_FORMAT = 1


class EmptyDatasetError(ValueError):
    """A source without a single usable prompt."""


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


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What became of every row of a source: rows_read = conversations + duplicates + rejected + left_over.

    `prompts` is how many answers the conversations are to get; `left_over` are those beyond max_prompts.
    """

    key: str
    rows_read: int
    conversations: int
    prompts: int
    duplicates: int
    rejected: dict[str, int]
    left_over: int = 0
    reused: bool = False


def prepare_prompts(
    folder: Path, sources: Source, *, options: PrepareOptions, source_sha256: str
) -> PrepareReport:
    """Write `<folder>/prompts.jsonl`, its index and prepare.json; keep them when they are up to date.

    Hold the dataset's lock: rejected.jsonl is rewritten, with what generation set aside kept.

    Raises:
        EmptyDatasetError: no row became a prompt; says what became of them.
        SourceError: a file that is no data at all.
    """
    remove_stale_temps(folder)
    key = options.key(source_sha256)
    if (known := read_report(folder)) is not None and known.key == key and (folder / PROMPTS).exists():
        return dataclasses.replace(known, reused=True)
    for _ in _read_set_aside(folder):
        pass  # a damaged line is found before anything is written
    with _open_draft(folder, options) as draft:
        rejected = _collect(_adapt(sources, options), draft, folder / _DRAFT / REJECTED)
        draft.settle(max_prompts=options.max_prompts)
        report = PrepareReport(
            key=key,
            rows_read=len(draft) + rejected.total(),
            conversations=draft.conversations,
            prompts=draft.answers,
            duplicates=draft.duplicates,
            rejected=dict(sorted(rejected.items())),
            left_over=draft.left_over,
        )
        if not report.prompts:
            raise EmptyDatasetError(
                f"dataset {options.name!r}: {report.rows_read} rows read, none became a prompt "
                f"(rejected: {report.rejected or 'none'}); check its source and its adapter "
                f"{options.adapter!r}"
            )
        (folder / REPORT).unlink(missing_ok=True)  # a crash from here on must not leave a stale key
        _write_prompts(folder, draft, own_history=options.shape == "each")
        _write_rejected(folder, folder / _DRAFT / REJECTED)
    write_json_atomically(folder / REPORT, dataclasses.asdict(report))
    return report


def read_report(folder: Path) -> PrepareReport | None:
    """What the last preparation said, or None."""
    try:
        data = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        data.setdefault("left_over", 0)  # reports of older versions have none
        return PrepareReport(**{f.name: data[f.name] for f in dataclasses.fields(PrepareReport)})
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def open_prompts(folder: Path) -> PromptFile:
    """The prepared prompts of a dataset folder."""
    return PromptFile(folder / PROMPTS)


def adapt_rows(sources: Source, options: PrepareOptions) -> Iterator[Prompt | Rejected]:
    """Every row of a source, in its order, as a prompt or with why it is none."""
    for row in _adapt(sources, options):
        yield row if isinstance(row, Rejected) else row.prompt


class _Adapted(NamedTuple):
    """A prompt with its line and the hash that tells its content apart."""

    prompt: Prompt
    line: bytes
    content: int


def _adapt(sources: Source, options: PrepareOptions) -> Iterator[_Adapted | Rejected]:
    adapter = get_adapter(options.adapter)
    label = options.name.split("_", 1)[0]
    for row in iter_rows(sources):
        if isinstance(row, MalformedRow):
            yield _rejected(f"{label}-{row.where}", "malformed_row", row.detail, row.where)
            continue
        try:
            prompt = make_prompt(
                adapter(row.row),
                options.shape,
                keep_system=options.keep_system_prompts,
                system_prompt=options.system_prompt,
            )
            yield _finish(prompt, label, options)
        except RowRejected as exc:
            yield _rejected(f"{label}-{row.where}", exc.reason, exc.detail, row.where)


def _finish(prompt: Prompt, label: str, options: PrepareOptions) -> _Adapted:
    """The prompt with the template arguments and the id. Its JSON, which costs most, is made once."""
    prompt.chat_template_kwargs.update(options.chat_template_kwargs)
    try:
        prompt = prompt.with_id(f"{label}-{prompt.id or content_id(prompt)}")
        messages = orjson.dumps(prompt.messages)
        return _Adapted(prompt, prompt.to_line_with(messages), hash_content(prompt, messages))
    except TypeError as exc:  # of json and orjson: lone surrogates, integers past 64 bits, bytes in parquet
        raise RowRejected("bad_field", f"the row has a value without a JSON form: {exc}") from exc


def _rejected(row_id: str, reason: str, detail: str, where: str) -> Rejected:
    return Rejected(id=row_id, reason=reason, detail=detail, permanent=True, stage="prepare", where=where)


def _read_set_aside(folder: Path) -> Iterator[bytes]:
    """The lines of rejected.jsonl that generation wrote."""
    path = folder / REJECTED
    for end, line in read_lines(path):
        if parse_line(Rejected.from_line, line, path, end).stage == "generate":
            yield line


@contextlib.contextmanager
def _open_draft(folder: Path, options: PrepareOptions) -> Iterator[PromptDraft]:
    """An empty draft in a folder of its own, which is removed in the end."""
    place = folder / _DRAFT
    shutil.rmtree(place, ignore_errors=True)  # of a killed preparation
    place.mkdir(parents=True)
    try:
        with name_in_errors(place), contextlib.closing(PromptDraft(place, seed=options.seed)) as draft:
            yield draft
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _collect(rows: Iterator[_Adapted | Rejected], draft: PromptDraft, rejected_path: Path) -> Counter[str]:
    """Write every row to the draft or to the rejected ones; returns how many these are by reason."""
    reasons: Counter[str] = Counter()
    with rejected_path.open("wb") as set_aside:
        for row in rows:
            if isinstance(row, Rejected):
                reasons[row.reason] += 1
                set_aside.write(row.to_line())
                continue
            prompt = row.prompt
            draft.add(row.line, prompt_id=prompt.id, content=row.content, answers=prompt.answers)
    return reasons


def _write_prompts(folder: Path, draft: PromptDraft, *, own_history: bool) -> None:
    index = IndexBuilder()
    with replace_atomically(folder / PROMPTS) as out:
        for one in draft.read_lines():
            index.add(one.line, id_hash=one.id_hash, answers=one.answers, own_history=own_history)
            out.write(one.line)
    index.write(folder / PROMPTS)


def _write_rejected(folder: Path, drafted: Path) -> None:
    with drafted.open("rb") as lines, replace_atomically(folder / REJECTED) as out:
        shutil.copyfileobj(lines, out)
        out.writelines(_read_set_aside(folder))
