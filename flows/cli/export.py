"""`draftmill export`: the training data of a run, written again."""

import contextlib
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.exits import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, fail
from flows.cli.starting import check_folder
from flows.cli.stats import collect_run_stats

EPILOG = """\
\b
Exit status:
  0    exported, or there already as it would be
  1    what may pass by itself: no dataset is complete, or another process
       exports at the moment
  2    something has to be changed: the folder is not one of a run, or what is
       in the place of export/ is no export, a flag, an evaluation set
  130  interrupted by Ctrl-C or SIGTERM; the export of before is untouched
"""


def export(
    output_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    eval_fraction: Annotated[
        float | None, typer.Option(min=0.0, max=0.99, help="Share held out; the run's own when left out.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the split; the run's own when left out.")] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Of parquet, jsonl, arrow, vocab, conversations, with commas; the run's own when left out.",
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(min=0, help="Ids of the draft model, 0 for no vocab; the run's own when left out."),
    ] = None,
    drop_duplicates: Annotated[
        bool | None, typer.Option(help="Leave out rows equal to an earlier one; the run's own when left out.")
    ] = None,
    decontaminate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Leave out rows that share 13 words in a row with this evaluation set. Repeat it for "
            "several; the run's own when left out.",
        ),
    ] = None,
    no_decontaminate: Annotated[
        bool, typer.Option("--no-decontaminate", help="Compare with no evaluation set, not the run's either.")
    ] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Take incomplete datasets too.")] = False,
) -> None:
    """Write the training data again from what is on disk; nothing when it is there already. Starts nothing.

    Example: draftmill export data/kimi-k25 --formats arrow,vocab --draft-vocab-size 16000
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends an export as Ctrl-C does
    before = _find_export(output_dir)
    try:
        said = _export(
            output_dir,
            eval_fraction=eval_fraction,
            seed=seed,
            formats=formats,
            draft_vocab_size=draft_vocab_size,
            drop_duplicates=drop_duplicates,
            decontaminate=[] if no_decontaminate else decontaminate or None,
            partial=partial,
        )
    except KeyboardInterrupt:
        untouched = _find_export(output_dir) == before
        what = "export that was there before is untouched" if untouched else "new export is there, whole"
        fail(f"interrupted; the {what}", EXIT_INTERRUPTED)
    typer.echo("\n".join(said))


def _find_export(output_dir: Path) -> tuple[int, int] | None:
    """Which export is there: another one has another folder in its place."""
    with contextlib.suppress(OSError):
        found = (output_dir / "export").lstat()
        return found.st_dev, found.st_ino
    return None


def _export(output_dir: Path, *, formats: str | None, **rules: Any) -> list[str]:
    """Returns what there is to say; ends the process when there is no export."""
    from flows.run_folder import check_exported, read_export_rules
    from tasks.aggregate.report import write_report
    from tasks.export.files import ExportError, ExportInputError
    from tasks.export.left_out import count_left_out, say_left_out
    from tasks.export.task import export_datasets
    from tasks.records.run_file import RunFolderError

    found = collect_run_stats(output_dir)
    check_folder(output_dir)
    try:
        chosen = read_export_rules(output_dir, formats=_split_formats(formats), **rules)
        report = check_exported(export_datasets(output_dir, found, chosen), output_dir, found)
        write_report(output_dir, found)
    except (RunFolderError, ExportInputError) as exc:
        fail(str(exc), EXIT_BAD_INPUT)
    except ExportError as exc:
        fail(str(exc), EXIT_FAILED)
    state = " (unchanged)" if report.unchanged else ""
    total, left_out = report.total, count_left_out(report)
    lines = [f"{total.rows} rows, {total.loss_tokens:,} trained tokens: {report.out_dir}{state}"]
    return [*lines, say_left_out(left_out)] if left_out else lines


def _split_formats(names: str | None) -> list[str] | None:
    from tasks.export.export_run import FORMATS

    formats = None if names is None else [name.strip() for name in names.split(",")]
    if formats is not None and (unknown := [name for name in formats if name not in FORMATS]):
        fail(f"--formats has {', '.join(map(repr, unknown))}; there are {', '.join(FORMATS)}", EXIT_BAD_INPUT)
    return formats
