"""An export that is there already is left alone; an interrupted one is made again, byte for byte."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from export_support import dataset, export, hashes, manifest, response, write_prompts

from tasks.export import key as export_key
from tasks.export import report as export_report
from tasks.export import rows as export_rows
from tasks.export.configs import Target
from tasks.records.rows import Prompt

OPTIONS = {
    "formats": ("parquet", "jsonl", "arrow", "vocab"),
    "draft_vocab_size": 6,
    "target": Target("m", vocab_size=20),
    "eval_fraction": 0.2,
}


def rows(count, first=0):
    return [response(f"r{n}", output=range(2, 4 + n % 9)) for n in range(first, first + count)]


def stamps(folder):
    return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.rglob("*")}


def test_an_unchanged_export_is_not_written_again(tmp_path):
    """Not a file is touched, and the report is the one of then."""
    source = dataset(tmp_path, [*rows(40), response("bad", input_ids=None)], tail=b'{"id":"torn')
    first = export(tmp_path, [source], **OPTIONS)
    before = stamps(tmp_path / "export")
    again = export(tmp_path, [source], **OPTIONS)
    assert stamps(tmp_path / "export") == before
    assert (first.unchanged, again.unchanged) == (False, True)
    for name in ("splits", "datasets", "length_losses", "files", "key", "vocab", "decontamination"):
        assert getattr(again, name) == getattr(first, name), name


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"eval_fraction": 0.3},
        {"formats": ("parquet", "jsonl", "vocab")},
        {"draft_vocab_size": 7},
        {"drop_duplicates": True},
        {"target": Target("m", vocab_size=21)},
        {"target": Target("n", vocab_size=20)},
        {"rows_per_file": 5},
        {"tokens_per_group": 30},
        {"tokens_per_shard": 30},
        {"provenance": {"model": "n"}},
    ],
)
def test_other_rules_are_another_export(tmp_path, change):
    """Each of them is in the key."""
    source = dataset(tmp_path, rows(20))
    keys = [export(tmp_path, [source], **OPTIONS | options).key for options in ({}, change)]
    assert keys[0] != keys[1] == manifest(tmp_path)["key"]


@pytest.mark.parametrize("changed", ["evals", "prompts"])
def test_other_texts_are_another_export(tmp_path, changed):
    """Evaluation sets and prompts are in the key by what they hold, not by where they are."""
    source, evals = dataset(tmp_path, rows(5)), tmp_path / "evals.txt"
    evals.write_text("a b " * 7)
    write_prompts(source, [Prompt(f"r{n}", [{"role": "user", "content": "q"}]) for n in range(5)])
    first = export(tmp_path, [source], decontaminate=[evals])
    moved = evals.rename(tmp_path / "d" / "evals.txt")
    assert export(tmp_path, [source], decontaminate=[moved]).unchanged
    if changed == "evals":
        moved.write_text("a c " * 7)
    else:
        write_prompts(source, [Prompt(f"r{n}", [{"role": "user", "content": "p"}]) for n in range(5)])
    second = export(tmp_path, [source], decontaminate=[moved])
    assert not second.unchanged
    assert second.key != first.key


@pytest.mark.parametrize("change", ["row", "torn", "status", "pyarrow", "format"])
def test_another_log_or_version_is_another_export(tmp_path, change, monkeypatch):
    """One row more, a torn one, a dataset that became complete, or a library that writes other bytes."""
    source = dataset(tmp_path, rows(20))
    first = export(tmp_path, [source], **OPTIONS)
    if change == "row":
        source = dataset(tmp_path, rows(21))
    elif change == "torn":
        source = dataset(tmp_path, rows(20), tail=b'{"id"')
    elif change == "status":
        source = export_rows.ExportDataset("d", source.folder, "exhausted")
    elif change == "pyarrow":
        monkeypatch.setattr(export_key.pa, "__version__", "0.1")
    else:
        monkeypatch.setattr(export_key, "EXPORT_FORMAT", 99)
    second = export(tmp_path, [source], **OPTIONS)
    assert not second.unchanged
    assert second.key != first.key


@pytest.mark.parametrize("damage", ["removed", "cut", "manifest", "old manifest"])
def test_a_damaged_export_is_made_again(tmp_path, damage):
    """A file that is gone or shorter, and a manifest that is no JSON or has no key."""
    source = dataset(tmp_path, rows(20))
    export(tmp_path, [source], **OPTIONS)
    before = hashes(tmp_path / "export")
    file = tmp_path / "export" / "README.md"
    if damage == "removed":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        content = b"{" if damage == "manifest" else b'{"format": 1}'
        (tmp_path / "export" / export_report.MANIFEST).write_bytes(content)
    assert not export(tmp_path, [source], **OPTIONS).unchanged
    assert hashes(tmp_path / "export") == before


def test_rows_that_come_while_it_is_made_are_not_in_it(tmp_path, monkeypatch):
    """A log may grow: what was hashed is what is exported."""
    source = dataset(tmp_path, rows(20))
    real = export_rows.hash_log

    def hash_and_grow(path):
        digest = real(path)
        with path.open("ab") as file:
            file.write(b"".join(row.to_line() for row in rows(5, first=100)))
        return digest

    monkeypatch.setattr(export_rows, "hash_log", hash_and_grow)
    report = export(tmp_path, [source], **OPTIONS)
    assert report.total.rows == 20


def test_a_log_is_hashed_up_to_its_last_line_end(tmp_path, monkeypatch):
    """However its blocks fall."""
    path = tmp_path / "log"
    path.write_bytes(b"ab\nc\n\ndef")
    for size in range(1, 12):
        monkeypatch.setattr(export_rows, "_BLOCK_BYTES", size)
        found = export_rows.hash_log(path)
        assert (found.bytes, found.is_torn) == (6, True)
        assert found.sha256 == export_rows.hashlib.sha256(b"ab\nc\n\n").hexdigest()
    assert export_rows.hash_log(tmp_path / "none") is None


EXPORTING = """
import os, sys
from pathlib import Path
from tasks.prepare import worker_process
from tasks.export.export_run import FORMATS, export_run
from tasks.export.configs import Target
from tasks.export.rows import ExportDataset
root, worker_process.MIN_BYTES = Path(sys.argv[1]), int(sys.argv[2])
os.sched_getaffinity = lambda pid: {0, 1}
print("ready", flush=True)
for seed in range(1, 1000):
    export_run(
        datasets=[ExportDataset("d", root / "d", "complete")], out_dir=root / "export", seed=seed,
        eval_fraction=0.2, formats=FORMATS, provenance={},
        draft_vocab_size=6, target=Target("m", 20), tokens_per_group=100,
    )
"""


@pytest.mark.parametrize("least_bytes", [0, 1 << 60])
def test_a_kill_at_any_moment_loses_nothing(tmp_path, least_bytes):
    """What is there then is whole, and the next export has the bytes of one that was never disturbed."""
    source = dataset(tmp_path, rows(300))
    export(tmp_path / "calm", [source], **OPTIONS)
    repository = Path(export_rows.__file__).parents[3]
    for _ in range(4):
        argv = [sys.executable, "-c", EXPORTING, str(tmp_path), str(least_bytes)]
        process = subprocess.Popen(argv, cwd=repository, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(random.uniform(0.05, 0.6))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if (tmp_path / "export").exists():
            files = manifest(tmp_path)["files"]
            on_disk = hashes(tmp_path / "export")
            assert {file["path"]: file["sha256"] for file in files}.items() <= on_disk.items()
        export(tmp_path, [source], **OPTIONS)
        assert hashes(tmp_path / "export") == hashes(tmp_path / "calm" / "export")
        assert sorted(p.name for p in tmp_path.iterdir()) == [".export.lock", "calm", "d", "export"]
