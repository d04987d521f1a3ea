"""Three-way merge of a deployment's settings: as last applied, as on the server, as in prefect.yaml.

Knows JSON values and nothing of Prefect. What was last applied is kept as hashes, in the shape of the value:
enough to see whether the file changed, small, and no copy of a value that was removed since.
Invariant: while the file is unchanged the server's value stays, whatever it is; a change of the file wins.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ABSENT: Any = object()  # a key that is not there; None is a value
_HASH = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Difference:
    """One place in which two values differ; `ABSENT` where one of them has nothing."""

    path: str
    before: Any
    after: Any


def hash_value(value: Any) -> Any:
    """Objects keep their keys; every other value, lists too, becomes a short hash."""
    if value is ABSENT:
        return ABSENT
    if isinstance(value, dict):
        return {key: hash_value(item) for key, item in value.items()}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def is_hashed(applied: Any) -> bool:
    """Whether it can be what `hash_value` returned."""
    if isinstance(applied, dict):
        return all(map(is_hashed, applied.values()))
    return isinstance(applied, str) and _HASH.fullmatch(applied) is not None


def merge(applied: Any, there: Any, file: Any) -> Any:
    """Take the file's value where the file changed since it was applied, and the server's elsewhere.

    Args:
        applied: `hash_value` of what the file had when it was last applied.
        there: the value on the server.
        file: the value in the file now.
    """
    if isinstance(applied, dict) and isinstance(there, dict) and isinstance(file, dict):
        merged = {
            key: merge(applied.get(key, ABSENT), there.get(key, ABSENT), file.get(key, ABSENT))
            for key in there | file
        }
        return {key: value for key, value in merged.items() if value is not ABSENT}
    return there if applied == hash_value(file) else file


def find_differences(before: Any, after: Any, path: str = "") -> Iterator[Difference]:
    """Every place in which they differ: a key at any depth, or a whole list."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from find_differences(
                before.get(key, ABSENT), after.get(key, ABSENT), f"{path}.{key}" if path else key
            )
    elif hash_value(before) != hash_value(after):
        yield Difference(path, before, after)
