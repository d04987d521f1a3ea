"""Whether the tokenizer's ids and the served model's are the same ones.

Knows sizes, tokens and what a server said of them; asks no server. Invariant: as in `preflight`, a
finding is one line; where none of these is a refusal, the ids of a rendered prompt exist in the served model.
An id that does not exist there ends SGLang's scheduler (IndexError, seen on 0.5.23), and the server with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.records.rows import Prompt
from tasks.tokens.rendering import Renderer, RenderError
from tasks.tokens.special_tokens import find_added_tokens
from tasks.tokens.tokenizer import TargetTokenizer
from tasks.warm_up.preflight import Finding
from tasks.warm_up.server_facts import ServerFacts

_NAMED = 3


def check_vocabulary(
    target: TargetTokenizer, servers: Sequence[ServerFacts], renderer: Renderer
) -> Iterator[Finding]:
    """The served model has an id for whatever a prompt is made of, and its size is known.

    Added tokens that the model lacks are no reason to refuse while a plain prompt has none of them: the
    tokenizers of some text-only models have such, an image token for one. A prompt with one is rejected when
    it is rendered.
    """
    for facts in servers:
        yield _compare_sizes(target, facts)
    known = [facts for facts in servers if facts.vocab_size is not None]
    if not known and target.config_vocab_size is None:
        yield Finding(
            "warning",
            f"target.tokenizer {target.name!r}: neither a server nor a config.json says how many ids its "
            f"model has; {target.vocab_size:,} is assumed, as many as the tokenizer has",
        )
    least = min(known, key=lambda facts: facts.vocab_size or 0, default=None)
    yield from _check_tokens(target, renderer, f"at {least.url}" if least else "of its config.json")


def _compare_sizes(target: TargetTokenizer, facts: ServerFacts) -> Finding:
    """Two sizes are two models; where the server has a tokenizer, a text shows whether that matters."""
    served, ours = facts.vocab_size, target.config_vocab_size
    if served is None:
        return Finding("note", f"{facts.url}: it does not say how many ids its model has; not compared")
    if ours is None or ours == served:
        return Finding("note", f"{facts.url}: its model has {served:,} ids")
    sizes = (
        f"{facts.url}: its model has {served:,} ids, the config.json of target.tokenizer {target.name!r} "
        f"says {ours:,}"
    )
    if facts.tokenizes:
        return Finding("warning", f"{sizes}; {served:,} is used, and the tokenizers are compared by a text")
    return Finding(
        "refusal",
        f"{sizes}, and it has no tokenizer to compare with (skip_tokenizer_init); set target.tokenizer to "
        "the served model's own",
    )


def _check_tokens(target: TargetTokenizer, renderer: Renderer, where: str) -> Iterator[Finding]:
    tokenizer, size = target.tokenizer, target.vocab_size
    sizes = f"target.tokenizer {target.name!r} has {len(tokenizer):,} ids, but the model {where} has {size:,}"
    beyond = [f"{token!r} ({one})" for token, one in find_added_tokens(tokenizer).items() if one >= size]
    if tokenizer.vocab_size > size or _is_beyond(renderer):
        yield Finding(
            "refusal",
            f"{sizes}: an id that the model does not have ends its server; set target.tokenizer to the "
            "served model's own",
        )
    elif beyond:
        more = f" and {len(beyond) - _NAMED} more" if len(beyond) > _NAMED else ""
        yield Finding("warning", f"{sizes}: a prompt with {', '.join(beyond[:_NAMED])}{more} is rejected")


def _is_beyond(renderer: Renderer) -> bool:
    """Whether a plain prompt has an id that the model lacks; other faults of it are said elsewhere."""
    try:
        renderer.render(Prompt(id="probe", messages=[{"role": "user", "content": "Say hello."}]))
    except RenderError as exc:
        return exc.reason == "id_outside_vocabulary"
    return False


def check_text_ids(
    url: str, target: TargetTokenizer, *, ours: Sequence[int], ours_with_added: Sequence[int], servers: Any
) -> Finding:
    """The server tokenizes a text as we do; it may add what belongs before or behind a text by itself."""
    if not isinstance(servers, list):
        return Finding("warning", f"{url}: it returns no prompt ids for a text; tokenizers not compared")
    if servers == list(ours):
        return Finding("note", f"{url}: a text of {len(servers)} ids is the same ids there and here")
    bos = getattr(target.tokenizer, "bos_token_id", None)
    if servers == list(ours_with_added) or (servers[:1] == [bos] and servers[1:] == list(ours)):
        return Finding(
            "note",
            f"{url}: a text of {len(ours)} ids is the same ids there and here, but for the beginning-of-text "
            "id that only the server adds (prompts are sent as ids, which it leaves alone)",
        )
    place = next(
        (at for at, pair in enumerate(zip(ours, servers, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(servers)),
    )
    text = target.tokenizer.decode(list(ours[max(0, place - 1) : place + 3]))
    return Finding(
        "refusal",
        f"{url} tokenizes a text into {len(servers)} ids, target.tokenizer {target.name!r} into {len(ours)}, "
        f"first different at id {place} (near {text!r}); set target.tokenizer to the served model's own",
    )


def find_foreign_ids(target: TargetTokenizer, reply: Mapping[str, Any]) -> list[int]:
    """The ids of an answer that our tokenizer does not have."""
    output, size = reply.get("output_ids"), len(target.tokenizer)
    return [one for one in output if type(one) is int and one >= size] if isinstance(output, list) else []


def check_foreign_ids(
    url: str, target: TargetTokenizer, ids: Sequence[int], text: str | None
) -> Finding | None:
    """A refusal where ids that our tokenizer does not have are another model's or another tokenizer's.

    An id that only pads the model's size has no `text` on the server: a model may say it, and a trainer can
    take it. One with a text is a token there.
    """
    if max(ids) >= target.vocab_size:
        said = f"an answer has the id {max(ids)}, but its model has {target.vocab_size:,} ids, and"
    elif text:
        said = f"an answer has the ids {', '.join(map(str, ids[:_NAMED]))}, which are {text!r} there, but"
    else:
        return None
    return Finding(
        "refusal",
        f"{url}: {said} target.tokenizer {target.name!r} has {len(target.tokenizer):,}; set target.tokenizer "
        "to the served model's own",
    )
