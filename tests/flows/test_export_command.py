"""The export command's own flags, on a folder that was made by hand."""

import asyncio
import json
import logging
import signal
import subprocess
import sys

import pytest
from export_support import dataset, hashes, response, write_prompts
from tiny_tokenizer import make_tokenizer
from typer.testing import CliRunner

from flows.catalog import InputError, build_parameters, complete_parameters, read_param_file
from flows.cli.app import app
from tasks.aggregate.run_stats import collect_stats, read_plans
from tasks.export.rows import ExportDataset
from tasks.export.task import ExportRules, export_drafter_data
from tasks.records.rows import Prompt
from tasks.records.run_file import update_run_file
from tasks.tokens.draft_vocab import choose_draft_vocab_size
from tasks.tokens.tokenizer import load_tokenizer
from tasks.warm_up.preflight import check_draft_vocab


@pytest.fixture
def run_folder(tmp_path):
    """A run of one dataset that has reached its budget, of a target with 20 ids."""
    details = {
        "datasets": {"d": {"budget_tokens": 27, "max_samples": None}},
        "export": {"eval_fraction": 0.2, "draft_vocab_size": 6},
        "target_vocab_size": 20,
    }
    fingerprint = {"seed": 0, "model": "org/model", "datasets": {}}
    update_run_file(tmp_path, fingerprint=fingerprint, details=details, now="now")
    source = dataset(tmp_path, [response(f"r{n}") for n in range(9)])
    write_prompts(source, [Prompt(f"r{n}", [{"role": "user", "content": f"q{n}"}]) for n in range(9)])
    return tmp_path


def call(*argv):
    return CliRunner().invoke(app, ["export", *map(str, argv)])


def read_manifest(folder):
    return json.loads((folder / "export" / "manifest.json").read_text())


def test_an_export_takes_the_runs_own_rules_and_says_when_nothing_changed(run_folder):
    """All formats, the draft vocabulary among them."""
    done = call(run_folder)
    assert done.exit_code == 0, done.output
    assert read_manifest(run_folder)["vocab"]["draft_vocab_size"] == 6
    assert (run_folder / "export" / "arrow" / "train" / "state.json").exists()
    assert "org/model" in (run_folder / "export" / "configs" / "specforge.yaml").read_text()
    assert "(unchanged)" not in done.stdout
    assert "(unchanged)" in call(run_folder).stdout


def test_rows_that_were_left_out_are_said_in_one_line(run_folder, caplog):
    """Also when nothing changed; the flow warns of those that something is wrong with."""
    assert len(call(run_folder).stdout.splitlines()) == 1
    bad = [response("r0"), response("x", input_ids=None), response("y", completion_tokens=4)]
    with (run_folder / "d" / "raw_responses.jsonl").open("ab") as log:
        log.write(b"".join(one.to_line() for one in bad) + b'{"id"\n{"id"\n')
    said = (
        "left out: unreadable 2, completion_tokens_differ 1, duplicates 1, no_ids 1; "
        "manifest.json has them by dataset"
    )
    assert call(run_folder, "--partial").stdout.splitlines()[1:] == [said]
    assert call(run_folder, "--partial").stdout.splitlines()[1:] == [said]
    stats = collect_stats(run_folder, read_plans(run_folder))
    rules = ExportRules(eval_fraction=0.2, seed=0, formats=["jsonl"], partial=True)
    with caplog.at_level(logging.INFO, logger="tasks.export.task"):
        asyncio.run(export_drafter_data.fn(run_folder, stats, rules))
    said_of_them = [(one.levelname, one.getMessage()) for one in caplog.records if "left out" in one.message]
    assert said_of_them == [
        ("WARNING", said.replace("duplicates 1, ", "")),
        ("INFO", "left out: duplicates 1; manifest.json has them by dataset"),
    ]


