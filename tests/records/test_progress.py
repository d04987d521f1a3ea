"""A checkpoint says what the log says, or is refused."""

import base64
import copy
import json
import time
import zlib
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.records.progress import CheckpointMismatchError, Progress, _pack, _unpack
from tasks.records.rows import Rejected, Response

PROMPTS = 11
COUNTS = ("byte_offset", "rejected_offset", "rows", "prompt_tokens", "completion_tokens", "duplicates")
FLAGS = st.lists(st.booleans(), max_size=200).map(lambda flags: np.array(flags, np.uint8))
EVENTS = st.lists(
    st.tuples(st.sampled_from(["answer", "rejected", "fail", "reopen"]), st.integers(0, 39)), max_size=60
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


def make_response(prompt_id="a", *, tokens=5, reason="stop"):
    return Response(prompt_id, 0, [1], [2] * tokens, "x", reason, prompt_tokens=3, completion_tokens=tokens)


def make_rejected(*, permanent, reason="http_400"):
    return Rejected("a", reason, "because", permanent=permanent, stage="generate")


def make_progress():
    progress = Progress.empty(PROMPTS)
    progress.add_response(make_response(tokens=7), position=2, byte_offset=100)
    progress.add_response(make_response(reason="length"), position=10, byte_offset=180)
    progress.add_response(make_response(), position=2, byte_offset=230)
    progress.add_rejected(make_rejected(permanent=True), position=4, byte_offset=60)
    return progress


def save(progress):
    checkpoint = progress.to_checkpoint(prompts_key="key", updated_at="2026-11-30T02:11:09Z")
    return json.loads(json.dumps(checkpoint))


def restore(checkpoint, *, prompts_key="key", prompts=PROMPTS):
    return Progress.from_checkpoint(checkpoint, prompts_key=prompts_key, prompts=prompts)


def as_dict(progress):
    return {name: getattr(progress, name) for name in (*COUNTS, "finish_reasons", "rejected")} | {
        "done": progress.done.tolist(),
        "set_aside": progress.set_aside.tolist(),
    }


def damages():
    """Every field of a checkpoint, with what a bug or a bad disk could make of it."""
    for name, value in save(make_progress()).items():
        wrong = [None, "", "x", [], {}, -1, 0, 1, 2**70, 0.5, True]
        if isinstance(value, int):
            wrong += [value + 1, value - 1, str(value), value + 0.5]
        if isinstance(value, str):
            wrong += [value[:-1], value + "0", value[::-1]]
        if isinstance(value, dict):
            wrong += [{"stop": 1}, {**value, "other": 0}, {key: n + 1 for key, n in value.items()}]
        if name in ("done", "set_aside"):
            wrong += [_pack(np.ones(n, np.uint8)) for n in (0, PROMPTS - 4, PROMPTS, PROMPTS + 8)]
        yield from ((name, other) for other in wrong if json.dumps(other) != json.dumps(value))


def test_a_checkpoint_comes_back_as_it_was_through_json():
    """Totals, bitmaps and offsets survive; what the caller keeps beside them does not disturb."""
    progress = make_progress()
    checkpoint = {**save(progress), "lengths": {"any": "thing"}}
    assert as_dict(restore(checkpoint)) == as_dict(progress)


def test_totals_count_each_prompt_once():
    """A second row of a prompt is a duplicate: its bytes count, its tokens do not."""
    progress = make_progress()
    assert (progress.rows, progress.completion_tokens, progress.prompt_tokens) == (2, 12, 6)
    assert (progress.duplicates, progress.byte_offset, progress.rejected_offset) == (1, 230, 60)
    assert progress.finish_reasons == {"stop": 1, "length": 1}
    assert progress.open_prompts == PROMPTS - 3
    assert [position for position in range(PROMPTS) if not progress.is_open(position)] == [2, 4, 10]


def test_a_row_of_an_unknown_prompt_counts_its_tokens():
    """The source was changed since: the row is training data all the same."""
    progress = Progress.empty(1)
    assert progress.add_response(make_response(), position=None, byte_offset=50)
    assert (progress.rows, progress.completion_tokens, progress.open_prompts) == (1, 5, 1)


@pytest.mark.parametrize(("permanent", "is_open"), [(True, False), (False, True)])
def test_only_permanent_rejections_close_a_prompt(permanent, is_open):
    """What failed for reasons that may pass is asked again."""
    progress = Progress.empty(1)
    progress.add_rejected(make_rejected(permanent=permanent), position=0, byte_offset=9)
    assert progress.is_open(0) == is_open
    assert progress.rejected == {"http_400": 1}


@pytest.mark.parametrize("answer_first", [True, False])
def test_an_answer_outweighs_a_rejection(answer_first):
    """A prompt that was rejected and answered later is done, in whichever order the files are read."""
    progress = Progress.empty(1)
    if answer_first:
        progress.add_response(make_response(), position=0, byte_offset=9)
    progress.add_rejected(make_rejected(permanent=True), position=0, byte_offset=9)
    if not answer_first:
        progress.add_response(make_response(), position=0, byte_offset=9)
    assert (progress.done[0], progress.set_aside[0], progress.open_prompts) == (1, 0, 0)


@pytest.mark.parametrize(("name", "value"), list(damages()))
def test_a_checkpoint_with_one_damaged_field_is_refused(name, value):
    """A wrong total would be believed for ever, so nothing of it is."""
    with pytest.raises(CheckpointMismatchError):
        restore({**save(make_progress()), name: value})


@given(data=st.data(), value=JSON)
def test_no_other_value_of_any_field_is_trusted(data, value):
    """Any JSON in the place of a field, or no field at all, makes the whole snapshot void."""
    checkpoint = save(make_progress())
    name = data.draw(st.sampled_from(sorted(checkpoint)))
    if json.dumps(checkpoint[name]) == json.dumps(value):
        return
    with pytest.raises(CheckpointMismatchError):
        restore({**checkpoint, name: value})
    del checkpoint[name]
    with pytest.raises(CheckpointMismatchError):
        restore(checkpoint)


@pytest.mark.parametrize("checkpoint", [{}, {"format": 1}, {"format": 1, "rows": 3, "done": ""}])
def test_what_is_no_checkpoint_is_refused(checkpoint):
    """Also the formats of other versions."""
    with pytest.raises(CheckpointMismatchError, match="format"):
        restore(checkpoint)


@pytest.mark.parametrize(
    "other", [{"prompts_key": "other"}, {"prompts": PROMPTS + 1}, {"prompts": PROMPTS - 1}, {"prompts": 0}]
)
def test_a_checkpoint_of_other_prompts_is_refused(other):
    """Positions mean nothing in another prompt file."""
    with pytest.raises(CheckpointMismatchError, match="other prompts"):
        restore(save(make_progress()), **other)


def test_reading_a_checkpoint_leaves_it_as_it_is():
    """The progress that comes of it does not write into it."""
    checkpoint = save(make_progress())
    before = copy.deepcopy(checkpoint)
    restore(checkpoint).add_response(make_response(), position=0, byte_offset=300)
    assert checkpoint == before


@given(flags=FLAGS)
def test_bitmaps_come_back_bit_by_bit_and_writable(flags):
    """Whatever the number of prompts."""
    back = _unpack(_pack(flags), len(flags))
    assert back.tolist() == flags.tolist()
    back[:] = 1


@given(flags=FLAGS, other=st.integers(0, 220))
def test_a_bitmap_of_another_length_is_refused(flags, other):
    """Missing bits must not come back as prompts that are not done."""
    if (other + 7) // 8 == (len(flags) + 7) // 8:
        return
    with pytest.raises(ValueError, match="flags were expected"):
        _unpack(_pack(flags), other)


def test_a_bitmap_of_a_million_prompts_is_small():
    """A checkpoint is written every few seconds: a dataset in progress must not cost megabytes."""
    done = np.zeros(1_000_000, np.uint8)
    done[:400_000] = 1
    assert len(_pack(done)) < 10_000
    assert len(zlib.decompress(base64.b85decode(_pack(done)))) == 125_000


def test_reopened_prompts_are_open_in_this_process_only():
    """--retry-rejected asks rejected prompts once more; a checkpoint meanwhile still says rejected."""
    progress = Progress.empty(3)
    progress.set_aside[1] = 1
    progress.reopen_set_aside()
    assert progress.is_open(1)
    assert progress.open_prompts == 3
    saved = progress.to_checkpoint(prompts_key="k", updated_at="now")
    again = Progress.from_checkpoint(saved, prompts_key="k", prompts=3)
    assert not again.is_open(1)
    assert again.open_prompts == 2


@given(events=EVENTS, chunk=st.integers(1, 45), prompts=st.integers(40, 45), data=st.data())
def test_open_positions_are_found_as_by_a_plain_loop(events, chunk, prompts, data):
    """From any position on, however many, and whatever happened since they were last looked for."""
    progress = Progress.empty(prompts)
    for what, position in events:
        if what == "answer":
            progress.add_response(make_response(), position=position, byte_offset=1)
        elif what == "reopen":
            progress.reopen_set_aside()
        else:
            rejected = make_rejected(permanent=what == "rejected")
            progress.add_rejected(rejected, position=position, byte_offset=1)
        start, limit = data.draw(st.integers(0, prompts + 1)), data.draw(st.integers(0, prompts + 1))
        one_by_one = [position for position in range(start, prompts) if progress.is_open(position)]
        with patch("tasks.records.progress._CHUNK", chunk):
            assert progress.find_open(start, limit=limit) == one_by_one[:limit]
        assert progress.open_prompts == sum(map(progress.is_open, range(prompts)))


def test_open_positions_behind_a_million_done_ones_are_found_at_once():
    """One by one it takes most of a second, in which no answer is read."""
    progress = Progress.empty(1_000_000)
    progress.done[:] = 1
    progress.done[[5, 999_998, 999_999]] = 0
    started_s = time.perf_counter()
    assert progress.find_open(6, limit=16) == [999_998, 999_999]
    assert time.perf_counter() - started_s < 0.2
