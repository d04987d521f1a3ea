"""`draftmill preview`: what a run would send, or has on disk, is shown without a server."""

import json

import pytest
from run_support import Runner
from tiny_tokenizer import make_tokenizer
from typer.testing import CliRunner

from flows.cli.app import app
from tasks.records.rows import Response
from tasks.tokens.rendering import Renderer
from tasks.tokens.tokenizer import load_tokenizer

CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "a first answer"},
    {"role": "user", "content": "go on"},
    {"role": "assistant", "content": "a second answer"},
]
NO_USER = [{"role": "assistant", "content": "x"}]


@pytest.fixture
def previewed(tmp_path, tokenizer_dir, monkeypatch):
    """`previewed(*flags)` previews the datasets a and t, in this process."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # it would fail if it were asked
    monkeypatch.chdir(tmp_path)
    runner = Runner(tmp_path, tokenizer_dir, env={})
    runner.raw["server"]["base_urls"] = ["http://127.0.0.1:9"]
    runner.add_dataset("a", prompts=None, turns="each")
    runner.add_dataset("t", prompts=None, kind="trajectory")
    rows = [
        {"id": "one", "messages": CHAT},
        {"id": "bad", "messages": NO_USER},
        {"id": "again", "messages": CHAT},
        {"id": "two", "messages": [CHAT[2], *CHAT[1:]]},
    ]
    for name in ("a", "t"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def preview(*flags):
        return CliRunner().invoke(app, ["preview", "--param-file", str(runner.write()), *flags])

    preview.runner = runner
    return preview


def _write_row(runner, name, answer):
    renderer = Renderer(load_tokenizer(runner.raw["target"]["tokenizer"]))
    prompt, output = renderer.encode(["<|begin|>user\nq<|end|><|begin|>assistant\n", answer])
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(output)}
    folder = runner.output_dir / name
    folder.mkdir(parents=True)
    row = Response(f"{name}-0", 0, prompt, output, answer, "stop", **counts)
    (folder / "raw_responses.jsonl").write_bytes(row.to_line())


def _assert_refused(done, *words):
    assert done.exit_code == 2, done.output
    [line] = done.stderr.splitlines()
    for word in words:
        assert word in line


def test_prompts_are_shown_with_the_real_template(previewed):
    """Each turn with the row's own answers marked, and the rows that the adapter rejects; nothing is made."""
    done = previewed("--dataset", "a")
    assert done.exit_code == 0, done.output
    for words in (
        "a-one · turn 0",
        "a-one · turn 1",
        "a-two · turn 1",
        "⟨a first answer⟩",
        "max_new_tokens 200",
    ):
        assert words in done.stdout
    assert "rows read: 4, duplicates, which a run drops too: 1, rejected by" in done.stdout
    assert "rejected by the adapter 'messages': 1" in done.stdout
    assert "a-again" not in done.stdout
    assert "a.jsonl:2  no_user_turn" in done.stdout
    assert done.stdout.count("▌the target answers here") == 4
    assert "⟦" not in done.stdout
    assert not previewed.runner.output_dir.exists()


def test_so_many_rows_are_shown(previewed):
    """As are asked for."""
    done = previewed("--dataset", "a", "--rows", "1")
    assert "a-one" in done.stdout
    assert "a-two" not in done.stdout
    assert "rows read: 1, rejected by the adapter 'messages': none" in done.stdout


def test_a_trajectory_shows_what_is_trained_on(previewed):
    """Between marks, for a pipe has no colours."""
    done = previewed("--dataset", "t")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("⟦a first answer<|end|>⟧") == done.stdout.count("⟦a second answer<|end|>⟧") == 2
    assert "\x1b" not in done.stdout
    assert "trained on" in done.stdout


