"""One dataset's generation, without Prefect: fixtures.

A dispatcher's tick is made longer than any test here, so that a lost wake-up is a test that does not end.
"""

import pytest
from generation_support import make_dataset, make_renderer
from tiny_tokenizer import make_tokenizer

from tasks.generate import dispatch, retries

NEVER_S = 3600.0


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("target") / "tokenizer")


@pytest.fixture(scope="session")
def renderer(tokenizer_folder):
    return make_renderer(tokenizer_folder)


@pytest.fixture
def make(tmp_path, renderer):
    """Prepare datasets, by name and with the options of make_dataset."""
    return lambda name="d1", **options: make_dataset(tmp_path / name, renderer, **options)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Retries come quickly; nothing is found by waiting for the next tick."""
    monkeypatch.setattr(retries, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(dispatch, "_TICK_S", NEVER_S)


@pytest.fixture
def ticking(monkeypatch):
    """Outages are found by the tick."""
    monkeypatch.setattr(dispatch, "_TICK_S", 0.02)
