"""How a command ends: what it prints and its exit code."""

from typing import NoReturn

import typer

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def say(text: str) -> None:
    """Print a line for a person."""
    typer.echo(f"draftmill: {text}", err=True)


def fail(message: str, code: int) -> NoReturn:
    """Print why, and end the process."""
    say(message)
    raise typer.Exit(code)


def leave(code: int) -> NoReturn:
    """End the process with an exit code."""
    raise typer.Exit(code)
