"""The flags of `draftmill run`, `check` and `preview`, and the parameters that they stand for.

Knows names and help texts; does not know files or what a run does.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

ParamFile = Annotated[
    Path | None,
    typer.Option(
        "--param-file", "-p", metavar="FILE", help="YAML or JSON file of parameters (see --help-parameters)."
    ),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset",
        "-d",
        metavar="NAME",
        help="Only this dataset of the file or the catalog; may be repeated.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output-dir", "-o", metavar="FOLDER", help="Where everything is written."),
]
Budget = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="TOKENS", help="Budget of completion tokens for every dataset, whatever the file says."
    ),
]
Samples = Annotated[int | None, typer.Option(min=1, metavar="COUNT", help="At most so many responses each.")]
BaseUrls = Annotated[
    list[str] | None,
    typer.Option("--base-url", metavar="URL", help="An SGLang server (mode connect); may be repeated."),
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="connect|launch|embedded",
        help="Use running servers, start SGLang here (with server.profile and target.model in the file), or "
        "start a small model on this machine's CPU for a trial.",
    ),
]
AcceptChanged = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD",
        help="Setting that may differ from the folder's, as the refusal names it; may be repeated.",
    ),
]
RetryRejected = Annotated[
    bool, typer.Option("--retry-rejected", help="Ask prompts again that were rejected for good.")
]
Rows = Annotated[int, typer.Option(min=1, metavar="COUNT", help="Conversations or rows to show.")]
OnDisk = Annotated[
    bool | None,
    typer.Option(
        "--on-disk/--source",
        help="Finished rows, or prompts of the source; without either, rows where there are any.",
    ),
]
Whole = Annotated[bool, typer.Option("--whole", help="Do not shorten long texts.")]


def to_overrides(
    max_samples: int | None,
    max_tokens_per_dataset: int | None,
    output_dir: Path | None,
    accept_changed: list[str] | None,
    retry_rejected: bool,
) -> dict[str, Any]:
    """The flags of a run by the names of parameters; None is left out."""
    return {
        "max_samples": max_samples,
        "max_tokens_per_dataset": max_tokens_per_dataset,
        "output_dir": None if output_dir is None else str(output_dir),
        "accept_changed": accept_changed or None,
        "retry_rejected": retry_rejected or None,
    }
