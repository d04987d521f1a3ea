"""What is on disk is counted once, however the last run ended."""

import json
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.records.append_file import AppendError
from tasks.records.prompt_file import IndexBuilder, PromptFile, hash_id
from tasks.records.response_log import REJECTED, RESPONSES, ResponseLog, read_lines
from tasks.records.rows import Prompt, RecordError, Rejected, Response

IDS = [f"B2-{number}" for number in range(9)]
KEY = "the prompts' key"

RESPONSE_EVENTS = st.tuples(
    st.just("response"), st.integers(0, len(IDS)), st.integers(0, 9), st.sampled_from(["stop", "length"])
)
REJECTED_EVENTS = st.tuples(
    st.just("rejected"), st.integers(0, len(IDS)), st.booleans(), st.sampled_from(["http_400", "timeout"])
)
EVENTS = st.lists(RESPONSE_EVENTS | REJECTED_EVENTS, max_size=25)

APPEND_AND_CHECKPOINT = """
import itertools, json, os, sys
from pathlib import Path
from tasks.records.prompt_file import PromptFile
from tasks.records.rows import Rejected, Response
from tasks.records.response_log import ResponseLog
folder = Path(sys.argv[1])
prompts = PromptFile(folder / "prompts.jsonl")
log = ResponseLog(folder, prompts)
log.resume(None, prompts_key="k")
for position in range(len(prompts)):
    name = prompts.read(position).id
    if position % 5 == 4:
        log.reject(Rejected(name, "http_400", "x", permanent=True, stage="generate"), position=position)
    else:
        ids = list(range(20_000))
        row = Response(name, 0, [1], ids, "x", "stop", prompt_tokens=1, completion_tokens=position)
        log.append(row, position=position)
    if position % 3 == 0:
        (folder / "new").write_text(json.dumps(log.progress.to_checkpoint(prompts_key="k", updated_at="now")))
        os.replace(folder / "new", folder / "checkpoint")
    os.write(1, b".")
"""


def make_response(prompt_id, *, tokens=5, reason="stop", **fields):
    ids = {"input_ids": [1, 2], "output_ids": [3] * tokens}
    counts = {"prompt_tokens": 2, "completion_tokens": tokens}
    return Response(id=prompt_id, turn=0, text="ü", finish_reason=reason, **{**ids, **counts, **fields})


def make_rejected(prompt_id, *, permanent=True, reason="http_400"):
    return Rejected(prompt_id, reason, "because", permanent=permanent, stage="generate")


def write_prompts(path, ids):
    lines = [Prompt(id=name, messages=[{"role": "user", "content": name}]).to_line() for name in ids]
    path.write_bytes(b"".join(lines))
    index = IndexBuilder()
    for name, line in zip(ids, lines, strict=True):
        index.add(line, id_hash=hash_id(name))
    index.write(path)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """A prepared dataset of nine prompts."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    write_prompts(path, IDS)
    with closing(PromptFile(path)) as opened:
        yield opened


@contextmanager
def open_log(folder, prompts, checkpoint=None, **options):
    """A log that has resumed, with what it found."""
    with closing(ResponseLog(Path(folder), prompts)) as log:
        point = log.resume(checkpoint, prompts_key=KEY, **options)
        yield log, point


def save(log):
    """A checkpoint as it comes back from the result store."""
    return json.loads(json.dumps(log.progress.to_checkpoint(prompts_key=KEY, updated_at="now")))


def as_dict(progress):
    state = {name: getattr(progress, name) for name in progress.__dataclass_fields__}
    return {name: getattr(value, "tolist", lambda value=value: value)() for name, value in state.items()}


def play(log, event):
    """Let an event happen to an open log, unless it is one that a live run refuses."""
    kind, position, value, reason = event
    if position == len(IDS):
        return
    if kind == "rejected":
        log.reject(make_rejected(IDS[position], permanent=value, reason=reason), position=position)
    elif not log.progress.done[position]:
        log.append(make_response(IDS[position], tokens=value, reason=reason), position=position)


def to_lines(event):
    """The file and the line of an event, for logs that other hands have written."""
    kind, position, value, reason = event
    name = IDS[position] if position < len(IDS) else "B2-gone"
    if kind == "rejected":
        return REJECTED, make_rejected(name, permanent=value, reason=reason).to_line()
    return RESPONSES, make_response(name, tokens=value, reason=reason).to_line()


def count_by_hand(folder):
    """Rows, tokens and done ids of the whole lines of a response log: each prompt's first row."""
    done, rows, tokens = set(), 0, 0
    for line in (folder / RESPONSES).read_bytes().split(b"\n")[:-1]:
        row = orjson.loads(line)
        if row["id"] not in IDS or row["id"] not in done:
            rows, tokens = rows + 1, tokens + row["completion_tokens"]
        done.add(row["id"])
    return rows, tokens, done & set(IDS)


