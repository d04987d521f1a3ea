"""Registering a deployment again: what was edited on the server stays, what changed in the file arrives."""

import asyncio
import re
from copy import deepcopy
from uuid import uuid4

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.deployments.runner import RunnerDeployment

from deployments.definitions import read_group
from deployments.errors import PrefectFileError
from deployments.registration import APPLIED, register

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_url")]

SETTINGS = {"server": {"mode": "connect", "base_urls": ["http://127.0.0.1:1"]}, "datasets": ["B1_glaive"]}
NIGHTLY = {"slug": "nightly", "cron": "0 1 * * *", "timezone": "UTC", "active": False}


class Deployed:
    """A deployment of a prefect.yaml of its own, and what the server has of it."""

    def __init__(self, path):
        self.path = path
        self.name = f"test-{uuid4().hex[:8]}"
        self.entry = {
            "name": self.name,
            "description": "as written",
            "entrypoint": "flows.pipeline.generate_drafter_data",
            "tags": ["file"],
            "parameters": {"parameters": deepcopy(SETTINGS)},
            "work_pool": {"name": "pipeline"},
            "schedules": [dict(NIGHTLY)],
        }

    @property
    def settings(self):
        """The run's parameters in the file."""
        return self.entry["parameters"]["parameters"]

    def read_file(self) -> RunnerDeployment:
        """As a serving process reads it."""
        self.path.write_text(yaml.safe_dump({"deployments": [self.entry]}))
        return read_group("pipeline", self.path)[0]

    def register(self, *, reset=False):
        """As at the start of `draftmill up`."""

        async def run():
            async with get_client() as client:
                return await register(client, self.read_file(), reset=reset)

        return asyncio.run(run())

    @property
    def there(self):
        """What the server has."""
        with get_client(sync_client=True) as client:
            return client.read_deployment_by_name(f"generate-drafter-data/{self.name}")

    def edit(self, **fields):
        """What Edit in the UI does."""
        with get_client(sync_client=True) as client:
            client._client.patch(f"/deployments/{self.there.id}", json=fields).raise_for_status()

    def edit_settings(self, **changed):
        """Of the run's parameters."""
        self.edit(parameters={"parameters": {**self.there.parameters["parameters"], **changed}})

    def edit_schedule(self, slug, **fields):
        """What a schedule's switch and its form in the UI do."""
        [schedule] = [schedule for schedule in self.there.schedules if schedule.slug == slug]
        with get_client(sync_client=True) as client:
            client.update_deployment_schedule(self.there.id, schedule.id, **fields)

    @property
    def schedules(self):
        """What the server has of them: slug, cron, active."""
        return {(s.slug, s.schedule.cron, s.active) for s in self.there.schedules}


@pytest.fixture
def deployed(tmp_path):
    """It is registered once."""
    deployed = Deployed(tmp_path / "prefect.yaml")
    deployed.register()
    return deployed


def test_what_was_edited_stays_and_is_named(deployed):
    """Everything that the UI can edit; a serving process that starts again says it not again."""
    deployed.edit_settings(max_tokens_per_dataset=5)
    deployed.edit(
        tags=["mine"],
        description="edited",
        job_variables={"env": {"A": "b"}},
        concurrency_limit=3,
        enforce_parameter_schema=False,
        paused=True,
    )
    deployed.edit_schedule("nightly", active=True)
    before = deployed.there
    registration = deployed.register()
    there = deployed.there
    assert there.parameters["parameters"] == {**SETTINGS, "max_tokens_per_dataset": 5}
    assert (there.tags, there.description, there.paused) == (["mine"], "edited", True)
    assert (there.job_variables, there.enforce_parameter_schema) == ({"env": {"A": "b"}}, False)
    assert there.global_concurrency_limit.limit == 3
    assert deployed.schedules == {("nightly", "0 1 * * *", True)}
    assert there.parameter_openapi_schema == before.parameter_openapi_schema
    [line] = registration.describe_kept()
    assert deployed.name in line
    for fact in (
        "max_tokens_per_dataset = 5",
        'tags = ["mine"]',
        '"edited"',
        "nightly.active = true",
        "--reset",
    ):
        assert fact in line
    assert registration.describe_changes() == []