def test_a_split_that_is_not_as_asked_is_warned_of(run_folder, caplog):
    """Also when nothing changed: rows without their prompt, and a split without rows."""
    assert call(run_folder).exit_code == 0
    assert caplog.messages == []
    (run_folder / "d" / "prompts.jsonl").unlink()
    for state in ("", "(unchanged)"):
        assert state in call(run_folder, "--eval-fraction", "1e-9").stdout
        by_id, empty = caplog.messages
        assert "9 rows are not in prompts.jsonl (d 9)" in by_id
        assert "eval has no row" in empty
        caplog.clear()


def test_formats_and_the_size_of_the_vocabulary_can_be_named(run_folder):
    """A size of 0 is none."""
    assert call(run_folder, "--formats", "arrow,vocab", "--draft-vocab-size", "5").exit_code == 0
    names = {p.name for p in (run_folder / "export").iterdir()}
    assert names == {"arrow", "vocab", "configs", "manifest.json", "README.md"}
    assert (run_folder / "export" / "vocab" / "d2t-5.npy").exists()
    assert call(run_folder, "--draft-vocab-size", "0").exit_code == 0
    assert not (run_folder / "export" / "vocab").exists()


def test_equal_rows_can_be_dropped(run_folder):
    """By a flag, or by the run's own setting, which the other flag turns off."""
    assert call(run_folder, "--drop-duplicates").stdout.startswith("1 rows")
    run = json.loads((run_folder / "run.json").read_text())
    run["details"]["export"]["drop_duplicates"] = True
    (run_folder / "run.json").write_text(json.dumps(run))
    assert "(unchanged)" in call(run_folder).stdout
    assert call(run_folder, "--no-drop-duplicates").stdout.startswith("9 rows")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--formats", "parquet,csv"],
            "has 'csv'; there are parquet, jsonl, arrow, vocab, conversations",
        ),
        (["--draft-vocab-size", "21"], "draft_vocab_size is 21, but the target has 20 ids"),
    ],
)
def test_what_cannot_be_exported_is_exit_2(run_folder, flags, message):
    """In one line, with what there is; nothing is written."""
    done = call(run_folder, *flags)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (run_folder / "export").exists()


def change_run(folder, **details):
    run = json.loads((folder / "run.json").read_text())
    run["details"] |= details
    (folder / "run.json").write_text(json.dumps(run))


def test_a_dataset_without_answers_is_not_called_incomplete(run_folder, caplog):
    """With --partial, too: more cannot be asked for."""
    plan = {"budget_tokens": 27, "max_samples": None}
    change_run(run_folder, datasets={"d": plan, "empty": plan})
    assert call(run_folder, "--partial").exit_code == 0
    assert [one.getMessage() for one in caplog.records] == ["not exported, for they have no answers: empty"]
    change_run(run_folder, datasets={"empty": plan})
    done = call(run_folder, "--partial")
    assert done.exit_code == 1
    assert "no dataset has an answer yet" in done.stderr
    assert "--partial" not in done.stderr


@pytest.mark.parametrize("ids", [0, -1])
def test_a_target_without_ids_leaves_the_vocabulary_out(run_folder, ids, caplog):
    """With the value, and where the right one is found; a vocabulary of 0 ids was asked for: no word."""
    change_run(run_folder, target_vocab_size=ids)
    for size in (6, None):
        change_run(run_folder, export={"draft_vocab_size": size, "eval_fraction": 0.2})
        assert call(run_folder).exit_code == 0
        assert f"details.target_vocab_size in run.json is {ids}" in caplog.records[-1].getMessage()
        assert "config.json" in read_manifest(run_folder)["vocab"]["left_out"]
    caplog.clear()
    assert call(run_folder, "--draft-vocab-size", "0").exit_code == 0
    assert not caplog.records


def test_what_stands_in_the_place_of_the_export_is_exit_2(run_folder):
    """Nothing passes by itself there."""
    (run_folder / "export").mkdir()
    (run_folder / "export" / "mine.txt").touch()
    done = call(run_folder)
    assert done.exit_code == 2
    assert "move that elsewhere" in done.stderr


