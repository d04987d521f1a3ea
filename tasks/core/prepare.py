"""From source rows to prompts.jsonl: adapted, told apart, shuffled, reported.

Knows sources, adapters and the dispatch order; does not know templates or servers. Invariant: the same
source, options and seed give the same bytes; every row read is a prompt, a duplicate or a rejected row.
"""

import array
import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tasks.core.adapters import RowRejected, Shape, content_id, get_adapter, make_prompt
from tasks.core.files import name_in_errors, remove_stale_temps, replace_atomically, write_json_atomically
from tasks.core.prompt_file import IndexBuilder, PromptFile, hash_id
from tasks.core.records import Prompt, Rejected
from tasks.core.response_log import REJECTED, parse_line, read_lines
from tasks.core.sources import MalformedRow, Source, iter_rows

PROMPTS = "prompts.jsonl"
REPORT = "prepare.json"
_FORMAT = 1


class EmptyDatasetError(ValueError):
    """A source without a single usable prompt."""


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """What decides prompts.jsonl besides the bytes of the source.

    `system_prompt` is put first where a conversation has none, which `keep_system_prompts` sees to when it is
    False. `chat_template_kwargs` are handed to the
    chat template ({"thinking": False}, say) and win over the row's own. `shape` says which turns the target
    writes.
    """

    name: str
    adapter: str
    seed: int
    shape: Shape = "last"
    system_prompt: str | None = None
    keep_system_prompts: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def key(self, source_sha256: str) -> str:
        """Names the prompt file that these options make of that source."""
        parts = {**dataclasses.asdict(self), "source": source_sha256, "format": _FORMAT}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What became of every row of a source: rows_read = conversations + duplicates + rejected.

    `prompts` is how many answers they are to get.
    """

    key: str
    rows_read: int
    conversations: int
    prompts: int
    duplicates: int
    rejected: dict[str, int]
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
    draft = _Draft(folder)
    try:
        for _ in _read_set_aside(folder):
            pass  # a damaged line is found before anything is written
        draft.collect(adapt_rows(sources, options))
        report = PrepareReport(
            key=key,
            rows_read=draft.rows_read,
            conversations=len(draft.kept),
            prompts=draft.count_answers(),
            duplicates=len(draft.offsets) - len(draft.kept),
            rejected=dict(sorted(draft.rejected.items())),
        )
        if not report.prompts:
            raise EmptyDatasetError(
                f"dataset {options.name!r}: {report.rows_read} rows read, none became a prompt "
                f"(rejected: {report.rejected or 'none'}); check its source and its adapter "
                f"{options.adapter!r}"
            )
        (folder / REPORT).unlink(missing_ok=True)  # a crash from here on must not leave a stale key
        draft.write(options.seed, own_history=options.shape == "each")
    finally:
        draft.discard()
    write_json_atomically(folder / REPORT, dataclasses.asdict(report))
    return report


def read_report(folder: Path) -> PrepareReport | None:
    """What the last preparation said, or None."""
    try:
        data = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        return PrepareReport(**{f.name: data[f.name] for f in dataclasses.fields(PrepareReport)})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def open_prompts(folder: Path) -> PromptFile:
    """The prepared prompts of a dataset folder."""
    return PromptFile(folder / PROMPTS)


def adapt_rows(sources: Source, options: PrepareOptions) -> Iterator[Prompt | Rejected]:
    """Every row of a source, in its order, as a prompt or with why it is none."""
    adapter = get_adapter(options.adapter)
    label = options.name.split("_", 1)[0]
    for row in iter_rows(sources):
        if isinstance(row, MalformedRow):
            yield _rejected(f"{label}-{row.where}", "malformed_row", row.detail, row.where)
            continue
        try:
            prompt = make_prompt(adapter(row.row), options.shape, keep_system=options.keep_system_prompts)
        except RowRejected as exc:
            yield _rejected(f"{label}-{row.where}", exc.reason, exc.detail, row.where)
            continue
        prompt = _with_options(prompt, options)
        yield dataclasses.replace(prompt, id=f"{label}-{prompt.id or content_id(prompt)}")


def _with_options(prompt: Prompt, options: PrepareOptions) -> Prompt:
    kwargs = {**prompt.chat_template_kwargs, **options.chat_template_kwargs}
    prompt = dataclasses.replace(prompt, chat_template_kwargs=kwargs)
    if not options.system_prompt or prompt.messages[0].get("role") == "system":
        return prompt
    return dataclasses.replace(
        prompt,
        messages=[{"role": "system", "content": options.system_prompt}, *prompt.messages],
        answer_after=[place + 1 for place in prompt.answer_after],
    )


def _rejected(row_id: str, reason: str, detail: str, where: str) -> Rejected:
    return Rejected(id=row_id, reason=reason, detail=detail, permanent=True, stage="prepare", where=where)


def _read_set_aside(folder: Path) -> Iterator[bytes]:
    """The lines of rejected.jsonl that generation wrote."""
    path = folder / REJECTED
    for end, line in read_lines(path):
        if parse_line(Rejected.from_line, line, path, end).stage == "generate":
            yield line


class _Draft:
    """The prompts in source order on disk, with 26 bytes each in memory, until the order is known."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / f".{PROMPTS}.draft"
        self._rejected_path = folder / f".{REJECTED}.draft"
        self.rows_read = 0
        self.rejected: Counter[str] = Counter()
        self.offsets = array.array("Q")
        self._answers = array.array("H")
        self._ids = array.array("Q")
        self._contents = array.array("Q")
        self.kept = np.empty(0, np.int64)

    def collect(self, rows: Iterator[Prompt | Rejected]) -> None:
        """Write every prompt to the draft and decide which are kept: the first of each content."""
        with (
            name_in_errors(self.path),
            self.path.open("wb") as draft,
            self._rejected_path.open("wb") as set_aside,
        ):
            offset = 0
            for row in rows:
                self.rows_read += 1
                if isinstance(row, Rejected):
                    self.rejected[row.reason] += 1
                    set_aside.write(row.to_line())
                    continue
                self.offsets.append(offset)
                self._answers.append(row.answers)
                self._ids.append(hash_id(row.id))
                self._contents.append(hash_id(content_id(row)))
                offset += draft.write(row.to_line())
        _, self.kept = np.unique(np.frombuffer(self._contents, np.uint64), return_index=True)

    def count_answers(self) -> int:
        """How many answers the kept conversations are to get."""
        return int(np.frombuffer(self._answers, np.uint16)[self.kept].sum())

    def write(self, seed: int, *, own_history: bool) -> None:
        """Write the kept prompts in dispatch order, a seeded shuffle by hash of seed and id, and the rest."""
        index = IndexBuilder()
        with self.path.open("rb") as draft, replace_atomically(self.folder / PROMPTS) as out:
            ids, renamed = self._tell_apart(draft)
            for at in _dispatch_order(ids, seed):
                line = self._read(draft, at)
                if renamed[at]:
                    line = _name_by_content(line).to_line()
                answers = self._answers[int(self.kept[at])]
                index.add(line, id_hash=int(ids[at]), answers=answers, own_history=own_history)
                out.write(line)
        index.write(self.folder / PROMPTS)
        with self._rejected_path.open("rb") as drafted, replace_atomically(self.folder / REJECTED) as out:
            shutil.copyfileobj(drafted, out)
            out.writelines(_read_set_aside(self.folder))

    def _tell_apart(self, draft: BinaryIO) -> tuple[np.ndarray, np.ndarray]:
        """Id hashes of the kept prompts, and which of them are renamed: a repeated id is kept by one.

        By the one with the least hash of content, so that the order of the rows decides nothing.
        """
        ids = np.frombuffer(self._ids, np.uint64)[self.kept]
        by_id = np.lexsort((np.frombuffer(self._contents, np.uint64)[self.kept], ids))
        renamed = np.zeros(len(ids), bool)
        renamed[by_id[1:]] = ids[by_id[1:]] == ids[by_id[:-1]]
        for at in np.flatnonzero(renamed):
            ids[at] = hash_id(_name_by_content(self._read(draft, int(at))).id)
        return ids, renamed

    def _read(self, draft: BinaryIO, at: int) -> bytes:
        draft.seek(self.offsets[int(self.kept[at])])
        return draft.readline()

    def discard(self) -> None:
        """Remove the draft files."""
        self.path.unlink(missing_ok=True)
        self._rejected_path.unlink(missing_ok=True)


def _name_by_content(line: bytes) -> Prompt:
    prompt = Prompt.from_line(line)
    return dataclasses.replace(prompt, id=f"{prompt.id}-{content_id(prompt)}")


def _dispatch_order(id_hashes: np.ndarray, seed: int) -> np.ndarray:
    """Positions sorted by a mix of seed and id (splitmix64, Steele et al. 2014): stable under additions."""
    with np.errstate(over="ignore"):
        salt = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")
        mixed = id_hashes ^ np.uint64(salt)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable")
