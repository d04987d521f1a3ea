"""A headless Chromium with one page, and how to wait for what it shows.

Knows nothing of Prefect. Invariant: nothing here waits for a fixed time; what does not come within the
generous limit is a TimeoutError that tells what was there instead.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from playwright.sync_api import Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
TIMEOUT_S = 180.0
WIDTH, HEIGHT = 1400, 900
_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_RELOAD_EVERY_S = 10.0
_STILL_S = 0.6  # a page whose text stays the same for so long has settled
_STILL_WITHIN_S = 20.0  # pages with a clock never do

T = TypeVar("T")


class Screen:
    """The browser, from start() to close()."""

    page: Page

    def __init__(self, *, chromium: Path, timeout_s: float) -> None:
        self._chromium = chromium
        self._timeout_s = timeout_s

    def start(self) -> None:
        """Start the browser with an empty profile.

        Raises:
            RuntimeError: there is no Chromium.
        """
        if not self._chromium.exists():
            raise RuntimeError(f"no browser at {self._chromium}: apt-get install chromium")
        self._playwright = sync_playwright().start()
        try:
            self._browser = self._playwright.chromium.launch(
                executable_path=self._chromium, args=_FLAGS, timeout=self._timeout_s * 1000
            )
            self.page = self._browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        except BaseException:
            self._playwright.stop()
            raise
        self.page.set_default_timeout(self._timeout_s * 1000)

    def close(self) -> None:
        """End the browser."""
        self._browser.close()
        self._playwright.stop()

    def goto(self, url: str) -> None:
        """Load a page and wait until it has settled."""
        self.page.goto(url)
        self.settle()

    def reload(self) -> None:
        """Load the same page again and wait until it has settled."""
        self.page.reload()
        self.settle()

    def settle(self) -> None:
        """Wait until the page shows a text, and the same one for a moment."""
        deadline, seen, since = time.monotonic() + _STILL_WITHIN_S, "", time.monotonic()
        while time.monotonic() < deadline:
            text = self.text()
            if text != seen:
                seen, since = text, time.monotonic()
            elif text and time.monotonic() - since >= _STILL_S:
                return
            self.page.wait_for_timeout(200)

    def text(self) -> str:
        """All that the page shows."""
        return self.page.locator("body").inner_text().strip()

    def wait(
        self,
        what: str,
        look: Callable[[], T | None],
        *,
        timeout_s: float | None = None,
        reload: bool = True,
    ) -> T:
        """What `look` finds; the page is loaded again every few seconds meanwhile.

        Raises:
            TimeoutError: it found nothing.
        """
        deadline = time.monotonic() + (timeout_s or self._timeout_s)
        loaded = time.monotonic()
        while not (found := look()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not on the page: {what}; {self.page.url} shows\n{self.text()}")
            if reload and time.monotonic() - loaded > _RELOAD_EVERY_S:
                self.reload()
                loaded = time.monotonic()
            self.page.wait_for_timeout(300)
        return found

    def pick_from_menu(self, text: str) -> None:
        """Click an entry of the menu that is open."""
        menu = self.page.locator(".p-pop-over-content").filter(visible=True)
        menu.get_by_text(text, exact=True).last.click()
