"""How long the prompts of a prepared dataset are, in tokens, and which lanes they will take.

Knows prompts and the renderer; does not know servers. A dataset's first positions are measured, all of them
where there are few: the dispatch order is a seeded shuffle, so that they stand for the rest. Invariant: what
is measured changes nothing that is prepared or generated.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tasks.records.length_quantiles import LengthQuantiles, length_quantiles
from tasks.records.prompt_file import PromptFile
from tasks.tokens.rendering import RenderError, fit_max_new_tokens

SAMPLE_PROMPTS = 1_000
_BATCH = 32
_TOO_LONG = "too long"


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """From how many tokens on a prompt takes the long lane, and how many the context has (None: unknown).

    `long_prompt_tokens` is None where nothing is generated: there are no lanes then, and no answer to fit.
    """

    long_prompt_tokens: int | None
    context_length: int | None = None


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """What `measured` of `prompts` prompts are like.

    `too_long` is how many the context cannot hold: prompts that would be rejected, or finished
    conversations, which have no `lanes` and are kept whole. `unrenderable` is how many the chat template
    refuses. `is_estimate` where a prompt holds answers that the target will write itself.
    """

    prompts: int
    measured: int
    tokens: LengthQuantiles | None
    lanes: dict[str, int] = field(default_factory=dict)
    too_long: int = 0
    unrenderable: int = 0
    is_estimate: bool = False

    def to_line(self) -> str:
        """All of it in one line, for a log."""
        parts = [self._describe_tokens()]
        parts += [f"{count:,} {lane}" for lane, count in self.lanes.items()]
        kept = "" if self.lanes else " (kept whole; a trainer cuts or drops them)"
        parts += [f"{self.too_long:,} too long for the context{kept}"] if self.too_long else []
        parts += [f"{self.unrenderable:,} refused by the template"] if self.unrenderable else []
        if self.measured < self.prompts:
            parts.append(f"of a sample of {self.measured:,}")
        if self.is_estimate:
            parts.append("with the row's answers in place of the target's")
        return ", ".join(parts)

    def to_rows(self) -> list[dict[str, object]]:
        """The same for a table."""
        sampled = f" (of a sample of {self.measured:,})" if self.measured < self.prompts else ""
        counts = {**self.lanes, "too long for the context": self.too_long, "refused": self.unrenderable}
        rows: list[dict[str, object]] = []
        if (tokens := self.tokens) is not None:
            values = {"median": tokens.p50, "95%": tokens.p95, "longest": tokens.max}
            rows += [{"what": f"prompt tokens, {name}{sampled}", "count": n} for name, n in values.items()]
        return rows + [{"what": f"{name}{sampled}", "count": count} for name, count in counts.items()]

    def _describe_tokens(self) -> str:
        if (tokens := self.tokens) is None:
            return "no prompt has tokens"
        return f"{tokens.p50:,} tokens in the middle, {tokens.p95:,} at 95%, {tokens.max:,} at most"


def sample_positions(prompts: PromptFile) -> Iterator[range]:
    """The positions to measure, a batch at a time, so that a caller may stop between two."""
    last = min(len(prompts), SAMPLE_PROMPTS)
    return (range(start, min(start + _BATCH, last)) for start in range(0, last, _BATCH))


def summarize_lengths(
    lengths: Sequence[int | RenderError], prompts: PromptFile, limits: LengthLimits
) -> PromptLengths:
    """What the lengths of the first positions say, each the tokens of a prompt or why it has none."""
    counts = Counter(length for length in lengths if not isinstance(length, RenderError))
    lanes = Counter(_name_lane(length, limits) for length in counts.elements())
    return PromptLengths(
        prompts=len(prompts),
        measured=len(lengths),
        tokens=length_quantiles(counts),
        lanes={} if limits.long_prompt_tokens is None else {name: lanes[name] for name in ("short", "long")},
        too_long=lanes[_TOO_LONG],
        unrenderable=len(lengths) - counts.total(),
        is_estimate=bool(prompts.follows[: len(lengths)].any()),
    )


def _name_lane(length: int, limits: LengthLimits) -> str:
    if limits.long_prompt_tokens is None:
        room = limits.context_length
        return _TOO_LONG if room is not None and length > room else ""
    try:
        fit_max_new_tokens(length, max_new_tokens=1, context_length=limits.context_length)
    except RenderError:
        return _TOO_LONG
    return "long" if length >= limits.long_prompt_tokens else "short"
