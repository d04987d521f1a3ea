"""A folder that is replaced whole or not at all.

Knows renames, locks and leftovers; does not know what the files are. Invariant: at every moment a
reader finds the old folder or the new one; after a kill the next call cleans up what was left.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tasks.core.files import sync_folder

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV)  # NFS, overlayfs, old kernels


class FolderError(RuntimeError):
    """A folder that may not be replaced; nothing was changed."""


@contextlib.contextmanager
def replace_folder_atomically(path: Path, *, marker: str) -> Iterator[Path]:
    """Give an empty folder to fill; it takes the place of `path` when the block ends well.

    Raises:
        FolderError: as hold_folder.
    """
    with hold_folder(path, marker=marker), fill_folder(path) as new:
        yield new


@contextlib.contextmanager
def hold_folder(path: Path, *, marker: str) -> Iterator[None]:
    """Keep other processes from replacing `path` during the block; what a killed one left is cleaned up.

    `path` may be replaced only when it is missing, empty or contains a file `marker`: anything else is not
    ours.

    Raises:
        FolderError: `path` is a symlink, no folder, or not ours, or another process replaces it now.
    """
    if path.name in ("", ".."):
        raise FolderError(f"{path} cannot be replaced; name a folder of its own")
    path.parent.mkdir(parents=True, exist_ok=True)
    path, new, old = owned_folders(path)
    with _hold_lock(path.with_name(f".{path.name}.lock"), path):
        _refuse_foreign(path, marker)
        if old.is_dir() and not old.is_symlink() and not path.exists():
            old.rename(path)  # killed between the two renames of _swap: the old one comes back
        _remove(new)
        _remove(old)
        yield


@contextlib.contextmanager
def fill_folder(path: Path) -> Iterator[Path]:
    """As replace_folder_atomically, for a `path` that hold_folder holds.

    The new folder is a sibling (`.<name>.new`), so that the swap is one rename.
    """
    path, new, old = owned_folders(path)
    new.mkdir()
    try:
        yield new
        _sync_tree(new)
        _swap(new, path, old)
    finally:
        _remove(new)
        if path.exists():  # else `old` is the only copy
            _remove(old)


def owned_folders(path: Path) -> tuple[Path, Path, Path]:
    """The folders that replacing `path` writes and removes: itself, the new and the old one."""
    path = path.parent.resolve() / path.name
    return path, path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")


@contextlib.contextmanager
def _hold_lock(lock: Path, path: Path) -> Iterator[None]:
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(
                f"{path} is being written by another process; wait until it has ended"
            ) from None
        yield
    finally:
        os.close(fd)


def _refuse_foreign(path: Path, marker: str) -> None:
    if path.is_symlink():
        raise FolderError(f"{path} is a symlink; remove it or name the folder that it points to")
    if not path.exists():
        return
    if not path.is_dir():
        raise FolderError(f"{path} is not a folder; remove it or name another one")
    if not (path / marker).is_file() and any(path.iterdir()):
        raise FolderError(f"{path} has files but no {marker}, so it is not replaced; name another folder")


def _swap(new: Path, path: Path, old: Path) -> None:
    """Put `new` at `path`; what was there ends up at `new` or `old`."""
    if not path.exists():
        new.rename(path)
    elif not _exchange(new, path):
        path.rename(old)
        try:
            new.rename(path)
        except BaseException:
            old.rename(path)
            raise
    sync_folder(path.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the filesystem or the C library cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            fd = os.open(Path(root) / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_folder(Path(root))


def _remove(path: Path) -> None:
    """Remove a folder, or a link or file in its place; links are never followed."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
