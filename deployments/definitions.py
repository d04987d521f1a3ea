"""The deployments of prefect.yaml, for the processes that serve them without a worker.

One file says what is deployed, whether `prefect deploy` or `draftmill up` does it. Knows the parts of
prefect.yaml that matter to both; does not know how anything runs, nor what the server has.
"""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from prefect.deployments.runner import RunnerDeployment
from prefect.schedules import Schedule
from prefect.utilities.callables import ParameterSchema

from deployments.errors import PrefectFileError

PREFECT_FILE = Path(__file__).resolve().parent.parent / "prefect.yaml"
GROUPS = ("pipeline", "datasets")


class FormSchema(ParameterSchema, extra="allow"):
    """A form's schema that may have more keywords than Prefect's."""


def read_group(group: str, prefect_file: Path = PREFECT_FILE) -> list[RunnerDeployment]:
    """The deployments of one work pool in prefect.yaml; served, they need no pool.

    Raises:
        PrefectFileError: the file is no YAML, or none of its deployments belongs to the pool.
    """
    try:
        entries = yaml.safe_load(prefect_file.read_text(encoding="utf-8"))["deployments"]
    except yaml.YAMLError as exc:
        raise PrefectFileError(f"{prefect_file} is no YAML: {exc}") from exc
    found = [_make_deployment(entry) for entry in entries if entry["work_pool"]["name"] == group]
    if not found:
        raise PrefectFileError(f"{prefect_file} has no deployment for the work pool {group!r}")
    return found


def _make_deployment(entry: Mapping[str, Any]) -> RunnerDeployment:
    deployment = RunnerDeployment.from_entrypoint(
        entry["entrypoint"],
        name=entry["name"],
        description=entry.get("description"),
        tags=entry.get("tags"),
        parameters=entry.get("parameters"),
        schedules=[_make_schedule(schedule, i) for i, schedule in enumerate(entry.get("schedules", []), 1)],
    )
    schema = deployment._parameter_openapi_schema.model_dump(exclude_unset=True)
    # The server would accept parameters that the flow does not have, and the run's process would die of them
    # later, with no message in its state (3.9.1).
    deployment._parameter_openapi_schema = FormSchema(**schema, additionalProperties=False)
    return deployment


def _make_schedule(entry: Mapping[str, Any], position: int) -> Schedule:
    interval = entry.get("interval")
    return Schedule(
        cron=entry.get("cron"),
        rrule=entry.get("rrule"),
        interval=None if interval is None else timedelta(seconds=interval),
        timezone=entry.get("timezone", "UTC"),
        active=entry.get("active", True),
        slug=entry.get("slug") or f"schedule-{position}",  # by which it is found again on the server
        parameters=entry.get("parameters", {}),
    )
