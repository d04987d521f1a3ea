"""prefect.yaml deploys on a real server, and its form knows every parameter."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

pytestmark = pytest.mark.prefect

ROOT = Path(__file__).parents[2]


def _prefect(*argv):
    command = [sys.executable, "-m", "prefect", "--no-prompt", *argv]
    env = {**os.environ, "DRAFTMILL_HOME": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def _read_deployment(name):
    async with get_client() as client:
        return await client.read_deployment_by_name(name)


@pytest.fixture(scope="module")
def deployed(prefect_url):
    """Everything in prefect.yaml."""
    _prefect("work-pool", "create", "pipeline", "--type", "process", "--overwrite")
    _prefect("deploy", "--all")


@pytest.mark.usefixtures("deployed")
@pytest.mark.parametrize("name", ["generate-drafter-data/pipeline", "generate-dataset/dataset"])
def test_a_flow_is_deployed_with_its_form(name):
    """`prefect deploy --all` works, and the form has a sentence for each parameter."""
    deployment = asyncio.run(_read_deployment(name))
    definitions = deployment.parameter_openapi_schema["definitions"]
    fields = definitions["RunParameters"]["properties"]
    assert fields["max_tokens_per_dataset"]["description"].startswith("Budget of completion tokens")
    assert definitions["RunParameters"]["additionalProperties"] is False
    assert [name for name, field in fields.items() if not field.get("description")] == []
