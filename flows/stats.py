"""The statistics of one run, counted again by themselves."""

from pathlib import Path

from prefect import flow

from flows.logs import show_our_logs
from tasks.aggregate.run_stats import read_plans
from tasks.aggregate.stats import DatasetStats
from tasks.aggregate.task import aggregate_stats
from tasks.records.run_file import check_run_folder


@flow(name="aggregate-stats", flow_run_name="stats of {output_dir}", persist_result=False)
async def aggregate_run_stats(output_dir: str) -> list[DatasetStats]:
    """Count what is on disk of a run, which may still be going on, and show it as a table.

    Args:
        output_dir: The folder of a run; a relative one starts in the folder that the flow runs in.

    Raises:
        RunFolderError: the folder is not one of a run, or cannot be written to.
    """
    show_our_logs()
    folder = Path(output_dir)
    plans = read_plans(folder)
    check_run_folder(folder)
    return await aggregate_stats(folder, plans)
