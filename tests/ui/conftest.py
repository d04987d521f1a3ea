"""A browser for the tests that look at Prefect's UI."""

import pytest
from prefect_ui import PrefectUI


@pytest.fixture
def open_ui():
    """Open the UI of a server: `open_ui(url)`; it fails where there is no Chromium."""
    opened = []

    def open_at(url):
        ui = PrefectUI(url)
        ui.start()
        opened.append(ui)
        return ui

    yield open_at
    for ui in opened:
        ui.close()
