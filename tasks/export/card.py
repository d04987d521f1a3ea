"""The dataset card: what is in an export, how to load it, and what was counted, in words.

Knows the report of an export; does not know rows or how they were counted. Invariant: nothing here depends on
the time or the machine, so equal exports have equal cards.
"""

from collections.abc import Mapping, Sequence

from tasks.export.report import ExportReport
from tasks.export.split.assign import SPLITS


def build_card(report: ExportReport) -> str:
    """README.md: what is here, how to load it, and the counts."""
    formats = {entry.format for entry in report.files}
    parts = [
        _front_matter(report),
        _INTRODUCTION,
        _files_section(report),
        _PARQUET_SECTION if "parquet" in formats else "",
        _JSONL_SECTION if "jsonl" in formats else "",
        _ARROW_SECTION if "arrow" in formats else "",
        _conversations_section(report),
        _vocab_section(report),
        _CONFIGS_SECTION if "configs" in formats else "",
        _counts_section(report),
        _split_section(report),
        _decontamination_section(report),
        _lengths_section(report),
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(report: ExportReport) -> str:
    splits = [name for name in SPLITS if any((f.format, f.split) == ("parquet", name) for f in report.files)]
    if not splits:
        return ""
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for name in splits:
        lines += [f"  - split: {name}", f"    path: data/{name}-*.parquet"]
    return "\n".join([*lines, "---", ""])


def _files_section(report: ExportReport) -> str:
    rows = [
        (f.path, *(f"{n:,}" if n else "" for n in (f.rows, f.tokens, f.loss_tokens)), f"{f.bytes:,}")
        for f in report.files
    ]
    return "## Files\n\n" + _table(("file", "rows", "tokens", "loss tokens", "bytes"), rows)


def _counts_section(report: ExportReport) -> str:
    rows = [
        (
            count.name,
            count.status,
            f"{count.exported.rows:,}",
            f"{count.exported.tokens:,}",
            f"{count.exported.loss_tokens:,}",
            f"{count.duplicates:,}",
            f"{count.exact_duplicates:,}",
            ", ".join(f"{reason} {n:,}" for reason, n in sorted(count.skipped.items())),
        )
        for count in report.datasets
    ]
    total = report.total
    rows.append(("total", "", f"{total.rows:,}", f"{total.tokens:,}", f"{total.loss_tokens:,}", "", "", ""))
    header = (
        "dataset", "status", "rows", "tokens", "loss tokens", "duplicates", "exact duplicates", "skipped"
    )  # fmt: skip
    return "## Counts\n\n" + _table(header, rows) + "\n" + _COUNTS_NOTE


def _split_section(report: ExportReport) -> str:
    shared = {count.name: count.shared_conversations for count in report.datasets}
    by_id = {count.name: count.split_by_id for count in report.datasets}
    parts = [_SPLIT_SECTION.format_map(report.split_by)]
    if total := sum(shared.values()):
        parts.append(
            f"{total:,} conversations have a first user turn that another dataset has too: {_list(shared)}.\n"
        )
    if total := sum(by_id.values()):
        parts.append(
            f"The prompts of {total:,} rows were not found ({_list(by_id)}): these are split by their "
            "conversation id, and their first user turn may be on the other side too.\n"
        )
    return "\n".join(parts)


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in counts.items() if n)


def _decontamination_section(report: ExportReport) -> str:
    if not report.decontamination:
        return ""
    rows = [
        (
            file["name"],
            *(f"{file[name]:,}" for name in ("records", "too_short", "ngrams")),
            ", ".join(f"{name} {n:,}" for name, n in sorted(file["rows"].items())) or "none",
        )
        for file in report.decontamination["files"]
    ]
    header = ("evaluation set", "records", "too short", "n-grams", "rows left out")
    return _DECONTAMINATION_SECTION + "\n" + _table(header, rows)


def _conversations_section(report: ExportReport) -> str:
    found = report.conversations
    if not found:
        return ""
    if "not_measured" in found:
        loss = f"What that loses here was not measured: {found['not_measured']}."
    elif not found["measured_rows"]:
        loss = "What that loses was not measured: there is no row."
    else:
        places = ", ".join(f"{place} {n:,}" for place, n in sorted(found["differ_from"].items()))
        loss = (
            f"Measured here: {found['rows_that_differ']:,} of {found['measured_rows']:,} rows "
            f"({_percent(found['mismatch_rate'])}) are other ids when rendered and tokenized again"
            f"{f', counted by where that begins: {places}' if places else ''}."
        )
    unknown = sum(count.texts_unknown for count in report.datasets)
    without = f" Of {unknown:,} rows the texts were not found; they are not in it." if unknown else ""
    return _CONVERSATIONS_SECTION + f"\n{loss}{without}\n"


