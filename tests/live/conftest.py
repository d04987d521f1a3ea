"""A real SGLang server, started by whoever runs these tests: `make test-live SGLANG_URL=http://...`."""

import os

import httpx
import pytest
from run_support import Runner

from flows.prefect_server import QUIET, run_prefect_server


@pytest.fixture(scope="session")
def sglang_url():
    """The URL of the server under test; a run without one fails rather than passing by doing nothing."""
    url = os.environ.get("SGLANG_URL")
    if not url:
        pytest.fail("SGLANG_URL is not set: start an SGLang server and name it, see `make help`")
    assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200, f"{url} is not ready"
    return url


@pytest.fixture(scope="session")
def tokenizer_dir(sglang_url):
    """The tokenizer that the server says it uses; it must be on this machine."""
    return httpx.get(f"{sglang_url}/model_info", trust_env=False).json()["tokenizer_path"]


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory):
    """One Prefect server for the session."""
    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "PREFECT_HOME": str(home)}.items():
            patch.setenv(name, value)
        with run_prefect_server(home / "server.log") as url:
            yield f"{url}/api"


@pytest.fixture
def runner(tmp_path, prefect_url, tokenizer_dir, sglang_url):
    """Runs the command line against the real server."""
    runner = Runner(tmp_path, tokenizer_dir, env={**os.environ, "PREFECT_API_URL": prefect_url})
    runner.raw["target"]["model"] = None
    runner.raw["server"]["base_urls"] = [sglang_url]
    runner.raw["lanes"] = {
        "long_prompt_tokens": 600,
        "short": {"concurrency": 8, "max_new_tokens": 120},
        "long": {"concurrency": 2, "max_new_tokens": 120},
    }
    yield runner
    runner.end_all()
