"""What the generation tests share: a prepared dataset, its checkpoint store, and servers to ask.

The task logic runs as the tasks run it, without Prefect: real files, a real tokenizer, real sockets.
"""

import asyncio
import contextlib
import json
from collections import Counter

import pytest
from fake_sglang import expected_answer

from serving.client.pool import ServerPool
from serving.client.sglang import SGLangClient
from tasks.generate.dispatch import DispatchRules
from tasks.generate.dispatch_permit import DispatchPermit
from tasks.generate.generation import GenerationRules, Resources, generate_dataset
from tasks.generate.window import Window
from tasks.prepare.lane import Lane
from tasks.prepare.preparation import PrepareOptions, open_prompts, prepare_prompts
from tasks.records.append_file import AppendError
from tasks.records.response_log import REJECTED, RESPONSES, ResponseLog, read_lines
from tasks.records.rows import Rejected, Response
from tasks.tokens.rendering import Renderer
from tasks.tokens.tokenizer import load_tokenizer

UNREACHABLE = 10**9  # a budget that no test dataset can reach
CONTEXT_LENGTH = 2048
LONG_PROMPT_TOKENS = 200
TIMEOUT_S = 120  # of one scenario: a lost wake-up or a leaked slot ends here, not in a hung test run
_RESOURCE_FIELDS = {"short", "long", "short_limit", "long_limit", "at_once", "api_key"}
_RESOURCE_FIELDS |= {"request_timeout_s", "stall_timeout_s"}
_DISPATCH_FIELDS = {*DispatchRules.__dataclass_fields__}


class DictStore:
    """A checkpoint store in memory, through JSON as the real one; counts what it does."""

    def __init__(self):
        self.text = None
        self.saves = 0
        self.loads = 0

    async def load(self):
        """The last checkpoint."""
        self.loads += 1
        return None if self.text is None else json.loads(self.text)

    async def save(self, checkpoint):
        """Replace the checkpoint."""
        self.saves += 1
        self.text = json.dumps(checkpoint)

    @property
    def rows(self):
        """Rows that the checkpoint covers."""
        return json.loads(self.text)["rows"]


class Dataset:
    """A prepared dataset in a folder."""

    def __init__(self, folder, renderer, store=None):
        self.folder = folder
        self.renderer = renderer
        self.store = store or DictStore()
        self.statuses = []

    @property
    def prompts(self):
        """All prompts in dispatch order."""
        with contextlib.closing(open_prompts(self.folder)) as prompts:
            return list(prompts)

    @property
    def rows(self):
        """The rows of raw_responses.jsonl."""
        return [Response.from_line(line) for _, line in read_lines(self.folder / RESPONSES)]

    @property
    def rejected(self):
        """The rows of rejected.jsonl."""
        return [Rejected.from_line(line) for _, line in read_lines(self.folder / REJECTED)]

    @property
    def tokens(self):
        """Completion tokens on disk, counted again."""
        return sum(row.completion_tokens for row in self.rows)

    async def generate(self, resources, **options):
        """Generate with the shared resources of a test."""
        async with asyncio.timeout(TIMEOUT_S):
            return await generate_dataset(
                self.folder,
                rules=make_rules(self.folder.name, **options),
                resources=resources,
                checkpoints=self.store,
                on_status=self.statuses.append,
            )

    def run(self, *servers, **options):
        """Start the servers, generate to the end, stop everything; takes options of both."""
        shared = {key: options.pop(key) for key in list(options) if key in _RESOURCE_FIELDS}

        async def scenario():
            async with serve(self.renderer, *servers, **shared) as resources:
                return await self.generate(resources, **options)

        return asyncio.run(scenario())

    def check_rows(self, server):
        """Every row is whole and is the server's own answer to its prompt's ids; no prompt has two."""
        prompts = {prompt.id: prompt for prompt in self.prompts}
        rows = self.rows
        assert max(Counter(row.id for row in rows).values(), default=0) <= 1
        for row in rows:
            assert row.input_ids == self.renderer.render(prompts[row.id])
            ids, finish = expected_answer(row.input_ids, row.extra["max_new_tokens"], server.mean_tokens)
            assert (row.output_ids, row.finish_reason) == (ids, finish["type"])
            assert (row.prompt_tokens, row.completion_tokens) == (len(row.input_ids), len(ids))

    def check_complete(self, server):
        """Every prompt has one true row, or one reason why it has none."""
        self.check_rows(server)
        done, reasons = {row.id for row in self.rows}, Counter(row.id for row in self.rejected)
        assert done.isdisjoint(reasons)
        assert done | set(reasons) == {prompt.id for prompt in self.prompts}
        assert max(reasons.values(), default=1) == 1


