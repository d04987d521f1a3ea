"""Each open prompt is offered once, in dispatch order."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_tokenizer import make_tokenizer

from tasks.generate.feed import BATCH, READY_PER_LANE, Feeder
from tasks.prepare.lane import Lane
from tasks.records.progress import Progress
from tasks.records.prompt_file import PromptFile
from tasks.records.rows import Prompt, Rejected, Response
from tasks.tokens.rendering import Renderer
from tasks.tokens.tokenizer import load_tokenizer

LANES = {"short": Lane("short", 8, 64), "long": Lane("long", 8, 64)}
PROMPTS = 12 * BATCH


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(load_tokenizer(str(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [Prompt(str(n), [{"role": "user", "content": f"question {n}"}]) for n in range(PROMPTS)]
    path.write_bytes(b"".join(row.to_line() for row in rows))
    with contextlib.closing(PromptFile(path)) as opened:
        yield opened


def offer(prompts, progress, renderer, *, after_first=lambda: None):
    """The positions that a feeder offers, taken one at a time; `after_first` runs when one was taken."""

    async def take_all():
        changed = asyncio.Event()
        with ThreadPoolExecutor(1) as executor:
            feeder = Feeder(
                prompts,
                progress,
                renderer,
                lanes=LANES,
                long_prompt_tokens=1000,
                context_length=None,
                executor=executor,
                on_change=changed.set,
                on_unrenderable=pytest.fail,
            )
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                feeding = group.create_task(feeder.run())
                offered = []
                while not feeder.is_empty:
                    changed.clear()
                    if not feeder.peek("short"):
                        await changed.wait()
                        continue
                    offered.append(feeder.take("short").position)
                    if len(offered) == 1:
                        after_first()
                feeding.cancel()
        return offered

    return asyncio.run(take_all())


@pytest.mark.parametrize("open_prompts", [0, 1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH, PROMPTS])
@pytest.mark.parametrize("where", ["first", "last", "scattered"])
def test_every_open_prompt_is_offered_once_in_order(prompts, renderer, open_prompts, where):
    """Done ones are passed over, and the feeder says when it has no more."""
    step = PROMPTS // open_prompts if where == "scattered" and open_prompts else 1
    first = PROMPTS - open_prompts if where == "last" else 0
    expected = list(range(first, PROMPTS, step))[:open_prompts]
    progress = Progress.empty(PROMPTS)
    progress.done[:] = 1
    progress.done[expected] = 0
    assert offer(prompts, progress, renderer) == expected


def test_prompts_that_were_closed_meanwhile_are_not_offered(prompts, renderer):
    """What was answered or rejected after the feeder began, and before it came there."""
    progress = Progress.empty(PROMPTS)
    answered, set_aside = PROMPTS - 20, PROMPTS - 3
    assert answered > READY_PER_LANE + 2 * BATCH + 1  # else it was rendered already

    def close_two():
        response = Response(str(answered), 0, [1], [2], "x", "stop", prompt_tokens=1, completion_tokens=1)
        progress.add_response(response, position=answered, byte_offset=1)
        rejected = Rejected(str(set_aside), "http_400", "x", permanent=True, stage="generate")
        progress.add_rejected(rejected, position=set_aside, byte_offset=1)

    offered = offer(prompts, progress, renderer, after_first=close_two)
    assert offered == [position for position in range(PROMPTS) if position not in (answered, set_aside)]
