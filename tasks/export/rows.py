"""The rows of the datasets' response logs that are exported, and the count of those that are not.

Knows responses, logs and the prompts' split keys; does not know splits or formats. Invariant: rows +
duplicates + exact duplicates + skipped is every generation of a log, and only what was hashed is read: a log
may grow meanwhile.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from tasks.export.contamination import EvalIndex, iter_texts
from tasks.export.duplicates import ExactDuplicates
from tasks.export.files import Conversation, ExportInputError, ExportRow, Messages
from tasks.export.report import DatasetCount
from tasks.export.split.keys import SplitKeys
from tasks.export.texts import ConversationReader
from tasks.prepare.preparation import PROMPTS
from tasks.prepare.sources.hash_cache import HashCache
from tasks.records.fast_responses import ResponseReader
from tasks.records.response_log import RESPONSES, read_lines
from tasks.records.rows import RecordError, Response, is_empty_answer
from tasks.tokens.masks import NotTokenExact, Sample, samples_from_response

_BLOCK_BYTES = 1 << 22
_LIKE_A_TURN = re.compile(r"#\d+$")


@dataclass(frozen=True, slots=True)
class ExportDataset:
    """A dataset to export; `status` and `kind` are only passed on to the manifest."""

    name: str
    folder: Path
    status: str
    kind: str = "generate"


@dataclass(frozen=True, slots=True)
class LogDigest:
    """The whole lines of a log: how many bytes, and their SHA-256. `is_torn`: more follows, without end."""

    bytes: int
    sha256: str
    is_torn: bool


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Which exact rows are left out: those like an earlier one, those that share words with `evals`.

    With `conversations` the others carry their words.
    """

    exact: ExactDuplicates | None = None
    evals: EvalIndex | None = None
    conversations: bool = False

    @property
    def needs_texts(self) -> bool:
        """Whether prompts.jsonl is read too."""
        return self.evals is not None or self.conversations


def hash_logs(datasets: Sequence[ExportDataset]) -> list[LogDigest | None]:
    """The digest of each dataset's log, None without one; a second for each gigabyte and core."""
    with ThreadPoolExecutor(2) as threads:  # hashing leaves the interpreter to others
        return list(threads.map(lambda dataset: hash_log(dataset.folder / RESPONSES), datasets))


def hash_log(path: Path) -> LogDigest | None:
    """The digest of a log's whole lines; None when there is no log."""
    if not path.exists():
        return None
    digest, size, rest = hashlib.sha256(), 0, b""
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            end = block.rfind(b"\n") + 1
            if end:
                digest.update(rest)
                digest.update(memoryview(block)[:end])
                size += len(rest) + end
                rest = b""
            rest += block[end:]
    return LogDigest(size, digest.hexdigest(), is_torn=bool(rest))


def hash_prompts(
    datasets: Sequence[ExportDataset], cache: HashCache, *, needs_texts: bool
) -> list[str | None]:
    """The SHA-256 of each dataset's prompts.jsonl, None without one; `cache` spares those of before.

    Raises:
        ExportInputError: one cannot be read, or is not there and the texts are needed.
    """
    paths = [dataset.folder / PROMPTS for dataset in datasets]
    try:
        with ThreadPoolExecutor(2) as threads:
            hashes = threads.map(
                lambda path: cache.hash_file(path) if needs_texts or path.exists() else None, paths
            )
            return list(hashes)
    except FileNotFoundError as exc:
        raise ExportInputError(
            f"{exc.filename} cannot be read ({exc.strerror}), and it has the texts: put it back, or export "
            "without decontaminate and conversations"
        ) from exc
    except OSError as exc:
        raise ExportInputError(
            f"{exc.filename} cannot be read ({exc.strerror}), and rows are split by their prompts: make it "
            "readable, or move it away to have them split by conversation id"
        ) from exc


