"""A run that has nothing but finished conversations: no server is asked, started or missed."""

import json

import pytest
from tiny_tokenizer import TEMPLATE, make_tokenizer
from typer.testing import CliRunner

from flows.catalog import build_parameters, complete_parameters
from flows.cli.app import app
from flows.opening import to_warm_up_rules
from flows.servers import needs_server

pytestmark = pytest.mark.prefect

NOBODY = ["http://127.0.0.1:9"]
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a first answer"}]


@pytest.fixture
def recorded(runner):
    """A runner with one dataset of finished conversations, whose server is away."""
    runner.raw["server"]["base_urls"] = NOBODY
    rows = [
        {"id": f"t{n}", "messages": [*TURNS, *TURNS[:1], TURNS[1] | {"content": str(n)}]} for n in range(7)
    ]
    (runner.folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runner.add_dataset("t", prompts=None, kind="trajectory")
    return runner


def _check(runner, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.chdir(runner.folder)
    return CliRunner().invoke(app, ["check", "--param-file", str(runner.write())])


def _complete(runner, monkeypatch):
    monkeypatch.chdir(runner.folder)
    return complete_parameters(build_parameters(runner.raw))


def test_finished_conversations_need_no_server(recorded, fake_server):
    """They are exported; the folder goes on later, with a server and a dataset for it to answer."""
    done = recorded.run()
    assert done.returncode == 0, done.stderr
    assert len(recorded.rows("t")) == 7
    assert (recorded.output_dir / "export" / "manifest.json").exists()
    assert json.loads((recorded.output_dir / "run.json").read_text())["details"].get("servers") is None
    recorded.add_dataset("a", prompts=5)
    recorded.raw["server"]["base_urls"] = [fake_server(tokens_per_s=2000)]
    done = recorded.run()
    assert done.returncode == 0, done.stderr
    assert (len(recorded.rows("t")), len(recorded.rows("a"))) == (7, 5)


@pytest.mark.parametrize(
    "server",
    [{"mode": "connect", "base_urls": NOBODY}, {"mode": "launch", "profile": "cpu", "python": "/no"}],
)
def test_the_check_says_so(recorded, monkeypatch, server):
    """Nothing is started, and what is for a server alone is not looked at."""
    recorded.raw["server"] = server
    done = _check(recorded, monkeypatch)
    assert done.exit_code == 0, done.output
    for words in ("no server is started or asked", "only tokenized", "The run can start"):
        assert words in done.output
    assert "KV tokens" not in done.output


@pytest.mark.parametrize(("shows", "words"), [(True, None), (False, "tools_not_rendered")])
def test_tools_are_warned_of_only_where_they_are_lost(recorded, monkeypatch, tmp_path, shows, words):
    """A template that shows them takes the conversation; one that ignores them has it rejected."""
    in_system = "{% if tools and messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}"
    template = (in_system if shows else "") + TEMPLATE
    recorded.raw["target"]["tokenizer"] = str(make_tokenizer(tmp_path / "tools", template=template))
    tool = {"type": "function", "function": {"name": "tide", "description": "", "parameters": {}}}
    row = {"messages": [{"role": "system", "content": "s"}, *TURNS], "tools": [tool]}
    with (recorded.folder / "t.jsonl").open("a") as lines:
        lines.write(json.dumps(row))
    done = _check(recorded, monkeypatch)
    assert done.exit_code == 0, done.output
    assert "ignores tools" not in done.output
    assert ("1 of the first 8 conversations would be rejected" in done.output) is (words is not None)
    assert (words or "") in done.output


def test_without_a_model_the_server_has_to_be_asked(recorded, monkeypatch):
    """It alone knows which one the conversations would be of; the way out is said."""
    recorded.raw["target"]["model"] = None
    recorded.raw["server"]["ready_timeout_s"] = 0.1
    done = _check(recorded, monkeypatch)
    assert done.exit_code == 1
    assert "name it in target.model" in done.output


def test_the_embedded_model_is_named_as_its_server_would(recorded, monkeypatch):
    """So that a folder goes on when there is something to answer."""
    recorded.raw |= {"target": {}, "server": {"mode": "embedded"}}
    parameters = _complete(recorded, monkeypatch)
    assert not needs_server(parameters)
    rules = to_warm_up_rules(parameters, [])
    assert rules.model == "smollm2-135m-instruct"
    assert rules.tokenizer.endswith("smollm2-135m-instruct")
    recorded.add_dataset("a", prompts=5)
    parameters = _complete(recorded, monkeypatch)
    assert needs_server(parameters)
    assert to_warm_up_rules(parameters, []).model is None
