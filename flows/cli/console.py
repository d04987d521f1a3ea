"""Where the command line prints its tables."""

from rich.console import Console

_LOG_WIDTH = 160  # of a file or a pipe, which wraps nothing


def make_console() -> Console:
    """A console as wide as the terminal, or wide enough for every table where there is none."""
    console = Console()
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console
