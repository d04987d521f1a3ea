"""Whether a run can succeed on these servers, with these settings, on this disk: one function a question.

Knows what was found out and what it means; asks no server itself. Invariant: a finding is one line that names
the object, the value and, where something has to be changed, what; all refusals of a preflight come together,
save that nothing is generated after one, and nothing more is looked for where another model is served and the
Hub would have to be asked.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tasks.prepare.lane import Lane
from tasks.tokens.draft_vocab import DRAFT_VOCAB_SIZE, check_draft_vocab_size
from tasks.tokens.special_tokens import ThinkTokens, asks_to_think, find_special_tokens, find_split_tokens
from tasks.tokens.tokenizer import TargetTokenizer
from tasks.warm_up.run_plan import PlannedDataset, RunPlan, estimate_bytes, mean
from tasks.warm_up.server_facts import ServerFacts

SHORTEST_ROOM = 256  # a prompt of the short lane that must fit, in tokens
_FAR_ABOVE = 2.0

# refusal: the run cannot succeed. problem: one dataset cannot, the others go on.
Level = Literal["refusal", "problem", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, in one line."""

    level: Level
    text: str


class PreflightError(ValueError):
    """The run cannot succeed as it stands; a line for each thing to change."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        self.refusals = list(dict.fromkeys(one.text for one in findings if one.level == "refusal"))
        super().__init__("\n".join(self.refusals))


def has_refusal(findings: Sequence[Finding]) -> bool:
    """Whether something has to be changed before the run can succeed."""
    return any(one.level == "refusal" for one in findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledDataset:
    """A dataset, from the first prompts of its source; `problem` is why there are none.

    `chat_template_kwargs` are those of its first prompt, `own_kwargs` those of its settings alone and
    `rows_kwargs` those of any row. `refused` is how many prompts cannot be rendered, the first for `refusal`;
    those of finished conversations cannot be shown to be what the target saw. `hides_tools` where a prompt
    has tools that the template ignores, `loses_calls` where one that is to be answered has
    tool calls that cannot be rendered.
    """

    name: str
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    own_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rows_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: list[int] = field(default_factory=list)
    refused: int = 0
    refusal: str | None = None
    hides_tools: bool = False
    loses_calls: bool = False
    is_generated: bool = True
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class LaneRules:
    """The lanes, short first, and where the long one begins."""

    lanes: Sequence[Lane]
    long_prompt_tokens: int

    def smallest_prompt(self, lane: Lane) -> int:
        """Tokens of a prompt that the lane must be able to answer."""
        return self.long_prompt_tokens if lane.name == "long" else min(SHORTEST_ROOM, self.long_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Report:
    """What a preflight found and what the run is about to do."""

    findings: list[Finding]
    plan: RunPlan
    settings: dict[str, dict[str, Any]]


def check_model(facts: ServerFacts, model: str) -> Finding:
    """The served model is the one asked for; paths and Hub ids that end alike are the same."""
    if not facts.names:
        return Finding("warning", f"{facts.url}: it does not say which model it serves; not compared")
    served = " as ".join(repr(name) for name in facts.names)
    if not model or any(_is_same_model(model, name) for name in facts.names):
        return Finding("note", f"{facts.url} serves {served}")
    return Finding(
        "refusal",
        f"{facts.url} serves {served}, but target.model is {model!r}; correct target.model or "
        "server.base_urls",
    )


def check_router(facts: ServerFacts) -> Iterator[Finding]:
    """What cannot be checked through a router is said."""
    if facts.is_router:
        yield Finding(
            "warning",
            f"{facts.url} is a router: it and its probes tell of one server behind it; not checked: whether "
            "the others are like it, and whether their KV memory suffices for the windows. A server that "
            "freezes is noticed only by server.request_timeout_s",
        )


def check_unused_settings(names: Sequence[str]) -> Iterator[Finding]:
    """Settings of the server that the run's server.mode has no use for."""
    if names:
        yield Finding(
            "warning",
            f"not used with this server.mode: {', '.join(names)}; set the mode that they are for, or leave "
            "them out",
        )


def check_special_tokens(target: TargetTokenizer) -> Finding:
    """Each special token of the chat template is one id."""
    if split := find_split_tokens(target.tokenizer):
        tokens = ", ".join(f"{token!r} is {count} ids" for token, count in split.items())
        return Finding(
            "refusal",
            f"target.tokenizer {target.name!r} splits special tokens of its chat template ({tokens}, not "
            "one); repair its files, or set target.tokenizer to a whole one",
        )
    count = len(find_special_tokens(target.tokenizer))
    return Finding("note", f"{target.name}: {count} special tokens in the chat template, one id each")


