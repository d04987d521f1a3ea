"""Read what a dataset's two logs say about it.

Knows raw_responses.jsonl and rejected.jsonl; does not know servers or clocks. Invariant: every figure
comes from the files, so it is the same after a crash as before it.
"""

from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path

from tasks.aggregate.recent_answers import Answer, RecentAnswers
from tasks.aggregate.stats import (
    TIME_BUCKET_S,
    Damage,
    DatasetStats,
    dataset_status,
    mean_speed,
    measure_reached,
    parse_time,
    span_fields,
)
from tasks.records.length_quantiles import length_quantiles
from tasks.records.log_tail import LogTail
from tasks.records.response_log import REJECTED, RESPONSES
from tasks.records.rows import (
    RecordError,
    Rejected,
    Response,
    is_empty_answer,
)
from tasks.records.skim import has_counted_ids, skim_row

_DETAIL = 200  # characters of an example's detail
# A row with a figure beyond these is an answer all the same: only the figure is left out.
_LATEST_S = 4_102_444_800.0  # the year 2100
_LONGEST_S = 30 * 86_400.0
_MAX_ATTEMPTS = 1_000_000
_NUMBERED = 5  # damaged lines of a log


def scan_dataset(
    folder: Path,
    *,
    name: str,
    budget_tokens: int | None,
    max_samples: int | None,
    prompts: int | None,
    torn_ok: bool = True,
    prepare: Mapping[str, int] | None = None,
) -> DatasetStats:
    """Read a dataset's two logs once; about 100 bytes of memory a row, whatever the rows' length.

    Args:
        folder: may lack either file: nothing was written yet.
        name: the dataset's, repeated in the result.
        budget_tokens: completion tokens to reach, or None.
        max_samples: rows at which the dataset is complete too, or None.
        prompts: the number of lines of prompts.jsonl; None when it is not there yet.
        torn_ok: ignore a last line without a newline, which is one that is being written.
        prepare: counts of the prepare report (duplicates and the like), repeated in the result.

    Raises:
        RecordError: a last line is torn and `torn_ok` is False.
    """
    scan = DatasetScan(folder)
    scan.read_new()
    if not torn_ok:
        scan.refuse_torn()
    return scan.to_stats(
        name=name, budget_tokens=budget_tokens, max_samples=max_samples, prompts=prompts, prepare=prepare
    )


class DatasetScan:
    """A dataset's two logs, read once and from then on only where they have grown.

    What was read of a log that is cut or replaced is forgotten, and the log is read again.
    """

    def __init__(self, folder: Path) -> None:
        self._responses, self._rejected = LogTail(folder / RESPONSES), LogTail(folder / REJECTED)
        self._scan, self._rejections = _Scan(), _Rejections()

    @property
    def recent(self) -> RecentAnswers:
        """The answers of the log's last minutes."""
        return self._scan.recent

    @property
    def rows(self) -> int:
        """Answers read so far."""
        return self._scan.rows

    def read_new(self) -> None:
        """Read what was added since the last time."""
        restarted = not self._responses.is_continued()
        if restarted:
            self._responses.restart()
            self._scan = _Scan()
        if restarted or not self._rejected.is_continued():
            self._rejected.restart()
            self._rejections = _Rejections()
        for line in self._responses.read():
            key = self._scan.add_line(line)
            if key is not None:
                self._rejections.settle(key)
        for line in self._rejected.read():
            self._rejections.add_line(line, self._scan.answered)

    def refuse_torn(self) -> None:
        """Accept only logs that end with a whole line.

        Raises:
            RecordError: one of them does not.
        """
        for log in (self._responses, self._rejected):
            size = log.path.stat().st_size if log.path.exists() else 0
            if size > log.end:
                raise RecordError(f"{log.path}: the last {size - log.end} bytes are no whole line")

    def to_stats(
        self,
        *,
        name: str,
        budget_tokens: int | None,
        max_samples: int | None,
        prompts: int | None,
        prepare: Mapping[str, int] | None = None,
    ) -> DatasetStats:
        """What was read so far; the arguments are those of `scan_dataset`."""
        scan, rejections = self._scan, self._rejections
        status = dataset_status(
            rows=scan.rows,
            completion_tokens=scan.completion_tokens,
            settled=len(scan.answered) + rejections.final,
            prompts=prompts,
            budget_tokens=budget_tokens,
            max_samples=max_samples,
        )
        unreadable = scan.unreadable + rejections.unreadable
        if unreadable:
            status = "incomplete"  # a run refuses to go on in such a log
        return DatasetStats(
            name=name,
            status=status,
            rows=scan.rows,
            answered=len(scan.answered),
            prompts=prompts,
            prompt_tokens=scan.prompt_tokens,
            completion_tokens=scan.completion_tokens,
            budget_tokens=budget_tokens,
            reached_percent=measure_reached(
                status,
                completion_tokens=scan.completion_tokens,
                budget_tokens=budget_tokens,
                answers=len(scan.answered),
                prompts=prompts,
            ),
            finish_reasons=dict(sorted(scan.finish_reasons.items())),
            lengths=length_quantiles(scan.length_counts),
            empty=scan.empty,
            not_token_exact=scan.not_token_exact,
            duplicates=scan.duplicates,
            unreadable=unreadable,
            rejected={reason: count for reason, count in sorted(rejections.reasons.items()) if count},
            permanently_rejected=rejections.final,
            prepare=dict(prepare or {}),
            retries=scan.retries,
            **span_fields(scan.started, scan.first_finished, scan.last_finished),
            mean_tokens_per_s=mean_speed(scan.started, scan.last_finished, scan.tokens_by_time),
            length_counts=dict(scan.length_counts),
            cut_lengths=dict(scan.cut_lengths),
            tokens_by_time=dict(scan.tokens_by_time),
            rejected_examples=rejections.find_examples(),
            max_samples=max_samples,
            damaged={
                name: Damage(part.unreadable, tuple(part.first_unreadable))
                for name, part in ((RESPONSES, scan), (REJECTED, rejections))
                if part.unreadable
            },
        )


