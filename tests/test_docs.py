"""What the pages name is there: whoever follows a recipe or the map must not end at a file that was moved."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "benchmarks|demo|deployments|docs|flows|requirements|scripts|serving|tasks|tests"
PLACEHOLDERS = ("NAME", "DATASET")


def _id(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_files_and_folders_that_a_page_names_are_there(page):
    """By their path from the root in backticks, and by links from the page's own folder."""
    text = page.read_text(encoding="utf-8")
    paths = [ROOT / path for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text)]
    paths += [page.parent / path for path in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
    missing = [str(path) for path in paths if not path.exists()]
    assert [path for path in missing if not any(one in path for one in PLACEHOLDERS)] == []


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_make_targets_that_a_page_names_are_there(page):
    """In backticks, or at the beginning of a line of a code block."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= set(targets)
