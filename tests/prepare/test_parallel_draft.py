"""Several processes prepare what one does, to the byte; no process is left, none's death is missed."""

import asyncio
import dataclasses
import gzip
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_support import find_workers, is_running

from tasks.prepare import parallel_draft, worker_process
from tasks.prepare.preparation import (
    EmptyDatasetError,
    PreparationStoppedError,
    PrepareOptions,
    prepare_prompts,
)
from tasks.prepare.prompt_draft import PromptDraft
from tasks.prepare.sources import SourceError, file_chunks, iter_rows, watch_source
from tasks.prepare.worker_process import WorkerDiedError
from tasks.records.response_log import REJECTED

OPTIONS = PrepareOptions(name="B2_code", adapter="messages", seed=7, shape="each", system_prompt="Be kind.")
FILES = ("prompts.jsonl", "prompts.index", REJECTED, "prepare.json")
BAD = ["{", "[1]", "3", '{"messages": []}', '{"other": NaN}', '{"messages": "x"}', "", " \t", '"\ufeff"']


def make_row(number, text):
    return json.dumps({"id": number, "messages": [{"role": "user", "content": text}]}, ensure_ascii=False)


GOOD = [
    make_row(n % 41, f"q{n % 53} “é”") for n in range(60)
]  # with repeated ids, repeated contents and both
MIXED = random.Random(3).sample(GOOD + BAD * 4, 60 + 4 * len(BAD))


@pytest.fixture
def small(monkeypatch):
    """Two cores, and chunks of a line or two of sources that are all large."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(worker_process, "MIN_BYTES", 0)
    monkeypatch.setattr(file_chunks, "_FIRST_BYTES", 100)
    monkeypatch.setattr(file_chunks, "_CHUNK_BYTES", 150)
    monkeypatch.setattr("tasks.prepare.prompt_draft._MAX_LINES", 2)


class WorkerHere:
    """In place of a worker, so that a property takes no process; what goes in and out is as it would be."""

    def __init__(self, running, *call):
        self._calls = deque()
        self._state = None
        self._running = running
        self.send(*call)

    def send(self, call, *args):
        self._calls.append(pickle.dumps((call, args)))
        assert len(self._calls) <= 1 + parallel_draft._MAX_CALLS

    def receive(self):
        if self._state is None:
            make_state, args = pickle.loads(self._calls.popleft())  # noqa: S301 - from above
            self._state = make_state(*args)
            self._running.callback(self._state._writer.close)
            self._running.callback(self._state._reader.close)
        call, args = pickle.loads(self._calls.popleft())  # noqa: S301 - from above
        return pickle.loads(pickle.dumps(call(self._state, *args)))  # noqa: S301 - from here


def write(folder, name, lines, end="\n"):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    data = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def prepare(folder, paths, **changes):
    """What preparation leaves, or the error; the index starts with a time."""
    folder.mkdir(exist_ok=True)
    options = dataclasses.replace(OPTIONS, **changes)
    try:
        prepare_prompts(folder, paths, options=options, source_sha256="0")
    except (SourceError, EmptyDatasetError) as exc:
        return str(exc)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    return read_files(folder)


def read_files(folder):
    return {name: (folder / name).read_bytes()[24 * name.endswith("index") :] for name in FILES}


def prepare_by_one(folder, paths, **changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "MIN_BYTES", 1 << 60)
        return prepare(folder, paths, **changes)


@pytest.mark.parametrize(
    ("name", "lines", "end"),
    [
        ("a.jsonl", MIXED, "\n"),
        ("a.jsonl", [GOOD[0], *MIXED], "\r\n"),
        ("a.ndjson", ["{", "\ufeff", *MIXED], "\n"),
        ("a.ndjson.gz", MIXED, "\n"),
        ("a.jsonl", ["\ufeff" + GOOD[0], *BAD, GOOD[1] * 2, GOOD[2]], "\n"),
        ("a.jsonl", [" " * 99] * 9 + ["{", *MIXED], "\n"),
        ("a.json", MIXED, "\n"),
        ("a.json", ["[", ",".join(GOOD), "]"], "\n"),
        ("a.jsonl", GOOD[:1], ""),
        ("a.jsonl", [], ""),
        ("a.jsonl", ["no json at all", *GOOD], "\n"),
        ("a.jsonl", ["x" * 99] * 4 + GOOD, "\n"),
        ("a.jsonl", ["x" * 99] * 9, "\n"),
        ("a.jsonl", ["[", ",\n".join(GOOD), "]"], "\n"),
        ("a.jsonl", ["[1]", "{", "3"] * 99, "\n"),
    ],
)
def test_the_prompts_and_the_errors_are_those_of_one_process(tmp_path, small, monkeypatch, name, lines, end):
    """To the byte, whatever the files are."""
    paths = [write(tmp_path, "0.jsonl", GOOD[:9]), write(tmp_path, name, lines, end)]
    paths += [write(tmp_path, "z.jsonl", MIXED)]
    monkeypatch.setattr(parallel_draft, "Worker", WorkerHere)
    assert prepare(tmp_path / "several", paths) == prepare_by_one(tmp_path / "one", paths)


@settings(max_examples=40)
@given(
    lines=st.lists(
        st.builds(make_row, st.integers(0, 3), st.text("ab é", max_size=60)) | st.sampled_from(BAD),
        max_size=40,
    ),
    cuts=st.tuples(st.integers(1, 40), st.integers(1, 200)),
    cores=st.integers(2, 5),
    max_prompts=st.none() | st.integers(1, 9),
)
def test_how_a_source_is_shared_out_decides_nothing(lines, cuts, cores, max_prompts):
    """Neither the number of workers nor where the file is cut."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        paths = [write(folder, "a.jsonl", lines), write(folder, "b/a.jsonl", [GOOD[0], *lines])]
        patch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
        patch.setattr(worker_process, "MIN_BYTES", 0)
        patch.setattr(parallel_draft, "Worker", WorkerHere)
        for constant, value in zip(("_FIRST_BYTES", "_CHUNK_BYTES"), cuts, strict=True):
            patch.setattr(file_chunks, constant, value)
        several = prepare(folder / "several", paths, max_prompts=max_prompts)
        assert several == prepare_by_one(folder / "one", paths, max_prompts=max_prompts)


