"""Before the first prompt: wait for the servers, have everything checked, and open the session.

Knows the order of things; what is checked is in `preflight`, what is asked in `probing`.
Invariants: a session is opened only on servers that answered a probe with the ids that were sent and with ids
of their own, and only where no check refused. Nothing is generated before every check that only asks has
passed.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.client.errors import NotReady, ServerBusy, ServerFailed, ServerMisconfigured, ServerUnreachable
from serving.client.pool import STALL_TIMEOUT_S, ServerPool
from serving.client.sglang import SGLangClient
from serving.launch.command import API_KEY_VARIABLE
from tasks.generate.dispatch_permit import DispatchPermit, ProcessDispatchPermit
from tasks.generate.generation import Resources
from tasks.generate.session import Session
from tasks.generate.window import Window
from tasks.prepare.lane import Lane
from tasks.records.dataset_plan import DatasetPlan
from tasks.tokens.rendering import Renderer
from tasks.tokens.template_names import find_template_names
from tasks.tokens.tokenizer import TargetTokenizer, TokenizerError, load_tokenizer
from tasks.warm_up.measure import measure_speed
from tasks.warm_up.planning import DatasetWork, make_plan, sample_datasets
from tasks.warm_up.preflight import (
    Finding,
    LaneRules,
    PreflightError,
    Report,
    SampledDataset,
    check_context,
    check_disk,
    check_draft_vocab,
    check_kv_tokens,
    check_load,
    check_model,
    check_prompts,
    check_router,
    check_special_tokens,
    check_unused_settings,
    has_refusal,
    is_path,
)
from tasks.warm_up.probing import explain_misconfigured, measuring_prompt, probe_server
from tasks.warm_up.run_plan import OnDisk, RunPlan
from tasks.warm_up.server_facts import ServerFacts, redact_settings
from tasks.warm_up.template_checks import check_refused, check_template_kwargs, check_tool_calls, check_tools
from tasks.warm_up.vocabulary_checks import check_vocabulary

logger = logging.getLogger(__name__)

MEASURE_FROM_TOKENS = 100_000  # a run of less is over before its speed is of use
_SAY_EVERY_S = 10.0
_ASK_AGAIN_S = 0.5

CountRows = Callable[[Path, Sequence[DatasetPlan]], Awaitable[dict[str, OnDisk]]]


@dataclass(frozen=True, slots=True)
class WarmUpRules:
    """What to open a session with: the servers, the model asked for and how it will be used.

    Where nothing is generated there may be no servers; `model` is given then.
    `turns_folder` is where datasets in processes of their own take turns, None when all are in this one;
    `turn_place` is this one's place among them. `datasets` are those that the session is for. The speed is
    measured for `measure_s` where `measure_from_tokens` or more are to be made. `unused_settings` have
    no use with the run's server.mode.
    """

    base_urls: Sequence[str]
    model: str | None
    tokenizer: str | None
    revision: str | None
    trust_remote_code: bool
    tool_calls_as_text: bool
    sampling: Mapping[str, Any]
    lanes: Sequence[Lane]
    seed: int
    output_dir: Path
    datasets: Sequence[DatasetWork] = ()
    long_prompt_tokens: int = 4096
    export_formats: Sequence[str] = ()
    draft_vocab_size: int | None = None
    measure_s: float = 0.0
    measure_from_tokens: int = MEASURE_FROM_TOKENS
    unused_settings: Sequence[str] = ()
    concurrent_datasets: int = 1
    turns_folder: Path | None = None
    turn_place: int = 0
    ready_timeout_s: float = 120.0
    request_timeout_s: float = 3600.0
    stall_timeout_s: float = STALL_TIMEOUT_S


async def open_session(rules: WarmUpRules, *, count_rows: CountRows) -> tuple[Session, Report]:
    """Wait for the servers, check them, and open the session; returns it and what the checks found.

    Raises:
        NotReady: a server did not answer in time.
        PreflightError: the servers answer, but this run could not succeed: all that has to be changed.
    """
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    asks = not rules.datasets or any(one.goal.budget_tokens is not None for one in rules.datasets)
    if asks and not rules.base_urls:
        raise ValueError("at least one server is needed")
    if not asks and rules.base_urls:
        logger.info("nothing is generated, but only the server knows its model: name it in target.model")
    try:
        servers = await _wait_ready(rules, api_key)
    except ServerMisconfigured as exc:
        raise PreflightError([Finding("refusal", explain_misconfigured(exc))]) from exc
    model = rules.model or next(reversed(servers[0].names), "")
    findings = [check_model(facts, model) for facts in servers]  # None asked for: all serve the same
    findings += [finding for facts in servers for finding in check_router(facts)]
    findings += check_unused_settings(rules.unused_settings)
    if not servers:
        findings.append(Finding("note", "nothing is generated: no server is started or asked"))
    if has_refusal(findings) and not is_path(rules.tokenizer or model):
        raise PreflightError(findings)  # the Hub has a minute to say that there is no such model
    try:
        target = await asyncio.to_thread(_load_target, rules, model, servers)
    except TokenizerError as exc:
        raise PreflightError([*findings, Finding("refusal", str(exc))]) from exc
    renderer = Renderer(target, calls_as_text=rules.tool_calls_as_text)
    vocabulary = list(check_vocabulary(target, servers, renderer))
    findings += vocabulary
    if has_refusal(vocabulary):  # of another model: what its prompts would be like says nothing
        raise PreflightError(findings)
    context_length = _least([target.context_length, *[facts.context_length for facts in servers]])
    pool = ServerPool(
        [
            SGLangClient(
                url,
                vocab_size=target.vocab_size,
                api_key=api_key,
                request_timeout_s=rules.request_timeout_s,
                max_connections=sum(lane.concurrency for lane in rules.lanes) + 16,
            )
            for url in rules.base_urls
        ],
        stall_timeout_s=rules.stall_timeout_s,
    )
    try:
        opening = _Opening(rules, servers, target, renderer, pool, context_length)
        report = await opening.check(findings, count_rows)
    except BaseException:
        await pool.close()
        raise
    session = Session(
        model=model,
        target=target,
        resources=Resources(
            pool=pool,
            window=Window({lane.name: lane for lane in rules.lanes}, is_shared=rules.concurrent_datasets > 1),
            renderer=renderer,
            context_length=_least([context_length, *[facts.kv_tokens for facts in servers]]),
            turn=_make_turn(rules),
        ),
        fingerprint=_fingerprint(rules, model, target),
    )
    return session, report


async def load_served_target(rules: WarmUpRules) -> tuple[TargetTokenizer, int | None]:
    """The tokenizer and the context that a session would have; nothing else is checked, nothing opened.

    Raises:
        NotReady, ServerMisconfigured: a server did not say what it serves.
        TokenizerError: the tokenizer cannot be loaded.
    """
    servers = await _wait_ready(rules, os.environ.get(API_KEY_VARIABLE) or None)
    model = rules.model or next(reversed(servers[0].names), "")
    target = await asyncio.to_thread(_load_target, rules, model, servers)
    lengths = [length for facts in servers for length in (facts.context_length, facts.kv_tokens)]
    return target, _least([target.context_length, *lengths])


@dataclass(frozen=True, slots=True)
class _Opening:
    """A session that is not open yet; `context_length` is the model's or what servers were started with."""

    rules: WarmUpRules
    servers: Sequence[ServerFacts]
    target: TargetTokenizer
    renderer: Renderer
    pool: ServerPool
    context_length: int | None

    async def check(self, findings: list[Finding], count_rows: CountRows) -> Report:
        """Everything there is to check, then the speed.

        Raises:
            PreflightError: something has to be changed.
        """
        rules = self.rules
        samples = await asyncio.to_thread(sample_datasets, rules.datasets, self.target, self.renderer)
        on_disk = await count_rows(rules.output_dir, [work.goal for work in rules.datasets])
        plan = make_plan(rules.datasets, samples, on_disk, lanes=rules.lanes)
        begun = [name for name, there in on_disk.items() if there.rows]
        findings = [*findings, *self._check_settings([one.dataset for one in samples], plan, begun)]
        if not has_refusal(findings):  # nothing is generated after one: it may be somebody else's server
            findings += await self._probe([one.dataset for one in samples])
        if has_refusal(findings):
            raise PreflightError(findings)
        settings = {facts.url: redact_settings(facts.server_info) for facts in self.servers}
        return Report(findings, RunPlan(plan.datasets, await self._measure(plan)), settings)

    def _check_settings(
        self, datasets: Sequence[SampledDataset], plan: RunPlan, begun: Sequence[str]
    ) -> list[Finding]:
        """What needs no answer of a server."""
        rules = self.rules
        lanes = LaneRules(rules.lanes, rules.long_prompt_tokens)
        return [
            check_special_tokens(self.target),
            *check_draft_vocab(rules.draft_vocab_size, self.target.vocab_size, formats=rules.export_formats),
            *check_tools(datasets),
            *check_tool_calls(datasets),
            *check_refused(datasets),
            *check_template_kwargs(find_template_names(self.target.tokenizer), datasets, begun=begun),
            *(check_context(self.context_length, lanes) if self.servers else ()),
            *check_prompts(datasets, self.context_length),
            *[check_kv_tokens(facts, lanes, self.context_length) for facts in self.servers],
            *(check_load(self.servers, lanes, datasets, plan) if self.servers else ()),
            check_disk(
                rules.output_dir, plan, vocab_size=self.target.vocab_size, formats=rules.export_formats
            ),
        ]

    async def _probe(self, datasets: Sequence[SampledDataset]) -> list[Finding]:
        answers = await asyncio.gather(
            *(
                probe_server(
                    client,
                    facts,
                    target=self.target,
                    renderer=self.renderer,
                    datasets=datasets,
                    context_length=self.context_length,
                )
                for client, facts in zip(self.pool.clients, self.servers, strict=True)
            )
        )
        return [finding for found in answers for finding in found]

    async def _measure(self, plan: RunPlan) -> float | None:
        """None for a short run, and for a dataset by itself: others may be at work on the servers."""
        rules = self.rules
        is_short = plan.left_tokens < max(1, rules.measure_from_tokens)
        if is_short or not rules.measure_s or rules.turns_folder is not None:
            return None
        prompt = measuring_prompt(self.renderer)
        room = None if self.context_length is None else self.context_length - len(prompt) - 1
        concurrency = sum(lane.concurrency for lane in rules.lanes)
        try:
            return await measure_speed(
                self.pool, prompt, concurrency=concurrency, seconds=rules.measure_s, room=room
            )
        except ServerMisconfigured as exc:
            raise PreflightError([Finding("refusal", str(exc))]) from exc


