"""The flags of the SGLang version that we know, as kept in sglang_flags.json.

Knows names, types and choices, and what old recipes call things; does not know profiles, ranges or SGLang
itself. Invariant: a flag is found by its exact name or alias only. SGLang's parser takes abbreviations, which
mean another flag, or none, in the next version.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

TABLE_FILE = Path(__file__).with_name("sglang_flags.json")
SECRET_FLAGS = frozenset({"--api-key", "--admin-api-key", "--ssl-keyfile-password", "--watermark-config"})

# What old recipes say, and what to say today.
RENAMED = {
    "--cuda-graph-max-bs": "it is --cuda-graph-max-bs-decode (there is one for prefill too)",
    "--fp8-gemm-runner-backend": "it is --fp8-gemm-backend",
    "--enable-pcie-oneshot-allreduce": "only a fork has it; set the environment variable "
    "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1 instead",
    "--stream-output": "it is --incremental-streaming-output, and draftmill does not stream",
    "--enable-nan-detection": "it is gone; leave it out",
    "--tp": "it is --tp-size",
    "--dp": "it is --dp-size",
    "--pp": "it is --pp-size",
    "--context-len": "it is --context-length",
}
RENAMED_VALUES = {("--kv-cache-dtype", "fp8"): "it is fp8_e4m3 (or fp8_e5m2)"}

FlagType = Literal["switch", "str", "int", "float", "size", "json"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of SGLang. `nargs` is None for exactly one value; a switch takes none."""

    name: str
    type: FlagType
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    nargs: str | None = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class FlagTable:
    """All flags of one version, by every name they have."""

    version: str
    by_name: Mapping[str, Flag]

    def find(self, name: str) -> Flag | None:
        """The flag of exactly this name or alias; None where there is none."""
        return self.by_name.get(name)

    def canonical(self, name: str) -> str:
        """The first name of a flag, so that two aliases are one; an unknown name comes back as it is."""
        flag = self.by_name.get(name)
        # --no-x is an alias of --x to argparse, but says the opposite
        return flag.name if flag and not name.startswith("--no-") else name

    def explain_unknown(self, name: str) -> str:
        """What is wrong with a name that is not in the table, and what it should be."""
        if name in RENAMED:
            return f"{name}: SGLang {self.version} has no such flag: {RENAMED[name]}"
        longer = sorted(known for known in self.by_name if known.startswith(name))
        close = " or ".join(longer[:3]) or find_close(name, self.by_name)
        hint = f"; did you mean {close}?" if close else ""
        return f"{name}: SGLang {self.version} has no such flag{hint}"


def find_close(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one is likely to mean."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)), None)


@cache
def load_flag_table() -> FlagTable:
    """The table kept in the repository."""
    raw = json.loads(TABLE_FILE.read_text())
    by_name: dict[str, Flag] = {}
    for entry in raw["flags"]:
        fields = {**entry, "aliases": tuple(entry["aliases"]), "choices": tuple(entry.get("choices", ()))}
        flag = Flag(**fields)
        by_name |= dict.fromkeys((flag.name, *flag.aliases), flag)
    return FlagTable(raw["sglang"], by_name)
