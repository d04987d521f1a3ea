"""Generate one dataset: resume, dispatch, checkpoint, say how it ended.

Where the log, the budget and the servers meet. Knows the order of things; each thing lives elsewhere.
Invariant: however it ends, what the log holds is checkpointed if there was a second to do it, and a
dataset that is neither at its budget nor out of prompts ends with an error.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from serving.client.pool import ServerPool
from tasks.generate.budget import BudgetPolicy, TokenBudget
from tasks.generate.dispatch import Dispatcher, DispatchRules
from tasks.generate.dispatch_permit import DispatchPermit
from tasks.generate.feed import Feeder, Unrenderable
from tasks.generate.opened_dataset import CheckpointStore, OpenedDataset, open_dataset
from tasks.generate.window import Window
from tasks.records.response_log import ResponseLog
from tasks.tokens.rendering import Renderer

logger = logging.getLogger(__name__)

Outcome = Literal["complete", "exhausted"]


class NothingAnsweredError(RuntimeError):
    """Every prompt of a dataset was rejected for good: something about it or its settings is wrong."""


class GenerationIncompleteError(RuntimeError):
    """Prompts are left that failed for reasons that may pass; a resume asks them again."""


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """How one dataset is generated, beyond what the shared resources decide.

    `budget_tokens` is None for finished conversations, which are only tokenized.
    """

    name: str
    budget_tokens: int | None
    dispatch: DispatchRules
    budget_policy: BudgetPolicy = "forecast"
    long_prompt_tokens: int = 4096
    expected_mean_tokens: float | None = None
    checkpoint_every_s: float = 5.0
    report_every_s: float = 5.0
    retry_rejected: bool = False


@dataclass(slots=True)
class Resources:
    """What the datasets of one run share: servers, window, renderer, threads, and whose turn it is.

    `turn` bounds how many datasets begin at the same time; a dataset gives it up when it can no longer fill
    the window, be it one lane of it, so that the next one fills it meanwhile. `find_permanent_failure` says
    why no server will come back, None where one may.
    """

    pool: ServerPool
    window: Window
    renderer: Renderer
    context_length: int | None
    turn: DispatchPermit
    find_permanent_failure: Callable[[], str | None] = lambda: None
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "render"))


@dataclass(frozen=True, slots=True)
class GenerationStatus:
    """A look at a running dataset, for progress lines and artifacts."""

    name: str
    rows: int
    prompts: int
    completion_tokens: int
    budget_tokens: int | None
    in_flight: int
    retries: int
    given_up: int
    tokens_per_s: float
    is_paused: bool = False

    @property
    def share(self) -> float:
        """Completed tokens over the budget, 0 to 1 and beyond; without one, settled prompts over all."""
        if self.budget_tokens is None:
            return (self.rows + self.given_up) / self.prompts if self.prompts else 1.0
        return self.completion_tokens / self.budget_tokens if self.budget_tokens else 1.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the budget at the present speed; None when nothing moves."""
        left = (self.budget_tokens or 0) - self.completion_tokens
        if left <= 0:
            return 0.0
        return left / self.tokens_per_s if self.tokens_per_s > 0 else None

    def to_line(self) -> str:
        """One line for a log."""
        if self.budget_tokens is None:
            done = f"{self.rows} of {self.prompts} conversations tokenized"
            return f"{self.name}: {done}, {self.completion_tokens:,} tokens of the target"
        eta = "-" if self.eta_s is None else f"{self.eta_s / 60:.1f} min"
        pace = f"{self.in_flight} in flight, {self.tokens_per_s:,.0f} tok/s, ETA {eta}"
        return (
            f"{self.name}: {self.completion_tokens:,} of {self.budget_tokens:,} tokens ({self.share:.0%}), "
            f"{self.rows} of {self.prompts} prompts, "
            f"{'paused until a server is back' if self.is_paused else pace}"
        )


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """How a dataset's generation ended."""

    name: str
    outcome: Outcome
    rows: int
    new_rows: int
    prompts: int
    completion_tokens: int
    budget_tokens: int | None
    resumed: str

    def to_line(self) -> str:
        """One line for a log."""
        if self.budget_tokens is None:
            made = f"{self.new_rows} of them new" if self.new_rows else "nothing new was needed"
            tokens = f"{self.completion_tokens:,} tokens of the target"
            return f"{self.name} is complete: {self.rows} conversations, {tokens} ({made})"
        made = f"{self.new_rows} new responses" if self.new_rows else "nothing new was needed"
        end = f"{self.rows} responses, {self.completion_tokens:,} of {self.budget_tokens:,} tokens"
        if self.outcome == "complete":
            return f"{self.name} is complete: {end} ({made})"
        short = self.budget_tokens - self.completion_tokens
        used_up = f"all {self.prompts} prompts used, {short:,} tokens short"
        return f"{self.name} is exhausted: {used_up}; {end} ({made})"