def _vocab_section(report: ExportReport) -> str:
    if "draft_vocab_size" not in report.vocab:
        return ""
    coverages = [(one["name"], one) for one in report.vocab["datasets"]] + [("total", report.vocab["total"])]
    rows = [
        (name, f"{one['loss_tokens']:,}", f"{one['ids']:,}", _percent(one["coverage"]))
        for name, one in coverages
    ]
    header = ("dataset", "loss tokens (train)", "different ids", "in the draft vocabulary")
    return _VOCAB_SECTION.format_map(report.vocab) + "\n" + _table(header, rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def _lengths_section(report: ExportReport) -> str:
    rows = [
        (f"{x.max_length:,}", f"{x.rows_cut:,}", f"{x.rows_without_loss:,}", f"{x.loss_tokens_lost:,}")
        for x in report.length_losses
    ]
    header = ("max_length", "rows cut", "rows left without loss tokens", "loss tokens lost")
    return "## What a trainer's max_length would lose\n\n" + _table(header, rows)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [header, ("---",) * len(header), *rows]
    return "".join("| " + " | ".join(_cell(text) for text in row) + " |\n" for row in cells)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


_INTRODUCTION = """\
# Token-exact drafter training data

Written by draftmill. A row is one generation: `input_ids` are the ids the target model saw, followed by the
ids it produced; `loss_mask` is 1 exactly on the produced ids, the stop token included. Nothing is shifted,
cut or added. `manifest.json` has the hashes and the provenance.
"""
_COUNTS_NOTE = """\
Duplicates are further rows of one id and turn. Exact duplicates have the ids and the mask of an earlier row;
they are left out only where that was asked for (`drop_duplicates`).
"""
_DECONTAMINATION_SECTION = """\
## Decontamination

Left out are rows whose prompt or answer has 13 words in a row, lower-cased and split at what is no letter,
digit or underscore, that are in a text of an evaluation set too (the overlap of Brown et al. 2020, appendix
C). Records without 13 words in one text are too short to be looked for, and are counted. A row that shares
words with several sets is counted with each. `prompt_unknown` above are rows whose texts were not found.
"""
_SPLIT_SECTION = """\
## Split

By a hash of the first user turn, white space around it ignored (of all messages where there is none): seed
{seed}, eval fraction {eval_fraction}. Train and eval share no first user turn, whatever dataset, system
prompt or tools it comes with, and the turns of a conversation stay together.
"""
_PARQUET_SECTION = """\
## Parquet

| column | type | |
| --- | --- | --- |
| id | string | the row's id; `<id>#<turn>` for the later turns of a conversation |
| input_ids | `list<int32>` | prompt and answer |
| loss_mask | `list<uint8>` | 1 on the answer |
| n_tokens, n_loss | int32 | their length, and the ones of the mask |
| finish_reason | string | "stop", or "length" when the answer was cut by max_new_tokens |
| dataset, conversation_id, turn | string, string, int32 | where the row comes from |
| meta | string | JSON |

```python
import pyarrow.dataset as ds

for batch in ds.dataset("data", format="parquet").to_batches(columns=["input_ids", "loss_mask"]):
    ids = batch["input_ids"]
    flat, starts = ids.values.to_numpy(), ids.offsets.to_numpy()  # row n is flat[starts[n] : starts[n + 1]]
```
"""
_JSONL_SECTION = """\
## JSONL

`jsonl/*.jsonl` has `id`, `input_ids` and `loss_mask` of the same rows in the same order, and no other key:
SpecForge `data.prompts_path`, `speculators prepare-data`.
"""
_ARROW_SECTION = """\
## Arrow

`arrow/{train,eval}` are folders for `datasets.load_from_disk`, with `input_ids`, `loss_mask` and `seq_len` of
the same rows in the same order, as torch tensors: `speculators train --data-path`.
"""
_CONVERSATIONS_SECTION = """\
## Conversations: lossy

`conversations/*.jsonl` has `id` and `conversations` (`role`, `content`) as text, one line a generation, for
trainers that take nothing else. **It is not token-exact**: a trainer renders and tokenizes it again, which
gives other ids than the target produced. Thoughts and tool calls are text in it, tools and template switches
are not in it, and an answer that was cut gets an end. Use the other files where you can.
"""
_VOCAB_SECTION = """\
## Draft vocabulary

The {draft_vocab_size:,} of {target_vocab_size:,} ids that the target said most often in the train split, of
equal counts the smaller id. `vocab/t2d-{draft_vocab_size}.npy` says of each target id whether it is in
(bool); `vocab/d2t-{draft_vocab_size}.npy` has offsets (int64): draft id `i` is target id `i + d2t[i]`.
`vocab_mapping.pt` has both and `token_freq.pt` the counts, for trainers; where they are missing,
`vocab/to_pt.py` makes them with torch.
"""
_CONFIGS_SECTION = """\
## Trainers

`configs/` has settings of SpecForge 0.2.0 and command lines of speculators 0.9.0 for these files.
"""