INTERRUPTED = """
import os, sys
from deployments.cli import main
where, name, number, *sys.argv[1:] = sys.argv[1:]
module = __import__(where, fromlist=[name])
real = getattr(module, name)
def interrupt(*args, **options):
    os.kill(os.getpid(), int(number))
    return real(*args, **options)
setattr(module, name, interrupt)
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("where", "name", "said"),
    [
        ("tasks.aggregate.run_stats", "collect_stats", "the export that was there before is untouched"),
        ("tasks.export.rows", "samples_from_response", "the export that was there before is untouched"),
        ("tasks.aggregate.report", "write_report", "the new export is there, whole"),
    ],
)
def test_ctrl_c_ends_an_export_with_one_line(run_folder, number, where, name, said):
    """Before it, in it and behind it; nothing half-made stays, and nothing of the old one is lost."""
    assert call(run_folder).exit_code == 0
    before = hashes(run_folder / "export")
    argv = [sys.executable, "-c", INTERRUPTED, where, name, str(int(number)), "export", str(run_folder)]
    done = subprocess.run([*argv, "--seed", "1"], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"draftmill: interrupted; {said}\n")
    assert (hashes(run_folder / "export") == before) == ("untouched" in said)
    assert not list(run_folder.glob(".export.[no]*"))


@pytest.mark.parametrize("command", ["export", "stats"])
def test_the_help_has_the_exit_codes(command):
    """As of all commands that a script calls."""
    shown = CliRunner().invoke(app, [command, "--help"]).stdout
    assert "Exit status:\n" in shown
    assert ("  130  interrupted" in shown) == (command == "export")


def test_an_evaluation_set_that_is_not_there_is_exit_2(run_folder):
    """Of the flag or of the run; the run's is left aside by a flag."""
    run = json.loads((run_folder / "run.json").read_text())
    run["details"]["export"]["decontaminate"] = [str(run_folder / "gone.jsonl")]
    (run_folder / "run.json").write_text(json.dumps(run))
    done = call(run_folder)
    assert done.exit_code == 2
    assert "decontaminate: there is no file" in done.stderr
    assert "gone.jsonl" in done.stderr
    assert not (run_folder / "export").exists()
    assert "other.txt" in call(run_folder, "--decontaminate", "other.txt").stderr
    assert call(run_folder, "--no-decontaminate").exit_code == 0


def test_an_evaluation_set_of_a_run_is_looked_for_before_it_starts(tmp_path):
    """From the parameter file's folder."""
    source = tmp_path / "a.jsonl"
    source.write_text('{"prompt": "q"}\n')
    file = tmp_path / "run.yaml"
    file.write_text(
        "datasets: [{name: a, source: a.jsonl, adapter: prompt}]\nexport: {decontaminate: [set.txt]}"
    )
    parameters = build_parameters(read_param_file(file))
    with pytest.raises(InputError, match=f"export.decontaminate: there is no file '{tmp_path}/set.txt'"):
        complete_parameters(parameters)
    (tmp_path / "set.txt").touch()
    with pytest.raises(
        InputError, match=r"export.decontaminate: .*set.txt' protects nothing: it has 0 records"
    ):
        complete_parameters(parameters)
    (tmp_path / "set.txt").write_text("a")
    assert complete_parameters(parameters).export.decontaminate == [str(tmp_path / "set.txt")]


def set_up_conversations(folder, *, sha256=None):
    """What was asked, and a tokenizer in run.json; with another hash the rows were made with another one."""
    prompts = [Prompt(f"r{n}", [{"role": "user", "content": "q"}]) for n in range(9)]
    write_prompts(ExportDataset("d", folder / "d", "complete"), prompts)
    target = load_tokenizer(str(make_tokenizer(folder / "tokenizer")))
    run = json.loads((folder / "run.json").read_text())
    run["details"]["target"] = {"model": "org/model", "tokenizer": str(folder / "tokenizer")}
    run["fingerprint"] |= {
        "tokenizer_sha256": sha256 or target.identity.files_sha256,
        "chat_template_sha256": target.identity.chat_template_sha256,
    }
    (folder / "run.json").write_text(json.dumps(run))


