"""Bring a deployment of prefect.yaml to the server, and keep what was changed on the server.

Prefect overwrites a deployment with the file each time it is registered (3.9.1). Here only what changed in
the file since the last time is sent. What the file said then is kept in the form's schema, as hashes, under a
keyword that nobody else reads: it is stored and deleted with the deployment, and `prefect deploy`, which
brings the whole file, removes it. Invariant: what is not known to have changed in the file stays as the
server has it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import DeploymentApplyError, RunnerDeployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from deployments.definitions import FormSchema
from deployments.errors import PrefectFileError
from deployments.merge import ABSENT, Difference, find_differences, hash_value, is_hashed, merge

APPLIED = "x-draftmill-applied"
_SENT = ("description", "tags", "parameters")
# Everything that a person can change on the server and Prefect would send at each registration.
_EDITABLE = (
    *_SENT,
    "schedules",
    "paused",
    "job_variables",
    "concurrency_limit",
    "concurrency_options",
    "enforce_parameter_schema",
)
_MAX_SHOWN = 100
_REFUSED = "{}: the server refuses what prefect.yaml says, correct it there: {}"

Settings = dict[str, Any]
AnySchedule = DeploymentSchedule | DeploymentScheduleCreate


@dataclass(frozen=True, slots=True)
class Registration:
    """What came of it: the file's settings against the ones that stay, and what the server had before.

    Attributes:
        kept: from what the server has to what the file says.
        taken: from what the server had to what the file says.
        applied_is_known: whether it could be seen what changed in the file.
        refusal: why the server refuses the parameters; None where it takes them.
    """

    name: str
    kept: list[Difference] = field(default_factory=list)
    taken: list[Difference] = field(default_factory=list)
    applied_is_known: bool = True
    refusal: str | None = None

    def describe_changes(self) -> list[str]:
        """A line for what was taken, and one for what is refused; old values in full."""
        lines = []
        if self.taken:
            taken = (f"{d.path} = {_show(d.after)} (was {_show(d.before)})" for d in self.taken)
            lines.append(f"{self.name}: took from prefect.yaml {', '.join(taken)}")
        if self.refusal is not None:
            lines.append(
                f"{self.name}: the server refuses its parameters ({self.refusal}); they and the form stay "
                "as they were, and its runs may fail. Edit them in the UI and start again, or take "
                "prefect.yaml's with `draftmill up --reset`"
            )
        return lines

    def describe_kept(self) -> list[str]:
        """A line for what differs from prefect.yaml and stays."""
        if not self.kept:
            return []
        kept = (
            f"{d.path} = {_shorten(_show(d.before))} (prefect.yaml: {_shorten(_show(d.after))})"
            for d in self.kept
        )
        why = "" if self.applied_is_known else "; what changed in prefect.yaml is not known"
        return [f"{self.name}: kept {', '.join(kept)}{why}; `draftmill up --reset` takes prefect.yaml's"]


async def register(
    client: PrefectClient, deployment: RunnerDeployment, *, reset: bool = False
) -> Registration:
    """Create the deployment, or send what changed in its file; registered again, it changes nothing more.

    Args:
        client: of the server.
        deployment: as `read_group` returned it.
        reset: take the file's settings, whatever the server has.

    Raises:
        PrefectFileError: the server refuses what the file says, and there is nothing else to take.
    """
    file = _read_file_settings(deployment)
    there = await _find(client, deployment.full_name)
    if there is None:
        await _create(deployment, hash_value(file))
        registration = Registration(deployment.full_name)
    else:
        registration = await _update(client, deployment, there, file, reset=reset)
    _leave_to_server(deployment)
    return registration


async def _find(client: PrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return await client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


async def _create(deployment: RunnerDeployment, applied: Settings) -> None:
    _set_form(deployment, _read_form(deployment), applied)
    try:
        await deployment.aapply()
    except DeploymentApplyError as exc:
        raise PrefectFileError(_REFUSED.format(deployment.full_name, exc)) from exc


async def _update(
    client: PrefectClient,
    deployment: RunnerDeployment,
    there: DeploymentResponse,
    file: Settings,
    *,
    reset: bool,
) -> Registration:
    server, applied = _read_server_settings(there), _find_applied(there)
    merged = file if reset else _merge_settings(applied, server, file)
    form, now_applied = _read_form(deployment), hash_value(file)
    from_file = _list_schedules(deployment)
    _set_form(deployment, form, applied)
    _leave_to_server(deployment, but=_find_changed(server, merged))
    refusal = await _apply(deployment)
    if refusal is not None:
        if reset:
            raise PrefectFileError(_REFUSED.format(deployment.full_name, refusal))
        merged = {**merged, "parameters": server["parameters"]}
        form, now_applied["parameters"] = there.parameter_openapi_schema or {}, applied.get("parameters")
    await _apply_schedules(client, there, from_file, merged["schedules"])
    # What was applied is noted last: cut off before, the file still counts as changed, and it is done again.
    _set_form(deployment, form, now_applied)
    _leave_to_server(deployment, but=_find_changed(server, merged))
    await deployment.aapply()
    return Registration(
        deployment.full_name,
        kept=list(find_differences(merged, file)),
        taken=list(find_differences(server, merged)),
        applied_is_known=applied.keys() >= file.keys(),
        refusal=refusal,
    )


def _merge_settings(applied: Settings, server: Settings, file: Settings) -> Settings:
    return {
        name: merge(applied[name], server[name], file[name]) if name in applied else server[name]
        for name in file
    }


def _find_changed(server: Settings, merged: Settings) -> Settings:
    return {name: merged[name] for name in _SENT if hash_value(merged[name]) != hash_value(server[name])}


async def _apply(deployment: RunnerDeployment) -> str | None:
    """Send it; returns why the server refuses its parameters."""
    try:
        await deployment.aapply()
    except PrefectHTTPStatusError as exc:
        if exc.response.status_code != httpx.codes.CONFLICT:
            raise
        return str(exc.response.json()["detail"]).removeprefix("Error updating deployment: ")
    return None


async def _apply_schedules(
    client: PrefectClient,
    there: DeploymentResponse,
    from_file: list[DeploymentScheduleCreate],
    wanted: Settings,
) -> None:
    """One at a time: the server keeps the schedules that a list of all of them leaves out (3.9.1)."""
    times = {_get_key(schedule): schedule.schedule for schedule in from_file}
    current = {_get_key(schedule): schedule for schedule in there.schedules}
    for key, schedule in current.items():
        settings = _read_schedule(schedule)
        if key not in wanted:
            await client.delete_deployment_schedule(there.id, schedule.id)
        elif wanted[key] != settings:
            moved = wanted[key]["when"] != settings["when"]
            await client.update_deployment_schedule(
                there.id,
                schedule.id,
                active=wanted[key]["active"],
                schedule=times[key] if moved else None,
                parameters=wanted[key]["parameters"],
            )
    for key in wanted.keys() - current.keys():  # only the file can have brought them
        new = DeploymentScheduleCreate(
            schedule=times[key],
            active=wanted[key]["active"],
            parameters=wanted[key]["parameters"],
            slug=key,
        )
        await client.create_deployment_schedules(there.id, [new])


def _read_file_settings(deployment: RunnerDeployment) -> Settings:
    settings = deployment.model_dump(mode="json", include=set(_SENT))
    return {
        **settings,
        "description": deployment.description or "",
        "schedules": _read_schedules(_list_schedules(deployment)),
    }


def _read_server_settings(there: DeploymentResponse) -> Settings:
    return {
        "description": there.description or "",
        "tags": there.tags,
        "parameters": there.parameters,
        "schedules": _read_schedules(there.schedules),
    }


def _list_schedules(deployment: RunnerDeployment) -> list[DeploymentScheduleCreate]:
    return [item for item in deployment.schedules or [] if isinstance(item, DeploymentScheduleCreate)]


def _read_schedules(schedules: Iterable[AnySchedule]) -> Settings:
    return {_get_key(schedule): _read_schedule(schedule) for schedule in schedules}


def _read_schedule(schedule: AnySchedule) -> Settings:
    when = schedule.schedule.model_dump(mode="json", exclude={"anchor_date"})  # the time of registration
    if "rrule" in when:  # the server adds that time as its first line
        when["rrule"] = "\n".join(x for x in when["rrule"].splitlines() if not x.startswith("DTSTART"))
    described = ", ".join(f"{name} {value}" for name, value in when.items())
    return {"when": described, "active": schedule.active, "parameters": schedule.parameters}


def _get_key(schedule: AnySchedule) -> str:
    """Its slug; one that was made in the UI has none."""
    return schedule.slug or str(getattr(schedule, "id", ""))


def _find_applied(there: DeploymentResponse) -> Settings:
    """What the file said when it was last applied, hashed; empty where that is not known."""
    applied = (there.parameter_openapi_schema or {}).get(APPLIED)
    if not isinstance(applied, dict):
        return {}
    return {name: value for name, value in applied.items() if is_hashed(value)}


def _read_form(deployment: RunnerDeployment) -> dict[str, Any]:
    return deployment._parameter_openapi_schema.model_dump(exclude_unset=True)


def _set_form(deployment: RunnerDeployment, form: Mapping[str, Any], applied: Settings) -> None:
    deployment._parameter_openapi_schema = FormSchema(**{**form, APPLIED: applied})


def _leave_to_server(deployment: RunnerDeployment, *, but: Settings | None = None) -> None:
    """Have the next registration send nothing that a person can edit, but these settings."""
    deployment.schedules = None  # not even unset ones are left out
    for name in _EDITABLE:
        deployment.model_fields_set.discard(name)  # Prefect sends what is set
    for name, value in (but or {}).items():
        setattr(deployment, name, value)


def _show(value: Any) -> str:
    return "nothing" if value is ABSENT else json.dumps(value, ensure_ascii=False)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
