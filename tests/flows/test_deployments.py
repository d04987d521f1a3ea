"""prefect.yaml deploys on a real server, and its form knows every parameter."""

import asyncio
import subprocess
import sys

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError
from served_support import ROOT, read_children, read_run, trigger, wait_for_end

pytestmark = pytest.mark.prefect


POOLS = ("pipeline", "datasets")
PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]


def _prefect(*argv):
    done = subprocess.run(
        [*PREFECT, *argv], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def _read_deployment(name):
    async with get_client() as client:
        return await client.read_deployment_by_name(name)


@pytest.fixture(scope="module")
def deployed(prefect_url):
    """Everything in prefect.yaml."""
    for pool in POOLS:
        _prefect("work-pool", "create", pool, "--type", "process", "--overwrite")
    _prefect("deploy", "--all")


@pytest.mark.usefixtures("deployed")
@pytest.mark.parametrize("name", ["generate-drafter-data/pipeline", "generate-dataset/dataset"])
def test_a_flow_is_deployed_with_its_form(name):
    """`prefect deploy --all` works, and the form knows the parameters of a run."""
    deployment = asyncio.run(_read_deployment(name))
    definitions = deployment.parameter_openapi_schema["definitions"]
    fields = definitions["RunParameters"]["properties"]
    assert fields["max_tokens_per_dataset"]["description"].startswith("Budget of completion tokens")
    assert definitions["RunParameters"]["additionalProperties"] is False
    assert "messages" in definitions["DatasetSettings"]["properties"]["adapter"]["enum"]


@pytest.mark.usefixtures("deployed")
@pytest.mark.parametrize(
    "name",
    [
        "generate-drafter-data/pipeline",
        "generate-drafter-data/demo",
        "generate-dataset/dataset",
        "aggregate-stats/stats",
        "export-drafter-data/export",
    ],
)
def test_a_form_has_a_sentence_for_each_parameter(name):
    """At the field itself, or at the section that it is; in every section too."""
    schema = asyncio.run(_read_deployment(name)).parameter_openapi_schema
    sections = schema.get("definitions", {})
    assert schema["properties"]
    for form in (schema, *sections.values()):
        assert _list_undescribed(form["properties"], sections) == []


def _list_undescribed(fields, sections):
    def describe(field):
        section = sections.get(field.get("$ref", "").rpartition("/")[2], {})
        return field.get("description") or section.get("description")

    return [name for name, field in fields.items() if not describe(field)]


@pytest.mark.usefixtures("deployed")
def test_the_form_of_an_export_knows_its_ranges():
    """A share that cannot be held out is refused before a worker takes the run."""
    deployment = asyncio.run(_read_deployment("export-drafter-data/export"))
    share = deployment.parameter_openapi_schema["properties"]["eval_fraction"]["anyOf"][0]
    assert (share["minimum"], share["exclusiveMaximum"]) == (0, 1)
    assert deployment.parameter_openapi_schema["required"] == ["output_dir"]
    with pytest.raises(PrefectHTTPStatusError, match=r"1\.5"):
        asyncio.run(_trigger(deployment.id, {"output_dir": "x", "eval_fraction": 1.5}))


async def _trigger(deployment_id, parameters):
    async with get_client() as client:
        return await client.create_flow_run_from_deployment(deployment_id, parameters=parameters)


@pytest.mark.usefixtures("deployed")
def test_the_nightly_schedule_waits_to_be_turned_on():
    """Deploying starts nothing."""
    [schedule] = asyncio.run(_read_deployment("generate-drafter-data/pipeline")).schedules
    assert (schedule.slug, schedule.schedule.cron, schedule.active) == ("nightly", "0 1 * * *", False)


@pytest.fixture
def workers(tmp_path):
    """A worker for each pool, on this machine."""
    started = []
    for pool in POOLS:
        with (tmp_path / f"worker-{pool}.log").open("wb") as log:
            argv = [*PREFECT, "worker", "start", "--pool", pool]
            started.append(subprocess.Popen(argv, cwd=tmp_path, stdout=log, stderr=log))
    yield
    for worker in started:
        worker.terminate()
    for worker in started:
        worker.wait(120)


@pytest.mark.usefixtures("deployed", "workers")
def test_workers_run_the_pipeline_and_its_datasets(runner, fake_server):
    """Each in its pool; the pipeline's run ends Completed with its data exported."""
    runner.raw["server"]["base_urls"] = [fake_server()]
    runner.add_dataset("a", prompts=30)
    runner.raw["datasets"][0]["source"] = str(runner.folder / "a.jsonl")
    run = trigger("generate-drafter-data/pipeline", {"parameters": runner.raw})
    assert wait_for_end(run).is_completed()
    assert len({row["id"] for row in runner.rows("a")}) == len(runner.rows("a")) == 30
    assert (runner.output_dir / "export" / "manifest.json").exists()
    [dataset] = read_children(run).values()
    assert (read_run(run).work_pool_name, dataset.work_pool_name) == POOLS