def _make_turn(rules: WarmUpRules) -> DispatchPermit:
    if rules.turns_folder is None:
        return DispatchPermit(rules.concurrent_datasets)
    return ProcessDispatchPermit(rules.turns_folder, rules.concurrent_datasets, rules.turn_place)


async def close_session(session: Session) -> None:
    """Close connections and threads."""
    session.resources.threads.shutdown(wait=False, cancel_futures=True)
    await session.resources.pool.close()


async def _wait_ready(rules: WarmUpRules, api_key: str | None) -> list[ServerFacts]:
    """Wait for all servers; returns what each says of itself."""
    last_said_s = float("-inf")

    def say(why: str) -> None:
        nonlocal last_said_s
        if time.monotonic() - last_said_s >= _SAY_EVERY_S:
            last_said_s = time.monotonic()
            logger.info("waiting for the server (%g s at most): %s", rules.ready_timeout_s, why)

    deadline_s = time.monotonic() + rules.ready_timeout_s
    pool = ServerPool([SGLangClient(url, api_key=api_key) for url in rules.base_urls])
    try:
        await pool.wait_ready(timeout_s=rules.ready_timeout_s, on_wait=say)
        while True:
            try:
                return [await _read_facts(client) for client in pool.clients]
            except (ServerBusy, ServerFailed, ServerUnreachable) as exc:
                if time.monotonic() >= deadline_s:
                    raise NotReady(
                        f"the server is not ready after {rules.ready_timeout_s:g} s: {exc}. "
                        "Start it, those behind a router too, or correct server.base_urls"
                    ) from exc
                say(str(exc))
                await asyncio.sleep(_ASK_AGAIN_S)
    finally:
        await pool.close()


