"""`python -m serving.embedded`: load a model and serve it until told to stop.

Knows the command line and the process's signals; the rest is in the modules that it calls.
Invariant: SIGTERM ends the process within seconds with exit status 0, also while it downloads or loads.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from serving.embedded.engine import Engine
from serving.embedded.errors import EmbeddedError
from serving.embedded.model import DEMO_MODEL, DEMO_NAMES, ModelFiles, resolve_model
from serving.embedded.protocol import ServedModel
from serving.embedded.server import EmbeddedHttpServer
from serving.parent import watch_parent

DEFAULT_SLOTS = 8
DEFAULT_CONTEXT_LENGTH = 2048

# More threads than this do not make a model of this size faster.
_MAX_THREADS = 8
_DRAIN_S = 2.0
_LAST_RESORT_S = 5.0

logger = logging.getLogger("serving.embedded")


class _Stopped(BaseException):
    """A signal asks this process to end; like SystemExit, it is nothing to recover from."""


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        signal.signal(signal.SIGTERM, _stop_on_signal)
        signal.signal(signal.SIGINT, _stop_on_signal)
        if args.exit_with_parent is not None:
            watch_parent(args.exit_with_parent or os.getppid(), _stop_orphan)
        _serve(args)
    except _Stopped:
        logger.info("stopped")
    except EmbeddedError as exc:
        logger.error("%s", exc)  # noqa: TRY400 - the message is complete, a traceback would bury it
        return 1
    return 0


def default_threads() -> int:
    """Return how many CPU threads to decode with: the CPUs this process may use, up to 8."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _cgroup_cpus(Path("/sys/fs/cgroup/cpu.max")), _MAX_THREADS))


def _serve(args: argparse.Namespace) -> None:
    httpd = EmbeddedHttpServer(args.host, args.port, allow_remote=args.allow_remote)
    files = resolve_model(args.model, args.cache_dir)
    started = time.monotonic()
    engine = Engine(files, slots=args.slots, context_length=args.context_length, threads=args.threads)
    served = _describe(args, files)
    httpd.open_for(engine, served)
    serving = threading.Thread(target=httpd.serve_forever, name="accept", daemon=True)
    serving.start()
    logger.info(
        "serving %s at %s: %d slots of %d tokens on %d threads, loaded in %.1f s",
        *(served.name, httpd.url, args.slots, args.context_length, args.threads, time.monotonic() - started),
    )
    if args.ready_file is not None:
        _write_ready_file(args.ready_file, httpd.url, served)
    try:
        serving.join()  # until a signal raises _Stopped here
    finally:
        _drain(httpd, engine)


def _drain(httpd: EmbeddedHttpServer, engine: Engine) -> None:
    """Let running requests answer as aborted, so that their clients are not left with a dead connection."""
    httpd.shutdown()
    httpd.server_close()
    engine.abort_all()
    deadline = time.monotonic() + _DRAIN_S
    while httpd.in_flight and time.monotonic() < deadline:
        time.sleep(0.02)


def _describe(args: argparse.Namespace, files: ModelFiles) -> ServedModel:
    name = args.served_model_name or (DEMO_MODEL if args.model in DEMO_NAMES else args.model)
    config_file = files.tokenizer_dir / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    return ServedModel(name, files, config.get("model_type"), config.get("architectures"))


def _write_ready_file(path: Path, url: str, served: ServedModel) -> None:
    content = {
        "url": url,
        "pid": os.getpid(),
        "tokenizer_dir": str(served.files.tokenizer_dir),
        "model_id": served.name,
    }
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(file.name, path)  # noqa: PTH105 - the call that promises atomicity


def _stop_on_signal(_number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the first
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit_within(_LAST_RESORT_S)  # should the exception be lost in a destructor, where Python ignores it
    raise _Stopped


def _stop_orphan() -> None:
    logger.warning("the parent process is gone; stopping")
    os.kill(os.getpid(), signal.SIGTERM)  # the usual way out also ends a download
    _exit_within(_LAST_RESORT_S)


def _exit_within(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _cgroup_cpus(cpu_max: Path) -> int:
    """Return the CPU quota of a container (cgroup v2), or a large number when there is none."""
    try:
        quota, period = cpu_max.read_text(encoding="ascii").split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return 1 << 16


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.embedded",
        description="Serve a small GGUF model on the CPU with SGLang's protocol.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", default="demo", help='"demo", a .gguf file, or a folder with exactly one')
    add("--served-model-name", help="the name in /model_info and /v1/models")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000, help="0 takes a free one")
    add("--allow-remote", action="store_true", help="allow a host that is not loopback (no authentication)")
    add("--slots", type=_positive, default=DEFAULT_SLOTS, help="requests decoded at once")
    add("--context-length", type=_positive, default=DEFAULT_CONTEXT_LENGTH, help="tokens per request")
    add("--threads", type=_positive, default=default_threads(), help="CPU threads of the decoder")
    add("--cache-dir", type=Path, help="where the demo model is kept (default: $DRAFTMILL_CACHE or XDG)")
    add("--ready-file", type=Path, help="write the URL, pid and tokenizer folder here once listening")
    add(
        "--exit-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="end when the parent process (PID, or whoever started this) dies",
    )
    return parser


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # a normal exit destroys what llama.cpp's busy threads still use, and crashes