def check_ids(url: str, *, sent: Sequence[int], reply: Mapping[str, Any]) -> Finding:
    """The server saw the ids that were sent, and returns the ids that it made.

    VLM servers once tokenized `input_ids` again (sglang issue 26555).
    """
    meta = reply.get("meta_info")
    meta = meta if isinstance(meta, Mapping) else {}
    seen, prompt_tokens = reply.get("prompt_token_ids"), meta.get("prompt_tokens")
    if (seen is not None and seen != list(sent)) or prompt_tokens != len(sent):
        return Finding(
            "refusal",
            f"{url}: {len(sent)} ids were sent, but the server saw {prompt_tokens} or other ones; training "
            "data would not be what the model saw. Check that target.tokenizer belongs to the served model",
        )
    output, count = reply.get("output_ids"), meta.get("completion_tokens")
    if not isinstance(output, list) or not output or len(output) != count:
        had = f"{len(output)} output_ids" if isinstance(output, list) else "no output_ids"
        return Finding(
            "refusal",
            f"{url}: it answers, but with {had} for {count} completion_tokens; /generate must return the ids "
            "it made (SGLang 0.5 or later; a router must pass them on)",
        )
    how = "the same ids were seen" if seen is not None else "as many were seen (it does not say which)"
    return Finding("note", f"{url}: {len(sent)} ids were sent and {how}; the answer's ids came back")


def find_thinkers(datasets: Sequence[SampledDataset], *, opens_by_default: bool) -> list[SampledDataset]:
    """The datasets that ask for thoughts, or get them from the template without asking."""
    asked = {one.name: asks_to_think(one.chat_template_kwargs) for one in datasets}
    return [one for one in datasets if asked[one.name] or (asked[one.name] is None and opens_by_default)]


def check_thinking(
    url: str, dataset: str, think: ThinkTokens, *, sent: Sequence[int], reply: Mapping[str, Any]
) -> Finding:
    """Where thinking is on, an answer begins with a thought."""
    output = reply.get("output_ids")
    output = output if isinstance(output, list) else []
    if think.has_thought(sent, output):
        return Finding("note", f"{url}: dataset {dataset!r} has thinking on, and a probe does ({think.name})")
    return Finding(
        "refusal",
        f"dataset {dataset!r}: thinking expected but absent: {url} answered a probe with {len(output)} ids "
        f"and no {think.name}; check the switch in its chat_template_kwargs (thinking, enable_thinking) and "
        "the model",
    )


def check_context(context_length: int | None, rules: LaneRules) -> Iterator[Finding]:
    """Each lane can answer its smallest prompts, in full or at least in part."""
    if context_length is None:
        yield Finding("warning", "the context length is not known: no server says it, and no config.json")
        return
    fits = []
    for lane in rules.lanes:
        prompt = rules.smallest_prompt(lane)
        room = context_length - prompt - 1  # SGLang keeps one position free
        if room >= lane.max_new_tokens:
            fits.append(lane.name)
        elif room >= 1:
            yield Finding(
                "warning",
                f"a context of {context_length:,} tokens leaves {room:,} for answers to prompts of "
                f"{prompt:,}, not lanes.{lane.name}.max_new_tokens ({lane.max_new_tokens:,}): longer ones "
                "are cut",
            )
        elif lane.name == "long":  # no prompt of it fits into the model at all
            yield Finding(
                "note",
                f"lanes.long is not used: its prompts, from {prompt:,} tokens on, exceed the context of "
                f"{context_length:,}",
            )
        else:
            yield Finding(
                "refusal",
                f"a context of {context_length:,} tokens is too small for lanes.{lane.name}: prompts of "
                f"{prompt:,} tokens leave no room for an answer; serve a larger --context-length",
            )
    if fits:
        yield Finding("note", f"context {context_length:,}: enough for lanes {' and '.join(fits)}")


def check_prompts(datasets: Sequence[SampledDataset], context_length: int | None) -> Iterator[Finding]:
    """The first prompts of each dataset can be had, rendered and fit into the context.

    Finished conversations beyond it are training data all the same: a trainer cuts or drops them.
    """
    for one in datasets:
        if one.problem is not None:
            yield Finding("problem", f"dataset {one.name!r}: {one.problem}")
            continue
        if not one.prompt_tokens:
            yield Finding("warning", f"dataset {one.name!r}: none of its first rows gives a prompt")
        if context_length is not None:
            limit = context_length - 1 if one.is_generated else context_length + 1
            long = [count for count in one.prompt_tokens if count >= limit]
            yield from _check_lengths(one, long, context_length)


def _check_lengths(one: SampledDataset, long: Sequence[int], context_length: int) -> Iterator[Finding]:
    if not long:
        return
    all_of_them = len(long) == len(one.prompt_tokens)
    what = "prompts" if one.is_generated else "conversations"
    text = (
        f"dataset {one.name!r}: {'all' if all_of_them else len(long)} of the first {len(one.prompt_tokens)} "
        f"{what} exceed the context of {context_length:,} tokens (up to {max(long):,})"
    )
    if one.is_generated:
        text += " and would be rejected; serve a larger context, or take other prompts"
    else:
        text += ": they are exported whole, and a trainer cuts or drops them at its max_length"
    yield Finding("problem" if all_of_them and one.is_generated else "warning", text)


