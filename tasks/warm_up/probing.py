"""Ask each server a few questions before a run: does it take ids, make ids, tokenize and think as we do?

Knows what to ask, in which order and how often; what an answer means is said in `preflight` and
`vocabulary_checks`. Invariants: one bad moment of a server is no refusal: what may pass is asked again,
and a server that never answers is NotReady. Ids are sent last, after a text that the server has turned into
ids itself, where it can: an id that the model does not have ends the server.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.client.errors import NotReady, PromptRefused, RequestFailed, ServerMisconfigured
from serving.client.sglang import SGLangClient
from tasks.records.rows import Prompt
from tasks.tokens.rendering import Renderer, RenderError
from tasks.tokens.special_tokens import (
    ThinkTokens,
    encode_plain,
    find_added_tokens,
    find_special_tokens,
    find_think_tokens,
)
from tasks.tokens.tokenizer import TargetTokenizer
from tasks.warm_up.preflight import (
    Finding,
    SampledDataset,
    check_ids,
    check_thinking,
    find_thinkers,
    has_refusal,
)
from tasks.warm_up.server_facts import ServerFacts
from tasks.warm_up.vocabulary_checks import check_foreign_ids, check_text_ids, find_foreign_ids

TRIES = 4
_PAUSE_S = 0.5
_FEW, _SOME = 4, 48
_FEW_IDS = 8
_LAST_ADDED = 64  # a tokenizer that was extended has its new tokens at the end; some have thousands
_SAMPLE = 'def f(x):  return x ** 2  # 3.14159, ünïcödé, 漢字 🙂\n\tif it\'s "so": pass'
_PUZZLE = "How many times does the letter r occur in strawberry? Think step by step."


async def probe_server(
    client: SGLangClient,
    facts: ServerFacts,
    *,
    target: TargetTokenizer,
    renderer: Renderer,
    datasets: Sequence[SampledDataset],
    context_length: int | None,
) -> list[Finding]:
    """What one server's answers to a few short prompts show.

    Raises:
        NotReady: it fails each time.
    """
    try:
        prompt = _probe_prompt("Say hello.")
        findings: list[Finding] = []
        if facts.tokenizes:
            findings += await _probe_text(client, target, renderer.render_text(prompt), context_length)
        if not has_refusal(findings):
            findings.append(await _probe_ids(client, facts, target, renderer.render(prompt)))
        if has_refusal(findings):  # what comes after would only be wrong for the same reason
            return findings
        findings += await _probe_thinking(client, renderer, find_think_tokens(target.tokenizer), datasets)
    except RenderError as exc:
        text = f"target.tokenizer {target.name!r}: its chat template renders no plain question ({exc.detail})"
        return [Finding("refusal", f"{text}; use the instruct model's tokenizer")]
    except PromptRefused as exc:
        return [
            Finding("refusal", f"a short prompt is refused: {exc}; check that the server serves the target")
        ]
    except ServerMisconfigured as exc:
        return [Finding("refusal", explain_misconfigured(exc))]
    return findings


def explain_misconfigured(exc: ServerMisconfigured) -> str:
    """Which URL or key cannot be used, and what to do."""
    return f"{exc}; correct server.base_urls, or give the server's key as DRAFTMILL_API_KEY"


def measuring_prompt(renderer: Renderer) -> list[int]:
    """Ids that a model has something to say to; few, for a CPU may need seconds to read a whole prompt."""
    return renderer.render(_probe_prompt("Write a long story about a lighthouse."))[-_FEW_IDS:]


async def _probe_ids(
    client: SGLangClient, facts: ServerFacts, target: TargetTokenizer, ids: list[int]
) -> Finding:
    """Asked again while it looks bad: a server under load may answer one prompt in a hundred badly."""
    foreign: list[int] = []

    def judge(reply: Mapping[str, Any]) -> Finding:
        foreign[:] = find_foreign_ids(target, reply)
        return check_ids(client.base_url, sent=ids, reply=reply)

    finding = await _ask(client, ids, _FEW, judge)
    if finding.level == "refusal" or not foreign:
        return finding
    text = await client.detokenize(foreign) if facts.tokenizes else None
    return check_foreign_ids(client.base_url, target, foreign, text) or finding


async def _probe_text(
    client: SGLangClient, target: TargetTokenizer, rendered: str, context_length: int | None
) -> list[Finding]:
    tokenizer = target.tokenizer
    text = "\n".join([rendered, _SAMPLE, "".join(_find_telling_tokens(target))])
    ours = await asyncio.to_thread(encode_plain, tokenizer, text)
    if context_length is not None and len(ours) + _FEW > context_length:
        return [
            Finding("note", f"{client.base_url}: tokenizers not compared: the context is too small for it")
        ]
    with_added = list(tokenizer(text)["input_ids"])

    def judge(reply: Mapping[str, Any]) -> Finding:
        servers = reply.get("prompt_token_ids")
        return check_text_ids(client.base_url, target, ours=ours, ours_with_added=with_added, servers=servers)

    try:
        return [await _ask(client, text, 1, judge)]
    except PromptRefused as exc:
        return [Finding("warning", f"tokenizers not compared: {exc}")]


def _find_telling_tokens(target: TargetTokenizer) -> list[str]:
    """The chat template's special tokens and those added last, but for what the model has no id for."""
    added = find_added_tokens(target.tokenizer)
    beyond = {token for token, one in added.items() if one >= target.vocab_size}
    last = sorted(added.keys() - beyond, key=lambda token: added[token])[-_LAST_ADDED:]
    named = [token for token in find_special_tokens(target.tokenizer) if token not in beyond]
    return list(dict.fromkeys([*named, *last]))


