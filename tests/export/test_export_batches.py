"""Whoever reads the logs, this process or one of its own, the export is the same; none is left or missed."""

import dataclasses
import os
import signal

import pytest
from export_support import dataset, export, hashes, response, write_prompts
from worker_support import find_workers

from tasks.export import batches as export_batches
from tasks.export.configs import Target
from tasks.export.export_run import FORMATS
from tasks.export.files import ExportError, ExportInputError
from tasks.export.formats.parquet import ParquetSink
from tasks.prepare import worker_process
from tasks.records.rows import Prompt

WORDS = "One two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.fixture
def apart(monkeypatch):
    """Every log is large enough for a process of its own, and there are cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(worker_process, "MIN_BYTES", 0)


def make_datasets(root):
    """Turns, finished conversations, equal rows, and all that is not exported."""
    turns = [response(f"c{n % 7}", turn=n // 7, output=range(2, 3 + n % 5)) for n in range(21)]
    spans = [{"turn": n, "input_ids": [1, 2, 3, 4 + n], "loss_spans": [[1, 2], [3, 4]]} for n in range(2)]
    recorded = response("t", input_ids=[], output_ids=[], sequences=spans, completion_tokens=4)
    bad = [response("no", input_ids=None), response("less", completion_tokens=9), response("e", (1,), (2,))]
    first = dataset(root, [*turns, turns[3], *bad], "first", tail=b'{"no json\n{"torn')
    second = dataset(root, [recorded, *turns, response("w", text=f"and {WORDS.lower()}")], "second")
    asked = [Prompt(f"c{n}", [{"role": "user", "content": f"é {n}"}]) for n in range(7)]
    nothing = dataset(root, [], "nothing")
    for one in (first, second, nothing):
        write_prompts(one, [*asked, Prompt("t", asked[0].messages), Prompt("w", asked[0].messages)])
    return [first, second, nothing]


@pytest.mark.parametrize("tokens_per_group", [1, 20, 1000])
def test_the_bytes_and_the_counts_are_the_same(tmp_path, apart, monkeypatch, tokens_per_group):
    """Of all formats, with everything that a reader leaves out."""
    (tmp_path / "set.txt").write_text(WORDS)
    options = {
        "formats": FORMATS, "draft_vocab_size": 4, "target": Target("m", vocab_size=20), "eval_fraction": 0.3,
        "drop_duplicates": True, "decontaminate": [tmp_path / "set.txt"], "rows_per_file": 5,
        "tokens_per_group": tokens_per_group,
    }  # fmt: skip
    datasets = make_datasets(tmp_path)
    started = []
    monkeypatch.setattr(
        export_batches, "Worker", lambda *args: started.append(1) or worker_process.Worker(*args)
    )
    by_worker = export(tmp_path / "a", datasets, **options)
    monkeypatch.setattr(worker_process, "MIN_BYTES", 1 << 60)
    here = export(tmp_path / "b", datasets, **options)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert dataclasses.replace(by_worker, out_dir=here.out_dir) == here
    assert started == [1]
    assert here.total.rows
    assert {one.exact_duplicates for one in here.datasets} > {0}
    assert {"no_ids", "empty_answer", "unreadable", "torn_last_line"} <= set(here.datasets[0].skipped)
    assert here.datasets[1].skipped["contaminated"] == 1
    assert find_workers(os.getpid()) == []


def kill_reader():
    os.kill(find_workers(os.getpid())[0], signal.SIGKILL)


def fill_disk():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (kill_reader, r"was killed by SIGKILL.* run the same command again; the export .* untouched"),
        (fill_disk, "No space left"),
    ],
)
def test_what_befalls_an_export_changes_nothing(tmp_path, apart, monkeypatch, harm, error):
    """In its middle: the old files stay, the next one is whole, and no process is left."""
    source = dataset(tmp_path, [response(f"r{n}") for n in range(99)])
    export(tmp_path, [source])
    before, write = hashes(tmp_path / "export"), ParquetSink.write

    def write_some(self, batch):
        if batch.ids[0] == "r3":
            harm()
        write(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ParquetSink, "write", write_some)
        with pytest.raises((ExportError, OSError), match=error):
            export(tmp_path, [source], seed=1, tokens_per_group=1)
    assert hashes(tmp_path / "export") == before
    assert find_workers(os.getpid()) == []
    assert export(tmp_path, [source], seed=1, tokens_per_group=1).total.rows == 99
    assert not (tmp_path / ".export.new").exists()


@pytest.mark.parametrize("what", ["prompts", "set"])
def test_what_the_reader_cannot_read_is_named_as_ever(tmp_path, apart, what):
    """The error crosses from the other process as it is."""
    source, path = dataset(tmp_path, [response("a")]), tmp_path / "set.jsonl"
    path.write_text(f'{{"a": "{"word " * 13}"}}\n' + "[1]\n" * (what == "set"))
    write_prompts(source, [Prompt("a", [{"role": "user", "content": "q"}])])
    if what == "prompts":
        (source.folder / "prompts.jsonl").write_bytes(b"{}\n")
    with pytest.raises(ExportInputError, match={"set": "set.jsonl:2"}.get(what, what)):
        export(tmp_path, [source], decontaminate=[path])
    assert not (tmp_path / "export").exists()
    assert find_workers(os.getpid()) == []


def test_an_export_that_fails_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    """Its files are thrown away: gigabytes that are written out first would only delay the error."""
    source = dataset(tmp_path, [response(f"r{n}") for n in range(9)])
    write, synced = ParquetSink.write, []

    def fail_early(self, batch):
        if batch.ids[0] == "r1":
            fill_disk()
        write(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ParquetSink, "write", fail_early)
        patch.setattr(os, "fsync", synced.append)
        with pytest.raises(OSError, match="No space left"):
            export(tmp_path, [source], formats=FORMATS[:3], tokens_per_group=1)
        assert synced == []
        patch.setattr(ParquetSink, "write", write)
        export(tmp_path, [source], formats=FORMATS[:3], tokens_per_group=1)
    assert len(synced) > len(FORMATS[:3])
