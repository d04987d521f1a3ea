"""Prefect's UI (the older one, 3.9.1) as a person uses it: pages opened, buttons clicked, text read.

Knows the pages; knows no flow, no deployment and no API. Invariant: what it tells was on the screen, and
what it changes was clicked or typed. A page may lag behind the server by some seconds, so what waits for a
state loads the page again now and then.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Locator, Page
from run_form import RunForm
from screen import CHROMIUM, HEIGHT, TIMEOUT_S, WIDTH, Screen


@dataclass(frozen=True, slots=True)
class RunRow:
    """One line of a list of flow runs."""

    run_id: str
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class ArtifactCard:
    """One card of a run's Artifacts tab."""

    artifact_id: str
    key: str
    kind: str
    description: str


class PrefectUI:
    """A browser on the UI (or API) at `url`; use it as a context manager."""

    def __init__(self, url: str, *, chromium: Path = CHROMIUM, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url.rstrip("/").removesuffix("/api")
        self._screen = Screen(chromium=chromium, timeout_s=timeout_s)

    def __enter__(self) -> "PrefectUI":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def page(self) -> Page:
        """Playwright's page, for what is not here."""
        return self._screen.page

    def start(self) -> None:
        """Start the browser; RuntimeError names what to install where there is none."""
        self._screen.start()

    def close(self) -> None:
        """End the browser."""
        self._screen.close()

    def screenshot(self, path: Path | str, *, height: int = HEIGHT) -> None:
        """Save what is on the screen once it has settled; on a higher screen if asked."""
        self.page.set_viewport_size({"width": WIDTH, "height": height})
        self._screen.settle()
        self.page.screenshot(path=path)
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})

    # A deployment

    def open_deployment(self, name: str) -> None:
        """Open the deployment `flow/name` from the list of deployments."""
        flow, deployment = name.split("/")
        self._screen.goto(f"{self._url}/deployments")
        rows = self.page.locator("tr").filter(has=self.page.get_by_text(flow, exact=True))
        rows.get_by_role("link", name=deployment, exact=True).click()
        self.page.get_by_role("button", name="Run", exact=True).wait_for()

    def start_custom_run(self) -> RunForm:
        """Run > Custom run."""
        self.page.get_by_role("button", name="Run", exact=True).click()
        self._screen.pick_from_menu("Custom run")
        return RunForm(self._screen)

    # A flow run

    def open_run(self, run_id: str) -> None:
        """Open a flow run's page."""
        self._screen.goto(f"{self._url}/runs/flow-run/{run_id}")
        self._badge().wait_for()

    def refresh(self) -> None:
        """Load the page again."""
        self._screen.reload()

    def read_state(self) -> str:
        """What the run's badge says; it may be some seconds old."""
        return self._badge().inner_text().strip()

    def wait_for_state(self, *states: str, timeout_s: float | None = None) -> str:
        """Watch the run until its badge says one of these."""
        return self._screen.wait(
            f"state {' or '.join(states)}",
            lambda: state if (state := self.read_state()) in states else None,
            timeout_s=timeout_s,
        )

    def read_subflows(self) -> dict[str, RunRow]:
        """The Subflow Runs tab by name (its first page: 10 runs)."""
        content = self.open_tab("Subflow Runs")
        self._screen.settle()
        rows = [_read_row(row) for row in content.locator(".flow-run-list-item").all()]
        return {row.name: row for row in rows}

    def wait_for_subflows(
        self, states: Mapping[str, str], timeout_s: float | None = None
    ) -> dict[str, RunRow]:
        """Watch the Subflow Runs tab until the runs of these names are in these states."""

        def look() -> dict[str, RunRow] | None:
            rows = self.read_subflows()
            return rows if states.items() <= {(row.name, row.state) for row in rows.values()} else None

        return self._screen.wait(f"subflows {dict(states)}", look, timeout_s=timeout_s)

    def open_subflow(self, name: str) -> str:
        """Click a run of the Subflow Runs tab; its id."""
        link = self._wait_in_tab("Subflow Runs", ".flow-run-bread-crumbs__flow-run-link", name)
        run_id = _last_part(link)
        link.click()
        self.page.wait_for_url(f"**/{run_id}**")
        self._screen.settle()
        return run_id

    def retry(self) -> None:
        """Click Retry and confirm; returns when the run has left the state that it was in."""
        self._click_and_confirm("Retry")

    def cancel(self, *, subflows: bool = False) -> None:
        """Click Cancel, tick "Cancel all sub flow runs" if asked, and confirm."""
        self._click_and_confirm("Cancel", tick=subflows)

    def read_message(self) -> str:
        """The state's message (Details tab) in full; it is cut at 70 characters until it is clicked."""
        label = self.page.get_by_text("State Message", exact=True)
        message = self.open_tab("Details").locator(".p-key-value").filter(has=label)
        more = message.get_by_text("See More", exact=True)
        if more.count():
            more.click()
        return message.locator("> :last-child").inner_text().removesuffix("See Less").strip()

    def read_logs(self) -> str:
        """The Logs tab's text."""
        content = self.open_tab("Logs")
        self._screen.settle()
        return content.inner_text()

    def open_tab(self, name: str) -> Locator:
        """Click a tab of the run's page; its content. A run that waits to start has only some tabs."""
        tab = self.page.locator(".p-tab").get_by_text(name, exact=True)
        self._screen.wait(f"tab {name}", tab.count)
        tab.click()
        content = self.page.locator(f"#{name.lower().replace(' ', '-')}-content")
        content.wait_for()
        return content

    # The artifacts of the run that is on the screen

    def read_artifacts(self) -> list[ArtifactCard]:
        """The Artifacts tab, newest first; a run that was retried has each key twice."""
        content = self.open_tab("Artifacts")
        self._screen.settle()
        return [_read_card(card) for card in content.locator("a:has(.artifact-card)").all()]

    def open_artifact(self, key: str) -> None:
        """Click the newest artifact of this key."""
        self._wait_in_tab("Artifacts", "a:has(.artifact-card) .artifact-card__title", key).click()
        self.page.locator(".artifact-data-view").wait_for()

    def read_progress(self) -> float:
        """The percentage on a progress artifact's page, loaded again: it does not follow by itself."""
        self._screen.reload()
        shown = self.page.locator(".artifact-data-progress").inner_text()
        return float(re.sub(r"[^\d.]", "", shown))

    def read_table(self) -> list[dict[str, str]]:
        """The rows on a table artifact's page; cells are Markdown there, so "-" is a bullet and no text."""
        self._screen.reload()
        table = self.page.locator(".artifact-data-table table")
        names = [name.strip() for name in table.locator("thead th").all_inner_texts()]
        rows = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
        return [dict(zip(names, map(str.strip, row), strict=True)) for row in rows]

    def _badge(self) -> Locator:
        return self.page.locator(".page-heading-flow-run .state-badge")

    def _wait_in_tab(self, tab: str, selector: str, text: str) -> Locator:
        """The first element of the tab with this text, once there is one."""
        exactly = re.compile(rf"^\s*{re.escape(text)}\s*$")
        found = self.page.locator(selector).filter(has_text=exactly)
        self._screen.wait(f"{text} in {tab}", lambda: self.open_tab(tab) and found.count())
        return found.first

    def _click_and_confirm(self, name: str, *, tick: bool = False) -> None:
        button = self.page.locator(".page-heading").get_by_role("button", name=name, exact=True)
        self._screen.wait(f"button {name}", button.count)
        before = self.read_state()
        button.click()
        dialog = self.page.get_by_role("dialog")
        if tick:
            dialog.get_by_role("checkbox").click()
        dialog.locator(".p-modal__footer button:not(.p-modal__close-button)").click()
        dialog.wait_for(state="detached")
        self._screen.wait(f"a state other than {before}", lambda: self.read_state() != before)


def _read_row(row: Locator) -> RunRow:
    link = row.locator(".flow-run-bread-crumbs__flow-run-link")
    return RunRow(
        _last_part(link), link.inner_text().strip(), row.locator(".state-badge").inner_text().strip()
    )


def _read_card(card: Locator) -> ArtifactCard:
    description = card.locator(".artifact-card__description")
    return ArtifactCard(
        artifact_id=_last_part(card),
        key=card.locator(".artifact-card__title").inner_text().strip(),
        kind=card.locator(".artifact-card__subheader").inner_text().strip().lower(),
        description=description.inner_text().strip() if description.count() else "",
    )


def _last_part(link: Locator) -> str:
    return (link.get_attribute("href") or "").rsplit("/", 1)[-1]