def test_only_what_changed_in_the_file_arrives(deployed):
    """Beside an edit in the same object; over an edit of the same key, whose value is said."""
    deployed.edit_settings(max_tokens_per_dataset=5, budget_policy="drain")
    deployed.edit(tags=["mine"])
    deployed.settings["datasets"] = ["B6_ultrachat"]
    deployed.settings["max_tokens_per_dataset"] = 7
    registration = deployed.register()
    assert deployed.there.tags == ["mine"]
    assert deployed.there.parameters["parameters"] == {
        **SETTINGS,
        "datasets": ["B6_ultrachat"],
        "max_tokens_per_dataset": 7,
        "budget_policy": "drain",
    }
    [line] = registration.describe_changes()
    assert "max_tokens_per_dataset = 7 (was 5)" in line
    assert "budget_policy" not in line


def test_what_was_removed_stays_removed(deployed):
    """A parameter and a schedule; and a schedule that was added stays."""
    deployed.edit(parameters={"parameters": {"server": SETTINGS["server"]}})
    with get_client(sync_client=True) as client:
        [schedule] = deployed.there.schedules
        client.delete_deployment_schedule(deployed.there.id, schedule.id)
        added = {"schedule": {"cron": "0 5 * * *"}, "active": True}
        client._client.post(f"/deployments/{deployed.there.id}/schedules", json=[added]).raise_for_status()
    deployed.register()
    assert deployed.there.parameters["parameters"] == {"server": SETTINGS["server"]}
    assert deployed.schedules == {(None, "0 5 * * *", True)}


def test_schedules_follow_the_file_but_stay_turned_on(deployed):
    """A changed time arrives, a new schedule too, and one that left the file goes."""
    deployed.edit_schedule("nightly", active=True)
    weekly = {"slug": "weekly", "cron": "0 2 * * 0", "timezone": "UTC", "active": False}
    deployed.entry["schedules"] = [{**NIGHTLY, "cron": "0 3 * * *"}, weekly]
    deployed.register()
    assert deployed.schedules == {("nightly", "0 3 * * *", True), ("weekly", "0 2 * * 0", False)}
    deployed.entry["schedules"] = [weekly]
    deployed.register()
    assert deployed.schedules == {("weekly", "0 2 * * 0", False)}


@pytest.mark.parametrize(
    "schedule",
    [
        {"interval": 3600},
        {"rrule": "FREQ=DAILY;INTERVAL=2", "slug": "second-day"},
        {"cron": "0 1 * * *", "parameters": {"parameters": SETTINGS}},
    ],
)
def test_a_schedule_of_any_kind_is_taken_once(deployed, schedule):
    """It is the same at the next start, with or without a slug of its own."""
    deployed.entry["schedules"] = [schedule]
    deployed.register()
    [before] = deployed.there.schedules
    registration = deployed.register()
    assert deployed.there.schedules == [before]
    assert registration.describe_kept() == registration.describe_changes() == []


@pytest.mark.parametrize("applied", [None, "damaged", {"parameters": 5, "tags": {"a": None}}])
def test_with_nothing_to_compare_with_the_server_has_it(deployed, applied):
    """After `prefect deploy`, an older draftmill or damage; what changes in the file from then on arrives."""
    schema = {**deployed.there.parameter_openapi_schema, APPLIED: applied}
    deployed.edit(parameter_openapi_schema=schema, tags=["mine"])
    deployed.settings["max_tokens_per_dataset"] = 7
    [line] = deployed.register().describe_kept()
    assert "is not known" in line
    assert "max_tokens_per_dataset = nothing (prefect.yaml: 7)" in line
    assert deployed.there.parameters["parameters"] == SETTINGS
    assert deployed.there.tags == ["mine"]
    deployed.settings["max_tokens_per_dataset"] = 8
    deployed.register()
    assert deployed.there.parameters["parameters"] == {**SETTINGS, "max_tokens_per_dataset": 8}
    assert deployed.there.tags == ["mine"]


