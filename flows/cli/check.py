"""`draftmill check`: whether a run could succeed, and its plan."""

import signal
from pathlib import Path
from typing import Any

from flows.cli.exits import EXIT_INTERRUPTED, leave, say
from flows.cli.options import (
    AcceptChanged,
    BaseUrls,
    Budget,
    Datasets,
    Mode,
    Output,
    ParamFile,
    RetryRejected,
    Samples,
    to_overrides,
)
from flows.cli.starting import check_folder, check_free, load_parameters, set_up_prefect, to_server

_STARTS_SGLANG = "starts SGLang, which takes minutes for a big model, and stops it afterwards"


EPILOG = """\
\b
Exit status:
  0  the run can start
  1  a server does not answer or may start later, or another run is at work in
     the folder
  2  something has to be changed first; each is named in a line of its own

\b
Environment:
  DRAFTMILL_API_KEY  the key of the SGLang servers, if they ask for one
"""


def check(
    param_file: ParamFile = None,
    dataset: Datasets = None,
    max_tokens_per_dataset: Budget = None,
    max_samples: Samples = None,
    output_dir: Output = None,
    base_url: BaseUrls = None,
    mode: Mode = None,
    accept_changed: AcceptChanged = None,
    retry_rejected: RetryRejected = False,
) -> None:
    """Check whether a run could succeed, and print its plan. Takes the flags of run and generates nothing.

    Example: draftmill check --param-file params.yaml
    """
    overrides = to_overrides(max_samples, max_tokens_per_dataset, output_dir, accept_changed, retry_rejected)
    server = to_server(base_url, mode)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = _check(load_parameters(param_file, overrides, server=server, only=dataset))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    leave(code)


def _check(parameters: Any) -> int:
    from flows.cli.interrupts import run_until_interrupted
    from flows.servers import needs_server

    set_up_prefect()
    starts_sglang = parameters.server.mode == "launch" and needs_server(parameters)
    output_dir = Path(parameters.output_dir)
    was_there = output_dir.exists()
    check_folder(output_dir)
    try:
        check_free(output_dir)
        say(f"checking; it {_STARTS_SGLANG if starts_sglang else 'takes some seconds'}")
        from flows.cli.check_run import check_run

        return run_until_interrupted(
            check_run(parameters), exit_code=EXIT_INTERRUPTED, last_words="draftmill: stopped at once"
        )
    finally:
        if not was_there:
            from flows.cli.check_run import remove_traces

            remove_traces(output_dir)
