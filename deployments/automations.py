"""The automation that ships with the deployments."""

from pathlib import Path

import yaml
from prefect.client.orchestration import PrefectClient
from prefect.events.schemas.automations import AutomationCore

ZOMBIE_RUNS = Path(__file__).with_name("zombie-runs.yaml")


async def ensure_automation(client: PrefectClient, file: Path = ZOMBIE_RUNS) -> None:
    """Create the automation of a file; one of its name that is there already stays as it is."""
    automation = _read(file)
    if not await client.read_automations_by_name(automation.name):
        await client.create_automation(automation)


def _read(file: Path) -> AutomationCore:
    return AutomationCore.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
