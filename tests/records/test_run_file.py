"""Rows of two settings are in one folder only where somebody said so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.records.run_file import (
    Change,
    FingerprintChangedError,
    RunFolderError,
    check_run_folder,
    find_changes,
    hash_fingerprint,
    read_run_file,
    update_run_file,
)

NOW = "2026-11-30T02:11:09Z"
OWN = {"adapter": "messages", "source_sha256": "aa", "system_prompt": None, "chat_template_kwargs": {}}
BASE = {"model": "target", "sampling": {"temperature": 1.0, "top_p": 0.95}, "seed": 0}
COOLER = {"temperature": 0.6, "top_p": 0.95}

RECORD = """
import sys
from pathlib import Path
from tasks.records.run_file import update_run_file
for number in range(20):
    name = f"{sys.argv[2]}{number}"
    update_run_file(Path(sys.argv[1]), fingerprint={"model": "m", "datasets": {name: {"adapter": "x"}}},
                    details={}, now="now")
"""


def make_fingerprint(*names, own=(), **changes):
    """The fingerprint of datasets, with changed fields of the run and of each dataset."""
    return {**BASE, **changes, "datasets": {name: {**OWN, **dict(own)} for name in names or ("B1",)}}


def update(folder, fingerprint, **options):
    return update_run_file(folder, **{"fingerprint": fingerprint, "details": {}, "now": NOW, **options})


def add_rows(folder, name):
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "raw_responses.jsonl").write_text("{}\n")


@pytest.fixture
def folder(tmp_path):
    """A run folder with rows in B1 and none in B2."""
    update(tmp_path, make_fingerprint("B1", "B2"))
    add_rows(tmp_path, "B1")
    (tmp_path / "B2").mkdir()
    (tmp_path / "B2" / "raw_responses.jsonl").touch()
    return tmp_path


def test_a_new_folder_is_recorded(tmp_path):
    """What is returned is what is read back."""
    data = update(tmp_path / "new", make_fingerprint(), details={"version": "1"})
    assert read_run_file(tmp_path / "new") == data
    assert data["fingerprint"] == make_fingerprint()
    assert data["details"] == {"version": "1", "datasets": {}}
    assert (data["created_at"], data["updated_at"], data["accepted_changes"]) == (NOW, NOW, [])


def test_the_same_settings_go_on(folder):
    """Also when other datasets are run, and the time of creation stays."""
    data = update(folder, make_fingerprint("B1"), now="later")
    assert (data["created_at"], data["updated_at"], data["accepted_changes"]) == (NOW, "later", [])


@pytest.mark.parametrize(
    ("changed", "field", "old", "new"),
    [
        (make_fingerprint(model="other"), "model", "'target'", "'other'"),
        (make_fingerprint(sampling=COOLER), "sampling.temperature", "1.0", "0.6"),
        (make_fingerprint(sampling={"temperature": 1.0}), "sampling.top_p", "0.95", "None"),
        (make_fingerprint(more=1), "more", "None", "1"),
        (make_fingerprint(own={"source_sha256": "bb"}), "datasets.B1.source_sha256", "'aa'", "'bb'"),
        (
            make_fingerprint(own={"chat_template_kwargs": {"thinking": False}}),
            "datasets.B1.chat_template_kwargs.thinking", "None", "False",
        ),
        (make_fingerprint("B2", seed=1), "seed", "0", "1"),
        (make_fingerprint(own={"turns": "trajectory"}), "datasets.B1.kind", "'generate'", "'trajectory'"),
        (make_fingerprint(own={"turns": "each"}), "datasets.B1.turns", "'last'", "'each'"),
        (
            make_fingerprint(own={"keep_system_prompts": False}),
            "datasets.B1.keep_system_prompts", "True", "False",
        ),
    ],
)  # fmt: skip
def test_a_change_is_refused_with_both_values_and_both_ways_out(folder, changed, field, old, new):
    """One line a field, nothing else, and nothing is written."""
    before = (folder / "run.json").read_bytes()
    with pytest.raises(FingerprintChangedError) as caught:
        update(folder, changed)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{folder} holds responses")
    assert lines[1:-1] == [f"  {field}: {old} there, {new} now"]
    assert "Use another output_dir" in lines[-1]
    assert lines[-1].count("--accept-changed") == 1
    assert f"--accept-changed {field} " in lines[-1]
    assert (folder / "run.json").read_bytes() == before


def test_a_kind_that_was_accepted_is_accepted_by_its_name(folder):
    """The fingerprint keeps it under `turns`, as older folders do; nobody has to know."""
    changed = make_fingerprint(own={"turns": "trajectory"})
    data = update(folder, changed, accept_changed=["datasets.B1.kind"])
    assert [one["field"] for one in data["accepted_changes"]] == ["datasets.B1.kind"]
    assert data["fingerprint"]["datasets"]["B1"]["turns"] == "trajectory"
    back = make_fingerprint(own={"turns": "each"})
    assert [one.field for one in find_changes(changed, back)] == ["datasets.B1.kind", "datasets.B1.turns"]


@pytest.mark.parametrize("accepted", ["sampling.temperature", "sampling"])
def test_an_accepted_change_is_recorded_once(folder, accepted):
    """By the field's own name or by its first parts; the new value is the folder's from then on."""
    changed = make_fingerprint(sampling=COOLER)
    update(folder, changed, accept_changed=[accepted], now="later")
    data = update(folder, changed, now="much later")
    entry = {"field": "sampling.temperature", "old": 1.0, "new": 0.6, "at": "later"}
    assert data["accepted_changes"] == [entry]
    with pytest.raises(FingerprintChangedError, match=r"temperature: 0\.6 there, 1\.0 now"):
        update(folder, make_fingerprint())


@pytest.mark.parametrize(
    "accepted", [[], ["samp"], ["sampling.temp"], ["temperature"], ["seed"], [""], ["sampling."]]
)
def test_only_whole_names_accept_a_change(folder, accepted):
    """A part of a name or another field's accepts nothing."""
    with pytest.raises(FingerprintChangedError):
        update(folder, make_fingerprint(sampling=COOLER), accept_changed=accepted)


