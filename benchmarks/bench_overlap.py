"""How long a whole run takes against the ideal: a server that is full from the first token to the last.

The real generation code on a simulated server (simulated_server.py says how its throughput is shared), in
virtual time: hours pass in a minute and the CPU's share is nil (bench_client.py measures that one). Two ways
through the same datasets: `ours` hands the turn on when a dataset's drain begins and stops by forecast, as
the flow does; `one by one` waits for each dataset's last answer and stops when the budget is reached.

"over ideal" is the run's time over (tokens generated / peak throughput). What is not ideal is lost, and the
tables say where: while a dataset holds the turn, or after it, until another one has it. Nobody can fill the
last tail: at 8 x 10,000,000 tokens it weighs little, at the budgets of --quick it is all that is lost.

--long LANE gives the last dataset long prompts only, a lane of their own with so many slots, and the server
room for both lanes.

    python benchmarks/bench_overlap.py [--quick] [--budget-tokens N] [--window W] [--long LANE]
        [--concavity K] [--seed N]
"""

import argparse
import asyncio
import contextlib
import functools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from simulated_server import SimulatedServer, VirtualLoop
from tiny_tokenizer import VOCAB_SIZE, make_tokenizer

from serving.client.pool import ServerPool
from serving.client.sglang import SGLangClient
from tasks.generate.budget import BudgetPolicy
from tasks.generate.dispatch import Dispatcher, DispatchRules
from tasks.generate.dispatch_permit import DispatchPermit
from tasks.generate.generation import GenerationRules, Resources, generate_dataset
from tasks.generate.window import Window
from tasks.prepare.lane import Lane
from tasks.prepare.preparation import PrepareOptions, prepare_prompts
from tasks.records.response_log import REJECTED, RESPONSES
from tasks.tokens.rendering import Renderer
from tasks.tokens.tokenizer import load_tokenizer

MEAN_TOKENS = (1577, 3793, 2000, 6000, 5000, 1500, 2500, 8000)  # one dataset each, before the cap
CAP_TOKENS = 10_240
LONG_PROMPT_TOKENS = 100
TARGET = 1.05


@dataclass(slots=True)
class Moment:
    """What the server had done when something happened."""

    at_s: float
    running: int
    lost_s: float


@dataclass(slots=True)
class Trace:
    """One dataset's way through a run."""

    name: str
    got_turn: Moment
    gave_turn: Moment
    ended: Moment


class _WatchedTurn(DispatchPermit):
    """A turn that notes when it is had and when it is given up."""

    def __init__(self, look: Callable[[], Moment]) -> None:
        super().__init__(1)
        self._look = look
        self.traces: dict[str, Trace] = {}

    @contextlib.asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[Callable[[], None]]:
        async with super().hold(name) as give_up:
            now = self._look()
            trace = self.traces[name] = Trace(name, now, now, now)

            def note_and_give_up() -> None:
                trace.gave_turn = self._look()
                give_up()

            yield note_and_give_up
        trace.ended = self._look()


