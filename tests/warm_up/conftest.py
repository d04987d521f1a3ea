"""A renderer of a tiny real tokenizer."""

import pytest
from generation_support import make_renderer
from tiny_tokenizer import make_tokenizer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory):
    return make_renderer(make_tokenizer(tmp_path_factory.mktemp("target") / "tokenizer"))
