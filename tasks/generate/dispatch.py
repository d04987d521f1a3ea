"""The sliding window at work: take a prompt, send it, check the answer, put it on disk, count it.

Knows the budget, the window, the servers and the log; does not know Prefect, checkpoints or templates.
Invariants: an answer is on disk before it is counted; no answer is cancelled to meet a budget; nothing
done per request grows with the dataset; a prompt that waits for its retry holds no slot, and no more of
them wait than a lane has slots.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from serving.client.errors import PromptRefused, RequestFailed, ServerLost, ServerMisconfigured
from serving.client.pool import ServerPool
from serving.client.protocol import Generation, GenerationRequest
from tasks.generate.budget import TokenBudget
from tasks.generate.chains import find_followers, reject_followers, to_history
from tasks.generate.feed import Feeder, Unrenderable
from tasks.generate.retries import Attempt, RetryQueue
from tasks.generate.window import Window
from tasks.records.prompt_file import hash_id
from tasks.records.response_log import ResponseLog
from tasks.records.rows import Prompt, Rejected, Response

logger = logging.getLogger(__name__)

_TICK_S = 1.0
REFUSALS_TO_STOP = 25
DEATHS_TO_REJECT = 5
_REJECTIONS_TO_LOG = 20  # of one run, each on its own line; all of them are in rejected.jsonl


class OutageError(RuntimeError):
    """No server gave a good answer for too long; what was generated is kept."""


class ServersGoneError(OutageError):
    """No server is there, and none will come back by itself."""


@dataclass(frozen=True, slots=True)
class DispatchRules:
    """How prompts are asked and when one is given up.

    `sampling_params` go to the server as they are. `seed` makes each prompt's sampling repeatable.
    `max_attempts` and `max_empty_answers` bound what one prompt may cost. `on_length` says whether an
    answer cut at its max_new_tokens is kept (and labelled) or rejected.
    """

    sampling_params: Mapping[str, Any]
    seed: int | None = None
    max_samples: int | None = None
    max_attempts: int = 5
    max_empty_answers: int = 3
    on_length: Literal["keep", "reject"] = "keep"
    outage_timeout_s: float = 1800.0


@dataclass(slots=True)
class DispatchCounts:
    """What this process has done, for the progress line; the truth is in the log."""

    answers: int = 0
    completion_tokens: int = 0
    retries: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    given_up: int = 0


class Dispatcher:
    """Generates for one dataset until its budget is reached or its prompts ran out.

    `find_permanent_failure` is asked while no server is up: why none will come back, or None.
    """

    def __init__(
        self,
        *,
        log: ResponseLog,
        feeder_of: Callable[[Callable[[], None], Callable[[Unrenderable], None]], Feeder],
        pool: ServerPool,
        window: Window,
        budget: TokenBudget,
        rules: DispatchRules,
        on_turn_over: Callable[[], None] = lambda: None,
        shares_window: bool = True,
        find_permanent_failure: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._pool = pool
        self._window = window
        self._budget = budget
        self._rules = rules
        self._on_turn_over = on_turn_over
        self._shares_window = shares_window
        self._find_end = find_permanent_failure
        self._clock = clock
        self._wake = asyncio.Event()
        self._feeder = feeder_of(self._wake.set, self._reject_unrenderable)
        self._numbers = itertools.count()
        self._rid_prefix = f"draftmill-{uuid.uuid4().hex}"
        self._retries = RetryQueue(window.lanes)
        self._in_flight: dict[int, Attempt] = {}
        self._turn_is_over = False
        self._stop: Exception | None = None
        self._started_s = clock()
        self._refused_in_a_row = 0
        self._failing_since_s: float | None = None
        self._silent_s = 0.0
        self._last_failure = ""
        self.counts = DispatchCounts()

    @property
    def in_flight(self) -> int:
        """Requests of this dataset that are with a server."""
        return len(self._in_flight)

    @property
    def is_paused(self) -> bool:
        """Whether all servers are away."""
        return not self._pool.is_up

    async def run(self) -> None:
        """Dispatch until done, then drain.

        Raises:
            OutageError: no server for outage_timeout_s, or none that will come back.
            ServerMisconfigured: no prompt can succeed.
            AppendError: a row could not be written.
        """
        stops = (self._pool.subscribe(self._wake.set), self._window.subscribe(self._wake.set))
        try:
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(self._feeder.run())
                while not self._is_done():
                    self._wake.clear()
                    now_s = self._clock()
                    self._dispatch(group, now_s)
                    self._check_outage()
                    if not self._is_done():
                        await self._sleep_until_woken(now_s)
                feeding.cancel()
        except BaseExceptionGroup as failures:
            raise _first(failures) from failures
        finally:
            for stop in stops:
                stop()
            self._hand_turn_on()
        if self._stop is not None:
            raise self._stop

    def _is_done(self) -> bool:
        return not self._in_flight and (self._stop is not None or self._has_enough() or self._has_no_more())

    def _has_enough(self) -> bool:
        cap = self._rules.max_samples
        return self._budget.reached or (cap is not None and self._log.progress.rows >= cap)

    def _has_no_more(self) -> bool:
        return self._feeder.is_empty and self._retries.is_empty

    def _dispatch(self, group: asyncio.TaskGroup, now_s: float) -> None:
        """Fill the window as far as budget, servers and ready prompts allow."""
        if self._stop is not None:
            return
        for lane in self._window.lanes:
            while self._pool.is_up and self._window.has_room(lane) and self._may_send_more():
                item = self._next_item(lane, now_s)
                if item is None:
                    if self._shares_window and self._feeder.is_starved(lane):
                        self._hand_turn_on()
                    break
                self._send(group, item)
        if self._has_no_more():
            self._hand_turn_on()

    def _send(self, group: asyncio.TaskGroup, item: Attempt) -> None:
        number = next(self._numbers)
        self._window.take(item.rendered.lane, by=self._wake.set)
        self._budget.dispatched(number, now_s=self._clock(), max_new_tokens=item.rendered.max_new_tokens)
        self._in_flight[number] = item
        asking = group.create_task(self._ask(number, item))
        # A task that is cancelled before its first step runs no `finally`.
        asking.add_done_callback(lambda _: self._settle(number, item))

    def _may_send_more(self) -> bool:
        cap = self._rules.max_samples
        if cap is not None and self._log.progress.rows + self.in_flight >= cap:
            allowed = False
        else:
            allowed = self._budget.may_dispatch(now_s=self._clock())
        if not allowed:
            self._hand_turn_on()
        return allowed

    def _next_item(self, lane: str, now_s: float) -> Attempt | None:
        slots = self._window.slots(lane)
        again = self._retries.pop_due(
            lane, now_s=now_s, slots=slots, in_flight=self._in_flight.values(), answers=self.counts.answers
        )
        if again is not None:
            return again
        if self._retries.is_full(lane, slots=slots):
            return None  # a server that fails everything must not be fed the whole dataset meanwhile
        return Attempt(self._feeder.take(lane)) if self._feeder.peek(lane) else None

    def _hand_turn_on(self) -> None:
        """Let the next dataset fill what this one cannot: all at its end, or a lane it has no use for."""
        if not self._turn_is_over:
            self._turn_is_over = True
            self._on_turn_over()

    async def _ask(self, number: int, item: Attempt) -> None:
        """One attempt at one prompt; every way out frees the slot and settles the budget."""
        counted = False
        started_s = self._clock()
        try:
            async with self._pool.lease() as client:
                answer = await client.generate(self._request(number, item))
            server = client.base_url
            if refusal := self._refusal(answer, item):
                self._handle_refusal(refusal, item)
                return
            self._log.append(
                self._to_response(answer, item, server=server, latency_s=self._clock() - started_s),
                position=item.rendered.position,
            )
            self._budget.completed(number, completion_tokens=answer.completion_tokens, now_s=self._clock())
            counted = True
            self._count_good(answer)
            self._go_on(answer, item)
        except RequestFailed as exc:
            self._handle_failure(exc, item)
        except PromptRefused as exc:
            self._reject(item, exc.reason, str(exc), permanent=True, status=exc.status)
            self._count_refusal(exc)
        except ServerMisconfigured as exc:
            self._stop = self._stop or exc
        finally:
            self._settle(number, item, counted=counted)

    def _go_on(self, answer: Generation, item: Attempt) -> None:
        """Offer the next turn of a conversation, on this answer; end it where the answer is no turn."""
        rendered = item.rendered
        if not find_followers(self._log, rendered.position):
            return
        text = to_history(answer.text, answer.finish_reason)
        if text is None:
            why = "was cut" if answer.finish_reason == "length" else "has no text besides its thoughts"
            self.counts.given_up += reject_followers(self._log, rendered.position, why)
        else:
            self._feeder.continue_with(rendered.position + 1, (*rendered.history, text))

    def _settle(self, number: int, item: Attempt, *, counted: bool = False) -> None:
        """Free the slot of a request that has ended, once."""
        if number not in self._in_flight:
            return
        del self._in_flight[number]
        if not counted:
            self._budget.dropped(number)
        self._window.free(item.rendered.lane)
        self._wake.set()

    def _request(self, number: int, item: Attempt) -> GenerationRequest:
        params = {**self._rules.sampling_params, "max_new_tokens": item.rendered.max_new_tokens}
        if self._rules.seed is not None:
            params["sampling_seed"] = self._seed_of(item.rendered.prompt)
        return GenerationRequest(
            rid=f"{self._rid_prefix}-{number}", input_ids=item.rendered.input_ids, sampling_params=params
        )

    def _seed_of(self, prompt: Prompt) -> int:
        turn = f":{prompt.turn}" if prompt.turn else ""
        return hash_id(f"{self._rules.seed}:{prompt.id}{turn}") & 0x7FFFFFFF

    def _to_response(self, answer: Generation, item: Attempt, *, server: str, latency_s: float) -> Response:
        rendered = item.rendered
        extra: dict[str, Any] = {"max_new_tokens": rendered.max_new_tokens}
        if rendered.prompt.meta:
            extra["meta"] = rendered.prompt.meta
        return Response(
            id=rendered.prompt.id,
            turn=rendered.prompt.turn,
            input_ids=rendered.input_ids,
            output_ids=answer.output_ids,
            text=answer.text,
            finish_reason=answer.finish_reason,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            attempt=item.attempt,
            lane=rendered.lane,
            server=server,
            latency_s=round(latency_s, 3),
            finished_at=f"{datetime.now(UTC).replace(tzinfo=None).isoformat(timespec='seconds')}Z",
            extra=extra,
        )

    def _refusal(self, answer: Generation, item: Attempt) -> tuple[str, str] | None:
        """Why a whole answer is not kept, or None."""
        if answer.is_empty:
            return "empty_answer", f"{item.empty_answers + 1} answers held nothing but the stop token"
        if answer.finish_reason == "length" and self._rules.on_length == "reject":
            return "cut_by_length", f"the answer reached max_new_tokens ({item.rendered.max_new_tokens})"
        return None

    def _handle_refusal(self, refusal: tuple[str, str], item: Attempt) -> None:
        self._failing_since_s, self._silent_s = None, 0.0  # the server works; it is the answer
        reason, detail = refusal
        if reason == "empty_answer" and item.empty_answers + 1 < self._rules.max_empty_answers:
            self._ask_again(replace(item, attempt=item.attempt + 1, empty_answers=item.empty_answers + 1))
        else:
            self._reject(item, reason, detail, permanent=True, status=200)

    def _handle_failure(self, exc: RequestFailed, item: Attempt) -> None:
        self.counts.failures[exc.reason] = self.counts.failures.get(exc.reason, 0) + 1
        self._last_failure = str(exc)
        if self._failing_since_s is None:
            self._failing_since_s = self._clock()
        self._silent_s = self._clock() - self._failing_since_s
        if isinstance(exc, ServerLost):
            item = replace(item, deaths=item.deaths + 1, answers=self.counts.answers)
        if item.deaths >= DEATHS_TO_REJECT:
            detail = f"{item.deaths} times a server died or froze with it, the last time so: {exc}"
            self._reject(item, "kills_the_server", detail, permanent=True, status=None)
        elif not exc.costs_attempt:
            self._ask_again(item)
        elif item.attempt < self._rules.max_attempts:
            self._ask_again(replace(item, attempt=item.attempt + 1))
        else:
            detail = f"{item.attempt} attempts failed, the last one with: {exc}"
            self._reject(item, exc.reason, detail, permanent=False, status=exc.status)

    def _ask_again(self, item: Attempt) -> None:
        self.counts.retries += 1
        self._retries.push(item, now_s=self._clock())

    def _reject(
        self, item: Attempt, reason: str, detail: str, *, permanent: bool, status: int | None
    ) -> None:
        rejected = Rejected(
            id=item.rendered.prompt.id,
            reason=reason,
            detail=detail,
            permanent=permanent,
            stage="generate",
            attempts=item.attempt,
            status=status,
            turn=item.rendered.prompt.turn,
        )
        self._write_rejected(rejected, item.rendered.position)

    def _reject_unrenderable(self, item: Unrenderable) -> None:
        rejected = Rejected(
            id=item.prompt.id,
            reason=item.error.reason,
            detail=item.error.detail,
            permanent=True,
            stage="generate",
            turn=item.prompt.turn,
        )
        self._write_rejected(rejected, item.position)

    def _write_rejected(self, rejected: Rejected, position: int) -> None:
        level = logging.WARNING if self.counts.given_up < _REJECTIONS_TO_LOG else logging.DEBUG
        logger.log(level, "prompt %r is rejected (rejected.jsonl has it): %s", rejected.id, rejected.detail)
        self._log.reject(rejected, position=position)
        self.counts.given_up += 1
        if rejected.permanent:
            self.counts.given_up += reject_followers(self._log, position, "was rejected")

    def _count_good(self, answer: Generation) -> None:
        self.counts.answers += 1
        self.counts.completion_tokens += answer.completion_tokens
        self._refused_in_a_row = 0
        self._failing_since_s, self._silent_s = None, 0.0

    def _count_refusal(self, exc: PromptRefused) -> None:
        """Stop when nothing but refusals come back: it is not the prompts then."""
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= REFUSALS_TO_STOP and not self.counts.answers and self._stop is None:
            self._stop = ServerMisconfigured(
                f"the first {self._refused_in_a_row} prompts were all refused, the last one so: {exc}. "
                "Correct the server or the parameters, then run again with --retry-rejected"
            )

    def _check_outage(self) -> None:
        """Stop when no server is up, or requests do nothing but fail, for longer than the time-out.

        Silence is measured from failure to failure: a long answer on its way is none. An outage that began
        before this dataset or this retry of it counts from here: each gets the whole time-out.
        """
        if not self._pool.is_up and self._stop is None and (why := self._find_end()) is not None:
            self._stop = ServersGoneError(
                f"{why}; everything generated is kept, and the same command goes on from here"
            )
        down_s = max(min(self._pool.down_for_s, self._clock() - self._started_s), self._silent_s)
        if down_s > self._rules.outage_timeout_s and self._stop is None:
            self._stop = OutageError(
                f"no server gave a good answer for {down_s:.0f} s (outage_timeout_s "
                f"{self._rules.outage_timeout_s:g}{self._tell_last_failure()}); everything generated is "
                "kept, and the same command goes on from here when the server is back"
            )

    def _tell_last_failure(self) -> str:
        return f"; the last failure was: {self._last_failure}" if self._last_failure else ""

    async def _sleep_until_woken(self, now_s: float) -> None:
        # What was due when we looked waits for a slot, a server or the budget: those wake us themselves.
        due_s = self._retries.find_due_s(after_s=now_s)
        timeout_s = _TICK_S if due_s is None else min(_TICK_S, due_s - self._clock())
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception of a group: several tasks that fail at once fail for one reason."""
    for failure in failures.exceptions:
        return _first(failure) if isinstance(failure, BaseExceptionGroup) else failure
    return failures