def test_conversations_are_measured_with_the_tokenizer_of_the_run(run_folder):
    """That is loaded from where run.json says; incomplete datasets are taken where that is asked for."""
    set_up_conversations(run_folder)
    assert call(run_folder, "--formats", "conversations").exit_code == 0
    found = read_manifest(run_folder)["conversations"]
    assert (found["rows"], found["measured_rows"], found["mismatch_rate"]) == (9, 9, 1.0)
    assert "(unchanged)" in call(run_folder, "--formats", "conversations").stdout
    run = json.loads((run_folder / "run.json").read_text())
    run["details"]["datasets"]["d"]["budget_tokens"] = 1_000
    (run_folder / "run.json").write_text(json.dumps(run))
    assert call(run_folder, "--formats", "conversations").exit_code == 1
    assert call(run_folder, "--formats", "conversations", "--partial").exit_code == 0
    assert read_manifest(run_folder)["datasets"][0]["status"] == "incomplete"


@pytest.mark.parametrize("why", ["other", "gone", "none"])
def test_conversations_are_not_measured_with_another_tokenizer(run_folder, why):
    """Nor with none: the manifest says why, and the rest is exported."""
    set_up_conversations(run_folder, sha256="x" if why == "other" else None)
    run = json.loads((run_folder / "run.json").read_text())
    if why == "gone":
        run["details"]["target"]["tokenizer"] = str(run_folder / "gone")
    elif why == "none":
        run["details"].pop("target")
        run["fingerprint"].pop("model")
    (run_folder / "run.json").write_text(json.dumps(run))
    done = call(run_folder, "--formats", "conversations")
    assert done.exit_code == 0, done.output
    reason = {"other": "is not the one that the rows were made with", "gone": "cannot be loaded"}
    found = read_manifest(run_folder)["conversations"]["not_measured"]
    assert reason.get(why, "does not tell the target's tokenizer") in found


def test_a_draft_vocabulary_that_is_too_large_is_refused_before_a_run():
    """Hours later it would be the export that fails; without the format nobody minds."""
    [finding] = check_draft_vocab(32_000, 1_000, formats=["vocab"])
    assert finding.level == "refusal"
    assert "export.draft_vocab_size is 32000, but the target has 1000 ids" in finding.text
    assert check_draft_vocab(32_000, 1_000, formats=["jsonl"]) == []
    assert check_draft_vocab(0, 1_000, formats=["vocab"]) == []
    assert check_draft_vocab(1_000, 1_000, formats=["vocab"]) == []


def test_the_usual_draft_vocabulary_is_as_small_as_the_target(run_folder):
    """Where nobody named a size; the check says so, and the export makes it."""
    [finding] = check_draft_vocab(None, 1_000, formats=["vocab"])
    assert finding.level == "note"
    assert "all 1,000 ids of the target" in finding.text
    assert check_draft_vocab(None, 32_000, formats=["vocab"]) == []
    sizes = [choose_draft_vocab_size(None, size) for size in (None, 31_999, 32_001)]
    assert sizes == [32_000, 31_999, 32_000]
    run = json.loads((run_folder / "run.json").read_text())
    run["details"]["export"]["draft_vocab_size"] = None
    (run_folder / "run.json").write_text(json.dumps(run))
    assert call(run_folder).exit_code == 0
    assert read_manifest(run_folder)["vocab"]["draft_vocab_size"] == 20
    assert call(run_folder, "--draft-vocab-size", "0").exit_code == 0
    assert "left_out" in read_manifest(run_folder)["vocab"]
