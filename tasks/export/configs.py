"""Settings for the trainers that read an export: SpecForge 0.2.0 and speculators 0.9.0.

Knows which of their keys and flags name our files, as their own code has them; does not know how to train.
Invariant: only what these versions take is written, and every path starts in the export's folder.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tasks.export.files import FileEntry, write_file


@dataclass(frozen=True, slots=True)
class Target:
    """The model that the data is of; `vocab_size` is None where run.json does not tell it."""

    model: str = "TARGET_MODEL"
    vocab_size: int | None = None
    trust_remote_code: bool = False


def write_configs(
    folder: Path, *, formats: Collection[str], target: Target, draft_vocab_size: int | None
) -> list[FileEntry]:
    """`configs/`: a file for each trainer that one of the formats is for."""
    texts = {}
    if "jsonl" in formats:
        texts["specforge.yaml"] = _write_specforge(target, draft_vocab_size)
    if {"jsonl", "arrow"} & set(formats):
        texts["speculators.md"] = _write_speculators(formats, target, draft_vocab_size)
    if texts:
        (folder / "configs").mkdir()
    return [
        write_file(folder, FileEntry(f"configs/{name}", "configs"), text.encode())
        for name, text in texts.items()
    ]


def _write_specforge(target: Target, draft_vocab_size: int | None) -> str:
    vocab = "" if draft_vocab_size is None else _SPECFORGE_VOCAB.format(size=draft_vocab_size)
    return _SPECFORGE.format(
        model=json.dumps(target.model), trust=json.dumps(target.trust_remote_code), vocab=vocab
    )


def _write_speculators(formats: Collection[str], target: Target, draft_vocab_size: int | None) -> str:
    trust = " --trust-remote-code" if target.trust_remote_code else ""
    model = f"{target.model}{trust}"
    vocab = "" if draft_vocab_size is None else _SPECULATORS_VOCAB.format(size=draft_vocab_size)
    parts = [_SPECULATORS]
    if "arrow" in formats:
        parts.append(_SPECULATORS_TRAIN.format(model=model, vocab=vocab))
    if "jsonl" in formats:
        parts.append(_SPECULATORS_PREPARE.format(model=model))
    return "\n".join(parts)


_SPECFORGE = """\
# SpecForge 0.2.0, EAGLE-3 on pre-tokenized data. Start it in the export's folder:
#   specforge train -c configs/specforge.yaml
# Online training captures hidden states from a SGLang server that runs SpecForge's patch, through Mooncake:
# set the addresses below. Rows longer than max_length are cut (README.md says what that loses).
model:
  target_model_path: {model}
  trust_remote_code: {trust}
{vocab}data:
  prompts_path: jsonl/train.jsonl
  max_length: 8192
training:
  strategy: eagle3
deployment:
  mode: disaggregated
  disaggregated:
    backend: mooncake
    control_dir: ../specforge/control
    server_urls: ["http://127.0.0.1:30000"]
output_dir: ../specforge/output
"""
_SPECFORGE_VOCAB = """\
  # The draft model's config (model.draft_model_config) must say draft_vocab_size: {size}. Where the file is
  # not there, vocab/to_pt.py makes it.
  vocab_mapping_path: vocab/vocab_mapping.pt
"""
_SPECULATORS = """\
# speculators 0.9.0

All of it runs in the export's folder. For a drafter that SGLang is to serve, train with
`--no-norm-before-residual --full-attention-indices 0`. SGLang's EAGLE-3 has neither of speculators' defaults
(the norm before the residual, a window of 2,048 tokens): it would compute something else than was trained.
"""
_SPECULATORS_TRAIN = """\
## Train on `arrow/train` as it is

Hidden states come from a vLLM server (`--vllm-endpoint`). They are kept in the data folder, which the next
export replaces, so train on a copy.

```bash
cp -r arrow/train ../speculators-data
speculators train --speculator-type eagle3 --verifier-name-or-path {model} \\
  --data-path ../speculators-data --save-path ../speculators-checkpoints \\
  --no-norm-before-residual --full-attention-indices 0{vocab}
```
"""
_SPECULATORS_VOCAB = """ \\
  --draft-vocab-size {size} --d2t-path vocab/d2t-{size}.npy --t2d-path vocab/t2d-{size}.npy"""
_SPECULATORS_PREPARE = """\
## Or let it cut and count by itself

```bash
speculators prepare-data --model {model} --data jsonl/train.jsonl \\
  --output ../speculators-prepared --seq-length 8192 --no-skip-token-freq
```
"""