@given(
    lines=st.lists(st.sampled_from([*GOOD[:3], *BAD, "\x0b", "x\x0b"]), max_size=12), cut=st.integers(1, 90)
)
def test_a_file_in_stretches_has_the_rows_of_the_whole(lines, cut):
    """Under the same numbers, with the same words about the malformed ones."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_chunks, "_CHUNK_BYTES", cut)
        path = write(Path(name), "a.jsonl", [GOOD[0], *lines])
        pieces = file_chunks.cut_file(path, name=path.name)
        rows = file_chunks.read_first(pieces)
        rows += [row for chunk in pieces for row in file_chunks.read_chunk(chunk)]
        assert rows == list(iter_rows([path]))


def test_processes_of_their_own_do_it_too(tmp_path, small):
    """Also from a thread beside an event loop, as a flow does; none is left."""
    paths = [write(tmp_path, "a.jsonl", MIXED), write(tmp_path, "b.jsonl.gz", MIXED)]

    async def prepare_in_thread():
        return await asyncio.to_thread(prepare, tmp_path / "several", paths)

    assert asyncio.run(prepare_in_thread()) == prepare_by_one(tmp_path / "one", paths)
    assert find_workers(os.getpid()) == []


def test_a_small_source_starts_no_process(tmp_path, monkeypatch):
    """Most sources are prepared before a process has started."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(subprocess, "Popen", None)
    assert prepare(tmp_path / "one", [write(tmp_path, "a.jsonl", GOOD)])["prompts.jsonl"]


def kill_one(*_):
    os.kill(find_workers(os.getpid())[0], signal.SIGKILL)


def fill_disk(*_):
    for pid in find_workers(os.getpid()):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, 1))


@pytest.mark.parametrize(
    ("where", "harm", "error"),
    [
        ("add", kill_one, r"was killed by SIGKILL.* run the same command again"),
        ("settle", kill_one, r"was killed by SIGKILL.* run the same command again"),
        ("add", fill_disk, r"File too large: .*\.prompts\.draft'"),
        ("settle", fill_disk, r"File too large: .*prompts\.jsonl'"),
    ],
)
def test_what_befalls_a_worker_is_named_and_changes_nothing(tmp_path, small, monkeypatch, where, harm, error):
    """While rows are drafted or copied: no row may be missing without a word, and what was there stays."""
    path, folder = write(tmp_path, "a.jsonl", MIXED * 9), tmp_path / "B2"
    before = prepare_by_one(folder, [path])
    call = getattr(PromptDraft, where)
    with monkeypatch.context() as patch:
        patch.setattr(PromptDraft, where, lambda *args, **kwargs: (harm(), call(*args, **kwargs))[1])
        with pytest.raises((WorkerDiedError, OSError), match=error):
            prepare(folder, [path], seed=8)
    assert read_files(folder) == before
    assert find_workers(os.getpid()) == []
    assert prepare(folder, [path], seed=8) == prepare_by_one(tmp_path / "fresh", [path], seed=8)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("stage", ["drafted", "copied"])
