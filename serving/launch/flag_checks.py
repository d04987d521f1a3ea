"""Whether SGLang would take these flags, said before anything starts.

SGLang's own parser has no ranges (`--mem-fraction-static 7` and `--port 99999` pass) and takes abbreviations.
Knows the kept table and our ranges; does not know profiles. Invariant: everything wrong is said at once.
"""

import json
import math
import re
from collections.abc import Mapping

from serving.launch.flag_table import RENAMED_VALUES, Flag, load_flag_table

_ANY = math.inf
# Inclusive bounds; the flags of the profiles, and those that people set by hand.
_RANGES: dict[str, tuple[float, float]] = {
    "--port": (1, 65535),
    "--nccl-port": (1, 65535),
    "--tp-size": (1, _ANY),
    "--dp-size": (1, _ANY),
    "--pp-size": (1, _ANY),
    "--ep-size": (1, _ANY),
    "--dcp-size": (1, _ANY),
    "--nnodes": (1, _ANY),
    "--node-rank": (0, _ANY),
    "--base-gpu-id": (0, _ANY),
    "--page-size": (1, _ANY),
    "--context-length": (1, _ANY),
    "--max-total-tokens": (1, _ANY),
    "--max-prefill-tokens": (1, _ANY),
    "--max-running-requests": (1, _ANY),
    "--max-queued-requests": (1, _ANY),
    "--cuda-graph-max-bs-decode": (1, _ANY),
    "--cuda-graph-max-bs-prefill": (1, _ANY),
    "--stream-interval": (1, _ANY),
    "--hicache-size": (0, _ANY),
    "--dist-timeout": (1, _ANY),
}
_ABOVE_ZERO = ("--schedule-conservativeness", "--hicache-ratio", "--watchdog-timeout")
_JSON_TEXT = frozenset(  # SGLang declares them as text, and fails minutes later
    {
        "--json-model-override-args",
        "--model-loader-extra-config",
        "--kv-events-config",
        "--hisparse-config",
        "--modelexpress-config",
    }
)
_SIZES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_EXCLUDE_EACH_OTHER = (("--enable-hierarchical-cache", "--disable-radix-cache"),)


def find_problems(settings: Mapping[str, str | None]) -> list[str]:
    """What is wrong with flags and their values (None for a switch), one sentence each."""
    table = load_flag_table()
    problems = []
    for name, value in settings.items():
        flag = table.find(name)
        problem = table.explain_unknown(name) if flag is None else _check_value(flag, name, value)
        if problem:
            problems.append(problem)
    for one, other in _EXCLUDE_EACH_OTHER:
        if one in settings and other in settings:
            problems.append(f"{one} and {other} exclude each other: leave one out")
    return problems


def split_values(name: str, value: str) -> list[str]:
    """The arguments that a value becomes: several where the flag takes a list, separated by blanks."""
    flag = load_flag_table().find(name)
    return value.split() if flag is not None and flag.nargs in ("+", "*") else [value]


def _check_value(flag: Flag, name: str, value: str | None) -> str | None:
    if flag.type == "switch":
        return None if value is None else _explain_switch(name, value)
    if value is None or not value.strip():
        return None if flag.nargs in ("?", "*") else f"{name} needs a value: {name[2:]}=VALUE"
    if "\0" in value or "\n" in value:
        return f"{name}: a value is one line"
    for item in split_values(name, value):
        wrong = _check_item(flag, item)
        if wrong:
            return f"{name}: {wrong}"
    return None


def _explain_switch(name: str, value: str) -> str:
    if value.lower() in ("0", "false", "no", "off"):
        return f"{name} is a switch, off when it is left out (the value is {value!r}): leave the flag out"
    return f"{name} is a switch, on when it is there (the value is {value!r}): write {name[2:]}="


def _check_item(flag: Flag, text: str) -> str | None:
    if (flag.name, text) in RENAMED_VALUES:
        return (
            f"{text!r} is no value of SGLang {load_flag_table().version}: {RENAMED_VALUES[flag.name, text]}"
        )
    if flag.choices and text not in flag.choices:
        return f"{text!r} is none of {', '.join(flag.choices)}"
    if flag.type == "json" or flag.name in _JSON_TEXT:
        return _check_json(text)
    if flag.type in ("int", "float", "size"):
        return _check_number(flag, text)
    if text.startswith("-"):
        return f"{text!r} starts with a dash: SGLang would take it for a flag"
    return None


def _check_json(text: str) -> str | None:
    try:
        json.loads(text)
    except ValueError as exc:
        return f"{text!r} is not JSON ({exc})"
    return None


def _check_number(flag: Flag, text: str) -> str | None:
    number = _parse_size(text) if flag.type == "size" else _parse_number(text, whole=flag.type == "int")
    if number is None:
        return f"{text!r} is not a {'number' if flag.type == 'float' else 'whole number'}"
    if flag.name == "--mem-fraction-static" and not 0 < number < 1:
        return f"{text} is not between 0 and 1: it is a share of the memory, for example 0.85"
    if flag.name == "--chunked-prefill-size" and not (number == -1 or number >= 1):
        return f"{text} is neither 1 or more nor -1 (off)"
    if flag.name in _ABOVE_ZERO and not number > 0:
        return f"{text} is not above 0"
    low, high = _RANGES.get(flag.name, (-_ANY, _ANY))
    if not low <= number <= high:
        return (
            f"{text} is not {low:g} or more"
            if high == _ANY
            else f"{text} is not between {low:g} and {high:g}"
        )
    return None


def _parse_number(text: str, *, whole: bool) -> float | None:
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _parse_size(text: str) -> float | None:
    """A count as SGLang reads it: 8192, 25.6k, 64Ki."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", text)
    if parts is None:
        return _parse_number(text, whole=True)
    if "." in parts[1] and parts[2].endswith("i"):
        return None
    return float(parts[1]) * _SIZES[parts[2]]