@contextlib.contextmanager
def full_disk_after(dataset, rows):
    """Make the response log of one dataset fail after some rows, as a full disk would."""
    append = ResponseLog.append

    def limited(self, response, *, position):
        if self.folder == dataset.folder and self.progress.rows >= rows:
            raise AppendError(28, "the disk is full", str(self.folder / RESPONSES))
        append(self, response, position=position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResponseLog, "append", limited)
        yield


async def cancel(task):
    """Cancel a task and wait for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def is_free(resources):
    """Whether every slot and every server is given back."""
    return resources.window.in_flight == 0 and all(m.in_flight == 0 for m in resources.pool._members)


def make_renderer(tokenizer_folder):
    """A renderer of the tiny tokenizer."""
    return Renderer(load_tokenizer(str(tokenizer_folder)))


def make_conversations(folder, renderer, *, shape, conversations=12, turns=3, system="", mark=""):
    """Prepare conversations of some turns; every third one has a mark in its second question."""
    folder.mkdir(parents=True)
    source = folder / "source.jsonl"
    with source.open("w") as lines:
        for number in range(conversations):
            messages = [{"role": "system", "content": system}] if system else []
            for turn in range(turns):
                text = f"question {number} {turn}{mark if number % 3 == 2 and turn == 1 else ''}"
                messages.append({"role": "user", "content": text})
                messages.append({"role": "assistant", "content": f"the old answer {number} {turn}"})
            lines.write(json.dumps({"id": f"c{number}", "messages": messages}) + "\n")
    options = PrepareOptions(name=folder.name, adapter="messages", seed=0, shape=shape)
    prepare_prompts(folder, [source], options=options, source_sha256="0")
    return Dataset(folder, renderer)


def make_dataset(
    folder, renderer, *, prompts=40, long_every=None, marked_every=None, mute_every=None, store=None
):
    """Prepare numbered prompts; some of them long, some with an "@" in their text, some with a "#"."""
    folder.mkdir(parents=True)
    source = folder / "source.jsonl"
    with source.open("w") as lines:
        for number in range(prompts):
            words = "the quick brown fox " * (80 if long_every and number % long_every == 0 else 1)
            mark = "@" if marked_every and number % marked_every == 0 else ""
            mark += "#" if mute_every and number % mute_every == mute_every - 1 else ""
            content = f"{words}{number}{mark}"
            row = {"id": f"p{number}", "messages": [{"role": "user", "content": content}]}
            lines.write(json.dumps(row) + "\n")
    options = PrepareOptions(name=folder.name, adapter="messages", seed=0)
    prepare_prompts(folder, [source], options=options, source_sha256="0")
    return Dataset(folder, renderer, store)


def mark_id(tokenizer_folder, mark="@"):
    """The token id of "@" (or of "#"), which only marked prompts hold."""
    [token_id] = load_tokenizer(str(tokenizer_folder)).tokenizer.encode(mark)
    return token_id


def make_rules(name, *, budget_tokens=UNREACHABLE, **options):
    """Rules with defaults for tests; dispatch rules are given by their own names."""
    dispatch = {key: options.pop(key) for key in list(options) if key in _DISPATCH_FIELDS}
    return GenerationRules(
        name=name,
        budget_tokens=budget_tokens,
        dispatch=DispatchRules(**{"sampling_params": {"temperature": 1.0}, **dispatch}),
        **{"long_prompt_tokens": LONG_PROMPT_TOKENS, "expected_mean_tokens": 40.0, **options},
    )


@contextlib.asynccontextmanager
async def open_resources(renderer, *urls, short=8, long=4, short_limit=200, long_limit=300, **options):
    """Clients, pool and window as warm-up makes them; everything closed at the end."""
    at_once = options.pop("at_once", 1)
    stall_timeout_s = options.pop("stall_timeout_s", 300.0)
    clients = [SGLangClient(url, vocab_size=1024, **options) for url in urls]
    lanes = [Lane("short", short, short_limit), Lane("long", long, long_limit)]
    resources = Resources(
        pool=ServerPool(clients, probe_every_s=0.05, stall_timeout_s=stall_timeout_s),
        window=Window({lane.name: lane for lane in lanes}, is_shared=at_once > 1),
        renderer=renderer,
        context_length=CONTEXT_LENGTH,
        turn=DispatchPermit(at_once),
    )
    try:
        yield resources
    finally:
        resources.threads.shutdown(wait=True, cancel_futures=True)
        await resources.pool.close()


@contextlib.asynccontextmanager
async def serve(renderer, *servers, **options):
    """Resources on fake servers that run as long as the block."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for server in servers:
            urls.append(await server.start())
            stack.push_async_callback(server.stop)
        yield await stack.enter_async_context(open_resources(renderer, *urls, **options))