def test_one_accepted_field_does_not_carry_another(folder):
    """The message names only what is still refused."""
    with pytest.raises(FingerprintChangedError) as caught:
        update(folder, make_fingerprint(seed=1, model="other"), accept_changed=["seed"])
    assert "model" in str(caught.value)
    assert "seed" not in str(caught.value)


def test_without_rows_nothing_is_refused(tmp_path):
    """Settings may change until the first response is there; that is not recorded as a mix."""
    update(tmp_path, make_fingerprint("B1", "B2"))
    data = update(tmp_path, make_fingerprint("B1", model="other", own={"adapter": "glaive"}))
    assert data["fingerprint"]["model"] == "other"
    assert data["accepted_changes"] == []


def test_a_dataset_without_rows_may_change_beside_one_with_rows(folder):
    """Its own fields concern only its own rows."""
    data = update(folder, make_fingerprint("B2", own={"source_sha256": "bb"}))
    assert data["fingerprint"]["datasets"]["B2"]["source_sha256"] == "bb"


def test_datasets_of_other_runs_are_kept(folder):
    """A run of one dataset forgets neither the others' fingerprints nor their details."""
    update(folder, make_fingerprint("B1"), details={"datasets": {"B1": {"budget": 1}}})
    data = update(folder, make_fingerprint("B3"), details={"datasets": {"B3": {"budget": 3}}})
    assert set(data["fingerprint"]["datasets"]) == {"B1", "B2", "B3"}
    assert data["details"]["datasets"] == {"B1": {"budget": 1}, "B3": {"budget": 3}}
    with pytest.raises(FingerprintChangedError, match=r"datasets\.B1\.adapter"):
        update(folder, make_fingerprint("B1", own={"adapter": "glaive"}))


@pytest.mark.parametrize("other", ["B1", "B1.v2.x"])
def test_a_dot_in_a_name_hides_no_change(tmp_path, other):
    """`mine` and `mine.v2` are two datasets: that one of them is not in this run excuses nothing."""
    update(tmp_path, make_fingerprint(other, "B1.v2"))
    add_rows(tmp_path, other)
    add_rows(tmp_path, "B1.v2")
    with pytest.raises(
        FingerprintChangedError, match=r"datasets\.B1\.v2\.source_sha256: 'aa' there, 'bb' now"
    ):
        update(tmp_path, make_fingerprint("B1.v2", own={"source_sha256": "bb"}))


def test_a_dot_in_a_name_refuses_no_change_without_rows(tmp_path):
    """The rows of `mine` are not those of `mine.v2`."""
    update(tmp_path, make_fingerprint("B1", "B1.v2"))
    add_rows(tmp_path, "B1")
    update(tmp_path, make_fingerprint("B1.v2", own={"source_sha256": "bb"}))


