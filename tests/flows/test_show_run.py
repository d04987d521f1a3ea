"""What the Prefect UI shows of a whole run, on a real Prefect server."""

import asyncio
import json
import subprocess
import sys

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.parameters import RunParameters
from flows.show_run import show_run
from tasks.artifacts import artifact_key, run_artifact_key

RUN = """
import asyncio, dataclasses, sys
import flows.dataset, flows.pipeline, tasks.artifacts, flows.show_run
from flows.parameters import RunParameters

tasks.artifacts.LAST_CALL_S = 120.0  # a busy machine is not what is tested
flows.show_run.SHOW_EVERY_S = 0.1
to_rules, update, updates = flows.dataset.to_generation_rules, tasks.artifacts._update, []
flows.dataset.to_generation_rules = lambda *a: dataclasses.replace(to_rules(*a), checkpoint_every_s=0.2)

async def count(artifact_id, data, description):
    updates.append(artifact_id)
    await update(artifact_id, data, description)

tasks.artifacts._update = count
parameters = RunParameters.model_validate_json(sys.argv[1])
asyncio.run(flows.pipeline.generate_drafter_data(parameters))
print(len(updates) - len(set(updates)))
"""


@pytest.mark.prefect
def test_a_run_leaves_one_bar_one_table_and_one_link(runner, fake_server):
    """They are updated in place, show the final figures and lead to the folder."""
    runner.raw["server"]["base_urls"] = [fake_server(tokens_per_s=60)]
    runner.raw["max_tokens_per_dataset"] = 1500
    runner.add_dataset("a")
    runner.add_dataset("b", prompts=10)
    parameters = RunParameters.model_validate(runner.raw).model_dump_json()
    done = subprocess.run(
        [sys.executable, "-c", RUN, parameters],
        cwd=runner.folder, env=runner.env, text=True, capture_output=True, timeout=300, check=True,
    )  # fmt: skip
    assert int(done.stdout.split()[-1]) > 2, "each was updated more than once"
    [bar], [table], [link] = (
        asyncio.run(_read(run_artifact_key(runner.output_dir, what)))
        for what in ("progress", "datasets", "report")
    )
    assert bar.type == "progress"
    of_b = sum(row["completion_tokens"] for row in runner.rows("b"))  # its ten prompts are no budget
    assert float(bar.data) == pytest.approx(100 * (1500 + of_b) / 3000, abs=0.01)
    assert "1 of 2 datasets done, 1 out of prompts" in bar.description
    assert {one.flow_run_id for one in (bar, table)} == {link.flow_run_id}
    # other tests' runs have a dataset of this name, on the same Prefect server
    prepared = max(asyncio.run(_read(artifact_key("prepare", "b"))), key=lambda one: one.created)
    counts = {row["what"]: row["count"] for row in json.loads(prepared.data)}
    assert (counts["rows read"], counts["prompts"], counts["short"], counts["long"]) == (10, 10, 10, 0)
    a, b, total = json.loads(table.data)
    rows = {name: runner.rows(name) for name in ("a", "b")}
    for shown, name, state in ((a, "a", "done"), (b, "b", "out of prompts")):
        assert (shown["dataset"], shown["state"]) == (name, state)
        assert shown["answers"] == str(len(rows[name]))
    tokens = sum(row["completion_tokens"] for row in (*rows["a"], *rows["b"]))
    assert total["completion tokens"] == f"{tokens:,}"
    assert str(runner.output_dir / "report.html") in link.data
    for one in (bar, table, link):
        assert str(runner.output_dir) in one.description


async def _read(key):
    async with get_client() as client:
        return await client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))


def test_nothing_is_shown_outside_a_flow_run(tmp_path, monkeypatch):
    """The block runs, and no one asks Prefect's server, which may not be there."""
    target = "flows.show_run.show_beside"
    monkeypatch.setattr(target, lambda *_, **__: pytest.fail("there is no run"))

    async def enter():
        async with show_run(tmp_path, []):
            return "inside"

    assert asyncio.run(enter()) == "inside"
