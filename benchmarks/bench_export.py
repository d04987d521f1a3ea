"""Time and memory of an export against reading the same logs: default formats, 92 million completion tokens.

Ten datasets with the lengths of the catalog's, ids as frequent as words are (Zipf) over 163,840; one is a
quarter of several turns and one is trajectories; as many prompts again were not asked yet. Each step runs in
a process of its own.

On 2 cores that nothing else uses, six runs: parsing 3.7 to 4.1 s, the export 9.0 to 10.2 s (16 to 18 s of
CPU), 2.3 to 2.6 times as long, and 380 MiB in two processes; that was before it read prompts, which takes
some 3% more CPU and 15 MiB. Where others use the cores too, the ratio says little: the parsing needs one, the
export both.

Usage: python benchmarks/bench_export.py [--quick] [--folder FOLDER]
"""

import argparse
import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from bench_support import ProcessClock, run_apart

from flows.parameters import Export
from tasks.export.configs import Target
from tasks.export.export_run import export_run
from tasks.export.rows import ExportDataset
from tasks.prepare.preparation import PROMPTS
from tasks.records.response_log import RESPONSES, read_lines
from tasks.records.rows import Prompt

VOCAB_SIZE, DRAFT_VOCAB_SIZE = 163_840, 32_000
TOKENS, QUICK_TOKENS = 92_000_000, 2_000_000
_FORMATS = Export().formats
MAX_RATIO, MAX_RSS_MIB, MAX_BYTES = 3.0, 1024, 2.5


@dataclass(frozen=True, slots=True)
class Shape:
    """A dataset: tokens of its prompts and answers on average, its share of all, and what its rows are."""

    name: str
    prompt_tokens: int
    answer_tokens: int
    share: float
    turns: int = 1
    is_trajectory: bool = False