def check_kv_tokens(facts: ServerFacts, rules: LaneRules, context_length: int | None) -> Finding:
    """The longest single request fits into the server's KV memory; `context_length` is the model's."""
    if facts.kv_tokens is None:
        return Finding("note", f"{facts.url}: it does not say how many KV tokens it has; not checked")
    needs = {lane.name: rules.smallest_prompt(lane) + lane.max_new_tokens for lane in rules.lanes}
    if context_length is not None:
        usable = {lane.name for lane in rules.lanes if rules.smallest_prompt(lane) + 1 < context_length}
        needs = {name: min(need, context_length) for name, need in needs.items() if name in usable}
    name = max(needs, key=lambda lane: needs[lane], default=None)
    if name is None or needs[name] <= facts.kv_tokens:
        return Finding("note", f"{facts.url}: {facts.kv_tokens:,} KV tokens (max_total_num_tokens)")
    return Finding(
        "refusal",
        f"{facts.url} has {facts.kv_tokens:,} KV tokens (max_total_num_tokens), but one request of "
        f"lanes.{name} takes {needs[name]:,}; raise the server's --mem-fraction-static, or lower "
        f"lanes.{name}.max_new_tokens",
    )


def check_load(
    servers: Sequence[ServerFacts], rules: LaneRules, datasets: Sequence[SampledDataset], plan: RunPlan
) -> Iterator[Finding]:
    """The windows together do not ask for far more KV memory than there is."""
    known = [one.all_kv_tokens for one in servers if one.all_kv_tokens is not None]
    if len(known) < len(servers) or not plan.datasets:
        return
    slots = [one.max_running for one in servers if one.max_running is not None]
    wanted = sum(lane.concurrency for lane in rules.lanes)
    running = min(1.0, sum(slots) / wanted) if len(slots) == len(servers) else 1.0
    needed = running * max(_expected_in_flight(rules, datasets, one) for one in plan.datasets)
    if needed > _FAR_ABOVE * sum(known):
        yield Finding(
            "warning",
            f"about {needed:,.0f} tokens would be in flight ({wanted} requests asked for), but the servers "
            f"have {sum(known):,} KV tokens: requests would wait and be retracted; lower lanes.*.concurrency",
        )


def _expected_in_flight(rules: LaneRules, datasets: Sequence[SampledDataset], one: PlannedDataset) -> float:
    prompts = next((sampled.prompt_tokens for sampled in datasets if sampled.name == one.goal.name), [])
    total = 0.0
    for lane in rules.lanes:
        own = [count for count in prompts if (count >= rules.long_prompt_tokens) == (lane.name == "long")]
        if own or lane.name == "short":
            answer = min(one.answer_tokens, float(lane.max_new_tokens))
            total += lane.concurrency * (mean(own, default=SHORTEST_ROOM) + answer)
    return total


def check_disk(output_dir: Path, plan: RunPlan, *, vocab_size: int, formats: Collection[str]) -> Finding:
    """What the run will write fits onto the disk."""
    needed = estimate_bytes(plan, vocab_size=vocab_size, formats=formats)
    free = shutil.disk_usage(_existing(output_dir)).free
    if needed > free:
        return Finding(
            "refusal",
            f"{output_dir} needs about {_size(needed)} ({needed:,} bytes) for rows and export, but its disk "
            f"has {_size(free)} ({free:,} bytes) free; make room, use another output_dir or lower budgets",
        )
    return Finding("note", f"{output_dir} needs about {_size(needed)}; its disk has {_size(free)} free")


def check_draft_vocab(
    draft_vocab_size: int | None, target_vocab_size: int, *, formats: Collection[str]
) -> list[Finding]:
    """The export can make the draft vocabulary that it is to make; None asks for the usual size at most."""
    if draft_vocab_size == 0 or "vocab" not in formats:
        return []
    if draft_vocab_size is None:
        if target_vocab_size >= DRAFT_VOCAB_SIZE:
            return []
        return [
            Finding(
                "note",
                f"the draft vocabulary has all {target_vocab_size:,} ids of the target, fewer than the usual "
                f"{DRAFT_VOCAB_SIZE:,}; set export.draft_vocab_size for another size, 0 for none",
            )
        ]
    try:
        check_draft_vocab_size(draft_vocab_size, target_vocab_size)
    except ValueError as exc:
        return [Finding("refusal", f"export.{exc}")]
    return []


def is_path(name: str) -> bool:
    """Whether a model's name is a folder's; else it is an id on the Hub."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name or Path(name).is_dir()


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    path = path.resolve()
    return next(one for one in (path, *path.parents) if one.exists())


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _is_same_model(asked: str, served: str) -> bool:
    """Case does not count, and of a path only its last part: machines mount models as they like."""
    one, other = _model_parts(asked), _model_parts(served)
    whole = len(one) == 2 and len(other) == 2 and not is_path(asked) and not is_path(served)
    return one == other if whole else one[-1:] == other[-1:]


def _model_parts(name: str) -> list[str]:
    parts = [part for part in name.lower().replace("\\", "/").split("/") if part not in ("", ".", "~")]
    for part in parts:  # a snapshot in the Hub's cache: models--ORG--NAME/snapshots/REVISION
        if part.startswith("models--"):
            return part.removeprefix("models--").split("--")
    return parts
