"""The cache of hashes: what is read again, and what is not."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from tasks.prepare.sources import hash_cache, hash_source
from tasks.prepare.sources.hash_cache import CACHE, HashCache


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch):
    monkeypatch.setattr(hash_cache, "_WORTH_BYTES", 0)


@pytest.fixture
def reads(monkeypatch) -> list[Path]:
    """The files that are really read, in order."""
    read: list[Path] = []
    really = hash_cache.hash_file
    monkeypatch.setattr(hash_cache, "hash_file", lambda path: (read.append(path), really(path))[1])
    return read


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def in_a_minute() -> int:
    return time.time_ns() + 60 * 10**9


def hash_later(folder: Path, path: Path) -> str:
    """As one that starts in a minute would hash it."""
    cache = HashCache(folder, now_ns=in_a_minute)
    found = cache.hash_file(path)
    cache.save()
    return found


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_file_that_stays_the_same_is_read_once(tmp_path, reads):
    """By whichever of its names."""
    file = write(tmp_path / "a", "one")
    (tmp_path / "link").symlink_to(file)
    found = [hash_later(tmp_path, path) for path in (file, file, tmp_path / "link")]
    assert found == [sha256("one")] * 3
    assert reads == [file]


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_changed_file_is_read_again(tmp_path, reads, keep_time):
    """Although it is as long as before, and although its time was put back."""
    file = write(tmp_path / "a", "one")
    before = file.stat()
    hash_later(tmp_path, file)
    write(file, "two")
    if keep_time:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hash_later(tmp_path, file) == sha256("two")
    assert len(reads) == 2


def test_a_replaced_file_is_read_again(tmp_path, reads):
    """Another file under the same name, with the same size and time."""
    file = write(tmp_path / "a", "one")
    hash_later(tmp_path, file)
    other = write(tmp_path / "b", "two")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)
    assert hash_later(tmp_path, file) == sha256("two")


def test_a_file_that_was_just_written_is_not_kept(tmp_path, reads):
    """The next change might come within the same tick of the filesystem's clock."""
    file = write(tmp_path / "a", "one")
    for _ in range(2):
        cache = HashCache(tmp_path)
        assert cache.hash_file(file) == sha256("one")
        cache.save()
    assert len(reads) == 2
    assert not (tmp_path / CACHE).exists()


def test_a_file_that_is_written_while_it_is_read_is_not_kept(tmp_path, monkeypatch):
    """What was read may be neither the old content nor the new."""
    file = write(tmp_path / "a", "one")
    monkeypatch.setattr(hash_cache, "hash_file", lambda path: sha256(write(path, "longer").name))
    hash_later(tmp_path, file)
    assert not (tmp_path / CACHE).exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b"\xff"])
def test_a_damaged_cache_is_passed_over(tmp_path, content):
    """And replaced."""
    file = write(tmp_path / "a", "one")
    (tmp_path / CACHE).write_bytes(content)
    assert hash_later(tmp_path, file) == sha256("one")
    assert sha256("one") in (tmp_path / CACHE).read_text()


def test_a_damaged_entry_is_passed_over(tmp_path, reads):
    """Its file is read again."""
    file = write(tmp_path / "a", "one")
    hash_later(tmp_path, file)
    damaged = (tmp_path / CACHE).read_text().replace(sha256("one"), "x")
    write(tmp_path / CACHE, damaged)
    assert hash_later(tmp_path, file) == sha256("one")
    assert len(reads) == 2


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    """A run that is refused leaves nothing behind."""
    hash_later(tmp_path / "absent", write(tmp_path / "a", "one"))
    assert not (tmp_path / "absent").exists()


def test_what_others_kept_meanwhile_stays(tmp_path, reads):
    """Datasets of one run are prepared at the same time."""
    files = [write(tmp_path / name, name) for name in "ab"]
    caches = [HashCache(tmp_path, now_ns=in_a_minute) for _ in files]
    for cache, file in zip(caches, files, strict=True):
        cache.hash_file(file)
        cache.save()
    for file in files:
        hash_later(tmp_path, file)
    assert reads == files


def test_a_source_has_the_same_hash_with_a_cache(tmp_path):
    """The cache is no part of it."""
    file = write(tmp_path / "a.jsonl", "{}")
    assert hash_source([file], cache_folder=tmp_path) == hash_source([file])