class _Lines:
    """Counts the lines of a log, and those that cannot be read."""

    def __init__(self) -> None:
        self.lines = self.unreadable = 0
        self.first_unreadable: list[int] = []

    def note_unreadable(self) -> None:
        """The line that was counted last is one."""
        self.unreadable += 1
        if self.unreadable <= _NUMBERED:
            self.first_unreadable.append(self.lines)


class _Scan(_Lines):
    """Running sums over raw_responses.jsonl."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.prompt_tokens = self.completion_tokens = 0
        self.empty = self.not_token_exact = self.duplicates = self.retries = 0
        self.finish_reasons: Counter[str] = Counter()
        self.length_counts: Counter[int] = Counter()
        self.cut_lengths: Counter[int] = Counter()
        self.tokens_by_time: Counter[int] = Counter()
        self.recent = RecentAnswers()
        self.answered: set[int] = set()
        self.started: float | None = None
        self.first_finished: float | None = None
        self.last_finished: float | None = None

    def add_line(self, line: bytes) -> int | None:
        """The key of the answer; None where the line is no first row of one."""
        self.lines += 1
        try:
            row = skim_row(line)
            response = Response.from_row(row)
        except RecordError:
            self.note_unreadable()
            return None
        # 64 bits of a hash: a million rows collide with a chance of 3e-8.
        key = hash((response.id, response.turn))
        if key in self.answered:
            self.duplicates += 1
            return None
        self.answered.add(key)
        exact = has_counted_ids(row, response.prompt_tokens, response.completion_tokens)
        self._add(response, exact=exact)
        return key

    def _add(self, response: Response, *, exact: bool) -> None:
        self.rows += 1
        self.prompt_tokens += response.prompt_tokens
        self.completion_tokens += response.completion_tokens
        self.finish_reasons[response.finish_reason] += 1
        self.length_counts[response.completion_tokens] += 1
        if response.finish_reason == "length":
            self.cut_lengths[response.completion_tokens] += 1
        self.empty += is_empty_answer(response.completion_tokens, response.finish_reason)
        self.not_token_exact += not exact
        if response.attempt <= _MAX_ATTEMPTS:
            self.retries += max(0, response.attempt - 1)
        try:
            finished = parse_time(response.finished_at)
        except (ValueError, OverflowError):
            return  # older rows carry no time
        if not 0 < finished < _LATEST_S:
            return
        latency_s = response.latency_s if 0 <= response.latency_s <= _LONGEST_S else 0.0
        started = max(0.0, finished - latency_s)
        self.started = started if self.started is None else min(self.started, started)
        self.first_finished = finished if self.first_finished is None else min(self.first_finished, finished)
        self.last_finished = finished if self.last_finished is None else max(self.last_finished, finished)
        self.tokens_by_time[int(finished // TIME_BUCKET_S) * TIME_BUCKET_S] += response.completion_tokens
        self.recent.add(Answer(started, finished, response.completion_tokens, response.server))


class _Rejections(_Lines):
    """The last word of rejected.jsonl on each prompt and source row that has no answer.

    `reasons` counts them; `final` are prompts that will not be asked again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reasons: Counter[str] = Counter()
        self.final = 0
        self._last: dict[int, tuple[str, bool, bool]] = {}  # reason, of a prompt, permanent
        self._examples: dict[str, tuple[int, str]] = {}

    def add_line(self, line: bytes, answered: Container[int]) -> None:
        self.lines += 1
        try:
            rejected = Rejected.from_line(line)
        except RecordError:
            self.note_unreadable()
            return
        # A source row that became no prompt may have no id; its place in the source tells it apart.
        is_prompt = rejected.stage == "generate"
        key = hash((rejected.id, rejected.turn if is_prompt else rejected.where))
        self._forget(key)
        if is_prompt and key in answered:
            return
        self._last[key] = (rejected.reason, is_prompt, rejected.permanent)
        self.reasons[rejected.reason] += 1
        self.final += is_prompt and rejected.permanent
        self._examples.setdefault(rejected.reason, (key, _to_example(rejected)))

    def settle(self, key: int) -> None:
        """A prompt was answered after all."""
        if key in self._last and self._last[key][1]:
            self._forget(key)

    def find_examples(self) -> dict[str, str]:
        """One of the rejected for each reason, where one is known."""
        return {reason: text for reason, (_, text) in sorted(self._examples.items())}

    def _forget(self, key: int) -> None:
        if (known := self._last.pop(key, None)) is None:
            return
        reason, is_prompt, permanent = known
        self.reasons[reason] -= 1
        self.final -= is_prompt and permanent
        if self._examples.get(reason, (None,))[0] == key:
            del self._examples[reason]


def _to_example(rejected: Rejected) -> str:
    detail = rejected.detail if len(rejected.detail) <= _DETAIL else f"{rejected.detail[:_DETAIL]}…"
    return ": ".join(part for part in (rejected.id or rejected.where, detail) if part)