async def generate_dataset(
    folder: Path,
    *,
    rules: GenerationRules,
    resources: Resources,
    checkpoints: CheckpointStore,
    on_status: Callable[[GenerationStatus], None],
) -> GenerationResult:
    """Bring one prepared dataset to its budget, resuming from whatever is on disk.

    Raises:
        FolderLockedError: another process generates it.
        GenerationIncompleteError: prompts are left that may still succeed.
        OutageError, ServerMisconfigured, AppendError, RecordError: as their own docs say.
    """
    async with open_for(folder, rules, checkpoints) as opened:
        logger.info("%s: %s", rules.name, opened.resumed)
        if not is_finished(opened.log, rules):
            await _Run(opened, rules, on_status).generate(resources)
        return conclude(opened, rules)


async def find_result(
    folder: Path, *, rules: GenerationRules, checkpoints: CheckpointStore
) -> GenerationResult | None:
    """The result of a prepared dataset that needs no more answers, without any server; else None.

    Raises:
        FolderLockedError, RecordError: as in generate_dataset.
    """
    async with open_for(folder, rules, checkpoints) as opened:
        if not is_finished(opened.log, rules) or not opened.log.progress.rows:
            return None
        logger.info("%s: %s", rules.name, opened.resumed)
        return conclude(opened, rules)


def open_for(
    folder: Path, rules: GenerationRules, checkpoints: CheckpointStore
) -> AbstractAsyncContextManager[OpenedDataset]:
    """A prepared dataset, opened as these rules say."""
    return open_dataset(
        folder,
        name=rules.name,
        checkpoints=checkpoints,
        prior_mean_tokens=rules.expected_mean_tokens,
        retry_rejected=rules.retry_rejected,
    )


def is_finished(log: ResponseLog, rules: GenerationRules) -> bool:
    """Whether there is nothing left to do: enough is there, or every prompt is settled."""
    return has_reached(log, rules) or log.progress.open_prompts == 0


def has_reached(log: ResponseLog, rules: GenerationRules) -> bool:
    """Whether the budget or the cap of samples is reached."""
    progress, cap = log.progress, rules.dispatch.max_samples
    if rules.budget_tokens is not None and progress.completion_tokens >= rules.budget_tokens:
        return True
    return cap is not None and progress.rows >= cap


def conclude(opened: OpenedDataset, rules: GenerationRules) -> GenerationResult:
    """How it ended.

    Raises:
        GenerationIncompleteError: prompts are left that may still succeed.
        NothingAnsweredError: all were rejected for good.
    """
    progress, reached = opened.log.progress, has_reached(opened.log, rules)
    if not reached and progress.open_prompts:
        budget = "" if rules.budget_tokens is None else f" of {rules.budget_tokens:,}"
        raise GenerationIncompleteError(
            f"{rules.name}: {progress.open_prompts} prompts are left that failed for reasons that may pass "
            f"(see rejected.jsonl); {progress.completion_tokens:,}{budget} tokens are on "
            "disk. Run the same command again to ask them again"
        )
    if not progress.rows and not reached:
        reasons = ", ".join(f"{reason} {count}" for reason, count in progress.rejected.most_common())
        raise NothingAnsweredError(
            f"{rules.name}: none of its {len(progress.done)} prompts gave a row ({reasons}; each is in "
            "rejected.jsonl): correct its settings or its source, then run again with --retry-rejected"
        )
    return GenerationResult(
        name=rules.name,
        outcome="complete" if reached or rules.budget_tokens is None else "exhausted",
        rows=progress.rows,
        new_rows=progress.rows - opened.rows_before,
        prompts=len(progress.done),
        completion_tokens=progress.completion_tokens,
        budget_tokens=rules.budget_tokens,
        resumed=opened.resumed,
    )


