"""What the datasets of a run hold and have: a look at their sources, and a count of what is on disk.

Knows where these are; does not know servers. Invariant: a source that cannot be read is a finding of its
dataset, and stops no other one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.prepare.lane import Lane
from tasks.prepare.preparation import PrepareOptions
from tasks.prepare.sample import SAMPLE_ROWS, sample_prompts
from tasks.prepare.sources import SourceError, describe_error, name_empty, resolve_source
from tasks.records.dataset_plan import DatasetPlan
from tasks.records.rows import Prompt
from tasks.tokens.call_style import has_calls
from tasks.tokens.rendering import Renderer, RenderError
from tasks.tokens.tokenizer import TargetTokenizer
from tasks.tokens.trajectories import TrajectoryRenderer
from tasks.warm_up.preflight import SHORTEST_ROOM, SampledDataset
from tasks.warm_up.run_plan import OnDisk, PlannedDataset, RunPlan, expect_answer_tokens, mean

_SAMPLE_CONVERSATIONS = 8  # a long one takes a tenth of a second


@dataclass(frozen=True, slots=True)
class DatasetWork:
    """A dataset that a run is to bring to its goal."""

    goal: DatasetPlan
    source: str
    options: PrepareOptions
    expected_mean_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The first prompts of a dataset, and how many its source has (None: not known)."""

    dataset: SampledDataset
    rows: int | None = None


def sample_datasets(
    works: Sequence[DatasetWork], target: TargetTokenizer, renderer: Renderer
) -> list[Sample]:
    """Read and render the first prompts of each source."""
    trajectories = TrajectoryRenderer(target, renderer)
    return [_sample(work, renderer, trajectories) for work in works]


def make_plan(
    works: Sequence[DatasetWork],
    samples: Sequence[Sample],
    on_disk: Mapping[str, OnDisk],
    *,
    lanes: Sequence[Lane],
) -> RunPlan:
    """What is left to do, as it seems before the first answer."""
    longest = max(lane.max_new_tokens for lane in lanes)
    planned = []
    for work, sample in zip(works, samples, strict=True):
        there = on_disk.get(work.goal.name, OnDisk())
        planned.append(
            PlannedDataset(
                goal=work.goal,
                on_disk=there,
                prompts=sample.rows,
                prompt_tokens=mean(sample.dataset.prompt_tokens, default=SHORTEST_ROOM),
                answer_tokens=expect_answer_tokens(work.expected_mean_tokens, there, max_new_tokens=longest),
            )
        )
    return RunPlan(tuple(planned))


def _sample(work: DatasetWork, renderer: Renderer, trajectories: TrajectoryRenderer) -> Sample:
    """What goes wrong here is this dataset's alone, and fails it when it is prepared."""
    kwargs = work.options.chat_template_kwargs
    is_generated = work.options.shape != "trajectory"
    own: dict[str, Any] = {"name": work.goal.name, "own_kwargs": kwargs, "is_generated": is_generated}
    try:
        return _read_sample(work, own, renderer, trajectories)
    except (SourceError, OSError) as exc:
        problem = str(exc)
    except Exception as exc:  # noqa: BLE001 - some row that we fail at; it must not stop the other datasets
        problem = f"its first rows cannot be prepared ({describe_error(exc)})"
    return Sample(SampledDataset(**own, chat_template_kwargs=kwargs, problem=problem))


def _read_sample(
    work: DatasetWork, own: dict[str, Any], renderer: Renderer, trajectories: TrajectoryRenderer
) -> Sample:
    kwargs, is_generated = own["own_kwargs"], own["is_generated"]
    source = resolve_source(work.source, base=Path.cwd())
    limit = SAMPLE_ROWS if is_generated else _SAMPLE_CONVERSATIONS
    sample = sample_prompts(source, work.options, limit=limit)
    prompts = [one.at_turn(turn) for one in sample.prompts for turn in range(one.answers)]
    if is_generated:
        lengths = [one if isinstance(one, RenderError) else len(one) for one in renderer.render_all(prompts)]
    else:
        lengths = [_measure(prompt, trajectories) for prompt in prompts]
    refusals = [f"{one.reason}: {one.detail}" for one in lengths if isinstance(one, RenderError)]
    calls = is_generated and any(has_calls(one.messages) for one in sample.prompts)
    loses_calls = calls and renderer.refuses_calls
    problem = None
    if len(refusals) == len(lengths) and sample.is_whole and not loses_calls:
        why = refusals[0] if refusals else "the adapter rejects all" if sample.rows else name_empty(source)
        problem = f"no row gives a prompt ({why}); check its source {work.source}"
    dataset = SampledDataset(
        **own,
        chat_template_kwargs=sample.prompts[0].chat_template_kwargs if sample.prompts else kwargs,
        rows_kwargs={key: value for one in sample.prompts for key, value in one.chat_template_kwargs.items()},
        prompt_tokens=[one for one in lengths if not isinstance(one, RenderError)],
        refused=len(refusals),
        refusal=next(iter(refusals), None),
        hides_tools=any(one.tools and not renderer.shows_tools(one.messages) for one in sample.prompts),
        loses_calls=loses_calls,
        problem=problem,
    )
    per_row = len(prompts) / len(sample.prompts) if sample.prompts else 1.0
    limits = [work.options.max_prompts, None if sample.rows is None else round(sample.rows * per_row)]
    return Sample(dataset, min((limit for limit in limits if limit is not None), default=None))


def _measure(prompt: Prompt, trajectories: TrajectoryRenderer) -> int | RenderError:
    """The tokens of a finished conversation's longest row, or why it has none."""
    try:
        return max(len(row.input_ids) for row in trajectories.render(prompt))
    except RenderError as exc:
        return exc