class _Memory:
    """Checkpoints that go nowhere."""

    async def load(self) -> dict[str, Any] | None:
        return None

    async def save(self, checkpoint: dict[str, Any]) -> None:
        json.dumps(checkpoint)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run through, on what server."""

    folder: Path
    renderer: Renderer
    budget_tokens: int
    window: int
    long: int
    concavity: float
    seed: int

    @property
    def datasets(self) -> list[tuple[str, int]]:
        """Names and mean lengths."""
        return [(f"D{number}", mean) for number, mean in enumerate(MEAN_TOKENS, 1)]


@dataclass(slots=True)
class Outcome:
    """How a run went."""

    time_s: float
    tokens: int
    peak: float
    running: float
    cpu_s: float
    traces: list[Trace] = field(default_factory=list)

    @property
    def over_ideal(self) -> float:
        """Time over what a server at its peak would have taken for these tokens."""
        return self.time_s * self.peak / self.tokens


async def _run(setting: Setting, *, overlap: bool, policy: BudgetPolicy) -> Outcome:
    """All datasets in order; with overlap each starts when the one before is queued, as in the flow."""
    loop = asyncio.get_running_loop()
    width = setting.window + setting.long
    server = SimulatedServer(loop, window=width, concavity=setting.concavity, seed=setting.seed)

    def look() -> Moment:
        server.advance()
        return Moment(loop.time(), server.running, server.lost_s)

    turn = _WatchedTurn(look)
    slots = {"short": setting.window, "long": setting.long or setting.window}
    lanes = {name: Lane(name, count, CAP_TOKENS) for name, count in slots.items()}
    pool = ServerPool([SGLangClient("http://simulated", vocab_size=VOCAB_SIZE, transport=server)])
    resources = Resources(pool, Window(lanes), setting.renderer, None, turn)
    started = time.process_time()
    clocked = functools.partial(Dispatcher, clock=loop.time)
    with mock.patch("tasks.generate.generation.Dispatcher", clocked):
        async with asyncio.TaskGroup() as group:
            for name, mean in setting.datasets:
                rules = GenerationRules(
                    name,
                    setting.budget_tokens,
                    DispatchRules({"mean_tokens": mean}),
                    budget_policy=policy,
                    long_prompt_tokens=LONG_PROMPT_TOKENS,
                )
                running = group.create_task(_generate(setting.folder / name, rules, resources))
                if overlap:
                    queued = group.create_task(turn.wait_queued(name))
                    await asyncio.wait((running, queued), return_when=asyncio.FIRST_COMPLETED)
                else:
                    await running
    end = look()
    if abs(end.at_s - server.tokens / server.peak - end.lost_s) > 0.1:
        raise RuntimeError(f"{end.at_s} s are not {server.tokens} tokens at the peak and {end.lost_s} s lost")
    resources.threads.shutdown()
    await pool.close()
    return Outcome(
        time_s=end.at_s,
        tokens=server.tokens,
        peak=server.peak,
        running=server.running_s / server.busy_s / width,
        cpu_s=time.process_time() - started,
        traces=list(turn.traces.values()),
    )


async def _generate(folder: Path, rules: GenerationRules, resources: Resources) -> None:
    for log in (RESPONSES, REJECTED):
        (folder / log).unlink(missing_ok=True)
    result = await generate_dataset(
        folder, rules=rules, resources=resources, checkpoints=_Memory(), on_status=lambda _: None
    )
    if result.outcome != "complete":
        raise RuntimeError(result.to_line())


def _prepare(setting: Setting) -> None:
    """More prompts than any policy can use."""
    for name, mean in setting.datasets:
        source = setting.folder / f"{name}.jsonl"
        words = " long" * LONG_PROMPT_TOKENS if setting.long and name == setting.datasets[-1][0] else ""
        with source.open("wb") as out:
            for number in range(int(1.5 * setting.budget_tokens / min(mean, 5_000)) + 5 * setting.window):
                message = {"role": "user", "content": f"{name} {number}{words}"}
                row = {"id": str(number), "messages": [message]}
                out.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        options = PrepareOptions(name=name, adapter="messages", seed=setting.seed)
        prepare_prompts(setting.folder / name, [source], options=options, source_sha256="x")


def _print_table(outcome: Outcome) -> None:
    """Where the time went: in each dataset's turn, and after it until somebody else has the turn."""
    print(f"{'':8}{'mean':>7}{'turn s':>10}{'lost s':>8}{'running at end':>16}{'tail s':>8}{'lost s':>8}")
    ends = [*(trace.got_turn for trace in outcome.traces[1:]), outcome.traces[-1].ended]
    for trace, mean, end in zip(outcome.traces, MEAN_TOKENS, ends, strict=True):
        got, gave = trace.got_turn, trace.gave_turn
        print(
            f"    {trace.name:4}{mean:7,}{gave.at_s - got.at_s:10,.0f}{gave.lost_s - got.lost_s:8.1f}"
            f"{gave.running:16}{trace.ended.at_s - gave.at_s:8.0f}{end.lost_s - gave.lost_s:8.1f}"
        )


def main() -> None:
    """Run both ways and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="budgets of 500,000 tokens")
    parser.add_argument("--budget-tokens", type=int, default=10_000_000, help="of each of the 8 datasets")
    parser.add_argument("--window", type=int, default=150, help="W, and the requests we keep in flight")
    parser.add_argument("--long", type=int, default=0, help="slots of the long lane, for the last dataset")
    parser.add_argument("--concavity", type=float, default=1.0, help="k; 0 shares a constant throughput")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    budget_tokens = 500_000 if options.quick else options.budget_tokens
    ways: list[tuple[str, bool, BudgetPolicy]] = [("ours", True, "forecast"), ("one by one", False, "drain")]
    print(
        f"8 datasets x {budget_tokens:,} tokens, window {options.window}, long lane {options.long}, "
        f"concavity {options.concavity:g}, seed {options.seed}"
    )
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        renderer = Renderer(load_tokenizer(str(make_tokenizer(folder / "tokenizer"))))
        setting = Setting(
            folder, renderer, budget_tokens, options.window, options.long, options.concavity, options.seed
        )
        _prepare(setting)
        for name, overlap, policy in ways:
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                outcome = runner.run(_run(setting, overlap=overlap, policy=policy))
            verdict = f" (target {TARGET})" if overlap else ""
            print(
                f"{name}: {outcome.time_s:,.0f} s, {outcome.over_ideal:.3f} over ideal{verdict}, "
                f"{outcome.tokens / budget_tokens / len(MEAN_TOKENS):.4f} tokens over budget, "
                f"{outcome.running:.3f} of the window running; {outcome.cpu_s:.0f} s CPU"
            )
            _print_table(outcome)


if __name__ == "__main__":
    main()