def test_finished_rows_come_before_the_source(previewed):
    """Where there are any, and only then."""
    _assert_refused(previewed("-d", "a", "--on-disk"), "raw_responses.jsonl has no rows yet", "--on-disk")
    _write_row(previewed.runner, "a", "the answer<|end|>")
    for flags in ([], ["--on-disk"]):
        done = previewed("--dataset", "a", *flags)
        assert done.exit_code == 0, done.output
        assert "assistant\n⟦the answer<|end|>⟧" in done.stdout
        assert "finish_reason stop" in done.stdout
    done = previewed("--dataset", "a", "--source")
    assert "a-one" in done.stdout
    assert "the answer<|end|>" not in done.stdout


def test_a_terminal_shows_colours(previewed, monkeypatch):
    """What is trained on is green there."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _write_row(previewed.runner, "a", "the answer<|end|>")
    assert "\x1b[1;32mthe answer\x1b[0m" in previewed("--dataset", "a").stdout


def test_what_cannot_be_shown_is_one_line_and_exit_2(previewed, tmp_path):
    """An unknown dataset, a source that is no data, a tokenizer that is not there, a damaged row."""
    _assert_refused(previewed("--dataset", "nope"), "'nope'", "(a, t)", "B1_glaive")
    (tmp_path / "t.jsonl").write_bytes(b"\x00 no data")
    _assert_refused(previewed("--dataset", "t"), "dataset 't'", "t.jsonl")
    (previewed.runner.output_dir / "a").mkdir(parents=True)
    (previewed.runner.output_dir / "a" / "raw_responses.jsonl").write_text("{}\n")
    _assert_refused(previewed("--dataset", "a"), "raw_responses.jsonl", "is damaged")
    previewed.runner.raw["target"]["tokenizer"] = str(tmp_path / "none")
    _assert_refused(previewed("--dataset", "a"), "target.tokenizer", "none")


def test_rows_of_another_tokenizer_are_told(previewed, tmp_path):
    """Their ids are read with the one that is named now."""
    _write_row(previewed.runner, "a", "the answer<|end|>")
    fingerprint = {"tokenizer_sha256": "other", "datasets": {}}
    run = {"format": 1, "fingerprint": fingerprint, "details": {"datasets": {}}}
    (previewed.runner.output_dir / "run.json").write_text(json.dumps(run))
    assert "made with another tokenizer" in previewed("--dataset", "a").stdout


def test_a_server_that_a_run_would_launch_is_not_needed(previewed):
    """The machine that a preview runs on may have no SGLang."""
    previewed.runner.raw["server"] = {"mode": "launch", "profile": "cpu"}
    done = previewed("--dataset", "a")
    assert done.exit_code == 0, done.output


def test_the_server_is_asked_where_nothing_names_the_tokenizer(previewed, fake_server, tmp_path):
    """It says which one it uses, and its context counts; one that is away is exit 1."""
    folder = make_tokenizer(tmp_path / "served")
    previewed.runner.raw["target"] = {}
    previewed.runner.raw["server"]["base_urls"] = [
        fake_server(served_model_name=str(folder), context_length=100)
    ]
    done = previewed("--dataset", "a", "--rows", "1")
    assert done.exit_code == 0, done.output
    assert f"tokenizer {folder}, context 100 tokens\n" in done.stdout
    previewed.runner.raw["server"] = {"base_urls": ["http://127.0.0.1:9"], "ready_timeout_s": 0.1}
    done = previewed("--dataset", "a")
    assert done.exit_code == 1, done.output
    assert "http://127.0.0.1:9" in done.stderr.splitlines()[-1]


@pytest.mark.embedded
def test_the_embedded_model_brings_its_tokenizer(previewed):
    """No server is started for it."""
    previewed.runner.raw |= {"target": {}, "server": {"mode": "embedded", "context_length": 512}}
    done = previewed("--dataset", "a", "--rows", "1")
    assert done.exit_code == 0, done.output
    assert "<|im_start|>user\nhello<|im_end|>" in done.stdout
    assert "context 512 tokens\n" in done.stdout
