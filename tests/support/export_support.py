"""Write small response logs, export them and read the export back."""

import hashlib

import orjson
import pyarrow.parquet as pq

from tasks.export.export_run import export_run
from tasks.export.rows import ExportDataset
from tasks.records.rows import Response

BOTH = ("parquet", "jsonl")


def response(name, prompt=(1, 2), output=(3, 4, 5), **changes):
    """A row of two and three ids."""
    row = {
        "id": name,
        "turn": 0,
        "input_ids": list(prompt),
        "output_ids": list(output),
        "text": "t",
        "finish_reason": "stop",
        "prompt_tokens": len(prompt),
        "completion_tokens": len(output),
    }
    return Response.from_row(row | changes)


def dataset(root, responses, name="d", tail=b""):
    """Its response log on disk."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "raw_responses.jsonl").write_bytes(b"".join(r.to_line() for r in responses) + tail)
    return ExportDataset(name, folder, "complete")


def write_prompts(source, prompts):
    """What was asked, beside the answers."""
    (source.folder / "prompts.jsonl").write_bytes(b"".join(prompt.to_line() for prompt in prompts))


def export(root, datasets, **options):
    """An export of both tabular formats unless told otherwise."""
    defaults = {"eval_fraction": 0.0, "seed": 0, "formats": BOTH, "provenance": {"model": "m"}}
    return export_run(datasets=datasets, out_dir=root / "export", **(defaults | options))


def hashes(folder):
    """SHA-256 of every file."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def read_parquet(root, split):
    """The rows of a split."""
    files = sorted((root / "export" / "data").glob(f"{split}-*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def read_jsonl(root, split):
    """The rows of a split."""
    path = root / "export" / "jsonl" / f"{split}.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def manifest(root):
    """What manifest.json says."""
    return orjson.loads((root / "export" / "manifest.json").read_bytes())