SHAPES = (
    Shape("A1_deepswekimi", 9_000, 7_000, 0.08, is_trajectory=True),
    Shape("A2_kimik25", 9_000, 7_000, 0.08, is_trajectory=True),
    Shape("B1_glaive", 600, 1_577, 0.10),
    Shape("B2_opencodeinstruct", 250, 3_793, 0.11),
    Shape("B3_magicoder", 300, 2_000, 0.11),
    Shape("B4_mixturethoughts", 300, 5_000, 0.11),
    Shape("B5_openthoughts", 300, 5_000, 0.11),
    Shape("B6_ultrachat", 900, 1_500, 0.10, turns=3),
    Shape("B7_sharegpt", 900, 1_500, 0.10, turns=3),
    Shape("B8_sweagent", 6_000, 2_500, 0.10),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: seconds on the clock and of CPU, peak memory of its processes, and what it found."""

    wall_s: float
    cpu_s: float
    rss_mib: float
    found: Any

    @classmethod
    def of(cls, clock: ProcessClock, found: Any) -> "Measured":
        """What the clock has measured."""
        return cls(clock.wall_s, clock.cpu_s, clock.peak_mib, found)


def write_logs(folder: Path, tokens: int) -> int:
    """The response logs of all shapes; returns the tokens in them, prompts included."""
    rng = np.random.default_rng(0)
    weights = 1 / (np.arange(VOCAB_SIZE) + 2.7) ** 1.05
    stock = rng.permutation(VOCAB_SIZE)[rng.choice(VOCAB_SIZE, 8_000_000, p=weights / weights.sum())]
    return sum(
        _write_log(folder / shape.name, shape, int(tokens * shape.share), rng, stock) for shape in SHAPES
    )


def _write_log(folder: Path, shape: Shape, tokens: int, rng: np.random.Generator, stock: np.ndarray) -> int:
    folder.mkdir()
    written, both, number = 0, 0, 0
    prompts: list[int] = []
    with (folder / RESPONSES).open("wb") as file:
        while written < tokens:
            n_prompt, n_answer = (
                int(mean * rng.lognormal(-0.18, 0.6)) + 2
                for mean in (shape.prompt_tokens, shape.answer_tokens)
            )
            start = int(rng.integers(len(stock) - n_prompt - n_answer))
            ids = stock[start : start + n_prompt + n_answer]
            row = _make_row(shape, number, ids, n_prompt)
            file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            if number % shape.turns == 0:
                prompts.append(n_prompt)
            written, both, number = written + n_answer, both + len(ids), number + 1
    _write_prompts(folder / PROMPTS, shape, [*prompts, *prompts])
    return both


def _write_prompts(path: Path, shape: Shape, prompts: list[int]) -> None:
    """Of so many tokens each, four letters a token."""
    with path.open("wb") as file:
        for number, n_tokens in enumerate(prompts):
            text = f"{number} of {shape.name}: " + "ask " * n_tokens
            file.write(Prompt(_name(shape, number), [{"role": "user", "content": text}]).to_line())


def _name(shape: Shape, number: int) -> str:
    return f"{shape.name}-{number:08x}"


def _make_row(shape: Shape, number: int, ids: np.ndarray, n_prompt: int) -> dict[str, Any]:
    n_answer = len(ids) - n_prompt
    row = {
        "id": _name(shape, number // shape.turns), "turn": number % shape.turns,
        "prompt_tokens": n_prompt, "completion_tokens": n_answer, "cached_tokens": 0, "attempt": 1,
        "lane": "short", "finish_reason": "stop", "server": "http://127.0.0.1:30000", "latency_s": 8.1,
        "finished_at": "2026-11-30T02:11:09Z", "meta": {"kind": "bench"},
        "text": "some text of " * (n_answer // 3),
    }  # fmt: skip
    if not shape.is_trajectory:
        return {**row, "input_ids": ids[:n_prompt], "output_ids": ids[n_prompt:]}
    middle, half = n_prompt // 2, n_answer // 2
    spans = [[middle, middle + half], [n_prompt + half, len(ids)]]
    return {**row, "sequences": [{"turn": 0, "input_ids": ids, "loss_spans": spans}]}


def parse_logs(folder: Path) -> Measured:
    """Read and parse every line, and nothing else."""
    with ProcessClock() as clock:
        rows = 0
        for shape in SHAPES:
            for _, line in read_lines(folder / shape.name / RESPONSES):
                orjson.loads(line)
                rows += 1
    return Measured.of(clock, rows)


def export_logs(folder: Path) -> Measured:
    """Export everything in the formats that a run has by default."""
    with ProcessClock() as clock:
        report = export_run(
            datasets=[ExportDataset(shape.name, folder / shape.name, "complete") for shape in SHAPES],
            out_dir=folder / "export", eval_fraction=0.02, seed=0, formats=_FORMATS,
            draft_vocab_size=DRAFT_VOCAB_SIZE, target=Target("bench", VOCAB_SIZE), provenance={},
        )  # fmt: skip
    sizes = {name: sum(file.bytes for file in report.files if file.format == name) for name in _FORMATS}
    return Measured.of(clock, (report.total.rows, report.total.tokens, sizes, report.unchanged))


def main() -> None:
    """Write the logs, measure each step, and print what it took beside its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 million completion tokens")
    parser.add_argument("--folder", type=Path, help="kept and used again; a temporary one when left out")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / SHAPES[0].name).exists():
            run_apart(write_logs, folder, QUICK_TOKENS if options.quick else TOKENS)
        shutil.rmtree(folder / "export", ignore_errors=True)
        measure(folder)


def measure(folder: Path) -> None:
    """Parse, export, export again."""
    size = sum((folder / shape.name / RESPONSES).stat().st_size for shape in SHAPES)
    parsed = run_apart(parse_logs, folder)
    exported = run_apart(export_logs, folder)
    again = run_apart(export_logs, folder)
    rows, tokens, sizes, _ = exported.found
    print(
        f"{rows:,} rows, {tokens:,} tokens with prompts, {size / 1e9:.2f} GB of logs, {os.cpu_count()} cores"
    )
    for name, one in (("parse", parsed), ("export", exported), ("again", again)):
        print(f"{name:7} {one.wall_s:6.1f} s   {one.cpu_s:6.1f} s of CPU   peak RSS {one.rss_mib:5.0f} MiB")
    print(f"export / parse: {exported.wall_s / parsed.wall_s:.2f} (target {MAX_RATIO})")
    print(f"peak RSS: {exported.rss_mib:.0f} MiB (target {MAX_RSS_MIB})")
    print(f"parquet: {sizes['parquet'] / tokens:.2f} bytes a token (target {MAX_BYTES})")
    print("sizes: " + ", ".join(f"{name} {count / 1e6:,.0f} MB" for name, count in sizes.items()))
    if not again.found[3]:
        raise RuntimeError("the second export was written again")


if __name__ == "__main__":
    main()
