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
from collections.abc import Callable, Iterator
from pathlib import Path

from tasks.records.files import sync_folder

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV)  # NFS, overlayfs, old kernels

_ExplainForeign = Callable[[Path], str | None]
"""Why a folder that is not empty may not be replaced, as the rest of a sentence; None where it may."""


class FolderError(RuntimeError):
    """A folder that may not be replaced; nothing was changed."""


class ForeignFolderError(FolderError):
    """What stands in its place is somebody's: it has to be moved first."""


@contextlib.contextmanager
def hold_folder(path: Path) -> Iterator[None]:
    """Keep other processes from replacing `path` during the block; what a killed one left is cleaned up.

    Raises:
        FolderError: `path` is a symlink or no folder, or another process replaces it now.
    """
    if path.name in ("", ".."):
        raise FolderError(f"{path} cannot be replaced; name a folder of its own")
    path.parent.mkdir(parents=True, exist_ok=True)
    path, new, old = owned_folders(path)
    with _hold_lock(path.with_name(f".{path.name}.lock"), path):
        _refuse_no_folder(path)
        if old.is_dir() and not old.is_symlink() and not path.exists():
            old.rename(path)  # killed between the two renames of _swap: the old one comes back
        _remove(new)
        _remove(old)
        yield


@contextlib.contextmanager
def fill_folder(path: Path, *, explain_foreign: _ExplainForeign) -> Iterator[Path]:
    """Give an empty folder to fill; it takes the place of `path`, which is held, when the block ends well.

    The new folder is a sibling (`.<name>.new`), so that the swap is one rename.

    Raises:
        ForeignFolderError: `path` is not empty, and `explain_foreign` tells why it may not be replaced.
    """
    path, new, old = owned_folders(path)
    if path.exists() and any(path.iterdir()) and (why := explain_foreign(path)) is not None:
        raise ForeignFolderError(f"{path} {why}")
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


def _refuse_no_folder(path: Path) -> None:
    if path.is_symlink():
        raise ForeignFolderError(f"{path} is a symlink, and what it points to is not replaced; remove it")
    if path.exists() and not path.is_dir():
        raise ForeignFolderError(f"{path} is not a folder; move it elsewhere")


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
