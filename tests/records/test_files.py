"""Files and folders are replaced whole or not at all."""

import contextlib
import fcntl
import os

import pytest

from tasks.records import folders
from tasks.records.files import replace_atomically, write_bytes_atomically, write_json_atomically
from tasks.records.folders import FolderError, fill_folder, hold_folder


def write_half_and_fail(write, data):
    write(data)
    raise RuntimeError("boom")


def test_write_replaces_the_content_and_leaves_no_temp_file(tmp_path):
    """The new bytes are there and nothing else is."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"old and longer")
    write_bytes_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_sorted_and_ends_with_a_newline(tmp_path):
    """Two dicts of other insertion order give the same bytes."""
    write_json_atomically(tmp_path / "a.json", {"b": 1, "a": {"d": 2, "c": 3}})
    write_json_atomically(tmp_path / "b.json", {"a": {"c": 3, "d": 2}, "b": 1})
    text = (tmp_path / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text()
    assert text.index('"a"') < text.index('"b"')
    assert text.endswith("}\n")


def test_an_error_keeps_the_old_file_and_removes_the_temp_file(tmp_path):
    """A block that raises changes nothing."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="boom"), replace_atomically(path) as file:
        write_half_and_fail(file.write, b"half of the n")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_is_read_until_the_block_ends(tmp_path):
    """A reader in the middle of a write sees the old bytes."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with replace_atomically(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_content_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    """A power loss after the rename cannot leave an empty file."""
    events = []
    real_fsync, real_replace = os.fsync, type(tmp_path).replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), real_fsync(fd))[1])
    monkeypatch.setattr(
        type(tmp_path), "replace", lambda a, b: (events.append("rename"), real_replace(a, b))[1]
    )
    write_bytes_atomically(tmp_path / "a", b"x")
    assert events == ["fsync", "rename", "fsync"]


def test_a_symlink_is_replaced_and_its_target_is_not_written(tmp_path):
    """Writing to a link never writes through it."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"precious")
    link.symlink_to(target)
    write_bytes_atomically(link, b"new")
    assert target.read_bytes() == b"precious"
    assert not link.is_symlink()


def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path):
    """Others on a shared filesystem can read it where the umask says so."""
    old_mask = os.umask(0o022)
    try:
        write_bytes_atomically(tmp_path / "a", b"x")
    finally:
        os.umask(old_mask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


@contextlib.contextmanager
def replace(folder):
    """Ours are the folders that have a file m."""

    def explain_foreign(old):
        return None if (old / "m").exists() else "has no m"

    with hold_folder(folder), fill_folder(folder, explain_foreign=explain_foreign) as new:
        yield new


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_swapped_whole(tmp_path, monkeypatch, can_exchange):
    """The new folder is there without any file of the old one, with and without renameat2."""
    if not can_exchange:
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    for name in ("first", "second"):
        with replace(tmp_path / "out") as new:
            (new / "m").write_text(name)
            (new / name).mkdir()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["m", "second"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.lock", "out"]


def test_this_machine_swaps_folders_in_one_step(tmp_path):
    """The one-rename path is what runs here, not the fallback."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert folders._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists()


def test_an_error_keeps_the_old_folder(tmp_path):
    """A block that raises changes nothing and leaves nothing behind."""
    with replace(tmp_path / "out") as new:
        (new / "m").write_text("old")
    with pytest.raises(RuntimeError), replace(tmp_path / "out") as new:
        write_half_and_fail((new / "m").write_text, "new")
    assert (tmp_path / "out" / "m").read_text() == "old"
    assert not (tmp_path / ".out.new").exists()


def test_a_kill_between_the_two_renames_is_repaired(tmp_path):
    """Without renameat2 a kill can leave only .out.old: the next call brings it back first."""
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "m").write_text("old")
    with pytest.raises(RuntimeError), replace(tmp_path / "out"):
        raise RuntimeError("boom")
    assert (tmp_path / "out" / "m").read_text() == "old"


def test_the_old_folder_survives_when_both_renames_fail(tmp_path, monkeypatch):
    """The only copy is never cleaned up as a leftover."""
    with replace(tmp_path / "out") as new:
        (new / "m").write_text("old")
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    real = type(tmp_path).rename

    def rename(self, to):
        if to.name == "out":
            raise OSError("no")
        return real(self, to)

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    with pytest.raises(OSError, match="no"), replace(tmp_path / "out"):
        pass
    assert (tmp_path / ".out.old" / "m").read_text() == "old"


def test_leftovers_are_removed_without_following_links(tmp_path):
    """A link in the place of a leftover is unlinked; what it points to stays."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (tmp_path / ".out.new").symlink_to(precious)
    (tmp_path / ".out.old").symlink_to(precious)
    with replace(tmp_path / "out") as new:
        (new / "m").touch()
    assert (precious / "file").exists()
    assert (tmp_path / "out" / "m").exists()


def test_a_folder_that_is_not_ours_is_refused(tmp_path):
    """Files without the marker are somebody's: nothing is touched."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FolderError, match="has no m"), replace(tmp_path):
        pass
    assert (tmp_path / "thesis.tex").exists()


def test_a_symlink_as_the_folder_is_refused(tmp_path):
    """The swap never leaves the folder that was named."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match="symlink"), replace(tmp_path / "out"):
        pass
    assert (tmp_path / "out").is_symlink()


def test_a_second_writer_is_refused(tmp_path):
    """Two exports to one folder do not clean up each other's files."""
    with (tmp_path / ".out.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with (
            pytest.raises(FolderError, match="another process"),
            replace(tmp_path / "out"),
        ):
            pass
