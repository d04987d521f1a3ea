"""The deployments of prefect.yaml, for the processes that serve them without a worker.

One file says what is deployed, whether `prefect deploy` or `draftmill up` does it. Knows the parts of
prefect.yaml that matter to both; does not know how anything runs.
"""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Schedule
from prefect.utilities.callables import ParameterSchema

PREFECT_FILE = Path(__file__).resolve().parent.parent / "prefect.yaml"
GROUPS = ("pipeline", "datasets")


def read_group(group: str, prefect_file: Path = PREFECT_FILE) -> list[RunnerDeployment]:
    """The deployments of one work pool in prefect.yaml; served, they need no pool.

    Raises:
        ValueError: no deployment of the file belongs to it.
    """
    entries = yaml.safe_load(prefect_file.read_text(encoding="utf-8"))["deployments"]
    found = [_make_deployment(entry) for entry in entries if entry["work_pool"]["name"] == group]
    if not found:
        raise ValueError(f"{prefect_file} has no deployment for the work pool {group!r}")
    return found


async def keep_schedules(client: PrefectClient, deployment: RunnerDeployment) -> None:
    """Take the schedules that the server has over the file's of the same slug.

    Registering a deployment replaces its schedules (3.9.1): one that was turned on in the UI would be off
    again after each start.
    """
    try:
        there = await client.read_deployment_by_name(f"{deployment.flow_name}/{deployment.name}")
    except ObjectNotFound:
        return
    slugs = {schedule.slug for schedule in there.schedules}
    kept = [
        DeploymentScheduleCreate(
            schedule=schedule.schedule,
            active=schedule.active,
            parameters=schedule.parameters,
            slug=schedule.slug,
        )
        for schedule in there.schedules
    ]
    new = [schedule for schedule in deployment.schedules or [] if schedule.slug not in slugs]
    deployment.schedules = [*kept, *new]
    deployment.paused = there.paused


class _ClosedSchema(ParameterSchema):
    """A form's schema under which the server refuses parameters that the flow does not have.

    Prefect accepts them and the run's process dies of them later, with no message in its state (3.9.1).
    """

    additionalProperties: bool = False  # noqa: N815  JSON Schema's name


def _make_deployment(entry: Mapping[str, Any]) -> RunnerDeployment:
    deployment = RunnerDeployment.from_entrypoint(
        entry["entrypoint"],
        name=entry["name"],
        description=entry.get("description"),
        tags=entry.get("tags"),
        parameters=entry.get("parameters"),
        schedules=[_make_schedule(schedule) for schedule in entry.get("schedules", [])],
    )
    schema = deployment._parameter_openapi_schema.model_dump(exclude_unset=True)
    deployment._parameter_openapi_schema = _ClosedSchema(**schema, additionalProperties=False)
    return deployment


def _make_schedule(entry: Mapping[str, Any]) -> Schedule:
    interval = entry.get("interval")
    return Schedule(
        cron=entry.get("cron"),
        rrule=entry.get("rrule"),
        interval=None if interval is None else timedelta(seconds=interval),
        timezone=entry.get("timezone", "UTC"),
        active=entry.get("active", True),
        slug=entry.get("slug"),
        parameters=entry.get("parameters", {}),
    )
