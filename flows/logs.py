"""Our log lines, in the terminal and in the Prefect UI."""

import logging
from functools import partial

from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogHandler, PrefectConsoleHandler

_OURS = ("flows", "tasks", "serving")
_PREFECTS = ("prefect.flow_runs", "prefect.task_runs", "asyncio")


def show_our_logs() -> None:
    """Send what our modules log to the run they belong to; call it inside a flow, as often as you like.

    PREFECT_LOGGING_EXTRA_LOGGERS would attach the handler too, but leaves the level at WARNING.
    """
    _outlive_the_terminal()
    for name in _OURS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            logger.addHandler(APILogHandler())
    for name in _PREFECTS:
        logger = logging.getLogger(name)
        if _spare_the_traceback not in logger.filters:
            logger.addFilter(_spare_the_traceback)


def _outlive_the_terminal() -> None:
    """Go on when nothing reads our output any more: the process that started a run's own was killed, say.

    Rich, with which Prefect writes to the terminal, would end the process (rich 15, `on_broken_pipe`).
    """
    known = logging.Logger.manager.loggerDict.values()
    for logger in (logging.getLogger(), *(one for one in known if isinstance(one, logging.Logger))):
        for handler in logger.handlers:
            if isinstance(handler, PrefectConsoleHandler):
                console = handler.console
                console.on_broken_pipe = partial(setattr, console, "quiet", True)  # type: ignore[method-assign]


def _spare_the_traceback(record: logging.LogRecord) -> bool:
    """Our own errors are written for people, with what to do; a traceback would only hide the sentence.

    So it is with those of the operating system: a full disk or a missing permission is no bug.
    """
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, TerminationSignal):  # of a run that was cancelled, which its state says (3.9.1)
        return False
    ours = error is not None and type(error).__module__.split(".", 1)[0] in _OURS
    if ours or isinstance(error, OSError):
        record.exc_info = None
        record.exc_text = None
        record.msg, record.args = "%s: %s", (type(error).__name__, error)
    return True
