"""The Prefect server of a run: its own, and nobody else's."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from flows.prefect_server import PrefectServerError, run_prefect_server

pytestmark = pytest.mark.prefect


def test_servers_that_start_together_are_two(tmp_path, monkeypatch):
    """Each answers at an address of its own, and goes on when the other one ends."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    servers = [run_prefect_server(tmp_path / f"{name}.log") for name in "ab"]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda server: server.__enter__(), servers)
    try:
        assert first != second
        servers[0].__exit__(None, None, None)
        assert httpx.get(f"{second}/api/health", trust_env=False).status_code == httpx.codes.OK
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{first}/api/health", trust_env=False)
    finally:
        servers[1].__exit__(None, None, None)


def test_a_server_that_dies_is_started_again(tmp_path, monkeypatch, caplog):
    """At the same address, and who asks meanwhile waits for it; the last one ends with the block."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    others = find_servers()  # the session's
    with run_prefect_server(tmp_path / "server.log") as url:
        [process] = find_servers() - others
        process.kill()  # not waited for here: its parent is to see how it ended
        assert httpx.get(f"{url}/api/health", trust_env=False, timeout=300).json() is True
        assert len(find_servers() - others - {process}) == 1
        assert "Prefect's server has ended (status -9); starting it again" in caplog.text
    assert find_servers() == others


def find_servers():
    """The server processes of this one."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "flows.prefect_server" in child.cmdline():
                found.add(child)
    return found


def test_a_server_that_ends_at_once_says_why(tmp_path, monkeypatch):
    """The message has the last lines of its log."""
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{tmp_path}/none/x.db")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    with (
        pytest.raises(PrefectServerError, match=r"did not start at http://127(.|\n)*unable to open database"),
        run_prefect_server(tmp_path / "server.log"),
    ):
        pass
