"""`draftmill up`, and then everything by mouse: a run started, watched, mended and retried in Prefect's UI.

DRAFTMILL_SCREENSHOTS names a folder for the pictures (docs/images holds them).
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from run_support import DRAFTMILL

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo"
PATIENCE_S = 1200
DEPLOYMENTS = 5
pytestmark = [pytest.mark.ui, pytest.mark.timeout(3600)]


@pytest.fixture
def url(tmp_path):
    """The UI of a server that `draftmill up` starts, in a home of its own; it ends with exit 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PREFECT_HOME": str(tmp_path / "home")}
    env.pop("PREFECT_API_URL", None)
    with (tmp_path / "up.log").open("wb") as log:
        argv = [*DRAFTMILL, "up", "--port", str(port)]
        process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while count_deployments(url) < DEPLOYMENTS:
            assert process.poll() is None, (tmp_path / "up.log").read_text()
            assert time.monotonic() < deadline, "draftmill up did not start"
            time.sleep(0.5)
        assert f"watch, start and retry runs at {url}" in (tmp_path / "up.log").read_text()
        yield url
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def count_deployments(url):
    """Those that are there already."""
    try:
        return int(httpx.post(f"{url}/api/deployments/count", json={}, trust_env=False).text)
    except (httpx.HTTPError, ValueError):
        return 0


@pytest.fixture
def pictures(tmp_path):
    """Where the screenshots go."""
    folder = Path(os.environ.get("DRAFTMILL_SCREENSHOTS", tmp_path)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def output_dir():
    """Short enough to be read in a picture."""
    with tempfile.TemporaryDirectory(prefix="draftmill-") as folder:
        yield Path(folder) / "data"


@pytest.fixture
def sources(tmp_path):
    """Copies of the demo's prompts; those of the second dataset cannot be read."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for path in DEMO.glob("*.jsonl"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "opencodeinstruct.jsonl").write_text("<html>502 Bad Gateway</html>\n")
    return folder


def make_datasets(sources):
    """Three small datasets, as a person types them into the form."""
    means = {"B1_glaive": 60, "B2_opencodeinstruct": 100, "B6_ultrachat": 60}
    return [
        {
            "name": name,
            "source": str(sources / f"{kind}.jsonl"),
            "adapter": kind,
            "budget_tokens": 1200,
            "expected_mean_tokens": mean,
        }
        for name, mean in means.items()
        if (kind := name.split("_")[1])
    ]


def test_a_failed_dataset_is_mended_and_retried_by_mouse(url, open_ui, pictures, sources, output_dir):
    """Started with other parameters; one dataset fails and the rest goes on; its retry, then its parent's."""
    ui = open_ui(url)
    ui.open_deployment("generate-drafter-data/demo")
    form = ui.start_custom_run()
    form.set("parameters.output_dir", str(output_dir))
    form.set("parameters.datasets", make_datasets(sources))
    form.set("parameters.lanes.short.max_new_tokens", 128)
    form.set("parameters.lanes.concurrency", "auto")
    form.show("parameters.lanes.concurrency")
    ui.screenshot(pictures / "form.png", height=1100)
    parent = form.submit()

    ui.wait_for_subflows({"generate-B2_opencodeinstruct": "Failed"}, timeout_s=PATIENCE_S)
    ui.screenshot(pictures / "running.png", height=1100)
    watch_progress(ui, parent, pictures)
    ui.open_run(parent)
    assert ui.wait_for_state("Failed", timeout_s=PATIENCE_S) == "Failed"
    rows = ui.read_subflows()
    assert {name: row.state for name, row in rows.items()} == {
        "generate-B1_glaive": "Completed",
        "generate-B2_opencodeinstruct": "Failed",
        "generate-B6_ultrachat": "Completed",
    }
    assert "B2_opencodeinstruct" in ui.read_message()
    ui.read_subflows()
    ui.screenshot(pictures / "one-failed.png", height=1100)

    ui.open_subflow("generate-B2_opencodeinstruct")
    assert "opencodeinstruct.jsonl" in ui.read_message()
    ui.screenshot(pictures / "why.png")
    (sources / "opencodeinstruct.jsonl").write_bytes((DEMO / "opencodeinstruct.jsonl").read_bytes())
    ui.retry()
    assert ui.wait_for_state("Completed", timeout_s=PATIENCE_S) == "Completed"
    before = {path: path.read_bytes() for path in output_dir.glob("*/raw_responses.jsonl")}
    assert len(before) == 3

    ui.open_run(parent)
    ui.retry()
    assert ui.wait_for_state("Completed", timeout_s=PATIENCE_S) == "Completed"
    after = ui.read_subflows()
    assert {row.state for row in after.values()} == {"Completed"}
    assert {row.run_id for row in after.values()} == {row.run_id for row in rows.values()}
    ui.screenshot(pictures / "completed.png", height=1100)
    assert {path: path.read_bytes() for path in before} == before
    manifest = json.loads((output_dir / "export" / "manifest.json").read_text())
    assert manifest["total"]["rows"] == sum(log.count(b"\n") for log in before.values())


def watch_progress(ui, parent, pictures):
    """See the bar of the whole run move, and its table."""
    ui.open_run(parent)
    cards = {card.kind.lower(): card for card in ui.read_artifacts()}
    ui.open_artifact(cards["progress"].key)
    seen = [ui.read_progress()]
    deadline = time.monotonic() + PATIENCE_S
    while seen[-1] <= max(seen[0], 20):
        assert time.monotonic() < deadline, seen
        time.sleep(2)
        seen.append(ui.read_progress())
    ui.screenshot(pictures / "progress.png")
    ui.open_run(parent)
    ui.read_artifacts()
    ui.open_artifact(cards["table"].key)
    table = ui.read_table()
    assert [row["dataset"] for row in table][:3] == ["B1_glaive", "B2_opencodeinstruct", "B6_ultrachat"]
    ui.screenshot(pictures / "table.png")