async def _read_facts(client: SGLangClient) -> ServerFacts:
    """What a server says of itself; a router is ready before those behind it, whom it has to ask."""
    return ServerFacts(
        client.base_url,
        await client.model_info(),
        await client.server_info(),
        is_router=await client.is_router(),
        vocab_size=await client.ask_vocab_size(),
    )


def _load_target(rules: WarmUpRules, model: str, servers: Sequence[ServerFacts]) -> TargetTokenizer:
    """The tokenizer asked for, else the model's, else the folder that the server says it uses."""
    options: dict[str, Any] = {
        "revision": rules.revision,
        "trust_remote_code": rules.trust_remote_code,
        "served_vocab_size": _least([facts.vocab_size for facts in servers]),
    }
    if rules.tokenizer or rules.model:
        return load_tokenizer(rules.tokenizer or model, **options)
    name = str(servers[0].model_info.get("tokenizer_path") or model)
    try:
        return load_tokenizer(name, **options)
    except TokenizerError as exc:
        raise TokenizerError(
            f"{exc} (the server names it; set target.tokenizer to one that is here)"
        ) from exc


def known_fingerprint(rules: WarmUpRules) -> dict[str, Any]:
    """The fields of the fingerprint that do not depend on what the servers say."""
    return {
        "revision": rules.revision,
        "sampling": dict(rules.sampling),
        "max_new_tokens": {lane.name: lane.max_new_tokens for lane in rules.lanes},
        "seed": rules.seed,
    }


def _fingerprint(rules: WarmUpRules, model: str, target: TargetTokenizer) -> dict[str, Any]:
    return {
        "model": model,
        "tokenizer_sha256": target.identity.files_sha256,
        "chat_template_sha256": target.identity.chat_template_sha256,
        **known_fingerprint(rules),
    }


def _least(values: Sequence[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)
