"""What an export is made of, as one key: the same key, the same bytes.

Knows rules, digests of logs and the versions that decide bytes; does not know files. Invariant: everything
that changes a byte of an export changes its key.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.export.configs import Target
from tasks.export.formats.vocab import find_torch_version
from tasks.export.report import EXPORT_FORMAT
from tasks.export.rows import ExportDataset, LogDigest
from tasks.records.files import dump_json


@dataclass(frozen=True, slots=True)
class Rules:
    """How rows become files; `formats` in a fixed order."""

    eval_fraction: float
    seed: int
    formats: tuple[str, ...]
    draft_vocab_size: int | None
    drop_duplicates: bool
    rows_per_file: int | None
    tokens_per_group: int
    tokens_per_shard: int

    @property
    def split_by(self) -> dict[str, Any]:
        """How the splits were made, for the manifest."""
        return {
            "key": "first_user_turn",
            "key_without_prompt": "conversation_id",
            "seed": self.seed,
            "eval_fraction": self.eval_fraction,
        }


def build_key(
    rules: Rules,
    target: Target,
    provenance: Mapping[str, Any],
    datasets: Sequence[ExportDataset],
    digests: Sequence[LogDigest | None],
    *,
    prompts: Sequence[str | None],
    retokenizer: Mapping[str, Any] | None = None,
) -> str:
    """SHA-256 over all of it; `prompts` are the digests of each prompts.jsonl, None where there is none."""
    made_of = {
        "format": EXPORT_FORMAT,
        "versions": {"pyarrow": pa.__version__, "numpy": np.__version__, "torch": find_torch_version()},
        "rules": asdict(rules),
        "target": asdict(target),
        "provenance": dict(provenance),
        "datasets": [
            {"name": one.name, "status": one.status, "kind": one.kind, "log": digest and asdict(digest)}
            for one, digest in zip(datasets, digests, strict=True)
        ],
        "prompts": list(prompts),
        "retokenizer": retokenizer,
    }
    return hashlib.sha256(dump_json(made_of)).hexdigest()