def test_parameters_that_this_version_refuses_are_kept_and_named(deployed):
    """With the older form that they belong to; the rest arrives, and so do the parameters once they can."""
    older = deepcopy(deployed.there.parameter_openapi_schema)
    older["definitions"]["RunParameters"]["properties"]["old_field"] = {"type": "integer"}
    edited = {**SETTINGS, "old_field": 1}
    deployed.edit(parameter_openapi_schema=older, parameters={"parameters": edited})
    deployed.entry["tags"] = ["new"]
    deployed.settings["max_tokens_per_dataset"] = 7
    for _ in range(2):
        registration = deployed.register()
        assert "'old_field' was unexpected" in registration.refusal
        assert deployed.there.parameters["parameters"] == edited
        assert deployed.there.tags == ["new"]
    [line] = registration.describe_changes()
    assert deployed.name in line
    assert "draftmill up --reset" in line
    deployed.edit_settings(old_field=None)
    deployed.edit(parameters={"parameters": {**SETTINGS, "max_samples": 3}})
    registration = deployed.register()
    assert registration.refusal is None
    assert deployed.there.parameters["parameters"] == {
        **SETTINGS,
        "max_samples": 3,
        "max_tokens_per_dataset": 7,
    }
    fields = deployed.there.parameter_openapi_schema["definitions"]["RunParameters"]["properties"]
    assert "old_field" not in fields


def test_reset_takes_the_file_and_says_what_it_replaced(deployed):
    """In full, so that it can be put back."""
    deployed.edit_settings(output_dir="d" * 500)
    deployed.edit(tags=["mine"], description="")
    deployed.edit_schedule("nightly", active=True)
    [line] = deployed.register(reset=True).describe_changes()
    there = deployed.there
    assert there.parameters["parameters"] == SETTINGS
    assert (there.tags, there.description) == (["file"], "as written")
    assert deployed.schedules == {("nightly", "0 1 * * *", False)}
    assert "d" * 500 in line
    assert "active = false (was true)" in line


@pytest.mark.parametrize("is_new", [True, False])
def test_a_file_that_the_server_refuses_is_said(deployed, is_new):
    """With the deployment and the value; nothing of it is applied."""
    deployed.settings["max_tokens_per_dataset"] = "many"
    deployed.entry["schedules"] = []
    if is_new:
        deployed.entry["name"] = deployed.name = f"test-{uuid4().hex[:8]}"
    with pytest.raises(PrefectFileError) as refused:
        deployed.register(reset=True)
    assert deployed.name in str(refused.value)
    assert "max_tokens_per_dataset" in str(refused.value)
    assert "'many'" in str(refused.value)
    if not is_new:
        assert deployed.schedules == {("nightly", "0 1 * * *", False)}


def test_what_is_edited_after_registering_stays_when_it_is_served(deployed):
    """Serving registers once more."""
    deployed.settings["max_tokens_per_dataset"] = 7

    async def register_and_serve():
        async with get_client() as client:
            deployment = deployed.read_file()
            await register(client, deployment)
        await asyncio.to_thread(deployed.edit, tags=["mine"], parameters={"parameters": SETTINGS})
        await deployment.aapply()

    asyncio.run(register_and_serve())
    assert deployed.there.tags == ["mine"]
    assert deployed.there.parameters["parameters"] == SETTINGS
    assert deployed.schedules == {("nightly", "0 1 * * *", False)}


def test_a_prefect_file_that_is_no_yaml_is_named(tmp_path):
    """With its path."""
    path = tmp_path / "prefect.yaml"
    path.write_text("deployments: [")
    with pytest.raises(PrefectFileError, match=re.escape(str(path))):
        read_group("pipeline", path)