def read_export_rows(
    datasets: Sequence[ExportDataset],
    digests: Sequence[LogDigest | None],
    counts: Sequence[DatasetCount],
    split_keys: Sequence[SplitKeys],
    row_filter: RowFilter,
) -> Iterator[ExportRow]:
    """The exportable rows of all logs as far as they were hashed; everything else is counted."""
    for dataset, digest, count, keys in zip(datasets, digests, counts, split_keys, strict=True):
        if digest is not None:
            count.source_bytes, count.source_sha256 = digest.bytes, digest.sha256
            with contextlib.ExitStack() as stack:
                texts = None
                if row_filter.needs_texts:
                    texts = stack.enter_context(ConversationReader(dataset.folder))
                taker = _Taker(count, row_filter, texts, keys)
                yield from _read_rows(dataset.folder / RESPONSES, digest, taker)
            keys.close()


def _read_rows(path: Path, digest: LogDigest, taker: "_Taker") -> Iterator[ExportRow]:
    """Holds the ids, about 100 bytes a row."""
    count = taker.count
    seen: set[str | tuple[str, int]] = set()
    reader = ResponseReader()
    for end, line in read_lines(path):
        if end > digest.bytes:
            break
        try:
            response = reader.read(line)
        except RecordError:
            count.skipped["unreadable"] += 1
            continue
        key = (response.id, response.turn) if response.turn else response.id
        if key in seen:
            count.duplicates += 1
            continue
        seen.add(key)
        yield from taker.take(response)
    if digest.is_torn:
        count.skipped["torn_last_line"] += 1


@dataclass(frozen=True, slots=True)
class _Taker:
    """Takes the rows of one dataset's responses; what is left out is counted."""

    count: DatasetCount
    row_filter: RowFilter
    texts: ConversationReader | None
    split_keys: SplitKeys

    def take(self, response: Response) -> Iterator[ExportRow]:
        messages = self.texts.read(response) if self.texts else None  # of all: later turns build on it
        try:
            samples = samples_from_response(response)
        except NotTokenExact as exc:
            self.count.skipped[exc.reason] += 1
            return
        if (why := self._find_contamination(messages)) is not None:
            self.count.skipped[why] += 1
            return
        kept = [sample for sample in samples if self._keeps(sample)]
        for sample in kept:
            self.count.exported.add(sample)
            row = self._to_row(response, sample)
            if self.row_filter.conversations and sample is kept[-1]:
                row = self._with_conversation(row, messages, is_one_row=len(samples) == 1)
            yield row

    def _keeps(self, sample: Sample) -> bool:
        exact = self.row_filter.exact
        if is_empty_answer(sample.n_loss, sample.finish_reason):
            self.count.skipped["empty_answer"] += 1
            return False
        if exact is not None and not exact.is_new(sample):
            self.count.exact_duplicates += 1
            return False
        return True

    def _to_row(self, response: Response, sample: Sample) -> ExportRow:
        conversation_id = str(response.extra.get("conversation_id") or response.id)
        key = self.split_keys.find(response.id)
        if key is None:
            key = self.split_keys.make_unknown(conversation_id)
            self.count.split_by_id += 1
        meta = response.extra.get("meta") or {}
        return ExportRow(
            id=_name_row(response.id, sample.turn),
            sample=sample,
            dataset=self.count.name,
            conversation_id=conversation_id,
            meta=orjson.dumps(meta, option=orjson.OPT_SORT_KEYS).decode(),
            split_key=key,
        )

    def _with_conversation(self, row: ExportRow, messages: Messages | None, *, is_one_row: bool) -> ExportRow:
        if messages is None:
            self.count.texts_unknown += 1
            return row
        name = row.id if is_one_row else row.sample.id
        return replace(row, conversation=Conversation(name, messages, is_one_row))

    def _find_contamination(self, messages: Messages | None) -> str | None:
        """The reason to leave a row out, which is also that its words are not known."""
        if self.row_filter.evals is None:
            return None
        if messages is None:
            return "prompt_unknown"
        files = self.row_filter.evals.find(iter_texts(messages))
        for file in files:
            file.rows[self.count.name] = file.rows.get(self.count.name, 0) + 1
        return "contaminated" if files else None


def _name_row(response_id: str, turn: int) -> str:
    """The row's id, with its turn where that is a later one, or where the id looks as if it had one."""
    return f"{response_id}#{turn}" if turn or _LIKE_A_TURN.search(response_id) else response_id
