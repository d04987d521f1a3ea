"""Before the first prompt: is the server there, is it the right one, does it see what we send?

Knows which checks refuse a run; does not know datasets. Invariant: a session is opened only on servers
that answered a probe with the ids that were sent and with ids of their own.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from serving.client import SGLangClient
from serving.errors import RequestFailed, ServingError
from serving.pool import STALL_TIMEOUT_S, ServerPool
from tasks.core.records import Prompt
from tasks.core.rendering import Renderer
from tasks.core.tokenizer import TargetTokenizer, TokenizerError, load_tokenizer
from tasks.core.window import Lane, Window
from tasks.generation import Resources
from tasks.session import Session
from tasks.turn import ProcessTurn, Turn

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "DRAFTMILL_API_KEY"
_SAY_EVERY_S = 10.0


class PreflightError(ValueError):
    """The run cannot succeed as it stands; says what to change."""


@dataclass(frozen=True, slots=True)
class WarmUpRules:
    """What to open a session with: the servers, the model asked for and how it will be used.

    `turns_folder` is where datasets in processes of their own take turns, None when all are in this one;
    `turn_place` is this one's place among them.
    """

    base_urls: Sequence[str]
    model: str | None
    tokenizer: str | None
    revision: str | None
    trust_remote_code: bool
    sampling: Mapping[str, Any]
    lanes: Sequence[Lane]
    seed: int
    concurrent_datasets: int = 1
    turns_folder: Path | None = None
    turn_place: int = 0
    ready_timeout_s: float = 120.0
    request_timeout_s: float = 3600.0
    stall_timeout_s: float = STALL_TIMEOUT_S
    extra_fingerprint: Mapping[str, Any] = field(default_factory=dict)


@task(name="warm-up-server", cache_policy=NO_CACHE, persist_result=False)
async def warm_up_server(rules: WarmUpRules) -> Session:
    """Wait for the servers, check them, and open the session that the datasets share."""
    return await open_session(rules)


async def open_session(rules: WarmUpRules) -> Session:
    """The same without Prefect.

    Raises:
        NotReady: a server did not answer in time.
        PreflightError: a server answers, but this run could not succeed on it.
        TokenizerError: the tokenizer cannot be had.
    """
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    info = await _wait_ready(rules, api_key)
    model = rules.model or str(info.get("served_model_name") or info.get("model_path") or "")
    target = await asyncio.to_thread(_load_target, rules, model, info)
    clients = [
        SGLangClient(
            url,
            vocab_size=target.vocab_size,
            api_key=api_key,
            request_timeout_s=rules.request_timeout_s,
            max_connections=sum(lane.concurrency for lane in rules.lanes) + 16,
        )
        for url in rules.base_urls
    ]
    pool = ServerPool(clients, stall_timeout_s=rules.stall_timeout_s)
    try:
        renderer = Renderer(target)
        if not renderer.shows_tools:
            logger.warning("the chat template ignores tools: they are put into the system prompt as text")
        context_length = _least([target.context_length, *[await _context_of(client) for client in clients]])
        for client in clients:
            await _probe(client, renderer)
    except BaseException:
        await pool.close()
        raise
    logger.info(
        "ready: %s at %s, vocabulary %d, context %s",
        model, ", ".join(rules.base_urls), target.vocab_size, context_length,
    )  # fmt: skip
    return Session(
        model=model,
        target=target,
        resources=Resources(
            pool=pool,
            window=Window({lane.name: lane for lane in rules.lanes}, is_shared=rules.concurrent_datasets > 1),
            renderer=renderer,
            context_length=context_length,
            turn=_make_turn(rules),
        ),
        fingerprint=_fingerprint(rules, model, target),
    )


def _make_turn(rules: WarmUpRules) -> Turn:
    if rules.turns_folder is None:
        return Turn(rules.concurrent_datasets)
    return ProcessTurn(rules.turns_folder, rules.concurrent_datasets, rules.turn_place)


async def close_session(session: Session) -> None:
    """Close connections and threads."""
    session.resources.threads.shutdown(wait=False, cancel_futures=True)
    await session.resources.pool.close()


async def _wait_ready(rules: WarmUpRules, api_key: str | None) -> dict[str, Any]:
    """Wait for all servers; returns the first one's /model_info."""
    last_said_s = float("-inf")

    def say(why: str) -> None:
        nonlocal last_said_s
        if time.monotonic() - last_said_s >= _SAY_EVERY_S:
            last_said_s = time.monotonic()
            logger.info("waiting for the server (%g s at most): %s", rules.ready_timeout_s, why)

    pool = ServerPool([SGLangClient(url, api_key=api_key) for url in rules.base_urls])
    try:
        await pool.wait_ready(timeout_s=rules.ready_timeout_s, on_wait=say)
        return await pool.clients[0].model_info()
    finally:
        await pool.close()


def _load_target(rules: WarmUpRules, model: str, info: Mapping[str, Any]) -> TargetTokenizer:
    """The tokenizer asked for, else the model's, else the folder that the server says it uses."""
    options = {"revision": rules.revision, "trust_remote_code": rules.trust_remote_code}
    if rules.tokenizer or rules.model:
        return load_tokenizer(rules.tokenizer or model, **options)  # type: ignore[arg-type]
    name = str(info.get("tokenizer_path") or model)
    try:
        return load_tokenizer(name, **options)  # type: ignore[arg-type]
    except TokenizerError as exc:
        raise TokenizerError(
            f"{exc} (the server names it; set target.tokenizer to one that is here)"
        ) from exc


async def _context_of(client: SGLangClient) -> int | None:
    """The context length a server was started with, as far as it says."""
    info = await client.server_info()
    known = [info.get("context_length"), info.get("max_total_num_tokens")]
    return _least([value if isinstance(value, int) and value > 0 else None for value in known])


async def _probe(client: SGLangClient, renderer: Renderer) -> None:
    """One short answer, to see that ids go in and come out as they are.

    VLM servers once tokenized `input_ids` again (sglang issue 26555): the prompt's length tells.
    """
    ids = renderer.render(Prompt(id="probe", messages=[{"role": "user", "content": "Say hello."}]))
    try:
        reply = await client.probe(ids, {"max_new_tokens": 4, "temperature": 0.0})
    except (RequestFailed, ServingError) as exc:
        raise PreflightError(f"the server does not answer a prompt of {len(ids)} ids: {exc}") from exc
    meta = reply.get("meta_info") or {}
    seen = reply.get("prompt_token_ids")
    if (seen is not None and list(seen) != ids) or meta.get("prompt_tokens") != len(ids):
        raise PreflightError(
            f"{client.base_url}: {len(ids)} ids were sent, but the server saw {meta.get('prompt_tokens')} or "
            "other ones; training data would not be what the model saw. Check that target.tokenizer "
            "belongs to the served model"
        )
    output = reply.get("output_ids")
    if not isinstance(output, list) or len(output) != meta.get("completion_tokens"):
        raise PreflightError(
            f"{client.base_url}: /generate returned no output_ids that match completion_tokens; "
            "an SGLang server of 0.5 or later is needed"
        )


def known_fingerprint(rules: WarmUpRules) -> dict[str, Any]:
    """The fields of the fingerprint that do not depend on what the servers say."""
    return {
        "revision": rules.revision,
        "sampling": dict(rules.sampling),
        "max_new_tokens": {lane.name: lane.max_new_tokens for lane in rules.lanes},
        "seed": rules.seed,
        **rules.extra_fingerprint,
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
