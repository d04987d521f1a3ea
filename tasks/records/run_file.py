"""The folder of a run and its run.json: what it was made with, and whether a new run may go on in it.

Knows the fingerprint and who may change what; does not know Prefect or servers. Invariant: rows made
under two fingerprints are in one folder only where somebody accepted the change, which is recorded.
"""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from tasks.records.files import write_json_atomically
from tasks.records.response_log import RESPONSES

RUN_FILE = "run.json"
_FORMAT = 1


class RunFolderError(ValueError):
    """A run cannot go on in this folder until somebody changes something; says what."""


class FingerprintChangedError(RunFolderError):
    """The folder holds rows made with other settings."""


@dataclass(frozen=True, slots=True)
class Change:
    """One field of the fingerprint that differs from the folder's."""

    field: str
    old: Any
    new: Any


def hash_fingerprint(fingerprint: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of a fingerprint."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()


def find_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Fields of both that differ, dotted and as parameters name them; a dataset of only one is no change."""
    shared = old.get("datasets", {}).keys() & new.get("datasets", {}).keys()
    before, after = (dict(_flatten(_name_settings(_only_datasets(side, shared)))) for side in (old, new))
    return [
        Change(field, before.get(field), after.get(field))
        for field in sorted(before.keys() | after.keys())
        if before.get(field) != after.get(field)
    ]


def check_run_folder(output_dir: Path) -> None:
    """Make the folder where it is missing, write a file in it and read its run.json.

    Raises:
        RunFolderError: one of them fails.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output_dir, prefix=".write-check-") as file:
            file.write(b"\n")
            file.flush()
    except OSError as exc:
        raise RunFolderError(
            f"output_dir {str(output_dir)!r} cannot be written to ({exc.strerror}); "
            "make room or give the permission, or use another output_dir"
        ) from exc
    read_run_file(output_dir)


def read_run_file(output_dir: Path) -> dict[str, Any]:
    """The content of run.json; {} when there is none.

    Raises:
        RunFolderError: it is there but cannot be read, or is not JSON of a known format.
    """
    path = output_dir / RUN_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise RunFolderError(f"{path} cannot be read ({exc.strerror})") from exc
    except ValueError as exc:
        raise RunFolderError(f"{path} is damaged ({exc}); restore it, or use another output_dir") from exc
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise RunFolderError(f"{path} has a format that this version does not know")
    for part in ("fingerprint", "details"):
        if not isinstance(data.get(part), dict) or not isinstance(data[part].get("datasets"), dict):
            raise RunFolderError(
                f"{path} is damaged (no {part} of datasets); restore it, or use another output_dir"
            )
    read_setting(output_dir, {"accepted_changes": [], **data}, "accepted_changes", kind=list)
    return data


def read_setting(output_dir: Path, run: Mapping[str, Any], *names: str, kind: type | UnionType) -> Any:
    """The value under names, each inside the one before, in a `run` that `read_run_file` gave.

    Raises:
        RunFolderError: there is none, or it is of another kind; says which.
    """
    value: Any = run
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, kind):
        what = "missing" if value is None else repr(value)
        raise RunFolderError(
            f"{output_dir / RUN_FILE} is damaged ({'.'.join(names)} is {what}); restore it, or use another "
            "output_dir"
        )
    return value


def update_run_file(
    output_dir: Path,
    *,
    fingerprint: Mapping[str, Any],
    details: Mapping[str, Any],
    now: str,
    accept_changed: Collection[str] = (),
) -> dict[str, Any]:
    """Check the fingerprint against the folder's and record this run; returns the new content.

    Args:
        output_dir: created when missing.
        fingerprint: {"model": …, "datasets": {name: {…}}, …}; datasets of earlier runs are kept.
        details: what is recorded but decides nothing (budgets, versions), merged the same way.
        now: UTC time, ISO 8601.
        accept_changed: fields, or first parts of fields, that may differ.

    Raises:
        RunFolderError: run.json is damaged.
        FingerprintChangedError: names each field, both values and the two ways out; nothing is written.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    fingerprint = json.loads(json.dumps(fingerprint))  # as it is read back: a tuple is a list there
    with _lock(output_dir):
        data = read_run_file(output_dir)
        known = data.get("fingerprint", {})
        changes = check_fingerprint(output_dir, fingerprint, accept_changed=accept_changed)
        accepted = [
            {"field": change.field, "old": change.old, "new": change.new, "at": now} for change in changes
        ]
        known_details = data.get("details", {})
        data = {
            "format": _FORMAT,
            "created_at": data.get("created_at", now),
            "updated_at": now,
            "fingerprint": _merge_datasets(known, fingerprint),
            "accepted_changes": [*data.get("accepted_changes", []), *accepted],
            "details": {**known_details, **_merge_datasets(known_details, details)},
        }
        write_json_atomically(output_dir / RUN_FILE, data)
    return data


def check_fingerprint(
    output_dir: Path, fingerprint: Mapping[str, Any], *, accept_changed: Collection[str] = ()
) -> list[Change]:
    """The accepted changes against the fingerprint of the folder; writes nothing.

    Raises:
        RunFolderError: run.json is damaged.
        FingerprintChangedError: names each field, both values and the two ways out.
    """
    fingerprint = json.loads(json.dumps(fingerprint))
    known = read_run_file(output_dir).get("fingerprint", {})
    rows = datasets_with_rows(output_dir)
    if known:
        changes = find_changes(_only_datasets(known, rows), fingerprint) if rows else []
    else:  # responses of an older tool, or run.json was lost: nobody knows what they were made with
        changes = [Change(RUN_FILE, None, "these settings")] if rows else []
    if refused := [change for change in changes if not _accepts(accept_changed, change.field)]:
        raise FingerprintChangedError(_explain(output_dir, refused))
    return changes


def datasets_with_rows(output_dir: Path) -> set[str]:
    """Names of the datasets that have responses already: only those can be mixed up."""
    return {log.parent.name for log in output_dir.glob(f"*/{RESPONSES}") if log.stat().st_size}


def _only_datasets(fingerprint: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    datasets = fingerprint.get("datasets", {})
    return {**fingerprint, "datasets": {name: own for name, own in datasets.items() if name in names}}


def _name_settings(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """With datasets as a person writes them: a fingerprint has no defaults, and their kind under `turns`."""
    datasets = dict(fingerprint["datasets"])
    for name, own in datasets.items():
        if isinstance(own, Mapping):
            kind = "trajectory" if own.get("turns") == "trajectory" else "generate"
            turns = own.get("turns", "last") if kind == "generate" else "last"
            datasets[name] = {"keep_system_prompts": True, **own, "kind": kind, "turns": turns}
    return {**fingerprint, "datasets": datasets}


def _merge_datasets(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {**new, "datasets": {**old.get("datasets", {}), **new.get("datasets", {})}}


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _accepts(accepted: Collection[str], field: str) -> bool:
    return any(field == name or field.startswith(f"{name}.") for name in accepted)


def _explain(output_dir: Path, changes: Collection[Change]) -> str:
    lines = [f"{output_dir} holds responses made with other settings:"]
    lines += [f"  {c.field}: {c.old!r} there, {c.new!r} now" for c in changes]
    fields = " ".join(f"--accept-changed {c.field}" for c in changes)
    lines.append(
        f"Use another output_dir, or mix both in this one with {fields} "
        "(accept_changed in a form; recorded in run.json)."
    )
    return "\n".join(lines)


@contextmanager
def _lock(output_dir: Path) -> Iterator[None]:
    fd = os.open(output_dir / ".run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
