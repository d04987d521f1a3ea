"""The flows that count and export a run's folder by themselves, in a process of their own."""

import asyncio
import json
import subprocess
import sys

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from tasks.records.folder_lock import RUN_LOCK, hold_folder_lock
from tasks.records.run_file import update_run_file

pytestmark = pytest.mark.prefect

RUN_FLOWS = """
import asyncio, json, sys
from flows.export import export_run_data
from flows.stats import aggregate_run_stats
flows = {"stats": aggregate_run_stats, "export": export_run_data}
async def main():
    for name, parameters in json.loads(sys.argv[1]):
        state = await flows[name](**parameters, return_state=True)
        print(json.dumps([str(state.state_details.flow_run_id), state.type, state.message]))
asyncio.run(main())
"""


def _run_flows(runner, *calls):
    """Run flows one after the other; gives each one's run id, state and message."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_FLOWS, json.dumps(calls)],
        cwd=runner.folder, env=runner.env, text=True, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def _read_artifacts(flow_run_id):
    async with get_client() as client:
        return await client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        )


def test_a_run_is_counted_and_exported_by_itself(runner, fake_server):
    """Counted while a run holds the folder, with a table in the UI; exported with a split of its own."""
    runner.raw["server"]["base_urls"] = [fake_server()]
    runner.add_dataset("a", prompts=30)
    assert runner.run("--max-tokens-per-dataset", "300").returncode == 0
    rows = len(runner.rows("a"))
    (runner.output_dir / "stats.json").unlink()
    folder = {"output_dir": str(runner.output_dir)}
    with hold_folder_lock(runner.output_dir, RUN_LOCK):
        counted, exported = _run_flows(runner, ("stats", folder), ("export", folder | {"eval_fraction": 0.5}))
    assert (counted[1], exported[1]) == ("COMPLETED", "COMPLETED")
    artifacts = {one.type: one for one in asyncio.run(_read_artifacts(counted[0]))}
    assert set(artifacts) == {"table", "markdown"}
    table = artifacts["table"]
    assert [(line["dataset"], line["answers"]) for line in json.loads(table.data)] == [
        ("a", str(rows)),
        ("total", str(rows)),
    ]
    stats = json.loads((runner.output_dir / "stats.json").read_text())
    assert (stats["total"]["rows"], stats["total"]["status"]) == (rows, "complete")
    manifest = json.loads((runner.output_dir / "export" / "manifest.json").read_text())
    assert manifest["split_by"]["eval_fraction"] == 0.5
    assert manifest["total"]["rows"] == rows


def test_what_cannot_be_counted_or_exported_is_said_in_one_sentence(runner):
    """The command line's own, without a traceback, and a folder that is not there is not made."""
    details = {"datasets": {"a": {"budget_tokens": 5}}}
    update_run_file(runner.output_dir, fingerprint={"seed": 0}, details=details, now="now")
    nowhere = {"output_dir": str(runner.folder / "nowhere")}
    *refused, unfinished = _run_flows(
        runner, ("stats", nowhere), ("export", nowhere), ("export", {"output_dir": str(runner.output_dir)})
    )
    for _, state, message in refused:
        assert state == "FAILED"
        assert f"RunFolderError: {nowhere['output_dir']!r} is not the folder of a run" in message
    assert unfinished[1] == "FAILED"
    assert f"ExportError: {runner.output_dir}: no dataset has an answer yet" in unfinished[2]
    assert not (runner.folder / "nowhere").exists()
