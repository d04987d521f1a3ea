"""What the tasks of one run share in one process: the target's tokenizer, the servers, the window.

Carried in a context variable, not in arguments: Prefect walks through the arguments of tasks and stores
those of flows, and a server pool or a tokenizer can bear neither.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tasks.generate.generation import Resources
from tasks.tokens.tokenizer import TargetTokenizer


@dataclass(frozen=True, slots=True)
class Session:
    """An opened run. `fingerprint` is run.json's, without its datasets; `model` is what is served."""

    model: str
    target: TargetTokenizer
    resources: Resources
    fingerprint: dict[str, Any]


_current: ContextVar[Session | None] = ContextVar("draftmill_session", default=None)


def get_session() -> Session:
    """The session of the run we are in.

    Raises:
        RuntimeError: there is none; the caller forgot `use_session`.
    """
    session = _current.get()
    if session is None:
        raise RuntimeError("no session is open: enter use_session(...) around the tasks of a run")
    return session


def find_session() -> Session | None:
    """The session of the run we are in, or None."""
    return _current.get()


@contextmanager
def use_session(session: Session) -> Iterator[None]:
    """Make a session current for the block and for the tasks started in it."""
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)
