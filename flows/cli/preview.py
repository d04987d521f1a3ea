"""`draftmill preview`: a few prompts or finished rows as the model sees them."""

from typing import Any

from flows.cli.console import make_console
from flows.cli.exits import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, fail, leave
from flows.cli.options import (
    BaseUrls,
    Datasets,
    Mode,
    OnDisk,
    Output,
    ParamFile,
    Rows,
    Whole,
    to_overrides,
)
from flows.cli.starting import load_parameters, set_up_prefect, to_server

EPILOG = """\
\b
Exit status:
  0  shown
  1  the server that was to be asked for its tokenizer does not answer
  2  something has to be changed: a dataset, its source, the tokenizer

\b
Environment:
  DRAFTMILL_API_KEY  the key of such a server, if it asks for one
"""


def preview(
    param_file: ParamFile = None,
    dataset: Datasets = None,
    output_dir: Output = None,
    base_url: BaseUrls = None,
    mode: Mode = None,
    rows: Rows = 3,
    on_disk: OnDisk = None,
    whole: Whole = False,
) -> None:
    """Show a few prompts or finished rows as the model sees them, with what is trained on between ⟦ and ⟧.

    Starts nothing and changes nothing. A server is asked only where target.model and target.tokenizer are
    empty.

    Example: draftmill preview --param-file params.yaml --dataset B2_opencodeinstruct
    """
    server = to_server(base_url, mode)
    overrides = to_overrides(None, None, output_dir, None, False)
    parameters = load_parameters(param_file, overrides, server=server, only=dataset)
    try:
        _preview(parameters, rows=rows, on_disk=on_disk, whole=whole)
    except KeyboardInterrupt:
        leave(EXIT_INTERRUPTED)


def _preview(parameters: Any, **options: Any) -> None:
    set_up_prefect()
    from flows.catalog import InputError
    from flows.cli.preview_datasets import PreviewRules, preview_datasets
    from serving.client.errors import ServingError
    from serving.embedded.errors import EmbeddedError
    from tasks.tokens.tokenizer import TokenizerError

    try:
        preview_datasets(parameters, PreviewRules(**options), make_console())
    except (InputError, TokenizerError, EmbeddedError) as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    except ServingError as exc:
        fail(str(exc), EXIT_BAD_INPUT if exc.requires_user_action else EXIT_FAILED)