def test_a_preparation_that_is_stopped_ends(tmp_path, small, monkeypatch, cores, stage):
    """While rows are drafted or copied; what was there stays, and no process is left."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    path, folder = write(tmp_path, "a.jsonl", MIXED * 9), tmp_path / "B2"
    before = prepare_by_one(folder, [path])
    settle, stages = PromptDraft.settle, ["drafted"]
    monkeypatch.setattr(
        PromptDraft, "settle", lambda *args, **kwargs: (stages.append("copied"), settle(*args, **kwargs))[1]
    )
    with pytest.raises(PreparationStoppedError):
        prepare_prompts(
            folder,
            [path],
            options=dataclasses.replace(OPTIONS, seed=8),
            source_sha256="0",
            is_stopped=lambda: stages[-1] == stage,
        )
    assert stages[-1] == stage
    assert read_files(folder) == before
    assert find_workers(os.getpid()) == []


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("size", [1000, 0])
def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, small, monkeypatch, cores, size):
    """Cut or added to: what was read is not what was hashed, and is not kept."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    path, folder = write(tmp_path, "a.jsonl", MIXED * 9), tmp_path / "B2"
    before = prepare_by_one(folder, [path])
    check_source = watch_source([path])
    size = size or path.stat().st_size + 100

    def change():
        os.truncate(path, size)

    with pytest.raises(SourceError, match=r"a\.jsonl: changed while it was read; nothing was prepared"):
        prepare_prompts(
            folder,
            [path],
            options=dataclasses.replace(OPTIONS, seed=8),
            source_sha256="0",
            check_source=check_source,
            is_stopped=change,
        )
    assert read_files(folder) == before


def test_a_worker_that_fails_says_where(tmp_path, small):
    """Its error is raised here, with the place there."""
    draft = PromptDraft(tmp_path, seed=7)
    with parallel_draft.start_workers([], OPTIONS, draft) as workers:
        workers[0].send(parallel_draft.WorkerState.draft, "no chunk")
        with pytest.raises(AttributeError, match="'str' object") as caught:
            workers[0].receive()
        assert "in read_chunk" in caught.value.__notes__[0]
    draft.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_parent(tmp_path, sent):
    """However the run ends; a worker writes nothing about it, and the next preparation is a whole one."""
    source = write(tmp_path, "a.jsonl", MIXED * 20)
    code = (
        "import os, sys, time, pathlib\n"
        "from tasks.prepare import worker_process\n"
        "from tasks.prepare.preparation import PrepareOptions, PromptDraft, prepare_prompts\n"
        "from tasks.prepare.sources import file_chunks\n"
        "worker_process.MIN_BYTES, file_chunks._CHUNK_BYTES, file_chunks._FIRST_BYTES = 0, 100, 100\n"
        "os.sched_getaffinity = lambda pid: {0, 1}\n"
        "PromptDraft.add = lambda *_: print('ready', flush=True) or time.sleep(600)\n"
        "options = PrepareOptions(name='B2', adapter='messages', seed=7)\n"
        "folder, source = map(pathlib.Path, sys.argv[1:])\n"
        "prepare_prompts(folder, [source], options=options, source_sha256='0')\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "B2"), str(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with parent:
        assert parent.stdout.readline() == b"ready\n"
        workers = find_workers(parent.pid)
        parent.send_signal(sent)
        said = parent.stderr.read().decode()  # to the end: the workers have it open, too
    assert len(workers) == 2
    assert said.count("Traceback") == (sent == signal.SIGINT)
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert prepare(tmp_path / "B2", [source]) == prepare_by_one(tmp_path / "fresh", [source])


def test_a_worker_imports_little():
    """It has to be at work after a quarter of a second."""
    code = f"import sys, {parallel_draft.__name__}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"pandas", "pyarrow", "prefect", "transformers", "httpx", "pydantic"} & set(loaded.split())