@pytest.mark.parametrize(
    "value", [("</s>", "<|end|>"), ["</s>"], {"stop": (1, 2)}, {}, {"nested": {}}, None, 1e-7, "ü\u2028"]
)
def test_a_value_equals_itself_after_it_was_written(folder, value):
    """JSON has no tuples and keeps no empty object apart: that is no change of settings."""
    fingerprint = make_fingerprint(extra=value)
    update(folder, fingerprint, accept_changed=["extra"])
    assert update(folder, fingerprint)["fingerprint"]["model"] == "target"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"format": 99}',
        b'{"fingerprint": {}}',
        b'{"format": 1}',
        b'{"format":1,"fingerprint":{"datasets":{}},"details":{"datasets":{}},"accepted_changes":null}',
    ],
)
def test_a_damaged_run_file_is_named(folder, content):
    """Nothing is assumed about rows whose settings cannot be read, and the file stays as it is."""
    (folder / "run.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=rf"{folder}/run\.json (is damaged|has a format)"):
        update(folder, make_fingerprint())
    assert (folder / "run.json").read_bytes() == content


def test_a_folder_is_made_and_left_as_it_was(tmp_path):
    """The check leaves no file of its own."""
    check_run_folder(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []


@pytest.mark.parametrize("path", ["/dev/null", "/dev/null/run", "/proc"])
def test_a_folder_that_takes_no_file_is_refused(path):
    """What is no folder, lies in none, or is read-only (/proc is, to root as well)."""
    with pytest.raises(RunFolderError, match=rf"output_dir '{path}' cannot be written to"):
        check_run_folder(Path(path))


def test_no_run_file_is_no_run(tmp_path):
    """A folder that was never used has an empty record."""
    assert read_run_file(tmp_path) == {}


def test_changes_are_sorted_by_field():
    """A message reads the same each time."""
    old, new = {"b": 1, "a": {"y": 1, "x": 1}, "same": 0}, {"b": 2, "a": {"y": 2, "x": 2}, "same": 0}
    assert find_changes(old, new) == [Change("a.x", 1, 2), Change("a.y", 1, 2), Change("b", 1, 2)]


FIELDS = st.dictionaries(st.sampled_from("pqr"), st.integers(0, 2) | st.none(), max_size=3)
FINGERPRINTS = st.fixed_dictionaries(
    {"sampling": FIELDS, "datasets": st.dictionaries(st.sampled_from(["B1", "B1.x", "B2"]), FIELDS)}
)


@given(old=FINGERPRINTS, new=FINGERPRINTS)
def test_changes_are_what_differs_in_both(old, new):
    """Each field of the run and of every dataset that both have is compared; null counts as absent."""
    expected = {f"sampling.{f}" for f in "pqr" if old["sampling"].get(f) != new["sampling"].get(f)}
    for name in old["datasets"].keys() & new["datasets"].keys():
        one, other = old["datasets"][name], new["datasets"][name]
        expected |= {f"datasets.{name}.{f}" for f in "pqr" if one.get(f) != other.get(f)}
    assert {change.field for change in find_changes(old, new)} == expected


def test_the_hash_depends_on_the_values_and_not_on_their_order():
    """It names the checkpoint: the same settings find it again."""
    one = hash_fingerprint({"a": 1, "b": {"c": 2, "d": 3}})
    assert one == hash_fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert one != hash_fingerprint({"a": 1, "b": {"c": 2, "d": 4}})


def test_two_processes_lose_none_of_their_datasets(tmp_path):
    """Reading and writing happen under a lock."""
    writers = [subprocess.Popen([sys.executable, "-c", RECORD, tmp_path, name]) for name in "ab"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    assert len(json.loads((tmp_path / "run.json").read_text())["fingerprint"]["datasets"]) == 40


def test_details_of_the_run_outlive_those_of_a_dataset(tmp_path):
    """What is recorded for the run stays when a dataset adds its own afterwards."""
    update_run_file(tmp_path, fingerprint={"model": "m"}, details={"export": {"eval_fraction": 0.1}}, now="1")
    details = {"datasets": {"a": {"budget_tokens": 5}}}
    data = update_run_file(tmp_path, fingerprint={"model": "m"}, details=details, now="2")
    assert data["details"] == {"export": {"eval_fraction": 0.1}, **details}


def test_rows_without_a_run_file_are_taken_on_only_when_accepted(folder):
    """Nobody knows what they were made with, so they are refused until somebody vouches for them."""
    (folder / "run.json").unlink()
    with pytest.raises(FingerprintChangedError, match=r"--accept-changed run\.json"):
        update_run_file(folder, fingerprint={"model": "m"}, details={}, now="1")
    assert not (folder / "run.json").exists()
    data = update_run_file(
        folder, fingerprint={"model": "m"}, details={}, now="1", accept_changed=["run.json"]
    )
    assert [change["field"] for change in data["accepted_changes"]] == ["run.json"]
    update_run_file(folder, fingerprint={"model": "m"}, details={}, now="2")
