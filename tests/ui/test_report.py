"""report.html in a real browser: it shows what it should in light and dark, and asks nobody for anything.

DRAFTMILL_SCREENSHOTS names a folder for the pictures.
"""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from screen import CHROMIUM

from tasks.aggregate.report import write_report
from tasks.aggregate.run_stats import collect_stats, read_plans
from tasks.records.rows import Rejected, Response
from tasks.records.run_file import update_run_file

pytestmark = pytest.mark.ui
NAMES = ("B1_glaive", "B2_<img src=x onerror=document.title='x'>")


@pytest.fixture
def report(tmp_path):
    """Of two datasets, one at its budget and one with answers that were cut off; a night is between."""
    plans = {name: {"budget_tokens": budget} for name, budget in zip(NAMES, (20_000, 90_000), strict=True)}
    update_run_file(tmp_path, fingerprint={"model": "org/model"}, details={"plans": plans}, now="now")
    for name, reason in zip(NAMES, ("stop", "length"), strict=True):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        lines = [answer(number, reason) for number in range(60)]
        (folder / "raw_responses.jsonl").write_bytes(b"".join(lines))
        refused = Rejected("p", "http_500", f"<b>{name}</b>", permanent=False, stage="generate")
        (folder / "rejected.jsonl").write_bytes(refused.to_line())
    now = datetime.fromtimestamp(finished_s(60), UTC)
    return write_report(tmp_path, collect_stats(tmp_path, read_plans(tmp_path)), now=now)


def finished_s(number):
    return 1_800_000_000 + 9 * number + (30_000 if number >= 30 else 0)


def answer(number, reason):
    tokens = 20 + 17 * number
    finished = datetime.fromtimestamp(finished_s(number), UTC).isoformat()
    return Response(str(number), 0, [1], [2] * tokens, "", reason, 1, tokens, finished_at=finished).to_line()


@pytest.fixture
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_opens_from_disk(report, browser, scheme, width):
    """The headline and the charts are there, in either colours, on a screen of any width."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(report.as_uri())
    if folder := os.environ.get("DRAFTMILL_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"report-{scheme}-{width}.png", full_page=True)
    assert requests == [report.as_uri()]
    assert complaints == []
    assert page.title() == "org/model: draftmill report"
    headline = page.locator(".tiles").inner_text()
    for text in (
        "How far?",
        "%",
        "How fast?",
        "tokens/s",
        "When done?",
        " UTC\na first guess: in 8 min as of 16:2",
        "What went wrong?",
        "2 things",
    ):
        assert text in headline
    for chart, bars in (
        (".throughput-chart:visible", 30),
        (".lengths-chart >> nth=0", 5),
        (".lengths-chart >> nth=1", 5),
    ):
        assert page.locator(chart).bounding_box()["height"] > 40
        assert page.locator(f"{chart} >> .fill").count() >= bars
    assert page.locator(".lengths-chart >> nth=1 >> .cut").count() >= 5
    assert page.locator(".throughput-chart:visible >> .pause").count() == 1
    box = page.locator(".throughput-chart:visible").bounding_box()
    assert 0 <= box["x"] < box["x"] + box["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cells = page.locator("table.budgets td")
    boxes = [cells.nth(number).bounding_box() for number in range(cells.count())]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(background.split("(")[1].split(",")[0]) < 100) is (scheme == "dark")


def test_the_report_is_printed_in_light_colours(report, browser):
    """Also by a browser in the dark."""
    page = browser.new_page(color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.goto(report.as_uri())
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")