async def _probe_thinking(
    client: SGLangClient, renderer: Renderer, think: ThinkTokens | None, datasets: Sequence[SampledDataset]
) -> list[Finding]:
    """A probe for each way in which datasets ask for thinking."""
    if think is None:
        return []
    by_default = think.is_open(renderer.render(_probe_prompt(_PUZZLE)))
    ways: dict[str, SampledDataset] = {}
    for dataset in find_thinkers(datasets, opens_by_default=by_default):
        ways.setdefault(repr(sorted(dataset.chat_template_kwargs.items())), dataset)
    return [await _probe_thought(client, renderer, think, dataset) for dataset in ways.values()]


async def _probe_thought(
    client: SGLangClient, renderer: Renderer, think: ThinkTokens, dataset: SampledDataset
) -> Finding:
    ids = renderer.render(_probe_prompt(_PUZZLE, dataset.chat_template_kwargs))

    def judge(reply: Mapping[str, Any]) -> Finding:
        return check_thinking(client.base_url, dataset.name, think, sent=ids, reply=reply)

    return await _ask(client, ids, _SOME, judge)


async def _ask(
    client: SGLangClient,
    prompt: list[int] | str,
    max_new_tokens: int,
    judge: Callable[[Mapping[str, Any]], Finding],
) -> Finding:
    """The judgement of the first good answer, else of the last one."""
    finding: Finding | None = None
    failure: RequestFailed | None = None
    for turn in range(TRIES):
        if turn:
            await asyncio.sleep(_PAUSE_S * turn)
        try:
            reply = await client.probe(prompt, {"max_new_tokens": max_new_tokens, "temperature": 0.0})
        except RequestFailed as exc:
            failure = exc
            continue
        finding = judge(reply)
        if finding.level != "refusal":
            break
    if finding is None:
        raise NotReady(
            f"{client.base_url} is ready, but fails to answer a short prompt ({TRIES} times): {failure}"
        ) from failure
    return finding


def _probe_prompt(text: str, chat_template_kwargs: Mapping[str, Any] | None = None) -> Prompt:
    return Prompt(
        id="probe",
        messages=[{"role": "user", "content": text}],
        chat_template_kwargs=dict(chat_template_kwargs or {}),
    )
