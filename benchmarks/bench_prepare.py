"""Preparing a source of a million rows, beside only reading and parsing its lines.

For conversations of some 4 KB and for questions of 0.3 KB, each in a process of its own: (a) reading the
file and parsing each line with orjson, (b) `prepare_prompts` of a tenth of the rows, and (c) of all of them,
by one process and by 2 and 4 workers, as far as there are cores. Printed are rows a second by wall clock, CPU
time a row, the ratio of each (c) to (a), and the peak RSS, all processes together. With --odd, also sources
whose rows are all rejected, all duplicates, or all of one id.

Memory does not grow with the size of a row, only by what is held of each: its place and size in the draft,
two hashes, its number of answers, and for a moment where it stands in the order.

On two cores that nothing else uses (best of two rounds): of CPU, a conversation takes 29 us by one
process and 31 by two workers, a question 12 by either, of which reading and parsing are 5.7 and 0.9. By
wall clock c/a is 5.3 and 3.0 for conversations, 13.6 and 7.4 for questions: the target is one for large
rows.

Usage: python benchmarks/bench_prepare.py [--quick] [--rows N] [--rounds N] [--odd] [--folder FOLDER]
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from bench_support import ProcessClock, run_apart

from tasks.prepare import parallel_draft, worker_process
from tasks.prepare.preparation import PrepareOptions, prepare_prompts

TARGET_RATIO = 3.0
_WORDS = """
the of and to in is that for it as with be on not this from or an they which one you all there would
their we has when who will more no if out so said what about into than them can only other new some
could time these two may then first any now such like over most made after also did many before must
through years where much your way well should because each people how too little state good very
make world work function returns value list string number example answer question data model
“quoted” naïve
""".split()  # noqa: SIM905  so many are read as text


@dataclass(frozen=True, slots=True)
class Measured:
    """How many rows were gone through, how fast, and the peak RSS (MiB) of the processes that did it."""

    rows: int
    wall_s: float
    cpu_s: float
    peak_mib: float

    def to_line(self) -> str:
        """For the table."""
        return (
            f"{self.rows:9,} rows  {self.rows / self.wall_s:9,.0f} rows/s  "
            f"{self.cpu_s / self.rows * 1e6:6.1f} us CPU a row  peak RSS {self.peak_mib:5.0f} MiB"
        )


def make_source(path: Path, kind: str, rows: int) -> None:
    """A source of that kind; the same bytes each time."""
    with path.open("wb", buffering=1 << 20) as out:
        for row in islice(_KINDS[kind](), rows):
            out.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def measure_parsing(path: Path) -> Measured:
    """Read and parse, and keep nothing."""
    with ProcessClock() as clock, path.open("rb", buffering=1 << 18) as lines:
        rows = 0
        for line in lines:
            orjson.loads(line)
            rows += 1
    return Measured(rows, clock.wall_s, clock.cpu_s, clock.peak_mib)


def measure_preparing(path: Path, folder: Path, workers: int) -> Measured:
    """Prepare into a folder that is removed again; with one worker, it is this process."""
    options = PrepareOptions(name="bench", adapter="messages", seed=0)
    worker_process.MIN_BYTES = 0 if workers > 1 else sys.maxsize
    parallel_draft.MAX_WORKERS = workers
    try:
        with ProcessClock() as clock:
            report = prepare_prompts(folder, [path], options=options, source_sha256="bench")
        return Measured(report.rows_read, clock.wall_s, clock.cpu_s, clock.peak_mib)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_conversations() -> Iterator[dict[str, Any]]:
    pick, texts = _make_texts()
    for number in range(1 << 60):
        messages = []
        for turn in range(pick.choice((2, 4, 4, 6, 8))):
            is_question = turn % 2 == 0
            chars = pick.randrange(60, 400) if is_question else pick.randrange(400, 1800)
            text = f"{number}.{turn} {_cut(pick, texts, chars)}\n"
            messages.append({"content": text, "role": "user" if is_question else "assistant"})
        yield {"prompt": messages[0]["content"], "prompt_id": f"{number:064x}", "messages": messages}


def _make_questions() -> Iterator[dict[str, Any]]:
    pick, texts = _make_texts()
    for number in range(1 << 60):
        question = f"{number} {_cut(pick, texts, pick.randrange(60, 200))}"
        answer = _cut(pick, texts, pick.randrange(40, 120))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"id": f"q{number:08}", "messages": messages}


def _make_rejected() -> Iterator[dict[str, Any]]:
    yield from islice(_make_questions(), 1)
    for number in range(1 << 60):
        yield {"id": number, "messages": [{"role": "assistant", "content": f"{number}, and no question"}]}


def _make_duplicates() -> Iterator[dict[str, Any]]:
    for number in range(1 << 60):
        yield {"id": number, "messages": [{"role": "user", "content": "the same"}]}


def _make_namesakes() -> Iterator[dict[str, Any]]:
    return ({**row, "id": "same"} for row in _make_questions())


def _make_texts() -> tuple[random.Random, list[str]]:
    pick = random.Random(0)
    return pick, [" ".join(pick.choices(_WORDS, k=800)) for _ in range(200)]


def _cut(pick: random.Random, texts: list[str], chars: int) -> str:
    start = pick.randrange(1500)
    return texts[pick.randrange(len(texts))][start : start + chars]


_KINDS = {
    "conversations": _make_conversations,
    "questions": _make_questions,
    "all rejected": _make_rejected,
    "all duplicates": _make_duplicates,
    "all of one id": _make_namesakes,
}


def measure_kind(kind: str, rows: int, folder: Path, *, rounds: int) -> None:
    """Make the source, measure and print."""
    path, part, whole = folder / "source.jsonl", folder / "part.jsonl", folder / "prepared"
    run_apart(make_source, path, kind, rows)
    run_apart(make_source, part, kind, rows // 10)
    print(f"{kind}: {path.stat().st_size / rows / 1000:.1f} KB a row, {path.stat().st_size / 1e9:.2f} GB")
    cores = len(os.sched_getaffinity(0))
    counts = [count for count in (1, 2, 4) if count <= max(cores, 1)]
    parsings, preparings = [], {count: [] for count in counts}
    for _ in range(rounds):  # in turns, so that what else the machine does befalls all of them
        parsings.append(run_apart(measure_parsing, path))
        for count in counts:
            preparings[count].append(run_apart(measure_preparing, path, whole, count))
    parsing = _find_best(parsings)
    print(f"a  parsing                {parsing.to_line()}")
    for count in counts:
        small = run_apart(measure_preparing, part, whole, count)
        large = _find_best(preparings[count])
        print(f"b  preparing, {_count_processes(count)} {small.to_line()}")
        print(f"c  preparing, {_count_processes(count)} {large.to_line()}")
        _print_ratio(parsing, small, large, cores)
    print(flush=True)


def _find_best(measured: list[Measured]) -> Measured:
    return min(measured, key=lambda one: one.wall_s)


def _count_processes(count: int) -> str:
    return "1 process:" if count == 1 else f"{count} workers:"


def _print_ratio(parsing: Measured, small: Measured, large: Measured, cores: int) -> None:
    ratio, cpu_ratio = large.wall_s / parsing.wall_s, large.cpu_s / parsing.cpu_s
    grown = (large.peak_mib - small.peak_mib) * 2**20 / (large.rows - small.rows)
    met = "met" if ratio <= TARGET_RATIO else "missed"
    print(
        f"   c/a {ratio:.1f} (target {TARGET_RATIO:g}: {met} on {cores} cores), of CPU {cpu_ratio:.1f}; "
        f"memory grows by {grown:.0f} bytes a row",
        flush=True,
    )


def main() -> None:
    """Measure each kind of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=1, help="the best of so many is taken")
    parser.add_argument("--odd", action="store_true", help="also rows that do not become a prompt each")
    parser.add_argument("--folder", type=Path, help="where the temporary files go (10 GB, quick 1 GB)")
    options = parser.parse_args()
    rows = options.rows // 10 if options.quick else options.rows
    with tempfile.TemporaryDirectory(dir=options.folder) as temp:
        for kind in _KINDS if options.odd else list(_KINDS)[:2]:
            measure_kind(kind, rows, Path(temp), rounds=options.rounds)


if __name__ == "__main__":
    main()
