"""How far over a token budget three stop rules land, and what they cost in time and CPU.

A discrete-event simulation, pure and seeded: a window of requests, each with a wait (queue and prefill) and a
decode speed of its own (20% noise), answers capped at 10,240 tokens. Policies see what a client sees: when a
request was sent and, at its end, its length. `floor` knows every length beforehand and keeps the window full
until the prompt that reaches the budget: no rule can be below it, and times are relative to its makespan.

    python benchmarks/bench_budget.py [--quick] [--seeds 20] [--empty-speedup 2.0]
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tasks.generate.budget import TokenBudget

CAP_TOKENS = 10_240
TOKENS_PER_S = 50.0
SPEED_NOISE = 0.2
MIN_WAIT_S, MEAN_EXTRA_WAIT_S = 0.5, 2.0
POLICIES = ("floor", "drain", "naive", "forecast")


class Policy(Protocol):
    """What the simulator asks; TokenBudget has it."""

    def may_dispatch(self, *, now_s: float) -> bool:
        """One more now?"""

    def dispatched(self, request_id: int, *, now_s: float, max_new_tokens: int) -> None:
        """One more was sent."""

    def completed(self, request_id: int, *, completion_tokens: int, now_s: float) -> None:
        """One has answered."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A distribution of answer lengths."""

    name: str
    mean: float
    sigma: float  # 0 is the bimodal mix

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Lengths of n answers, capped."""
        if self.sigma:
            tokens = _lognormal(self.mean, self.sigma, n, rng)
        else:
            short, reasoning = _lognormal(300, 0.5, n, rng), _lognormal(9_000, 0.4, n, rng)
            tokens = np.where(rng.random(n) < 0.7, short, reasoning)
        return np.clip(np.round(tokens), 1, CAP_TOKENS).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts in dispatch order: how long each answer is, in tokens and in seconds."""

    lengths: list[int]
    durations_s: list[float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated run."""

    total_tokens: int
    makespan_s: float
    dispatched: int
    cpu_s: float


@dataclass(slots=True)
class Naive:
    """Completed + in flight x mean of the finished."""

    budget_tokens: int
    tokens: int = 0
    finished: int = 0
    in_flight: int = 0

    def may_dispatch(self, *, now_s: float) -> bool:
        """Yes while the rule says so."""
        mean = self.tokens / self.finished if self.finished else 3_000.0
        return self.tokens < self.budget_tokens and self.tokens + self.in_flight * mean < self.budget_tokens

    def dispatched(self, request_id: int, *, now_s: float, max_new_tokens: int) -> None:
        """Count it."""
        self.in_flight += 1

    def completed(self, request_id: int, *, completion_tokens: int, now_s: float) -> None:
        """Count it."""
        self.tokens += completion_tokens
        self.finished += 1
        self.in_flight -= 1


@dataclass(slots=True)
class Floor:
    """Sends exactly the prompts that it takes."""

    left: int

    def may_dispatch(self, *, now_s: float) -> bool:
        """Yes while the rule says so."""
        return self.left > 0

    def dispatched(self, request_id: int, *, now_s: float, max_new_tokens: int) -> None:
        """Count it."""
        self.left -= 1

    def completed(self, request_id: int, *, completion_tokens: int, now_s: float) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class Cell:
    """Results of one shape, budget and window, per policy, over seeds."""

    overshoot: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in POLICIES})
    time_lost: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in POLICIES})
    cpu_per_completion_s: list[float] = field(default_factory=list)


SHAPES = [
    *(
        Shape(f"lognormal {mean:,} s={sigma}", mean, sigma)
        for mean in (1577, 3793)
        for sigma in (0.6, 0.8, 1.0, 1.1)
    ),
    Shape("lognormal 8,000 s=1.0", 8000, 1.0),
    Shape("bimodal 300 / 9,000", 2910, 0.0),
]


def simulate(policy: Policy, work: Workload, *, window: int, empty_speedup: float = 1.0) -> Outcome:
    """Run to the end. Decode runs on a clock of its own, up to empty_speedup faster as the window empties."""
    running: list[tuple[float, int]] = []
    clock = now_s = 0.0
    sent = total = 0
    slope = 1.0 - 1.0 / empty_speedup
    started = time.process_time()
    while True:
        while len(running) < window and sent < len(work.lengths) and policy.may_dispatch(now_s=now_s):
            policy.dispatched(sent, now_s=now_s, max_new_tokens=CAP_TOKENS)
            heapq.heappush(running, (clock + work.durations_s[sent], sent))
            sent += 1
        if not running:
            return Outcome(total, now_s, sent, time.process_time() - started)
        pace = 1.0 - slope * (1.0 - len(running) / window)
        end, request_id = heapq.heappop(running)
        now_s += (end - clock) * pace
        clock = end
        total += work.lengths[request_id]
        policy.completed(request_id, completion_tokens=work.lengths[request_id], now_s=now_s)


def build_workload(shape: Shape, *, budget_tokens: int, window: int, seed: int) -> Workload:
    """More prompts than any policy can use."""
    rng = np.random.default_rng([seed, int(shape.mean), int(shape.sigma * 10), window, budget_tokens % 9973])
    n = int(2 * budget_tokens / min(shape.mean, 5_000)) + 10 * window
    lengths = shape.draw(n, rng)
    speeds = TOKENS_PER_S * _lognormal(1.0, SPEED_NOISE, n, rng)
    waits = MIN_WAIT_S + rng.exponential(MEAN_EXTRA_WAIT_S, n)
    return Workload(lengths.tolist(), (waits + lengths / speeds).tolist())


def run_cell(shape: Shape, *, budget_tokens: int, window: int, seeds: int, empty_speedup: float) -> Cell:
    """All policies on the same workloads."""
    cell = Cell()
    for seed in range(seeds):
        work = build_workload(shape, budget_tokens=budget_tokens, window=window, seed=seed)
        needed = int(np.searchsorted(np.cumsum(work.lengths), budget_tokens)) + 1
        policies: dict[str, Policy] = {
            "floor": Floor(needed),
            "drain": TokenBudget(budget_tokens=budget_tokens, policy="drain"),
            "naive": Naive(budget_tokens),
            "forecast": TokenBudget(budget_tokens=budget_tokens),
        }
        outcomes = {
            name: simulate(policy, work, window=window, empty_speedup=empty_speedup)
            for name, policy in policies.items()
        }
        for name, outcome in outcomes.items():
            if outcome.total_tokens < budget_tokens or outcome.dispatched == len(work.lengths):
                raise RuntimeError(f"{name} ended at {outcome.total_tokens} of {budget_tokens} tokens")
            cell.overshoot[name].append(100 * (outcome.total_tokens / budget_tokens - 1))
            cell.time_lost[name].append(100 * (outcome.makespan_s / outcomes["floor"].makespan_s - 1))
        ours, bare = outcomes["forecast"], outcomes["floor"]
        cell.cpu_per_completion_s.append(ours.cpu_s / ours.dispatched - bare.cpu_s / bare.dispatched)
    return cell


def main() -> None:
    """Print one table per budget and window."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="window 150, four shapes, five seeds")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--empty-speedup", type=float, default=1.0, help="of one request, alone on the server"
    )
    args = parser.parse_args()
    seeds, windows = (5, [150]) if args.quick else (args.seeds, [32, 150, 600])
    shapes = [SHAPES[i] for i in (0, 5, 7, 9)] if args.quick else SHAPES
    for budget_tokens in (1_000_000, 10_000_000):
        for window in windows:
            print(f"\nbudget {budget_tokens:,}, window {window}, {seeds} seeds")
            print(
                "overshoot % of the budget: mean/worst; time % over the floor's makespan; CPU of forecast as"
            )
            print("% of a core at 100 completions/s")
            print(f"{'lengths':24}{'floor':>7}{'drain':>14}{'naive':>14}{'forecast':>14}", end="")
            print(f"{'t drain':>9}{'t naive':>9}{'t fcst':>9}{'cpu %':>7}")
            for shape in shapes:
                cell = run_cell(
                    shape,
                    budget_tokens=budget_tokens,
                    window=window,
                    seeds=seeds,
                    empty_speedup=args.empty_speedup,
                )
                print(_format_row(shape, cell), flush=True)


def _format_row(shape: Shape, cell: Cell) -> str:
    over = {
        name: f"{np.mean(values):.2f}/{max(values):.2f}" if name != "forecast" else _precise(values)
        for name, values in cell.overshoot.items()
    }
    lost = {name: f"{np.mean(values):.1f}" for name, values in cell.time_lost.items()}
    cpu = 100 * 100 * float(np.mean(cell.cpu_per_completion_s))
    return (
        f"{shape.name:24}{np.mean(cell.overshoot['floor']):7.3f}{over['drain']:>14}{over['naive']:>14}"
        f"{over['forecast']:>14}{lost['drain']:>9}{lost['naive']:>9}{lost['forecast']:>9}{cpu:7.2f}"
    )


def _precise(values: list[float]) -> str:
    return f"{np.mean(values):.3f}/{max(values):.3f}"


def _lognormal(mean: float, sigma: float, n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, n)


if __name__ == "__main__":
    main()