class _Run:
    """One generation with its side tasks: checkpoints and progress."""

    def __init__(
        self, opened: OpenedDataset, rules: GenerationRules, on_status: Callable[[GenerationStatus], None]
    ) -> None:
        self._opened = opened
        self._rules = rules
        self._log = opened.log
        self._on_status = on_status
        self._recent: list[tuple[float, int]] = []

    async def generate(self, resources: Resources) -> None:
        async with resources.turn.hold(self._rules.name) as give_up_turn:
            dispatcher = self._dispatcher(resources, give_up_turn)
            side = (
                asyncio.create_task(self._keep_checkpoints()),
                asyncio.create_task(self._report(dispatcher)),
            )
            try:
                await dispatcher.run()
            finally:
                for task in side:
                    task.cancel()
                await asyncio.gather(*side, return_exceptions=True)
                await asyncio.shield(self._opened.save_checkpoint())
                self._on_status(self._status(dispatcher))

    def _dispatcher(self, resources: Resources, on_turn_over: Callable[[], None]) -> Dispatcher:
        def make_feeder(
            on_change: Callable[[], None], on_unrenderable: Callable[[Unrenderable], None]
        ) -> Feeder:
            return Feeder(
                self._opened.prompts,
                self._log.progress,
                resources.renderer,
                lanes=resources.window.lanes,
                long_prompt_tokens=self._rules.long_prompt_tokens,
                context_length=resources.context_length,
                executor=resources.threads,
                on_change=on_change,
                on_unrenderable=on_unrenderable,
                histories=self._opened.histories,
            )

        budget = TokenBudget(
            budget_tokens=self._rules.budget_tokens or 0,
            completed_tokens=self._log.progress.completion_tokens,
            policy=self._rules.budget_policy,
            forecast=self._opened.forecast,
        )
        return Dispatcher(
            log=self._log,
            feeder_of=make_feeder,
            pool=resources.pool,
            window=resources.window,
            budget=budget,
            rules=self._rules.dispatch,
            on_turn_over=on_turn_over,
            shares_window=resources.turn.shares_window,
            find_permanent_failure=resources.find_permanent_failure,
        )

    async def _keep_checkpoints(self) -> None:
        while True:
            await asyncio.sleep(self._rules.checkpoint_every_s)
            await self._opened.save_checkpoint()

    async def _report(self, dispatcher: Dispatcher) -> None:
        while True:
            self._on_status(self._status(dispatcher))
            await asyncio.sleep(self._rules.report_every_s)

    def _status(self, dispatcher: Dispatcher) -> GenerationStatus:
        progress = self._log.progress
        return GenerationStatus(
            name=self._rules.name,
            rows=progress.rows,
            prompts=len(progress.done),
            completion_tokens=progress.completion_tokens,
            budget_tokens=self._rules.budget_tokens,
            in_flight=dispatcher.in_flight,
            retries=dispatcher.counts.retries,
            given_up=dispatcher.counts.given_up,
            tokens_per_s=self._speed(progress.completion_tokens),
            is_paused=dispatcher.is_paused,
        )

    def _speed(self, completion_tokens: int) -> float:
        """Tokens per second over the last minute of reports."""
        now_s = asyncio.get_running_loop().time()
        self._recent = [(at, tokens) for at, tokens in self._recent if now_s - at <= 60.0]
        self._recent.append((now_s, completion_tokens))
        (first_s, first_tokens), span_s = self._recent[0], now_s - self._recent[0][0]
        return (completion_tokens - first_tokens) / span_s if first_s < now_s else 0.0
