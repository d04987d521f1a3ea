"""How long a prepared dataset's prompts are: measured in worker threads, and kept beside them.

Knows the renderer; what is counted is in `tasks.prepare.prompt_lengths`. Invariant: a preparation that
was measured is not measured again.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson

from tasks.prepare.preparation import PrepareReport, open_prompts
from tasks.prepare.prompt_lengths import LengthLimits, PromptLengths, sample_positions, summarize_lengths
from tasks.records.files import write_json_atomically
from tasks.records.length_quantiles import LengthQuantiles
from tasks.records.prompt_file import PromptFile
from tasks.records.rows import Prompt
from tasks.tokens.rendering import Renderer, RenderError
from tasks.tokens.tokenizer import TargetTokenizer
from tasks.tokens.trajectories import TrajectoryRenderer

LENGTHS = "prompt_lengths.json"
FindLengths = Callable[..., Awaitable[PromptLengths]]
"""`find_lengths` with the tokenizer of a run."""

_Lengths = list[int | RenderError]
_Measure = Callable[[Sequence[Prompt]], _Lengths]


async def find_lengths(
    folder: Path,
    report: PrepareReport,
    *,
    long_prompt_tokens: int | None,
    target: TargetTokenizer,
    renderer: Renderer,
    context_length: int | None,
) -> PromptLengths:
    """The lengths of a dataset's prompts; `long_prompt_tokens` is None where nothing is generated."""
    limits = LengthLimits(long_prompt_tokens, context_length)
    key = {"prompts": report.key, "limits": dataclasses.asdict(limits)}
    if (known := _read(folder / LENGTHS, key)) is not None:
        return known
    if long_prompt_tokens is not None:
        measure = _measure_prompts(renderer)
    else:
        measure = _measure_conversations(TrajectoryRenderer(target, renderer))
    with closing(open_prompts(folder)) as prompts:
        lengths: _Lengths = []
        for positions in sample_positions(prompts):
            lengths += await asyncio.to_thread(_measure_at, prompts, positions, measure)
        found = summarize_lengths(lengths, prompts, limits)
    write_json_atomically(folder / LENGTHS, {"key": key, **dataclasses.asdict(found)})
    return found


def _measure_at(prompts: PromptFile, positions: range, measure: _Measure) -> _Lengths:
    return measure([prompts.read(position) for position in positions])


def _measure_prompts(renderer: Renderer) -> _Measure:
    render_all = renderer.render_all
    return lambda prompts: [one if isinstance(one, RenderError) else len(one) for one in render_all(prompts)]


def _measure_conversations(renderer: TrajectoryRenderer) -> _Measure:
    return lambda prompts: [_try(renderer, prompt) for prompt in prompts]


def _try(renderer: TrajectoryRenderer, prompt: Prompt) -> int | RenderError:
    try:
        return renderer.count_tokens(prompt)
    except RenderError as exc:
        return exc


def _read(path: Path, key: dict[str, Any]) -> PromptLengths | None:
    try:
        data = orjson.loads(path.read_bytes())
        if data.pop("key") != key:
            return None
        tokens = data.pop("tokens")
        return PromptLengths(tokens=None if tokens is None else LengthQuantiles(**tokens), **data)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
