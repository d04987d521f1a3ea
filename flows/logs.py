"""Our log lines, in the terminal and in the Prefect UI."""

import logging

from prefect.logging.handlers import APILogHandler

_OURS = ("flows", "tasks", "serving")


def show_our_logs() -> None:
    """Send what our modules log to the run they belong to; call it inside a flow, as often as you like.

    PREFECT_LOGGING_EXTRA_LOGGERS would attach the handler too, but leaves the level at WARNING.
    """
    for name in _OURS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            logger.addHandler(APILogHandler())