def cut(path, data):
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)), label=f"cut of {path.name}")])


@given(before=EVENTS, after=EVENTS, data=st.data())
def test_a_run_killed_anywhere_resumes_the_same_with_and_without_its_checkpoint(prompts, before, after, data):
    """Any checkpoint taken earlier plus the rows after it equals all rows, and no whole row is lost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open_log(folder, prompts) as (log, _):
            for event in before:
                play(log, event)
            checkpoint = save(log)
            for event in after:
                play(log, event)
            live = as_dict(log.progress)
        with open_log(folder, prompts, checkpoint) as (log, point):
            assert point.from_checkpoint
            assert as_dict(log.progress) == live
        for file in (RESPONSES, REJECTED):
            cut(folder / file, data)
        with open_log(folder, prompts, checkpoint) as (log, _):
            resumed = as_dict(log.progress)
        with open_log(folder, prompts, None) as (log, _):
            assert as_dict(log.progress) == resumed
            done = {IDS[position] for position in log.progress.done.nonzero()[0]}
        assert (resumed["rows"], resumed["completion_tokens"], done) == count_by_hand(folder)


@given(before=EVENTS, after=EVENTS)
def test_logs_with_doubled_and_foreign_rows_are_counted_the_same_from_any_checkpoint(prompts, before, after):
    """Rows that were written twice, or whose prompt is gone, do not break the rule."""
    with tempfile.TemporaryDirectory() as name:
        folder, checkpoint = Path(name), None
        for events in (before, after):
            for file, line in map(to_lines, events):
                with (folder / file).open("ab") as log_file:
                    log_file.write(line)
            with open_log(folder, prompts, checkpoint) as (log, _):
                checkpoint, resumed = save(log), as_dict(log.progress)
        with open_log(folder, prompts, None) as (log, _):
            assert as_dict(log.progress) == resumed
        assert (resumed["rows"], resumed["completion_tokens"]) == count_by_hand(folder)[:2]
        kinds = Counter(event[0] for event in before + after)
        assert resumed["rows"] + resumed["duplicates"] == kinds["response"]
        assert sum(resumed["rejected"].values()) == kinds["rejected"]


@pytest.mark.parametrize("acknowledged", [1, 4, 11, 30])
def test_a_killed_run_loses_and_doubles_nothing(tmp_path, acknowledged):
    """After a kill -9 between two bytes, what was appended is there, and the checkpoint agrees."""
    write_prompts(tmp_path / "prompts.jsonl", [f"id-{number}" for number in range(500)])
    command = [sys.executable, "-c", APPEND_AND_CHECKPOINT, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        seen = len(writer.stdout.read(acknowledged))
        writer.kill()
        seen += len(writer.stdout.read())
    checkpoint = json.loads((tmp_path / "checkpoint").read_text())
    states = []
    for known in (checkpoint, None):
        prompts = PromptFile(tmp_path / "prompts.jsonl")
        with closing(prompts), closing(ResponseLog(tmp_path, prompts)) as log:
            point = log.resume(known, prompts_key="k")
            states.append(as_dict(log.progress))
        assert point.from_checkpoint == (known is not None)
    assert states[0] == states[1]
    closed = [
        position for position in range(500) if states[0]["done"][position] or states[0]["set_aside"][position]
    ]
    assert closed == list(range(len(closed)))
    assert seen <= len(closed) <= seen + 1


def test_only_the_rows_after_the_checkpoint_are_read(tmp_path, prompts):
    """Resuming is cheap: the rows before it are neither read nor shown."""
    with open_log(tmp_path, prompts) as (log, _):
        log.append(make_response(IDS[0]), position=0)
        checkpoint = save(log)
        log.append(make_response(IDS[1]), position=1)
    seen = []
    with open_log(tmp_path, prompts, checkpoint, on_response=seen.append) as (log, point):
        assert (point.from_checkpoint, point.scanned_rows, point.note) == (True, 1, "")
        assert log.progress.rows == 2
    assert [row.id for row in seen] == [IDS[1]]


@pytest.mark.parametrize("file", [RESPONSES, REJECTED])
@pytest.mark.parametrize("change", ["removed", "shorter", "shifted"])
def test_a_checkpoint_that_the_files_contradict_is_not_used(tmp_path, prompts, file, change):
    """A log that is shorter, or has no line end where the checkpoint stops, is counted from its start."""
    with open_log(tmp_path, prompts) as (log, _):
        for position in range(3):
            log.append(make_response(IDS[position]), position=position)
            log.reject(make_rejected(IDS[position + 4]), position=position + 4)
        checkpoint = save(log)
    lines = (tmp_path / file).read_bytes().splitlines(keepends=True)
    changed = {"removed": [], "shorter": lines[:-1], "shifted": [b" " + lines[0], *lines[1:], lines[0]]}[
        change
    ]
    (tmp_path / file).write_bytes(b"".join(changed))
    with open_log(tmp_path, prompts, checkpoint) as (log, point):
        assert not point.from_checkpoint
        said = "has no line end" if change == "shifted" else f"has {len(b''.join(changed))} bytes"
        assert f"{file} {said}" in point.note
        assert point.note.endswith("all rows are counted again")
        resumed = as_dict(log.progress)
    with open_log(tmp_path, prompts) as (log, _):
        assert as_dict(log.progress) == resumed


def test_a_checkpoint_of_other_prompts_is_not_used(tmp_path, prompts):
    """The dataset was prepared again: positions have other meanings, ids have not."""
    with open_log(tmp_path, prompts) as (log, _):
        log.append(make_response(IDS[3]), position=3)
        checkpoint = log.progress.to_checkpoint(prompts_key="another key", updated_at="now")
    with open_log(tmp_path, prompts, checkpoint) as (log, point):
        assert (point.from_checkpoint, log.progress.rows, log.progress.done[3]) == (False, 1, 1)
        assert "other prompts" in point.note


def test_a_torn_last_line_is_cut_and_its_prompt_is_open_again(tmp_path, prompts):
    """The bytes that were cut are told; the next row starts on a line of its own."""
    whole, torn = make_response(IDS[0]).to_line(), make_response(IDS[1]).to_line()[:-1]
    (tmp_path / RESPONSES).write_bytes(whole + torn)
    (tmp_path / REJECTED).write_bytes(b"{")
    with open_log(tmp_path, prompts) as (log, point):
        assert point.cut_bytes == len(torn) + 1
        assert log.progress.is_open(1)
        log.append(make_response(IDS[1]), position=1)
    assert [json.loads(line)["id"] for _, line in read_lines(tmp_path / RESPONSES)] == IDS[:2]


@pytest.mark.parametrize(
    "row",
    [
        {"id": IDS[2], "text": "hi", "usage": {"prompt_tokens": 4, "completion_tokens": 6}},
        {
            "id": IDS[2],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 4, "completion_tokens": 6, "x": 1},
        },
        {"id": IDS[2], "prompt_tokens": 4, "completion_tokens": 6, "text": "no ids"},
        {"id": IDS[2], "turn": None, "lane": None, "prompt_tokens": 4, "completion_tokens": 6, "more": [1]},
    ],
)
def test_rows_of_older_files_are_resumed(tmp_path, prompts, row):
    """Counts under `usage`, rows without ids, and keys of other tools count as well."""
    (tmp_path / RESPONSES).write_bytes(orjson.dumps(row) + b"\n")
    with open_log(tmp_path, prompts) as (log, point):
        assert (point.scanned_rows, log.progress.rows, log.progress.done[2]) == (1, 1, 1)
        assert (log.progress.prompt_tokens, log.progress.completion_tokens) == (4, 6)
        assert log.progress.finish_reasons == {"stop": 1}


@pytest.mark.parametrize("file", [RESPONSES, REJECTED])
@pytest.mark.parametrize("damage", [b"\n", b"{\n", b"\xff\xfe\n", b"\0\0\0\n", b"[1]\n", b"{}\n", b"null\n"])
def test_a_damaged_line_in_the_middle_is_named_with_its_file_and_byte(tmp_path, prompts, file, damage):
    """It is not passed over: the totals would be wrong and nobody would know."""
    good = (make_response(IDS[0]) if file == RESPONSES else make_rejected(IDS[0])).to_line()
    (tmp_path / file).write_bytes(good + damage + good)
    with pytest.raises(RecordError) as caught, open_log(tmp_path, prompts):
        pass
    text = str(caught.value)
    assert f"{tmp_path / file}: the line ending at byte {len(good + damage)} is damaged" in text
    assert "remove that line" in text


def test_a_line_that_was_removed_on_advice_is_asked_again(tmp_path, prompts):
    """What the message of a damaged line says works, with the old checkpoint as well."""
    with open_log(tmp_path, prompts) as (log, _):
        for position in range(4):
            log.append(make_response(IDS[position]), position=position)
        checkpoint = save(log)
    lines = (tmp_path / RESPONSES).read_bytes().splitlines(keepends=True)
    (tmp_path / RESPONSES).write_bytes(b"".join(lines[:1] + lines[2:]))
    with open_log(tmp_path, prompts, checkpoint) as (log, _):
        assert [log.progress.is_open(position) for position in range(5)] == [False, True, False, False, True]


def test_a_second_row_of_a_prompt_is_refused(tmp_path, prompts):
    """A doubled row is a mistake of the caller and does not reach the file."""
    with open_log(tmp_path, prompts) as (log, _):
        log.append(make_response(IDS[0]), position=0)
        with pytest.raises(ValueError, match=f"'{IDS[0]}' has a response already"):
            log.append(make_response(IDS[0]), position=0)
    assert len((tmp_path / RESPONSES).read_bytes().splitlines()) == 1


@pytest.mark.parametrize("kind", ["response", "rejected"])
def test_a_row_that_does_not_fit_is_not_counted(tmp_path, prompts, kind):
    """On a full disk the progress says what the file says, and a resume agrees."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open_log(tmp_path, prompts) as (log, _):
        play(log, (kind, 0, True, "stop"))
        before = as_dict(log.progress)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (log.progress.byte_offset + log.progress.rejected_offset + 9, hard)
        )
        try:
            with pytest.raises(AppendError, match="could not be appended"):
                play(log, (kind, 1, True, "stop"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert as_dict(log.progress) == before
        log.sync()
    with open_log(tmp_path, prompts) as (log, point):
        assert as_dict(log.progress) == before
        assert point.cut_bytes == 0


def test_a_row_is_on_disk_before_it_is_counted(tmp_path, prompts, monkeypatch):
    """Another process that reads the file at the moment of counting finds the row."""
    with open_log(tmp_path, prompts) as (log, _):
        real, on_disk = type(log.progress).add_response, []

        def spy(progress, response, **where):
            on_disk.append((tmp_path / RESPONSES).stat().st_size == where["byte_offset"])
            return real(progress, response, **where)

        monkeypatch.setattr(type(log.progress), "add_response", spy)
        log.append(make_response(IDS[0]), position=0)
    assert on_disk == [True]


def test_a_long_scan_reports_its_progress(tmp_path, prompts):
    """Every 20,000 rows: a full count of millions must not look like a hang."""
    line = orjson.dumps({"id": "gone", "prompt_tokens": 1, "completion_tokens": 1}) + b"\n"
    (tmp_path / RESPONSES).write_bytes(line * 40_001)
    told = []
    with open_log(tmp_path, prompts, on_scan=told.append) as (log, point):
        assert (log.progress.rows, point.scanned_rows) == (40_001, 40_001)
    assert told == [20_000, 40_000]


def test_a_line_that_is_being_written_is_not_given(tmp_path):
    """A reader beside the writer sees whole lines and where each ends, from any of those offsets on."""
    path = tmp_path / "log"
    path.write_bytes(b"one\nthree\nfi")
    assert list(read_lines(path)) == [(4, b"one\n"), (10, b"three\n")]
    assert list(read_lines(path, 4)) == [(10, b"three\n")]
    assert list(read_lines(path, 10)) == []
    assert list(read_lines(tmp_path / "missing")) == []


def test_a_log_that_cannot_be_opened_leaves_nothing_open(tmp_path, prompts):
    """When the second file fails, the first is closed again."""
    (tmp_path / REJECTED).mkdir()
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match=REJECTED):
        ResponseLog(tmp_path, prompts)
    assert set(Path("/proc/self/fd").iterdir()) == before
