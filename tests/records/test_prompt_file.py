"""Prompts are found by position and by id, and an index that is not theirs is built again."""

import contextlib
import os
import tempfile
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.records.prompt_file import IndexBuilder, PromptFile, hash_id, index_path
from tasks.records.rows import Prompt, RecordError

IDS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), unique=True, max_size=20)


def make_prompt(prompt_id, text="hi"):
    return Prompt(id=prompt_id, messages=[{"role": "user", "content": text}], meta={"n": 1})


def write_prompts(path, prompts):
    """Prompts with their index, as preparation writes them."""
    lines = [prompt.to_line() for prompt in prompts]
    path.write_bytes(b"".join(lines))
    index = IndexBuilder()
    for prompt, line in zip(prompts, lines, strict=True):
        index.add(line, id_hash=hash_id(prompt.id))
    index.write(path)


def read_all(path):
    """The prompts by position, after checking that each is found by its id."""
    prompts = PromptFile(path)
    try:
        found = list(prompts)
        assert [prompts.find(prompt.id) for prompt in found] == list(range(len(prompts)))
        assert prompts.find("of another dataset") is None
    finally:
        prompts.close()
    return found


@given(ids=IDS)
def test_prompts_are_found_with_and_without_an_index(ids):
    """Position and id lead to the same prompt, in the order of the file; a missing index is written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        prompts = [make_prompt(prompt_id, f"text of {prompt_id}") for prompt_id in ids]
        write_prompts(path, prompts)
        index = index_path(path).read_bytes()
        assert read_all(path) == prompts
        index_path(path).unlink()
        assert read_all(path) == prompts
        assert index_path(path).read_bytes() == index


def test_prompts_are_read_without_sorting_their_ids(tmp_path, monkeypatch):
    """A resume from a checkpoint looks for no id; sorting a million hashes takes a quarter of a second."""
    path = tmp_path / "prompts.jsonl"
    written = [make_prompt(str(n)) for n in range(9)]
    write_prompts(path, written)
    with monkeypatch.context() as patched, contextlib.closing(PromptFile(path)) as prompts:
        patched.delattr("numpy.argsort")
        assert list(prompts) == written
        with pytest.raises(AttributeError):
            prompts.find("0")
        patched.undo()
        assert prompts.find("8") == 8


def test_the_hash_of_an_id_never_changes():
    """Indexes and dispatch orders of other machines and versions depend on it."""
    assert hash_id("B2-9f3a61c0") == 0x51128C9DB8D5350E


@pytest.mark.parametrize("cut", [0, 1, 8, 23, 24, 25, 24 + 16, 24 + 32, -16, -1])
def test_an_index_that_was_cut_is_built_again(tmp_path, cut):
    """Prompts that the index does not name would never be asked, without a word."""
    path = tmp_path / "prompts.jsonl"
    prompts = [make_prompt(str(n)) for n in range(9)]
    write_prompts(path, prompts)
    whole = index_path(path).read_bytes()
    index_path(path).write_bytes(whole[:cut])
    assert read_all(path) == prompts
    assert index_path(path).read_bytes() == whole


def test_an_index_with_any_bit_flipped_is_built_again(tmp_path):
    """A wrong offset or hash would ask a finished prompt again."""
    path = tmp_path / "prompts.jsonl"
    prompts = [make_prompt(str(n)) for n in range(4)]
    write_prompts(path, prompts)
    whole = index_path(path).read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        index_path(path).write_bytes(damaged)
        assert read_all(path) == prompts
        assert index_path(path).read_bytes() == whole


@pytest.mark.parametrize("same_size", [True, False])
def test_an_index_of_other_prompts_is_built_again(tmp_path, same_size):
    """Another order of the same prompts has the same size, and yet other positions."""
    path = tmp_path / "prompts.jsonl"
    prompts = [make_prompt(str(n), "x" * n) for n in range(9)]
    write_prompts(path, prompts)
    before = path.stat().st_mtime_ns
    others = prompts[::-1] if same_size else prompts[2:]
    path.write_bytes(b"".join(prompt.to_line() for prompt in others))
    os.utime(path, ns=(before + same_size, before + same_size))  # each of the two gives it away
    assert read_all(path) == others


@pytest.mark.parametrize("line", [b"{\n", b"\n", b"[]\n", b'{"messages": []}\n', b'{"id": "x"}\n', b"\xff\n"])
def test_a_damaged_prompt_is_named_with_its_file_and_byte(tmp_path, line):
    """The message says where it is and how to get the file back."""
    path = tmp_path / "prompts.jsonl"
    first = make_prompt("first").to_line()
    path.write_bytes(first + line)
    with pytest.raises(
        RecordError, match=rf"{path}: the line at byte {len(first)} is damaged .* remove this"
    ):
        PromptFile(path)
    assert not index_path(path).exists()


def test_a_missing_file_is_an_error_and_not_an_empty_dataset(tmp_path):
    """Without prompts.jsonl there is nothing to open."""
    with pytest.raises(FileNotFoundError):
        PromptFile(tmp_path / "prompts.jsonl")


def test_lines_of_other_writers_are_read(tmp_path):
    """Spaces, another order of fields and no newline at the end change nothing."""
    path = tmp_path / "prompts.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}], "id": "b"}
    path.write_bytes(
        make_prompt("a").to_line() + b" " + orjson.dumps(row, option=orjson.OPT_INDENT_2).replace(b"\n", b" ")
    )
    assert [prompt.id for prompt in read_all(path)] == ["a", "b"]
